r"""The losses' sums without [B, T, V]: the vocabulary goes by in chunks, forward and backward.

Both laws come as states times a head, :math:`softmax(h W^T)`. A first pass finds their normalisers, a second
adds up the sums; the backward pass makes each chunk's scores anew.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jax import lax

from specjax.distill.losses import Sums, add_sums, sums_of
from specjax.types import Array, pytree

__all__ = ["Scores", "chunked_sums", "log_normalizer"]


@pytree
class Scores:
    """Logits as a product that is not taken yet: ``features`` times the rows of ``head``."""

    features: Array  # [N, D], any float dtype
    head: Array  # [V, D], one row a token
    log_normalizer: Array | None = None  # [N] float32: log sum exp of the logits over *all* tokens of the
    #                                      law, where ``head`` has only some; None: over those of ``head``


def chunked_sums(
    target: Scores,
    draft: Scores,
    labels: Array | None = None,
    *,
    chunk: int = 8192,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Sums:
    """As :func:`specjax.distill.losses.position_losses`, over the tokens that both heads list.

    Args:
      target: no gradient flows into it.
      draft: ``head`` lists the same tokens in the same order; a token that the draft's head doesn't have is
        one that it can't say, and the target's ``log_normalizer`` knows of its mass.
      labels: [N] int32 rows of the heads; -1 where what the target said isn't among them.
      chunk: tokens whose scores are held at once, [N, chunk] float32 twice.
      beta: see :func:`specjax.distill.losses.sums_of`.
      temperature: both laws are taken at it; a given ``log_normalizer`` must be of that temperature.

    Returns:
      The sums of each position, [N] each.
    """
    chex.assert_rank([target.features, target.head, draft.features, draft.head], 2)
    chex.assert_equal_shape_prefix([target.features, draft.features], 1)
    chex.assert_equal_shape_prefix([target.head, draft.head], 1)
    target = lax.stop_gradient(target)
    size = draft.head.shape[0]
    chunk = min(chunk, size)
    normalizers = [
        log_normalizer(x.features, x.head, chunk=chunk, temperature=temperature)
        if x.log_normalizer is None
        else x.log_normalizer.astype(jnp.float32)
        for x in (target, draft)
    ]

    def part(draft: Scores, normalizers: list[Array], start: Array) -> Sums:
        ids, fresh = _rows(start, chunk, size)
        log_p, log_q = (
            jnp.where(fresh, _logits(x, ids, temperature) - norm[:, None], -jnp.inf)
            for x, norm in zip((target, draft), normalizers, strict=True)
        )
        is_label = None if labels is None else fresh & (labels[:, None] == ids[None])
        return sums_of(log_p, log_q, is_label, beta=beta)

    if chunk == size:  # nothing to spare: the scores are kept for the backward pass
        return part(draft, normalizers, jnp.int32(0))

    def add(sums: Sums, start: Array) -> tuple[Sums, None]:
        return add_sums(sums, jax.checkpoint(part)(draft, normalizers, start)), None

    zero = jnp.zeros(draft.features.shape[0], jnp.float32)
    return lax.scan(add, Sums(zero, zero, zero, zero, zero), jnp.arange(0, size, chunk))[0]


def log_normalizer(features: Array, head: Array, *, chunk: int = 8192, temperature: float = 1.0) -> Array:
    """log sum exp of ``features`` [N, D] times ``head`` [V, D] over T, [N] float32, chunk by chunk."""
    size = head.shape[0]
    chunk = min(chunk, size)
    scores = Scores(features, head)

    def part(scores: Scores, start: Array) -> Array:
        ids, fresh = _rows(start, chunk, size)
        logits = jnp.where(fresh, _logits(scores, ids, temperature), -jnp.inf)
        return jax.nn.logsumexp(logits, axis=-1)

    if chunk == size:
        return part(scores, jnp.int32(0))

    def add(total: Array, start: Array) -> tuple[Array, None]:
        return jnp.logaddexp(total, jax.checkpoint(part)(scores, start)), None

    first = jax.checkpoint(part)(scores, jnp.int32(0))
    return lax.scan(add, first, jnp.arange(chunk, size, chunk))[0]


def _rows(start: Array, chunk: int, size: int) -> tuple[Array, Array]:
    """The rows of a chunk [C], moved back where it would overhang, and which are new in it [1, C]."""
    begin = jnp.minimum(start, size - chunk)
    ids = begin + jnp.arange(chunk)
    return ids, (ids >= start)[None]


def _logits(scores: Scores, ids: Array, temperature: float) -> Array:
    head = lax.dynamic_slice_in_dim(scores.head, ids[0], ids.shape[0])
    logits = jnp.einsum("nd,vd->nv", scores.features, head, preferred_element_type=jnp.float32)
    return logits / temperature
