"""A decode step on a TPU that isn't here: compiled by that TPU's own compiler, and read.

Nothing is run and no weights are drawn. The step and the prefill are the real ones; what they need comes
from the compiler. Times are estimates: the larger of what must be read at the memory's full rate and the
cycles that the compiler gives its instructions, plus the exchanges at the links' full rate. Forwards are
compiled with one and two layers, unrolled, and about 256 and 512 live slots, all read at once; the rest
follows linearly, since a compiler counts what is in a loop once.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.config import persistent_cache_min_compile_time_secs  # public only for all threads at once

from specjax.decode import speculative_step, start
from specjax.drafters import ModelDrafter
from specjax.parallel import program
from specjax.parallel.sharding import (
    Layout,
    Placement,
    ShardedModel,
    make_placement,
    place,
    sharded_jit,
    shardings_of,
    state_shardings,
)
from specjax.sampling import warp
from specjax.theory import best_num_draft_tokens, expected_tokens, speedup
from specjax.types import (
    Address,
    Context,
    DecodeState,
    Draft,
    Filters,
    ModelOutput,
    Params,
    Rule,
    SamplingParams,
)

__all__ = [
    "CHIPS",
    "Batch",
    "Chip",
    "Costs",
    "Forward",
    "Shape",
    "Step",
    "compile_rule",
    "compile_start",
    "compile_step",
    "costs",
    "devices_of",
    "export_step",
    "forward",
]


_FEW, _MANY = 248, 504  # slots that no block of attention divides, and so are read without a loop


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one device can do at most (Austin et al., "How to Scale Your Model", 2025)."""

    name: str
    memory: float  # bytes
    bandwidth: float  # of the memory, bytes a second
    flops: float  # bfloat16, a second
    link: float  # bytes a second, one way, of one link
    clock: float  # cycles a second, from flops and the number and size of the matrix units


CHIPS = {
    "TPU v5 lite": Chip("v5e", 16e9, 8.1e11, 1.97e14, 4.5e10, 1.5e9),
    "TPU v5": Chip("v5p", 96e9, 2.8e12, 4.59e14, 9e10, 1.75e9),
    "TPU v6 lite": Chip("v6e", 32e9, 1.6e12, 9.2e14, 9e10, 1.75e9),
}
"""By ``device_kind``."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model to plan with."""

    name: str
    num_layers: int
    build: Callable[[int, bool], tuple[Any, Params]]
    """``build(num_layers, scanned)`` -> the model, and its params as ``jax.ShapeDtypeStruct``."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """How much is decoded at once."""

    rows: int
    capacity: int
    num_draft_tokens: int
    live: int  # slots that attention reads, for the costs


def devices_of(topology: str) -> Sequence[Any]:
    """The devices of a TPU topology such as ``v5e:2x4``, which need not be here.

    Raises:
      ValueError: libtpu is not installed, or knows no such topology.
    """
    # Asked for a description only, libtpu still looks for a TPU, and for the metadata of a cloud machine.
    for name, value in (
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-8"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_MIN_LOG_LEVEL", "3"),
        ("TPU_STDERR_LOG_LEVEL", "3"),
    ):
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    try:
        devices: Sequence[Any] = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # whatever the plugin raises
        raise ValueError(
            f"no compiler for the topology {topology!r}: {str(error).splitlines()[0]} "
            '(names are like v5e:2x4, v5p:2x2x1, v6e:2x4; pip install -e ".[tpu]")'
        ) from error
    if devices[0].device_kind not in CHIPS:
        known = ", ".join(chip.name for chip in CHIPS.values())
        raise ValueError(f"{devices[0].device_kind} is not among the chips that can be planned for: {known}")
    return devices


def _lay(shape: Shape, layout: Layout, num_layers: int, scanned: bool) -> tuple[ShardedModel, Params]:
    model, params = shape.build(num_layers, scanned)
    return ShardedModel(model, layout), place(params, layout.param_shardings(model, params))


@dataclasses.dataclass(frozen=True)
class Step:
    """The arguments of a real step, as shapes with their places."""

    placement: Placement
    batch: Batch
    state: DecodeState
    target_params: Params
    draft_params: Params
    models: dict[str, Any]  # target and drafter
    prompts: tuple[Context, Any, SamplingParams]

    @classmethod
    def make(cls, target: Shape, draft: Shape, placement: Placement, batch: Batch) -> Step:
        """Builds both models, layers scanned, and the state of a sampled batch."""
        target_model, target_params = _lay(target, placement.target, target.num_layers, True)
        draft_model, draft_params = _lay(draft, placement.draft, draft.num_layers, True)
        models: dict[str, Any] = dict(
            target=target_model, drafter=ModelDrafter(draft_model, batch.num_draft_tokens)
        )

        def rows(dtype: Any, *more: int) -> Any:
            return jax.ShapeDtypeStruct((batch.rows, *more), dtype)

        number = rows(jnp.int32)
        context = Context(rows(jnp.int32, batch.capacity), number, number, rows(jnp.int32, 1))
        prompts = context, number, SamplingParams(rows(jnp.float32), rows(jnp.uint32), None, None)
        state = jax.eval_shape(partial(start, **models), target_params, draft_params, *prompts)
        return cls(
            placement,
            batch,
            place(state, placement.state(state)),
            target_params,
            draft_params,
            models,
            place(prompts, jax.tree.map(lambda x: placement.rows_of(x.shape), prompts)),
        )

    @property
    def arguments(self) -> tuple[DecodeState, Params, Params]:
        """Of :func:`specjax.decode.speculative_step`."""
        return self.state, self.target_params, self.draft_params

    def bytes_a_device(self) -> dict[str, int]:
        """What the weights and caches take on one device, before any padding."""
        parts = dict(
            target_weights=self.target_params,
            draft_weights=self.draft_params,
            target_cache=self.state.target_cache,
            draft_cache=self.state.draft_state,
        )
        return {name: _bytes_a_device(part) for name, part in parts.items()}


def compile_step(step: Step, rule: Rule) -> Any:
    """Compiles ``speculative_step`` for the devices of the step's mesh, its state given away."""
    run = sharded_jit(
        speculative_step,
        shardings_of(step.arguments),
        (shardings_of(step.state), None),
        donate=(0,),
        rule=rule,
        **step.models,
    )
    return _compile(run.lower(*step.arguments))


def compile_rule(step: Step, rule: Rule) -> Any:
    """Compiles the warp of the target's logits and the rule alone, the logits of both models being given.

    Args:
      step: whose batch and vocabulary it is.
      rule: the rule; rows may be filtered.
    """
    batch, layout = step.batch, step.placement.target
    context, _, sampling = step.prompts
    row = context.length
    number = sampling.temperature
    sampling = dataclasses.replace(sampling, filters=Filters(number, row, number))

    def logits(count: int) -> Any:
        shape = (batch.rows, count, step.models["target"].vocab_size)
        return jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=layout.sharding(("rows", None, "vocab"), shape)
        )

    def judge(
        logits: Any, draft_logits: Any, tokens: Any, lengths: Any, context: Any, sampling: Any
    ) -> tuple[Any, Any]:
        address = Address(sampling.seed, context.length)
        verdict = rule.verify(address, Draft(tokens, draft_logits, lengths), warp(logits, sampling, context))
        return verdict.num_accepted, verdict.next_token

    count = batch.num_draft_tokens
    tokens = jax.ShapeDtypeStruct((batch.rows, count), jnp.int32)
    tokens = place(tokens, step.placement.rows_of(tokens.shape))
    arguments = logits(count + 1), logits(count), tokens, row, context, sampling
    return _compile(jax.jit(judge, in_shardings=shardings_of(arguments)).lower(*arguments))


def compile_start(step: Step) -> Any:
    """Compiles the reading of the prompts."""
    arguments = step.target_params, step.draft_params, *step.prompts
    run = sharded_jit(start, shardings_of(arguments), shardings_of(step.state), **step.models)
    return _compile(run.lower(*arguments))


def _compile(lowered: Any) -> Any:
    # A program for absent devices can't be read back from the cache of programs: it must not get there. The
    # option is this thread's alone where it is set so.
    with persistent_cache_min_compile_time_secs(float("inf")):
        return lowered.compile()


def export_step(target: Shape, draft: Shape, batch: Batch, rule: Rule) -> bytes:
    """The step for one device of any kind (cpu, cuda, tpu), as a serialized ``jax.export`` artifact.

    It takes and gives the leaves of its trees, in their order: whoever calls it needs no class of ours.
    """
    step = Step.make(target, draft, make_placement("model=1"), batch)
    models = {"target": step.models["target"].model}
    drafter = step.models["drafter"]
    models["drafter"] = dataclasses.replace(drafter, model=drafter.model.model)
    leaves, tree = jax.tree.flatten(step.arguments)

    def run(*leaves: Any) -> list[Any]:
        arguments = jax.tree.unflatten(tree, leaves)
        return jax.tree.leaves(speculative_step(*arguments, rule=rule, **models))

    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    return bytes(jax.export.export(jax.jit(run), platforms=["cpu", "cuda", "tpu"])(*plain).serialize())


@dataclasses.dataclass(frozen=True)
class Forward:
    """One forward pass on one device: what it needs, and the compiler's estimate."""

    flops: float
    bytes_read: float  # weights, and the live slots of the cache
    cycles: float
    collectives: int
    collective_bytes: float
    floor: float  # seconds: bytes_read at the memory's full rate, or flops at the chip's
    seconds: float  # the estimate


def forward(shape: Shape, layout: Layout, chip: Chip, batch: Batch, num_tokens: int) -> Forward:
    """Costs of a forward of ``num_tokens`` a row, from three small programs."""
    one, two, longer = (
        _measure(shape, layout, batch.rows, num_tokens, layers, slots)
        for layers, slots in ((1, _FEW), (2, _FEW), (2, _MANY))
    )
    layer, slot = two - one, (longer - two) / (2 * (_MANY - _FEW))
    flops, cycles, count, moved = one - layer + shape.num_layers * (layer + slot * (batch.live - _FEW))
    model, params = _lay(shape, layout, shape.num_layers, True)
    cache = jax.eval_shape(lambda: model.model.init_cache(batch.rows, batch.live))
    cache = place(cache, state_shardings(layout, cache))
    # An embedding that isn't the head too is looked up, not read.
    read = {name: part for name, part in params.items() if name != "embedding" or "head" not in params}
    bytes_read = _bytes_a_device(read) + _bytes_a_device(cache)
    floor = max(bytes_read / chip.bandwidth, flops / chip.flops)
    ways = layout.mesh.size // layout.mesh.shape["data"]
    # A ring sends each byte (n - 1) / n times and back, over two links; a hop takes about a microsecond.
    exchange = 2 * (ways - 1) / ways * moved / (2 * chip.link) + count * (ways - 1) * 1e-6
    return Forward(
        flops, bytes_read, cycles, round(count), moved, floor, max(floor, cycles / chip.clock) + exchange
    )


def _measure(
    shape: Shape, layout: Layout, rows: int, num_tokens: int, num_layers: int, slots: int
) -> np.ndarray:
    """Flops, cycles, number and bytes of the exchanges of a shallow forward."""
    model, params = _lay(shape, layout, num_layers, False)
    cache = jax.eval_shape(lambda: model.model.init_cache(rows, slots))
    cache = place(cache, state_shardings(layout, cache))
    tokens = jax.ShapeDtypeStruct((rows, num_tokens), jnp.int32)
    tokens = place(tokens, layout.sharding(("rows", None), tokens.shape))
    arguments = params, tokens, cache, tokens
    none: Any = None  # wherever the compiler likes
    results = ModelOutput(none, none, shardings_of(cache))
    run = sharded_jit(_apply, shardings_of(arguments), results, donate=(2,), model=model)
    compiled = _compile(run.lower(*arguments))
    text = compiled.as_text()
    exchanged = program.collectives(text)
    moved = sum(collective.num_bytes for collective in exchanged)
    return np.array([program.flops(compiled), program.cycles(text), len(exchanged), moved], float)


def _apply(params: Params, tokens: Any, cache: Any, positions: Any, *, model: Any) -> ModelOutput:
    return model.apply(params, tokens, cache, positions)


def _bytes_a_device(tree: Any) -> int:
    """What arrays take on one device, as they are spread."""
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


@dataclasses.dataclass(frozen=True)
class Costs:
    """What speculation is weighed by, in decode steps of the target."""

    decode: Forward
    verify: Forward
    draft: Forward
    num_draft_tokens: int  # of ``verify``

    @property
    def draft_cost(self) -> float:
        """c: a draft forward."""
        return self.draft.seconds / self.decode.seconds

    def verify_cost(self, num_draft_tokens: int) -> float:
        """v: a forward of K + 1 tokens, on a line through the two that were compiled."""
        full = self.verify.seconds / self.decode.seconds - 1
        return 1 + full * num_draft_tokens / self.num_draft_tokens

    def tokens_a_second(self, rows: int, acceptance: float, num_draft_tokens: int) -> float:
        """Of the whole batch, if every drafted token is accepted alike."""
        tokens = expected_tokens(num_draft_tokens, acceptance)
        gain = speedup(tokens, num_draft_tokens, self.draft_cost, self.verify_cost)
        return float(rows / self.decode.seconds * gain)

    def break_even(self) -> float | None:
        """The acceptance from which the planned K is no slower than plain decoding; None if there is none."""
        count = self.num_draft_tokens
        grid = np.linspace(0, 1, 1001)
        gains = speedup(expected_tokens(count, grid), count, self.draft_cost, self.verify_cost)
        return float(grid[np.argmax(gains >= 1)]) if gains[-1] >= 1 else None

    def best(self, acceptance: float) -> int:
        """The K that decodes fastest; 0 is plain decoding."""
        candidates = range(1, 2 * self.num_draft_tokens + 1)
        return int(best_num_draft_tokens(acceptance, self.draft_cost, self.verify_cost, tuple(candidates)))


def costs(target: Shape, draft: Shape, placement: Placement, chip: Chip, batch: Batch) -> Costs:
    """Compiles the forwards of a step, side by side."""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        decode, verify, drafted = (
            pool.submit(forward, shape, layout, chip, batch, num_tokens)
            for shape, layout, num_tokens in (
                (target, placement.target, 1),
                (target, placement.target, batch.num_draft_tokens + 1),
                (draft, placement.draft, 1),
            )
        )
    return Costs(decode.result(), verify.result(), drafted.result(), batch.num_draft_tokens)
