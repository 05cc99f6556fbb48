"""What speculative decoding should do, in closed formulas: acceptance, tokens a step, speed, the best K.

Float64 NumPy. Write p and q for the target's and the draft's distribution at a position, both after the
warp; a deterministic draft has q one-hot. :mod:`specjax.theory_law` follows the rules through every draft
where the vocabulary is small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "Floats",
    "acceptance",
    "best_num_draft_tokens",
    "check_distribution",
    "check_rule",
    "coupled_acceptance",
    "coupled_matches",
    "expected_tokens",
    "residual",
    "speedup",
    "stop_probs",
]

Floats = npt.NDArray[np.float64]
"""Float64 arrays; a scalar where no axis is left."""

_RULES = ("token", "block", "coupled")


def acceptance(target_probs: npt.ArrayLike, draft_probs: npt.ArrayLike) -> Floats:
    """The probability that the token rule accepts a token drawn from the draft.

    sum_x min(p(x), q(x)) = 1 - TV(p, q) (Leviathan et al. 2023, arXiv 2211.17192, section 3).

    Args:
      target_probs: p, [..., V].
      draft_probs: q, [..., V]; leading axes broadcast.

    Returns:
      [...] in [0, 1].

    Raises:
      ValueError: the vocabularies differ, or these are not distributions.
    """
    target, draft = _pair(target_probs, draft_probs)
    return np.sum(np.minimum(target, draft), axis=-1)


def coupled_acceptance(target_probs: npt.ArrayLike, draft_probs: npt.ArrayLike) -> Floats:
    """The probability that argmax(log p + g) = argmax(log q + g) for one Gumbel vector g.

    sum_x 1 / sum_y max(p_y / p_x, q_y / q_x) over the x that both can draw; it is at least
    (1 - TV) / (1 + TV) and at most 1 - TV (Daliri et al. 2024, arXiv 2408.07978).

    Arguments, result and errors are those of :func:`acceptance`.
    """
    return np.sum(coupled_matches(target_probs, draft_probs), axis=-1)


def coupled_matches(target_probs: npt.ArrayLike, draft_probs: npt.ArrayLike) -> Floats:
    """The probability that both argmaxes are x, for each x: the summands of :func:`coupled_acceptance`.

    Sorted by p / q, the sum over y splits into one over p and one over q: O(V log V), not O(V^2).

    Arguments and errors are those of :func:`acceptance`.

    Returns:
      [..., V], at most min(p, q).
    """
    p, q = np.broadcast_arrays(*_pair(target_probs, draft_probs))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        order = np.argsort(np.where(p > 0, p / q, 0), axis=-1)
        p, q = np.take_along_axis(p, order, axis=-1), np.take_along_axis(q, order, axis=-1)
        # p_y / p_x is the larger where y comes after x, q_y / q_x where y comes before.
        after = np.cumsum(p[..., ::-1], axis=-1)[..., ::-1]
        before = np.cumsum(q, axis=-1) - q
        matches = np.where((p > 0) & (q > 0), 1 / (after / p + before / q), 0)
    return np.take_along_axis(matches, np.argsort(order, axis=-1), axis=-1)


def residual(target_probs: npt.ArrayLike, draft_probs: npt.ArrayLike, scale: npt.ArrayLike = 1.0) -> Floats:
    """What the token after a rejected one is drawn from: max(scale p - q, 0), normalised.

    ``scale`` is 1 under the token rule (arXiv 2211.17192), P_i of the kept prefix under the block rule
    (Sun et al. 2024, arXiv 2403.10444). Where nothing is left over, p itself: there nothing is rejected.

    Args:
      target_probs: p, [..., V].
      draft_probs: q, [..., V]; leading axes broadcast.
      scale: [...] in [0, 1].

    Returns:
      [..., V], each summing to 1.

    Raises:
      ValueError: the vocabularies differ, these are not distributions, or a scale is out of its range.
    """
    scale = np.asarray(scale, np.float64)
    if not np.all((scale >= 0) & (scale <= 1)):
        raise ValueError(f"scale must be in [0, 1], not {scale}")
    target, draft = _pair(target_probs, draft_probs)
    rest = np.maximum(scale[..., None] * target - draft, 0)
    total = np.sum(rest, axis=-1, keepdims=True)
    return np.where(total > 0, rest / np.where(total > 0, total, 1), target)


def expected_tokens(num_draft_tokens: npt.ArrayLike, acceptance: npt.ArrayLike) -> Floats:
    """The expected tokens of a step if every drafted token is accepted alike and independently.

    (1 - a^(K+1)) / (1 - a), and K + 1 at a = 1 (Leviathan et al. 2023, arXiv 2211.17192, equation 1).

    Args:
      num_draft_tokens: K >= 0, [...].
      acceptance: a in [0, 1], [...], broadcast with K.

    Returns:
      [...] from 1 to K + 1.

    Raises:
      ValueError: a value is out of its range.
    """
    drafted, accept = np.asarray(num_draft_tokens, np.float64), np.asarray(acceptance, np.float64)
    if not np.all(drafted >= 0):
        raise ValueError(f"num_draft_tokens must be at least 0, not {drafted!s}")
    if not np.all((accept >= 0) & (accept <= 1)):
        raise ValueError(f"acceptance must be in [0, 1], not {accept!s}")
    with np.errstate(divide="ignore"):
        # expm1 keeps the digits that 1 - a^(K+1) loses near a = 1.
        kept = -np.expm1((drafted + 1) * np.log(np.where(accept < 1, accept, 0.5)))
    return np.where(accept < 1, kept / np.where(accept < 1, 1 - accept, 1), drafted + 1)


def speedup(
    tokens: npt.ArrayLike,
    num_draft_tokens: npt.ArrayLike,
    draft_cost: npt.ArrayLike,
    verify_cost: npt.ArrayLike | Callable[[int], float] = 1.0,
) -> Floats:
    """How many times faster than plain decoding: tokens / (K c + v).

    The papers set v = 1 (arXiv 2211.17192, theorem 3.8); measure it. With K = 0 a step is a plain step and
    costs 1, whatever v.

    Args:
      tokens: [...] expected tokens a step, from :func:`expected_tokens`, a rule's formula or a measurement.
      num_draft_tokens: K >= 0, [...].
      draft_cost: c >= 0, [...]: one forward of the draft over one decode step of the target.
      verify_cost: v > 0: the target's forward over K + 1 tokens over its decode step, as [...] or as a
        function of K, which is asked of the K > 0 only.

    Returns:
      [...].

    Raises:
      ValueError: a cost or K is out of its range.
    """
    drafted, draft = np.asarray(num_draft_tokens), np.asarray(draft_cost, np.float64)
    if not np.all(drafted >= 0):
        raise ValueError(f"num_draft_tokens must be at least 0, not {drafted!s}")
    if callable(verify_cost):
        costs = [verify_cost(int(k)) if k > 0 else 1.0 for k in drafted.ravel()]
        verify = np.reshape(np.asarray(costs, np.float64), drafted.shape)
    else:
        verify = np.asarray(verify_cost, np.float64)
    if not (np.all(draft >= 0) and np.all(verify > 0)):
        raise ValueError(f"draft_cost must be at least 0 and verify_cost above 0, not {draft} and {verify}")
    return np.asarray(tokens, np.float64) / np.where(drafted > 0, drafted * draft + verify, 1)


def best_num_draft_tokens(
    acceptance: npt.ArrayLike,
    draft_cost: npt.ArrayLike,
    verify_cost: npt.ArrayLike | Callable[[int], float] = 1.0,
    candidates: Sequence[int] = tuple(range(1, 17)),
) -> npt.NDArray[np.int64]:
    """The K with the largest :func:`speedup` of :func:`expected_tokens`; 0, a speed-up of 1, is always one.

    Args:
      acceptance: [...] in [0, 1].
      draft_cost: c, one number or [N], one for each candidate.
      verify_cost: v, one number, [N], or a function of K.
      candidates: N values of K, each at least 0.

    Returns:
      [...] int64; the smallest among equals.

    Raises:
      ValueError: a value is out of its range, or the costs do not fit the candidates.
    """
    drafted = np.asarray(candidates, np.int64).reshape(-1)
    accept = np.asarray(acceptance, np.float64)
    for name, cost in (("draft_cost", draft_cost), ("verify_cost", verify_cost)):
        if not callable(cost) and np.shape(cost) not in ((), drafted.shape):
            raise ValueError(f"{name} needs one value, or one for each of {drafted.size} candidates: {cost}")
    gains = speedup(expected_tokens(drafted, accept[..., None]), drafted, draft_cost, verify_cost)
    order = np.argsort(drafted)
    options = np.concatenate([[0], drafted[order]])
    plain = np.ones((*accept.shape, 1))
    return options[np.argmax(np.concatenate([plain, gains[..., order]], axis=-1), axis=-1)]


def stop_probs(accept_probs: npt.ArrayLike, rule: str) -> Floats:
    """How many drafted tokens stand, as probabilities over the rule's own uniforms, given the draft.

    With a_i what the i-th uniform is held against, ``token`` stops at the first failure, n with probability
    a_1 .. a_n (1 - a_{n+1}); ``block`` after the last success, n with probability
    a_n (1 - a_{n+1}) .. (1 - a_K). So 1 + sum_n n * stop_probs[n] predicts a real step's tokens from its
    :class:`~specjax.types.Verdict`, unbiased, drafts shorter than K included.

    Args:
      accept_probs: [..., K] in [0, 1]; 0 where nothing was drafted.
      rule: ``token``, ``block`` or ``coupled`` (which stops as ``token`` does).

    Returns:
      [..., K + 1], summing to 1.

    Raises:
      ValueError: an unknown rule, or a probability out of its range.
    """
    check_rule(rule)
    accept = np.asarray(accept_probs, np.float64)
    if accept.ndim == 0 or not np.all((accept >= 0) & (accept <= 1)):
        raise ValueError(f"accept_probs must be [..., K] in [0, 1], not {accept!s}")
    one = np.ones((*accept.shape[:-1], 1))
    if rule == "block":
        failed = np.cumprod((1 - accept)[..., ::-1], axis=-1)[..., ::-1]  # all from i on
        return np.concatenate([one, accept], axis=-1) * np.concatenate([failed, one], axis=-1)
    passed = np.cumprod(accept, axis=-1)
    return np.concatenate([one, passed], axis=-1) * np.concatenate([1 - accept, one], axis=-1)


def check_rule(rule: str) -> None:
    """Raises a ValueError for a rule that has no formula here."""
    if rule not in _RULES:
        raise ValueError(f"no formula for the rule {rule!r}; there are {', '.join(_RULES)}")


def check_distribution(name: str, probs: npt.ArrayLike) -> Floats:
    """Returns ``probs`` [..., V] as float64, or raises a ValueError that calls them by ``name``."""
    array = np.asarray(probs, np.float64)
    if array.ndim == 0 or not (np.all(array >= 0) and np.allclose(array.sum(axis=-1), 1, rtol=0, atol=1e-4)):
        raise ValueError(f"{name} must be [..., V] with no negative value and sums of 1; shape {array.shape}")
    return array


def _pair(target_probs: npt.ArrayLike, draft_probs: npt.ArrayLike) -> tuple[Floats, Floats]:
    target = check_distribution("target_probs", target_probs)
    draft = check_distribution("draft_probs", draft_probs)
    if target.shape[-1] != draft.shape[-1]:
        raise ValueError(f"target and draft have {target.shape[-1]} and {draft.shape[-1]} tokens")
    return target, draft
