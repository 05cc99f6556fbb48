"""The engine's four programs, compiled for one device or for a mesh.

What the host gives is the same on every device; what it reads is brought to every device. In between, the
rows are spread over ``data``, and the models over their ways: see :mod:`specjax.parallel.sharding`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.typing import ArrayLike

from specjax.decode import Caches, read_block
from specjax.engine import slots as device
from specjax.parallel.sharding import Placement, sharded_jit, shardings_of, state_shardings
from specjax.types import Cache, Drafter, Logprobs, Model, Params, Rule

__all__ = ["Programs", "caches_shardings"]

_read = partial(jax.jit, static_argnames=("target", "drafter"), donate_argnums=0)(read_block)
_admit = partial(jax.jit, static_argnames="axes", donate_argnums=0)(device.admit)
_run = partial(jax.jit, static_argnames=("target", "drafter", "rule"), donate_argnums=0)(device.run)
_score = partial(jax.jit, static_argnames=("target", "num_top"), donate_argnums=0)(device.score)


class Programs:
    """Reading prompts, admitting rows, running steps, scoring texts.

    Args:
      target: the target; on a mesh as :meth:`~specjax.parallel.sharding.Layout.lay` wraps it.
      target_params: its weights, where they lie.
      drafter: the widest, which reads; None if there is none.
      draft_params: its weights.
      capacity: S of slots and lane.
      placement: how rows and models lie on a mesh; None for one device.
    """

    def __init__(
        self,
        target: Model,
        target_params: Params,
        drafter: Drafter | None,
        draft_params: Params,
        *,
        capacity: int,
        placement: Placement | None,
    ) -> None:
        self._target, self._drafter, self._capacity, self._placement = target, drafter, capacity, placement
        self._params = (target_params, draft_params)
        self._axes = device.batch_axes(target, drafter, capacity)
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def empty_caches(self, rows: int) -> Caches:
        """Caches in which nothing has been read."""
        make = partial(device.empty_caches, self._target, self._drafter, rows, self._capacity)
        return self._made(make, lambda caches: caches_shardings(self._mesh, caches))

    def empty_slots(self, count: int, num_draft_tokens: int) -> device.Slots:
        """Slots that are all free."""
        make = partial(
            device.empty_slots, self._target, self._drafter, count, self._capacity, num_draft_tokens
        )
        return self._made(make, self._slots_lie)

    def empty_score_cache(self) -> Cache:
        """What :meth:`score` keeps."""
        make = partial(self._target.init_cache, 1, self._capacity)
        return self._made(make, lambda cache: state_shardings(self._mesh.target, cache))

    def read(self, caches: Caches, *block: ArrayLike) -> Caches:
        """:func:`specjax.decode.read_block`; the caches are consumed."""
        models: dict[str, Any] = dict(target=self._target, drafter=self._drafter)
        return self._call(_read, read_block, (caches, *self._params), block, caches, models)

    def admit(self, slots: device.Slots, lane: Caches, *row: Any) -> device.Slots:
        """:func:`specjax.engine.slots.admit`; the slots are consumed."""
        return self._call(_admit, device.admit, (slots, lane), row, slots, dict(axes=self._axes))

    def run(
        self, slots: device.Slots, *control: ArrayLike, drafter: Drafter | None, rule: Rule
    ) -> tuple[device.Slots, device.Report]:
        """:func:`specjax.engine.slots.run`; the slots are consumed."""
        how = dict(target=self._target, drafter=drafter, rule=rule)
        return self._call(_run, device.run, (slots, *self._params), control, slots, how, reports=True)

    def score(self, cache: Cache, *block: ArrayLike, num_top: int) -> tuple[Cache, Logprobs]:
        """:func:`specjax.engine.slots.score`; the cache is consumed."""
        how = dict(target=self._target, num_top=num_top)
        return self._call(_score, device.score, (cache, self._params[0]), block, cache, how, reports=True)

    # Where things lie.

    @property
    def ways(self) -> int:
        """Over how many devices the rows are spread."""
        return 1 if self._placement is None else self._placement.target.mesh.shape["data"]

    @property
    def _mesh(self) -> Placement:
        assert self._placement is not None
        return self._placement

    def _slots_lie(self, slots: device.Slots) -> Any:
        return device.Slots(self._mesh.state(slots.state), state_shardings(self._mesh.target, slots.record))

    def _made(self, make: Callable[[], Any], lie: Callable[[Any], Any]) -> Any:
        if self._placement is None:
            return make()
        return jax.jit(make, out_shardings=lie(jax.eval_shape(make)))()

    def _call(
        self,
        alone: Callable[..., Any],
        function: Callable[..., Any],
        held: tuple,
        given: tuple,
        kept: Any,
        static: dict[str, Any],
        *,
        reports: bool = False,
    ) -> Any:
        """Calls a program with what the device holds and what the host gives; ``kept`` stays where it is."""
        if self._placement is None:
            return alone(*held, *given, **static)
        key = (function, *static.values())
        if key not in self._compiled:
            everywhere = self._mesh.everywhere
            into = (*shardings_of(held), *[everywhere] * len(given))
            out = (shardings_of(kept), everywhere) if reports else shardings_of(kept)
            self._compiled[key] = sharded_jit(function, into, out, donate=(0,), **static)
        return self._compiled[key](*held, *given)


def caches_shardings(placement: Placement, caches: Caches) -> Any:
    """Where the target's cache and the drafter's state lie, or their ``jax.ShapeDtypeStruct``."""
    target_cache, draft_state = caches
    return state_shardings(placement.target, target_cache), state_shardings(placement.draft, draft_state)
