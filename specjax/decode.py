"""The step: draft, one forward of the target, a rule, commit, roll back by length.

Everything here is pure and unjitted; :mod:`specjax.generate` puts the jit around it. ``speculative_step``
is written once: a loop on the device, a stream and a batch engine all call it.
"""

from __future__ import annotations

from functools import partial

import chex
import jax.numpy as jnp
from jax import lax

from specjax.prefill import prefill
from specjax.sampling import warp
from specjax.types import (
    Address,
    Array,
    Cache,
    DecodeState,
    Draft,
    Drafter,
    Model,
    Params,
    Rule,
    SamplingParams,
    StepInfo,
    Verdict,
)

__all__ = ["autoregressive_step", "speculative_step", "start"]


def start(
    target_params: Params,
    draft_params: Params,
    tokens: Array,
    length: Array,
    limit: Array,
    stop_tokens: Array,
    sampling: SamplingParams,
    *,
    target: Model,
    drafter: Drafter | None,
) -> DecodeState:
    """Prefills both models and makes the state that the first step takes.

    Args:
      target_params: the target's weights.
      draft_params: the drafter's, or None.
      tokens: [B, S] int32, prompts from the left, each at least one token.
      length: [B] int32, the prompts' lengths.
      limit: [B] int32, the lengths at which rows must end; ``S`` is at least limit + K + 1.
      stop_tokens: [B, E] int32 ids that end a row, -1 for none.
      sampling: one value a row.
      target: the model whose law the output has.
      drafter: what proposes; None for plain decoding.

    Returns:
      The state. Rows whose limit is their length are done from the start.
    """
    chex.assert_rank([tokens, length, limit, stop_tokens], [2, 1, 1, 2])
    chex.assert_type([tokens, length, limit, stop_tokens], jnp.int32)
    chex.assert_equal_shape_prefix([tokens, length, limit, stop_tokens], 1)
    return DecodeState(
        tokens=tokens,
        length=length,
        limit=limit,
        done=length >= limit,
        stop_tokens=stop_tokens,
        sampling=sampling,
        target_cache=prefill(target, target_params, tokens, length),
        draft_state=None if drafter is None else drafter.init(draft_params, tokens, length),
    )


def speculative_step(
    state: DecodeState, target_params: Params, draft_params: Params, *, target: Model, drafter: Drafter, rule: Rule
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

    Returns:
      The next state, and what happened.
    """
    address = Address(state.sampling.seed, state.length)
    draft, draft_state = drafter.propose(
        draft_params, partial(rule.draft_keys, address), state.draft_state, state.tokens, state.length, state.sampling
    )
    # The step itself adds a token, so a row one short of its limit has nothing to draft for.
    room = jnp.where(state.done, 0, jnp.maximum(state.limit - state.length - 1, 0))
    draft = Draft(draft.tokens, draft.logits, jnp.minimum(draft.lengths, room))

    judge = partial(_judge, state, target_params, draft, target=target, rule=rule)
    if drafter.always_full:
        verdict, features, cache = judge(state.target_cache, width=drafter.num_draft_tokens)
    else:
        verdict, features, cache = lax.cond(
            jnp.any(draft.lengths > 0),
            partial(judge, width=drafter.num_draft_tokens),
            partial(judge, width=0),
            state.target_cache,
        )
    draft_state = drafter.accept(draft_state, verdict.num_accepted, features)
    return _commit(state, draft, verdict, cache, draft_state)


def autoregressive_step(
    state: DecodeState, target_params: Params, *, target: Model, rule: Rule
) -> tuple[DecodeState, StepInfo]:
    """Extends every live row by one token: plain decoding, the baseline that speculation must equal.

    Its noise at a length is that of a speculative step without a draft, and of the coupled rule.

    Args:
      state: consumed; donate it.
      target_params: the target's weights.
      target: static under jit.
      rule: says how the token is picked: by argmax under ``greedy``, else by a draw.

    Returns:
      The next state, and what happened.
    """
    batch = state.length.shape[0]
    draft = Draft(jnp.zeros((batch, 0), jnp.int32), None, jnp.zeros(batch, jnp.int32))
    verdict, _, cache = _judge(state, target_params, draft, state.target_cache, width=0, target=target, rule=rule)
    return _commit(state, draft, verdict, cache, state.draft_state)


def _judge(
    state: DecodeState, target_params: Params, draft: Draft, cache: Cache, *, width: int, target: Model, rule: Rule
) -> tuple[Verdict, Array | None, Cache]:
    """Scores the newest token and the first ``width`` drafted ones, and has the rule judge them."""
    newest = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    fed = jnp.concatenate([newest, draft.tokens[:, :width]], axis=1)
    positions = state.length[:, None] - 1 + jnp.arange(width + 1)[None]
    output = target.apply(target_params, fed, cache, positions)
    logits = warp(output.logits, state.sampling)

    narrow = Draft(
        draft.tokens[:, :width],
        # Without a drafted token there are no logits to compare.
        draft.logits[:, :width] if draft.logits is not None and width else None,
        jnp.minimum(draft.lengths, width),
    )
    verdict = rule.verify(Address(state.sampling.seed, state.length), narrow, logits)
    missing = draft.tokens.shape[1] - width
    accept_probs = jnp.pad(verdict.accept_probs, ((0, 0), (0, missing)))
    features = output.features
    if features is not None:
        features = jnp.pad(features, ((0, 0), (0, missing), (0, 0)))
    verdict = Verdict(verdict.num_accepted, verdict.next_token, accept_probs, verdict.next_logits)
    return verdict, features, output.cache


def _commit(
    state: DecodeState, draft: Draft, verdict: Verdict, target_cache: Cache, draft_state: object
) -> tuple[DecodeState, StepInfo]:
    """Appends what stood, cut at the first stop token and at the limit; rolls back by not counting."""
    capacity = state.tokens.shape[1]
    index = jnp.arange(draft.tokens.shape[1] + 1)[None]
    drafted = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(index == verdict.num_accepted[:, None], verdict.next_token[:, None], drafted)

    within = index < jnp.minimum(verdict.num_accepted + 1, state.limit - state.length)[:, None]
    stops = within & jnp.any(tokens[:, :, None] == state.stop_tokens[:, None, :], axis=2)
    # A token is emitted if no stop stands before it; the stop itself is the row's last token.
    emitted = within & (jnp.cumsum(stops, axis=1) - stops == 0) & ~state.done[:, None]
    num_emitted = jnp.sum(emitted, axis=1, dtype=jnp.int32)

    slots = jnp.where(emitted, state.length[:, None] + index, capacity)
    rows = jnp.arange(tokens.shape[0])[:, None]
    length = state.length + num_emitted
    next_state = DecodeState(
        tokens=state.tokens.at[rows, slots].set(tokens, mode="drop"),
        length=length,
        limit=state.limit,
        done=state.done | jnp.any(stops, axis=1) | (length >= state.limit),
        stop_tokens=state.stop_tokens,
        sampling=state.sampling,
        target_cache=target_cache,
        draft_state=draft_state,
    )
    info = StepInfo(
        num_drafted=draft.lengths,
        num_accepted=jnp.minimum(verdict.num_accepted, num_emitted),
        num_emitted=num_emitted,
        verdict=verdict,
        draft=draft,
    )
    return next_state, info
