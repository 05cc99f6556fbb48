"""The rules: which drafted tokens stand, and what the step ends with.

Write p_i and q_i for the target's and the draft's distribution at drafted token d_i, both after the
warp, and r_i = p_i(d_i) / q_i(d_i). A deterministic draft has q one-hot: r_i = p_i(d_i). Each rule
returns a :class:`~specjax.types.Verdict` whose tokens follow the target's law exactly:

========= ========================= ==========================================================
name      stops                     source
========= ========================= ==========================================================
token     at the first u_i >= r_i   Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, 2302.01318
block     after the last u_i < h_i  Sun et al. 2024, arXiv 2403.10444
greedy    at the first d_i != argmax
coupled   where two Gumbel argmaxes that share their noise part; Daliri et al. 2024, arXiv 2408.07978
========= ========================= ==========================================================

Scalars ride in ``lax.scan`` over the K tokens; what touches the vocabulary is done once, outside.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jax import lax

from specjax.sampling import Role, argmax, is_token, keys_at, sample, uniform
from specjax.types import Address, Array, Draft, Key, Rule, Verdict

__all__ = ["RULES", "block", "coupled", "greedy", "residual_logits", "token"]


def token(address: Address, draft: Draft, target_logits: Array) -> Verdict:
    """Accepts d_i while u_i < min(1, r_i), then draws from max(p - q, 0), or p after the last.

    Args:
      address: names the step's noise; uniforms at offsets 0..K-1, the draw at the stop's offset.
      draft: K tokens a row, of which the first ``lengths`` count.
      target_logits: [B, K+1, V] float, warped (so the largest of each row is 0); row i scores the token
        after i drafted ones.

    Returns:
      The verdict.
    """
    _check(draft, target_logits)
    accept_probs = _masked(jnp.minimum(_ratios(draft, target_logits), 1), draft.lengths)
    # `<`, not `<=`: u is in [0, 1), and a token of probability 0 must never pass.
    num_accepted = _leading(_accept_uniforms(address, draft) < accept_probs)
    scale = jnp.ones(num_accepted.shape, target_logits.dtype)
    return _finish(address, draft, target_logits, accept_probs, num_accepted, scale)


def block(address: Address, draft: Draft, target_logits: Array) -> Verdict:
    """Keeps the longest prefix that passes a test of its own: never fewer tokens than :func:`token`.

    P_0 = 1, P_i = min(1, P_{i-1} r_i); S_i = sum_x max(P_i p_{i+1}(x) - q_{i+1}(x), 0);
    h_i = S_i / (S_i + 1 - P_i) before the last drafted token, h = P there. It keeps the tokens up to
    the *last* i with u_i < h_i and then draws from max(P_i p_{i+1} - q_{i+1}, 0), or from p after the
    last token (Sun et al. 2024, Algorithm 2).

    Arguments and result are those of :func:`token`.
    """
    _check(draft, target_logits)
    ratios = _ratios(draft, target_logits)

    def multiply(prefix: Array, ratio: Array) -> tuple[Array, Array]:
        prefix = jnp.minimum(prefix * ratio, 1)
        return prefix, prefix

    _, prefixes = lax.scan(multiply, jnp.ones(ratios.shape[0], ratios.dtype), ratios.T)
    prefixes = prefixes.T  # [B, K]: P_1 .. P_K

    # Token i is followed by the distributions of token i+1; the last has none and h = P there.
    following = None if draft.logits is None else draft.logits[:, 1:]
    leftover = _leftover(prefixes[:, :-1], draft.tokens[:, 1:], following, target_logits[:, 1:-1])
    # Bracketed so that P = 1 gives h = 1 exactly, however little is left over.
    inner = leftover / jnp.where(leftover > 0, leftover + (1 - prefixes[:, :-1]), 1)
    inner = jnp.pad(inner, ((0, 0), (0, min(1, ratios.shape[1]))))
    index = jnp.arange(ratios.shape[1], dtype=jnp.int32)
    accept_probs = jnp.where(index[None] == draft.lengths[:, None] - 1, prefixes, inner)
    accept_probs = _masked(accept_probs, draft.lengths)

    def keep_last(last: Array, step: tuple[Array, Array]) -> tuple[Array, None]:
        i, passed = step
        return jnp.where(passed, i + 1, last), None

    passed = _accept_uniforms(address, draft) < accept_probs
    num_accepted, _ = lax.scan(keep_last, jnp.zeros_like(draft.lengths), (index, passed.T))
    with_empty = jnp.pad(prefixes, ((0, 0), (1, 0)), constant_values=1)  # P_0 .. P_K
    scale = jnp.take_along_axis(with_empty, num_accepted[:, None], axis=1)[:, 0]
    return _finish(address, draft, target_logits, accept_probs, num_accepted, scale)


def greedy(address: Address, draft: Draft, target_logits: Array) -> Verdict:
    """Accepts d_i while it is the target's argmax, the lowest id among equals; draws no noise.

    Arguments and result are those of :func:`token`; right only where every row is greedy.
    """
    del address
    _check(draft, target_logits)
    return _match(draft, target_logits, argmax(target_logits))


def coupled(address: Address, draft: Draft, target_logits: Array) -> Verdict:
    """Emits the target's own Gumbel samples, t_i = argmax(log p_i + g_i), and goes on while d_i = t_i.

    g_i belongs to the absolute position (start + i), and a model draft draws with the same g_i. So the
    output is that of plain sampling with the same seed, token for token, whatever the draft. It accepts
    with probability sum_x 1 / sum_y max(p_y/p_x, q_y/q_x) >= (1 - TV) / (1 + TV).

    Arguments and result are those of :func:`token`.
    """
    _check(draft, target_logits)

    def choose(i: Array) -> Array:  # one position after the other: the noise of all at once is 8 times p
        return sample(
            _position_keys(address, i), lax.dynamic_index_in_dim(target_logits, i, 1, keepdims=False)
        )

    choices = lax.map(choose, jnp.arange(target_logits.shape[1]))
    return _match(draft, target_logits, choices.T)


def residual_logits(draft: Draft, target_logits: Array, num_accepted: Array, scale: Array) -> Array:
    """Log of what a step's last token is drawn from: max(scale p - q, 0), or p after the whole draft.

    Args:
      draft: K tokens a row.
      target_logits: [B, K+1, V] float, warped.
      num_accepted: [B] int32, the position at which the row stopped.
      scale: [B] float, 1 for the token rule, P of the kept prefix for the block rule.

    Returns:
      [B, V] float, unnormalised.
    """
    pick = jax.vmap(lambda rows, i: lax.dynamic_index_in_dim(rows, i, keepdims=False))
    target = _probs(pick(target_logits, num_accepted))
    num_drafted = draft.tokens.shape[1]
    if num_drafted == 0:
        return jnp.log(target)
    stopped = jnp.minimum(num_accepted, num_drafted - 1)
    if draft.logits is None:
        rest = jnp.where(is_token(pick(draft.tokens, stopped), target.shape), 0, target)
    else:
        draft_probs = _probs(pick(draft.logits, stopped))
        rest = jnp.maximum(scale[:, None] * target - draft_probs, 0)
    # Rounding can leave nothing over where p and q all but agree; then p is the answer, to rounding.
    use_target = (num_accepted == draft.lengths)[:, None] | (jnp.sum(rest, axis=-1, keepdims=True) <= 0)
    return jnp.log(jnp.where(use_target, target, rest))


def _check(draft: Draft, target_logits: Array) -> None:
    chex.assert_rank([draft.tokens, draft.lengths, target_logits], [2, 1, 3])
    batch, num_drafted = draft.tokens.shape
    chex.assert_shape(target_logits, (batch, num_drafted + 1, None))
    if draft.logits is not None:
        chex.assert_shape(draft.logits, (batch, num_drafted, target_logits.shape[-1]))


def _probs(logits: Array) -> Array:
    """The softmax of warped logits: their largest is 0, so there is none to look for."""
    weights = jnp.exp(logits)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def _log_prob(logits: Array, tokens: Array) -> Array:
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jnp.log(jnp.sum(jnp.exp(logits), axis=-1))


def _ratios(draft: Draft, target_logits: Array) -> Array:
    """r_i = p_i(d_i) / q_i(d_i), [B, K]."""
    # All K+1 rows, of which the last means nothing: leaving it out would make XLA copy the others.
    target = _log_prob(target_logits, jnp.pad(draft.tokens, ((0, 0), (0, 1))))[:, :-1]
    if draft.logits is None:
        return jnp.exp(target)
    # An impossible drafted token (only filler can be one) must not become -inf + inf.
    chosen = _log_prob(draft.logits, draft.tokens)
    return jnp.where(jnp.isneginf(target), 0, jnp.exp(target - chosen))


def _leftover(prefixes: Array, tokens: Array, draft_logits: Array | None, target_logits: Array) -> Array:
    """S_i = sum_x max(P_i p(x) - q(x), 0), all [B, N]."""
    if draft_logits is None:  # only the drafted token loses anything, and it loses all
        return prefixes * (1 - jnp.exp(_log_prob(target_logits, tokens)))
    rest = prefixes[..., None] * _probs(target_logits) - _probs(draft_logits)
    return jnp.sum(jnp.maximum(rest, 0), axis=-1)


def _masked(accept_probs: Array, lengths: Array) -> Array:
    return jnp.where(jnp.arange(accept_probs.shape[1])[None] < lengths[:, None], accept_probs, 0)


def _leading(passed: Array) -> Array:
    """How many in a row pass from the left: [B, K] bool -> [B] int32, a scan over the K verdicts."""

    def judge(carry: tuple[Array, Array], ok: Array) -> tuple[tuple[Array, Array], None]:
        alive, count = carry
        alive = alive & ok
        return (alive, count + alive), None

    batch = passed.shape[0]
    start = (jnp.ones(batch, bool), jnp.zeros(batch, jnp.int32))
    return lax.scan(judge, start, passed.T)[0][1]


def _finish(
    address: Address,
    draft: Draft,
    target_logits: Array,
    accept_probs: Array,
    num_accepted: Array,
    scale: Array,
) -> Verdict:
    next_logits = residual_logits(draft, target_logits, num_accepted, scale)
    next_token = sample(keys_at(address, num_accepted, Role.SAMPLE), next_logits)
    return Verdict(num_accepted, next_token, accept_probs, next_logits)


def _match(draft: Draft, target_logits: Array, choices: Array) -> Verdict:
    """The verdict of a rule that knows the target's token at every position, ``choices`` [B, K+1]."""
    agreed = _masked((choices[:, :-1] == draft.tokens).astype(target_logits.dtype), draft.lengths)
    num_accepted = _leading(agreed > 0)
    next_token = jnp.take_along_axis(choices, num_accepted[:, None], axis=1)[:, 0]
    number = target_logits.dtype.type
    chosen = is_token(next_token, (*next_token.shape, target_logits.shape[-1]))
    return Verdict(num_accepted, next_token, agreed, jnp.where(chosen, number(0), number(-jnp.inf)))


def _accept_uniforms(address: Address, draft: Draft) -> Array:
    offsets = lax.broadcasted_iota(jnp.int32, draft.tokens.shape, 1)
    return uniform(keys_at(address, offsets, Role.ACCEPT))


def _own_keys(address: Address, offset: Array) -> Key:
    """The draft's own noise, at (start, offset)."""
    return keys_at(address, jnp.full_like(address.start, offset), Role.DRAFT)


def _position_keys(address: Address, offset: Array) -> Key:
    """The noise with which plain decoding draws at position start + offset: there a step starts."""
    return keys_at(Address(address.seed, address.start + offset), jnp.zeros_like(address.start), Role.SAMPLE)


RULES = {
    rule.name: rule
    for rule in (
        Rule("token", token, _own_keys),
        Rule("block", block, _own_keys),
        Rule("greedy", greedy, _own_keys),
        Rule("coupled", coupled, _position_keys),
    )
}
"""The rules by the names that jobs know them by."""
