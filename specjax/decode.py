"""The step: draft, one forward of the target, a rule, commit, roll back by length.

Everything here is pure and unjitted; :mod:`specjax.generate` puts the jit around it. ``speculative_step``
is written once: a loop on the device, a stream and a batch engine all call it.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from specjax.prefill import prefill
from specjax.rows import put
from specjax.sampling import likeliest, warp
from specjax.types import (
    Address,
    Array,
    Cache,
    Context,
    DecodeState,
    Draft,
    Drafter,
    Logprobs,
    Model,
    Params,
    Rule,
    SamplingParams,
    StepInfo,
    Verdict,
    pytree,
)

__all__ = ["Caches", "autoregressive_step", "read_block", "speculative_step", "start"]

Caches = tuple[Cache, Any]
"""The target's cache and the drafter's state."""


def start(
    target_params: Params,
    draft_params: Params,
    context: Context,
    limit: Array,
    sampling: SamplingParams,
    *,
    target: Model,
    drafter: Drafter | None,
) -> DecodeState:
    """Prefills both models and makes the state that the first step takes.

    Args:
      target_params: the target's weights.
      draft_params: the drafter's, or None.
      context: the prompts; ``S`` is at least limit + K + 1.
      limit: [B] int32, the lengths at which rows must end.
      sampling: one value a row.
      target: the model whose law the output has.
      drafter: what proposes; None for plain decoding.

    Returns:
      The state, with every token but the newest read. A row whose limit is its length is done already.
    """
    chex.assert_rank([context.tokens, context.length, context.stop_tokens, limit], [2, 1, 2, 1])
    chex.assert_type([context.tokens, context.length, context.stop_tokens, limit], jnp.int32)
    chex.assert_equal_shape_prefix([context.tokens, context.length, context.stop_tokens, limit], 1)
    batch, capacity = context.tokens.shape
    empty = target.init_cache(batch, capacity), None if drafter is None else drafter.init(batch, capacity)

    def read(caches: Caches, tokens: Array, positions: Array) -> Caches:
        return read_block(
            caches,
            target_params,
            draft_params,
            tokens,
            positions,
            context.length,
            target=target,
            drafter=drafter,
        )

    target_cache, draft_state = prefill(read, empty, context.tokens, context.length)
    return DecodeState(
        context=context,
        limit=limit,
        done=context.length >= limit,
        sampling=sampling,
        target_cache=target_cache,
        draft_state=draft_state,
    )


def read_block(
    caches: Caches,
    target_params: Params,
    draft_params: Params,
    tokens: Array,
    positions: Array,
    length: Array,
    *,
    target: Model,
    drafter: Drafter | None,
) -> Caches:
    """Feeds a block of given text to both models.

    Args:
      caches: the target's cache and the drafter's state, which have read each row up to the block.
      target_params: the target's weights.
      draft_params: the drafter's, or None.
      tokens: [B, T] int32.
      positions: [B, T] int32, where they stand.
      length: [B] int32, the length of each row's text; what the block has past it is filler.
      target: static under jit.
      drafter: static under jit; None for plain decoding.

    Returns:
      The caches, with the block read.
    """
    target_cache, draft_state = caches
    output = target.apply(target_params, tokens, target_cache, positions)
    if drafter is not None:
        draft_state = drafter.read(draft_params, draft_state, tokens, positions, length, output.features)
    return output.cache, draft_state


def speculative_step(
    state: DecodeState,
    target_params: Params,
    draft_params: Params,
    *,
    target: Model,
    drafter: Drafter,
    rule: Rule,
    num_logprobs: int | None = None,
) -> tuple[DecodeState, StepInfo]:
    """Extends every live row by 1 to K + 1 tokens that follow the target's law.

    The drafter proposes d_1 .. d_K; the target is fed the newest token and the draft in one forward;
    the rule keeps a prefix and adds one token of its own. A step in which no row has a draft feeds the
    newest token alone: it costs a plain step.

    Args:
      state: consumed; donate it.
      target_params: the target's weights.
      draft_params: the drafter's weights, or None where it has none.
      target: the model whose law the output has; static under jit.
      drafter: static under jit.
      rule: one of :data:`specjax.verify.RULES`; static under jit.
      num_logprobs: how many of the likeliest tokens to report at each position, besides the emitted one;
        None reports nothing. Static under jit.

    Returns:
      The next state, and what happened.
    """
    draft_keys = partial(rule.draft_keys, Address(state.sampling.seed, state.context.length))
    draft, draft_state = drafter.propose(
        draft_params, draft_keys, state.draft_state, state.context, state.sampling
    )
    # The step itself adds a token, so a row one short of its limit has nothing to draft for.
    room = jnp.where(state.done, 0, jnp.maximum(state.limit - state.context.length - 1, 0))
    lengths = jnp.minimum(draft.lengths, room)
    if draft.logits is not None:  # a draft that broke costs speed, not the law
        lengths = jnp.minimum(lengths, _num_sound(draft.logits))
    draft = Draft(draft.tokens, draft.logits, lengths)

    judge = partial(_judge, state, target_params, draft, target=target, rule=rule, num_logprobs=num_logprobs)
    if drafter.always_full:
        judged = judge(state.target_cache, width=drafter.num_draft_tokens)
    else:
        judged = lax.cond(
            jnp.any(draft.lengths > 0),
            partial(judge, width=drafter.num_draft_tokens),
            partial(judge, width=0),
            state.target_cache,
        )
    draft_state = drafter.accept(draft_state, judged.verdict.num_accepted, judged.features)
    return _commit(state, draft, judged, draft_state)


def autoregressive_step(
    state: DecodeState, target_params: Params, *, target: Model, rule: Rule, num_logprobs: int | None = None
) -> tuple[DecodeState, StepInfo]:
    """Extends every live row by one token: plain decoding, the baseline that speculation must equal.

    Its noise at a length is that of a speculative step without a draft, and of the coupled rule.

    Args:
      state: consumed; donate it.
      target_params: the target's weights.
      target: static under jit.
      rule: says how the token is picked: by argmax under ``greedy``, else by a draw.
      num_logprobs: as in :func:`speculative_step`.

    Returns:
      The next state, and what happened.
    """
    batch = state.done.shape[0]
    draft = Draft(jnp.zeros((batch, 0), jnp.int32), None, jnp.zeros(batch, jnp.int32))
    judged = _judge(
        state,
        target_params,
        draft,
        state.target_cache,
        width=0,
        target=target,
        rule=rule,
        num_logprobs=num_logprobs,
    )
    return _commit(state, draft, judged, state.draft_state)


@pytree
class _Judged:
    """What the target and the rule say of a block."""

    verdict: Verdict
    num_sound: Array  # [B] int32: rows of logits, from the first, that are numbers
    features: Array | None  # [B, K+1, F]
    logprobs: Logprobs | None
    cache: Cache


def _judge(
    state: DecodeState,
    target_params: Params,
    draft: Draft,
    cache: Cache,
    *,
    width: int,
    target: Model,
    rule: Rule,
    num_logprobs: int | None,
) -> _Judged:
    """Scores the newest token and the first ``width`` drafted ones, and has the rule judge them."""
    length = state.context.length[:, None]
    slots = length + jnp.arange(width)[None]
    # The warp sees the drafted tokens where they would stand.
    context = dataclasses.replace(
        state.context, tokens=put(state.context.tokens, slots, draft.tokens[:, :width])
    )
    positions = length - 1 + jnp.arange(width + 1)[None]
    fed = jnp.concatenate(
        [jnp.take_along_axis(context.tokens, positions[:, :1], axis=1), draft.tokens[:, :width]], axis=1
    )
    output = target.apply(target_params, fed, cache, positions)
    logits = warp(output.logits, state.sampling, context)

    num_sound = _num_sound(logits)
    narrow = Draft(
        draft.tokens[:, :width],
        # Without a drafted token there are no logits to compare.
        draft.logits[:, :width] if draft.logits is not None and width else None,
        # What stands behind a row without a law can't be judged; a shorter draft can.
        jnp.minimum(jnp.minimum(draft.lengths, width), num_sound),
    )
    verdict = rule.verify(Address(state.sampling.seed, state.context.length), narrow, logits)
    logprobs = None
    if num_logprobs is not None:
        block = _block(narrow, verdict)
        log_probs = jax.nn.log_softmax(output.logits.astype(jnp.float32), axis=-1)
        top, top_tokens = likeliest(log_probs, num_logprobs)
        chosen = jnp.take_along_axis(log_probs, block[:, :, None], axis=-1)[..., 0]
        logprobs = Logprobs(chosen, top_tokens, top)

    def fill(x: Array) -> Array:  # both branches of a step give arrays of one shape
        return jnp.pad(x, ((0, 0), (0, draft.tokens.shape[1] - width), *[(0, 0)] * (x.ndim - 2)))

    verdict = dataclasses.replace(verdict, accept_probs=fill(verdict.accept_probs))
    features, logprobs = jax.tree.map(fill, (output.features, logprobs))
    return _Judged(verdict, num_sound, features, logprobs, output.cache)


def _num_sound(logits: Array) -> Array:
    """How many rows of warped logits [B, T, V], from the first, are a law: their largest is 0."""
    broken = jnp.max(logits, axis=-1) != 0
    return jnp.sum(jnp.cumsum(broken, axis=1) == 0, axis=1, dtype=jnp.int32)


def _block(draft: Draft, verdict: Verdict) -> Array:
    """The tokens [B, K+1] that a step may emit: the accepted ones, the rule's own, then filler."""
    index = jnp.arange(draft.tokens.shape[1] + 1)[None]
    drafted = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    return jnp.where(index == verdict.num_accepted[:, None], verdict.next_token[:, None], drafted)


def _commit(
    state: DecodeState, draft: Draft, judged: _Judged, draft_state: object
) -> tuple[DecodeState, StepInfo]:
    """Appends what stood, cut at the first stop token; rolls back by not counting."""
    context, verdict = state.context, judged.verdict
    capacity = context.tokens.shape[1]
    index = jnp.arange(draft.tokens.shape[1] + 1)[None]
    tokens = _block(draft, verdict)

    # Where the target's logits stop being numbers the row ends, as plain decoding would end there: what
    # was accepted before stands. (What is no number behind a rejected token, nobody would have seen.)
    failed = (verdict.num_accepted >= judged.num_sound) & ~state.done
    count = jnp.where(failed, judged.num_sound, verdict.num_accepted + 1)
    within = (index < count[:, None]) & ~state.done[:, None]
    stops = within & jnp.any(tokens[:, :, None] == context.stop_tokens[:, None, :], axis=2)
    # A token is emitted if no stop stands before it; the stop itself is the row's last token.
    emitted = within & (jnp.cumsum(stops, axis=1) - stops == 0)
    num_emitted = jnp.sum(emitted, axis=1, dtype=jnp.int32)

    slots = jnp.where(emitted, context.length[:, None] + index, capacity)
    length = context.length + num_emitted
    next_state = dataclasses.replace(
        state,
        context=dataclasses.replace(context, tokens=put(context.tokens, slots, tokens), length=length),
        done=state.done | failed | jnp.any(stops, axis=1) | (length >= state.limit),
        target_cache=judged.cache,
        draft_state=draft_state,
    )
    info = StepInfo(
        num_drafted=draft.lengths,
        num_accepted=jnp.minimum(verdict.num_accepted, num_emitted),
        num_emitted=num_emitted,
        failed=failed,
        verdict=verdict,
        draft=draft,
        logprobs=judged.logprobs,
    )
    return next_state, info
