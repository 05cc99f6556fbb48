"""Where arrays lie on many devices: a mesh, logical names beside the arrays, a table from names to axes.

A model names the dimensions of its weights, caches and logits (``kv_heads``, ``vocab``); a
:class:`Layout` says which axes of the mesh a name is spread over. Target and draft share the mesh and
have a table each. Nothing here is needed on one device: :func:`shard` then does nothing.

=============  ==================================================  ======================
name           of                                                  spread over
=============  ==================================================  ======================
``rows``       everything that has one entry for each row          ``data``
``kv_heads``   queries, keys, values and their cache               the ways of the model
``heads``      what attention's output product reads               the ways of the model
``mlp``        the hidden layer of the MLP                         the ways of the model
``vocab``      embedding, head, logits                             the ways of the model
=============  ==================================================  ======================

A dimension that its axes don't divide is not spread. The partitioner (Xu et al., "GSPMD", 2021) does the
rest: two all-reduces a layer, as in Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.cache import KVCache
from specjax.types import Array, Cache, DecodeState, Params

__all__ = [
    "Layout",
    "Names",
    "Placement",
    "ShardedModel",
    "fetch",
    "is_spread",
    "make_placement",
    "parse_mesh",
    "place",
    "put",
    "shard",
    "sharded_jit",
    "shardings_of",
    "state_shardings",
]

T = TypeVar("T")
Names = tuple[str | None, ...]
"""A logical name for each dimension of an array, the last ones if it has more; None is never spread."""

SPREAD = ("kv_heads", "heads", "mlp", "vocab")
"""The names that are spread over the ways of a model."""
CACHE = ("rows", "kv_heads")
"""Of the first dimensions of a :class:`~specjax.cache.KVCache`'s buffers."""

_ACTIVE: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("specjax_layout", default=None)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and one table from logical names to its axes."""

    mesh: Mesh
    table: tuple[tuple[str, tuple[str, ...]], ...]

    def sharding(self, names: Names, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of an array of ``shape`` whose last dimensions have ``names``."""
        names = (None,) * (len(shape) - len(names)) + names
        axes = dict(self.table)
        spread: list[tuple[str, ...] | None] = []
        for name, size in zip(names, shape, strict=True):
            ways = self.ways(name)
            spread.append(axes[name] if name and ways > 1 and size % ways == 0 else None)
        return NamedSharding(self.mesh, PartitionSpec(*spread))

    def ways(self, name: str | None) -> int:
        """Over how many devices a name is spread."""
        return math.prod(self.mesh.shape[axis] for axis in dict(self.table).get(name or "", ()))

    def lay(self, model: Any, params: Params) -> tuple[ShardedModel, Params]:
        """The model as it is traced under this layout, and its weights where they lie."""
        return ShardedModel(model, self), put(params, self.param_shardings(model, params))

    def param_shardings(self, model: Any, params: Params) -> Params:
        """Where the weights lie; those of a model that doesn't name them, on every device.

        Args:
          model: with ``param_names(params)``, or without.
          params: its weights, or as ``jax.ShapeDtypeStruct``.
        """
        if not hasattr(model, "param_names"):
            return jax.tree.map(lambda x: self.sharding((None,) * x.ndim, x.shape), params)
        return jax.tree.map(lambda x, names: self.sharding(names, x.shape), params, model.param_names(params))

    @contextmanager
    def active(self) -> Iterator[None]:
        """While this runs, :func:`shard` means this layout."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)


def shard(x: Array, *names: str | None) -> Array:
    """Says by name how ``x`` is spread, where a layout is active; else returns it as it is."""
    layout = _ACTIVE.get()
    return x if layout is None else jax.lax.with_sharding_constraint(x, layout.sharding(names, x.shape))


def is_spread(name: str) -> bool:
    """Whether a layout is active that spreads what has this name over several devices."""
    layout = _ACTIVE.get()
    return layout is not None and layout.ways(name) > 1


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """A model that is traced under a layout of its own; in all else the model it wraps.

    It stands wherever a :class:`specjax.types.Model` may, or, if it wraps one, a
    :class:`specjax.drafters.features.FeatureModel`, so the step and the drafters need not know.
    """

    model: Any
    layout: Layout

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.model.vocab_size

    @property
    def context_length(self) -> int:
        """The most positions that the model was made for."""
        return self.model.context_length

    @property
    def feature_width(self) -> int:
        """F, of a feature model."""
        return self.model.feature_width

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache, spread from the start: no device ever holds it whole."""
        cache = self.model.init_cache(batch, capacity)
        return jax.lax.with_sharding_constraint(cache, state_shardings(self.layout, cache))

    def apply(self, params: Params, *block: Any) -> Any:
        """The model's own, with :func:`shard` at work."""
        with self.layout.active():
            return self.model.apply(params, *block)

    def score(self, params: Params, features: Array) -> Array:
        """A feature model's own, likewise."""
        with self.layout.active():
            return self.model.score(params, features)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a batch and its two models lie on one mesh."""

    target: Layout
    draft: Layout

    @property
    def num_devices(self) -> int:
        """Of the mesh."""
        return self.target.mesh.size

    @property
    def rows(self) -> NamedSharding:
        """Of anything whose first dimension is the rows, if these divide; see :meth:`lay_rows`."""
        return NamedSharding(self.target.mesh, PartitionSpec("data"))

    @property
    def parts_of_rows(self) -> NamedSharding:
        """Of arrays [A, B, ..], of which B are the rows: a batch in parts, as training has it."""
        return NamedSharding(self.target.mesh, PartitionSpec(None, "data"))

    @property
    def everywhere(self) -> NamedSharding:
        """Of what every device holds."""
        return NamedSharding(self.target.mesh, PartitionSpec())

    def rows_of(self, shape: tuple[int, ...]) -> NamedSharding:
        """The same for an array of ``shape``; it is whole everywhere if its rows don't divide."""
        return self.target.sharding(("rows", *(None,) * (len(shape) - 1)), shape)

    def lay_rows(self, tree: T, fill: int | None = None) -> T:
        """Spreads arrays [B, ..] over ``data``, with as many rows more as make them divide.

        Args:
          tree: every process has it in whole.
          fill: what the rows more hold; None repeats the last row, so that no value is new to the batch.
        """

        def lay(x: Any) -> Any:
            host = np.asarray(x)
            more = [(0, -len(host) % self.target.mesh.shape["data"]), *[(0, 0)] * (host.ndim - 1)]
            host = (
                np.pad(host, more, mode="edge") if fill is None else np.pad(host, more, constant_values=fill)
            )
            return put(host, self.rows)

        return jax.tree.map(lay, tree)

    def state(self, state: DecodeState) -> DecodeState:
        """The shardings of a state or its ``jax.ShapeDtypeStruct``: rows over ``data``, caches by name."""
        return dataclasses.replace(
            state_shardings(self.target, dataclasses.replace(state, draft_state=None)),
            draft_state=state_shardings(self.draft, state.draft_state),
        )


def state_shardings(layout: Layout, tree: Any) -> Any:
    """The shardings of what has the rows first: caches by name, all else by its rows alone."""

    def of(x: Any) -> Any:
        if isinstance(x, KVCache):
            return jax.tree.map(lambda buffer: first(buffer, *CACHE), x)
        return first(x, "rows")

    def first(x: Any, *names: str) -> NamedSharding:
        return layout.sharding(names + (None,) * (x.ndim - len(names)), x.shape)

    return jax.tree.map(of, tree, is_leaf=lambda x: isinstance(x, KVCache))


def parse_mesh(text: str) -> dict[str, int]:
    """``data=2,model=4`` as {"data": 2, "model": 4}; an axis that isn't named is 1.

    Raises:
      ValueError: an unknown axis, one named twice, or a size that is no whole number from 1.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in ("data", "model") or name in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"a mesh is written like data=2,model=4, not {text!r}")
        sizes[name] = int(size)
    return {"data": 1, "model": 1} | sizes


def make_placement(
    mesh: str | Mapping[str, int], draft_ways: int | None = None, devices: Any = None
) -> Placement:
    """Lays a mesh over the devices, and makes the two tables.

    Args:
      mesh: the devices along ``data`` and ``model``, as :func:`parse_mesh` reads or returns them.
      draft_ways: over how many devices the draft's weights are spread, a divisor of ``model``; 1 has a copy
        on each, None takes all.
      devices: to take the first of; None takes all that JAX sees.

    Raises:
      ValueError: the mesh can't be read, there are fewer devices, or draft_ways doesn't divide ``model``.
    """
    sizes = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    data, model = sizes["data"], sizes["model"]
    devices = list(jax.devices() if devices is None else devices)
    if data * model > len(devices):
        raise ValueError(
            f"a mesh of data={data},model={model} needs {data * model} devices, not {len(devices)}"
        )
    if jax.process_count() > 1 and data * model != len(devices):
        raise ValueError(f"on several processes the mesh must take all of their {len(devices)} devices")
    ways = model if draft_ways is None else draft_ways
    if ways < 1 or model % ways:
        raise ValueError(f"the draft's ways must divide model={model}, which {ways} does not")
    # The draft is spread over the inner axis alone, and has a copy for each step along the outer one.
    grid = np.asarray(devices[: data * model]).reshape(data, model // ways, ways)
    devices_by_axis = Mesh(grid, ("data", "copies", "model"), axis_types=(AxisType.Auto,) * 3)

    def layout(*axes: str) -> Layout:
        return Layout(devices_by_axis, (("rows", ("data",)), *((name, axes) for name in SPREAD)))

    return Placement(target=layout("copies", "model"), draft=layout("model"))


def put(tree: T, shardings: Any) -> T:
    """Lays arrays that every process has in whole where ``shardings`` (a tree or a prefix of one) says."""

    def lay(sharding: NamedSharding, part: Any) -> Any:
        def one(x: Any) -> Array:
            host = np.asarray(x)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(one, part)

    return jax.tree.map(lay, shardings, tree)


def shardings_of(tree: Any) -> Any:
    """Where the arrays of a tree lie."""
    return jax.tree.map(lambda x: x.sharding, tree)


def place(tree: T, shardings: Any) -> T:
    """The shapes of a tree with their shardings: what a program can be compiled for."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def fetch(tree: T) -> T:
    """NumPy copies of arrays, wherever they lie; where processes share them, all must call this."""
    leaves = jax.tree.leaves(tree)
    if all(not isinstance(x, jax.Array) or x.is_fully_addressable for x in leaves):
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def sharded_jit(
    function: Callable[..., Any],
    in_shardings: Any,
    out_shardings: Any,
    donate: tuple[int, ...] = (),
    **static: Any,
) -> Any:
    """``jax.jit`` with explicit shardings; equal arguments give the same program.

    Args:
      function: of positional arrays and ``static`` values.
      in_shardings: one for each array, or a tree of them.
      out_shardings: likewise.
      donate: positions of the arguments that are consumed.
      static: hashable; passed by name.
    """
    inputs, outputs = (jax.tree.flatten(tree) for tree in (in_shardings, out_shardings))
    return _jit(
        function, tuple(inputs[0]), inputs[1], tuple(outputs[0]), outputs[1], donate, tuple(static.items())
    )


@functools.lru_cache(maxsize=64)
def _jit(
    function: Callable[..., Any],
    inputs: tuple,
    in_tree: Any,
    outputs: tuple,
    out_tree: Any,
    donate: Any,
    static: tuple,
) -> Callable[..., Any]:
    return jax.jit(
        functools.partial(function, **dict(static)),
        in_shardings=jax.tree.unflatten(in_tree, inputs),
        out_shardings=jax.tree.unflatten(out_tree, outputs),
        donate_argnums=donate,
    )
