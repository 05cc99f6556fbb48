"""The device's side of a batch job: a fixed number of slots that rows come into and go out of.

Pure functions, which :mod:`specjax.engine.programs` compiles once, whatever the requests: *admit* moves a row
from the lane into a slot, *run* takes some steps, *score* reads a text that is done. Everything that varies
is an array.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from specjax.decode import Caches
from specjax.generate import steps_while
from specjax.record import Record, empty_record
from specjax.types import (
    Array,
    Cache,
    Context,
    DecodeState,
    Drafter,
    Edits,
    Filters,
    Logprobs,
    Model,
    Params,
    Rule,
    SamplingParams,
    pytree,
)

__all__ = [
    "MAX_BIASES",
    "MAX_STOPS",
    "Report",
    "Row",
    "Slots",
    "admit",
    "batch_axes",
    "empty_caches",
    "empty_slots",
    "run",
    "score",
]

MAX_BIASES = 512
"""Biased tokens a row."""
MAX_STOPS = 16
"""Stop tokens a row."""


@pytree
class Slots:
    """All that the device holds of the rows being decoded."""

    state: DecodeState
    record: Record


@pytree
class Row:
    """A request, as it comes into a slot."""

    tokens: ArrayLike  # [S] int32
    length: ArrayLike  # int32
    limit: ArrayLike  # int32
    stop_tokens: ArrayLike  # [MAX_STOPS] int32, -1 is filler
    sampling: SamplingParams  # without the axis of rows; never without filters or edits


@pytree
class Report:
    """What the host may read after a run, while the next one goes on."""

    tokens: Array  # [B, S]
    length: Array  # [B]
    done: Array  # [B]
    record: Record
    num_steps: Array  # int32, steps of this run


def empty_caches(target: Model, drafter: Drafter | None, batch: int, capacity: int) -> Caches:
    """Caches in which nothing has been read."""
    return target.init_cache(batch, capacity), None if drafter is None else drafter.init(batch, capacity)


def empty_slots(
    target: Model, drafter: Drafter | None, batch: int, capacity: int, num_draft_tokens: int
) -> Slots:
    """Slots that are all free: rows of one token that are done."""

    def full(value: float, dtype: jax.typing.DTypeLike, *shape: int) -> Array:
        return jnp.full((batch, *shape), value, dtype)

    target_cache, draft_state = empty_caches(target, drafter, batch, capacity)
    sampling = SamplingParams(
        temperature=full(0, jnp.float32),
        seed=full(0, jnp.uint32),
        filters=Filters(min_p=full(0, jnp.float32), top_k=full(0, jnp.int32), top_p=full(1, jnp.float32)),
        edits=Edits(
            bias_tokens=full(-1, jnp.int32, MAX_BIASES),
            bias_values=full(0, jnp.float32, MAX_BIASES),
            presence_penalty=full(0, jnp.float32),
            frequency_penalty=full(0, jnp.float32),
            repetition_penalty=full(1, jnp.float32),
            min_tokens=full(0, jnp.int32),
        ),
    )
    context = Context(
        tokens=full(0, jnp.int32, capacity),
        length=full(1, jnp.int32),
        prompt_length=full(1, jnp.int32),
        stop_tokens=full(-1, jnp.int32, MAX_STOPS),
    )
    state = DecodeState(context, full(1, jnp.int32), full(True, bool), sampling, target_cache, draft_state)
    return Slots(state, empty_record((batch, capacity), num_draft_tokens, None))


def batch_axes(target: Model, drafter: Drafter | None, capacity: int) -> tuple[int, ...]:
    """Which axis of each array in the caches counts the rows: that in which two batch sizes differ.

    Only a model and a drafter look into their caches, but a row must be moved from the lane to a slot.

    Raises:
      ValueError: an array of theirs doesn't have exactly one such axis.
    """
    few, more = (
        jax.tree.leaves(jax.eval_shape(partial(empty_caches, target, drafter, batch, capacity)))
        for batch in (2, 3)
    )
    axes = [np.flatnonzero(np.not_equal(a.shape, b.shape)) for a, b in zip(few, more, strict=True)]
    if any(len(axis) != 1 for axis in axes):
        raise ValueError("each array of a cache or a drafter's state must have one axis of rows")
    return tuple(int(axis[0]) for axis in axes)


def admit(
    slots: Slots, lane: Caches, row: Row, lane_row: Array, slot: Array, *, axes: tuple[int, ...]
) -> Slots:
    """Puts a row whose prompt was read in the lane into a slot."""
    state = slots.state

    def put(rows: Array, value: ArrayLike) -> Array:
        return rows.at[slot].set(value)

    def move(rows: Array, lane_rows: Array, axis: int) -> Array:
        one = lax.dynamic_slice_in_dim(lane_rows, lane_row, 1, axis)
        return lax.dynamic_update_slice_in_dim(rows, one, slot, axis)

    leaves, structure = jax.tree.flatten((state.target_cache, state.draft_state))
    moved = map(move, leaves, jax.tree.leaves(lane), axes)
    target_cache, draft_state = jax.tree.unflatten(structure, list(moved))
    context = Context(
        tokens=put(state.context.tokens, row.tokens),
        length=put(state.context.length, row.length),
        prompt_length=put(state.context.prompt_length, row.length),
        stop_tokens=put(state.context.stop_tokens, row.stop_tokens),
    )
    return Slots(
        DecodeState(
            context=context,
            limit=put(state.limit, row.limit),
            done=put(state.done, jnp.asarray(row.length) >= row.limit),
            sampling=jax.tree.map(put, state.sampling, row.sampling),
            target_cache=target_cache,
            draft_state=draft_state,
        ),
        jax.tree.map(lambda rows: rows.at[slot].set(jnp.zeros((), rows.dtype)), slots.record),
    )


def run(
    slots: Slots,
    target_params: Params,
    draft_params: Params,
    free: Array,
    min_steps: Array,
    max_steps: Array,
    enough: Array,
    *,
    target: Model,
    drafter: Drafter | None,
    rule: Rule,
) -> tuple[Slots, Report]:
    """Takes steps until the host has something to do.

    Args:
      slots: consumed.
      target_params: the target's weights.
      draft_params: the drafter's.
      free: [B] bool, slots without a row: what is left there ends, and is as short as can be, since a forward
        reads all rows.
      min_steps: int32, steps to take while a row lives.
      max_steps: int32, steps to take at most.
      enough: int32, how many rows have to end in this run to make it come back before ``max_steps``.
      target: static.
      drafter: static; None for plain decoding.
      rule: static.

    Returns:
      The slots, and copies of what the host reads.
    """
    context = slots.state.context
    begin = dataclasses.replace(
        slots.state,
        context=dataclasses.replace(context, length=jnp.where(free, 1, context.length)),
        done=slots.state.done | free,
    )
    done_before = jnp.sum(begin.done, dtype=jnp.int32)

    def goes_on(state: DecodeState, count: Array) -> Array:
        ended = jnp.sum(state.done, dtype=jnp.int32) - done_before
        return (count < max_steps) & ~jnp.all(state.done) & ((count < min_steps) | (ended < enough))

    state, record, count = steps_while(
        goes_on,
        target_params,
        draft_params,
        begin,
        slots.record,
        target=target,
        drafter=drafter,
        rule=rule,
    )
    report = Report(state.context.tokens, state.context.length, state.done, record, count)
    return Slots(state, record), report


def score(
    cache: Cache,
    params: Params,
    tokens: Array,
    following: Array,
    positions: Array,
    *,
    target: Model,
    num_top: int,
) -> tuple[Cache, Logprobs]:
    """The log-probabilities [T] of the tokens that follow a block of one text, and of the likeliest there."""
    output = target.apply(params, tokens, cache, positions)
    log_probs = jax.nn.log_softmax(output.logits[0].astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(log_probs, following[0][:, None], axis=-1)[:, 0]
    top, top_tokens = jax.lax.top_k(log_probs, num_top)
    return output.cache, Logprobs(chosen, top_tokens, top)
