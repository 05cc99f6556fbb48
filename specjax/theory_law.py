"""What speculative decoding should do, exactly, where every draft can be enumerated: a small V and K.

Three answers, each computed in its own way, so that they can be held against each other and against the
real step: the expected tokens of a step by the formula of its rule (:func:`expected_step_tokens`);
everything that a step may emit, by following the rule through every draft (:func:`step_outcomes`); and
from that the law of the output (:func:`output_law`) and the tokens a step of a long decode
(:func:`tokens_per_step`).

Models are given as laws, functions from the tokens so far to probabilities, warped by the caller. Rules are
``token``, ``block`` and ``coupled``, as in :mod:`specjax.verify`; ``greedy`` is any of them with one-hot
laws. A deterministic draft is a one-hot law. The cost grows like V ** (K + 1). Float64 NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from specjax.theory import Floats, check_distribution, check_rule, coupled_matches, residual, stop_probs

__all__ = ["Law", "expected_step_tokens", "output_law", "step_outcomes", "tokens_per_step"]

Law = Callable[[tuple[int, ...]], npt.ArrayLike]
"""A language model as a function: the tokens so far to the probabilities [V] of the next one."""

_MAX_ENTRIES = 20_000_000


def expected_step_tokens(
    rule: str, target_law: Law, draft_law: Law, context: Sequence[int], num_draft_tokens: int
) -> float:
    """The expected tokens of one step after ``context``, by the rule's formula.

    ``token``: 1 + sum_i E_q[prod_{j<=i} min(1, r_j)], r_j = p(d_j) / q(d_j) (arXiv 2211.17192);
    ``block``: 1 + sum_i E_q[P_i], P_i = min(1, P_{i-1} r_i), never less (arXiv 2403.10444);
    ``coupled``: the token rule's with :func:`coupled_acceptance`'s summands in place of min(p, q).

    Args:
      rule: ``token``, ``block`` or ``coupled``.
      target_law: p after the warp, of any tuple of tokens that starts with ``context``.
      draft_law: q after the warp, likewise; one-hot for a deterministic draft.
      context: the tokens so far.
      num_draft_tokens: K >= 0.

    Returns:
      A number from 1 to K + 1.

    Raises:
      ValueError: an unknown rule, a law that is no distribution, or too many drafts to enumerate.
    """
    target, draft = _trees(rule, target_law, draft_law, context, num_draft_tokens)
    total, kept, drawn = 1.0, np.ones(1), np.ones(1)
    for p, q in zip(target, draft, strict=False):  # p has one level more, for the bonus token
        # By prefix d_1 .. d_i, [V**i]: the probabilities that it is drafted, and that it is kept as well.
        kept, drawn = kept[:, None], drawn[:, None]
        if rule == "block":
            kept = np.minimum(kept * p, drawn * q)
        elif rule == "token":
            kept = kept * np.minimum(p, q)
        else:
            kept = kept * coupled_matches(p, q)
        kept, drawn = kept.reshape(-1), (drawn * q).reshape(-1)
        total += float(np.sum(kept))
    return total


def step_outcomes(
    rule: str, target_law: Law, draft_law: Law, context: Sequence[int], num_draft_tokens: int
) -> tuple[Floats, ...]:
    """The probability of everything that one step after ``context`` may emit.

    It follows the rule as :mod:`specjax.verify` does, through every draft d and stop n, with the uniforms
    integrated out: sum_d q(d) P(stop at n | d) residual_n(x), added up over what was drafted beyond n.

    Arguments and errors are those of :func:`expected_step_tokens`.

    Returns:
      K + 1 arrays; the n-th, of shape [V] * (n + 1), holds the probabilities of emitting exactly these
      n + 1 tokens. Together they sum to 1.
    """
    target, draft = _trees(rule, target_law, draft_law, context, num_draft_tokens)
    vocab_size = target[0].shape[-1]
    num_drafts = vocab_size**num_draft_tokens
    # The drafts in lexicographic order, [N, K], and the distributions along each.
    tokens = np.indices((vocab_size,) * num_draft_tokens).reshape(num_draft_tokens, num_drafts).T
    p = np.zeros((num_drafts, num_draft_tokens + 1, vocab_size))
    for i, level in enumerate(target):
        p[:, i] = np.repeat(level, num_drafts // len(level), axis=0)
    q = np.zeros((num_drafts, num_draft_tokens, vocab_size))
    for i, level in enumerate(draft):
        q[:, i] = np.repeat(level, num_drafts // len(level), axis=0)

    accept_probs, following = _judge(rule, tokens, p, q)
    drawn = np.prod(_chosen(q, tokens), axis=-1)
    mass = (drawn[:, None] * stop_probs(accept_probs, rule))[..., None] * following
    return tuple(
        mass[:, n].reshape(vocab_size**n, -1, vocab_size).sum(axis=1).reshape((vocab_size,) * (n + 1))
        for n in range(num_draft_tokens + 1)
    )


def output_law(
    rule: str, target_law: Law, draft_law: Law, context: Sequence[int], num_draft_tokens: int, num_tokens: int
) -> Floats:
    """The law of the first tokens that repeated speculative steps emit; lossless if it is the target's.

    Steps are independent given the text: true of the token and block rules because every step's noise is
    fresh, and of the coupled rule because where it stops depends on no later position's noise.

    Args:
      rule: as in :func:`expected_step_tokens`, and so are the next four.
      target_law: p.
      draft_law: q.
      context: the prompt.
      num_draft_tokens: K >= 0.
      num_tokens: how many tokens, at least 1; what the last step emits beyond is added up.

    Returns:
      [V] * num_tokens, summing to 1.

    Raises:
      ValueError: as in :func:`expected_step_tokens`, or num_tokens below 1.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, not {num_tokens}")
    start = tuple(context)
    vocab_size = np.size(target_law(start))
    # reached[n][s]: the probability that a step starts right after the n emitted tokens s.
    reached = [np.zeros((vocab_size,) * n) for n in range(num_tokens)]
    reached[0] = np.ones(())
    law = np.zeros((vocab_size,) * num_tokens)
    for n in range(num_tokens):
        for emitted, probability in np.ndenumerate(reached[n]):
            if probability == 0:
                continue
            for step in step_outcomes(rule, target_law, draft_law, start + emitted, num_draft_tokens):
                left = num_tokens - n
                if step.ndim < left:
                    reached[n + step.ndim][emitted] += probability * step
                else:
                    law[emitted] += probability * step.sum(axis=tuple(range(left, step.ndim)))
    return law


def tokens_per_step(
    rule: str,
    target_law: Law,
    draft_law: Law,
    context: Sequence[int],
    num_draft_tokens: int,
    *,
    memory: int,
    num_steps: int | None = None,
) -> float:
    """The expected tokens a step over many steps, of laws that look at the last ``memory`` tokens only.

    A step from context c emits e tokens and leaves the next step the context c', so contexts at which steps
    start are a Markov chain M, which is not that of the text: over N steps the mean is
    sum_{n<N} (M^n E[e])(c) / N, in the long run pi . E[e] with pi M = pi (renewal-reward theorem).

    Args:
      rule: as in :func:`expected_step_tokens`, and so are the next four.
      target_law: p.
      draft_law: q.
      context: the prompt; its last ``memory`` tokens count.
      num_draft_tokens: K >= 0.
      memory: at least 1; a context is cut to this many tokens before a law sees it at a step's start.
      num_steps: N; None is the long run.

    Returns:
      A number from 1 to K + 1.

    Raises:
      ValueError: as in :func:`expected_step_tokens`; memory or num_steps below 1; or a long run that
        depends on chance, since the text may get caught in one of several sets of contexts.
    """
    if memory < 1 or (num_steps is not None and num_steps < 1):
        raise ValueError(f"memory and num_steps must be at least 1, not {memory} and {num_steps}")
    index = {tuple(context)[-memory:]: 0}
    means: list[float] = []
    moves: list[dict[int, float]] = []
    contexts = list(index)
    for here in contexts:  # grows while contexts are found
        outcomes = step_outcomes(rule, target_law, draft_law, here, num_draft_tokens)
        means.append(sum(step.ndim * float(step.sum()) for step in outcomes))
        move: dict[int, float] = {}
        for step in outcomes:
            for emitted in zip(*np.nonzero(step), strict=True):
                there = (*here, *map(int, emitted))[-memory:]
                if there not in index:
                    index[there] = len(contexts)
                    contexts.append(there)
                move[index[there]] = move.get(index[there], 0.0) + float(step[emitted])
        moves.append(move)

    chain = np.zeros((len(contexts), len(contexts)))
    for row, move in zip(chain, moves, strict=True):
        row[list(move)] = list(move.values())
    if num_steps is None:
        equations = np.concatenate([chain.T - np.eye(len(chain)), np.ones((1, len(chain)))])
        share, _, rank, _ = np.linalg.lstsq(equations, np.eye(len(chain) + 1)[-1], rcond=None)
        if rank < len(chain):
            raise ValueError("the long run depends on chance: not all contexts meet; give num_steps")
    else:
        here_share, share = np.eye(len(chain))[0], np.zeros(len(chain))
        for _ in range(num_steps):
            share += here_share / num_steps
            here_share = here_share @ chain
    return float(share @ np.asarray(means))


def _judge(rule: str, tokens: npt.NDArray[np.int64], p: Floats, q: Floats) -> tuple[Floats, Floats]:
    """What each uniform is held against, [N, K], and what follows each stop, [N, K + 1, V]."""
    num_drafts, num_drafted = tokens.shape
    target, draft = p[:, :-1], q
    drawn = _chosen(draft, tokens)
    safe = np.where(drawn > 0, drawn, 1)  # a draft that is never drawn weighs nothing
    scale = np.ones((num_drafts, num_drafted + 1))
    if rule == "coupled":
        matches = coupled_matches(target, draft)
        accept_probs = np.minimum(_chosen(matches, tokens) / safe, 1)
        # Given the draft, the target's own token has no short law; added up over drafts it has this one.
        rest = np.maximum(target - matches, 0)
        rest = rest / np.maximum(np.sum(rest, axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    else:
        ratios = _chosen(target, tokens) / safe
        accept_probs = np.minimum(ratios, 1)
        if rule == "block":
            for i in range(num_drafted):
                scale[:, i + 1] = np.minimum(scale[:, i] * ratios[:, i], 1)
            left = np.sum(np.maximum(scale[:, :-1, None] * target - draft, 0), axis=-1)  # S_0 .. S_{K-1}
            inner = left / np.where(left > 0, left + (1 - scale[:, :-1]), 1)
            accept_probs = np.concatenate([inner, scale[:, -1:]], axis=-1)[:, 1:]
        rest = residual(target, draft, scale[:, :-1])
    return accept_probs, np.concatenate([rest, p[:, -1:]], axis=1)


def _chosen(probs: Floats, tokens: npt.NDArray[np.int64]) -> Floats:
    return np.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


def _trees(
    rule: str, target_law: Law, draft_law: Law, context: Sequence[int], num_drafted: int
) -> tuple[list[Floats], list[Floats]]:
    """The laws after every draft d_1 .. d_i in lexicographic order, [V**i, V]: target i <= K, draft i < K."""
    check_rule(rule)
    if num_drafted < 0:
        raise ValueError(f"num_draft_tokens must be at least 0, not {num_drafted}")
    start = tuple(context)
    vocab_size = np.size(target_law(start))
    if (num_drafted + 1) * vocab_size ** (num_drafted + 1) > _MAX_ENTRIES:
        raise ValueError(f"{vocab_size} tokens and K = {num_drafted} are too many to enumerate")

    def level(name: str, law: Law, depth: int) -> Floats:
        laws = [np.asarray(law(start + drafted), np.float64) for drafted in np.ndindex((vocab_size,) * depth)]
        if any(probs.shape != (vocab_size,) for probs in laws):
            raise ValueError(
                f"{name} must give [{vocab_size}] after every context, as target_law does at first"
            )
        return check_distribution(name, np.stack(laws))

    target = [level("target_law", target_law, depth) for depth in range(num_drafted + 1)]
    return target, [level("draft_law", draft_law, depth) for depth in range(num_drafted)]
