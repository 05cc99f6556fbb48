"""Drawing from a draft that scores only some of the target's tokens.

Everything the draft does a token for is done over its own ``W`` tokens; only the K laws that the rule is
shown at the end are laid out over the target's ``V``, with -inf where the draft can't speak.
"""

from __future__ import annotations

import chex
import jax.numpy as jnp

from specjax.sampling import sample, warp
from specjax.types import Array, Context, Key, SamplingParams

__all__ = ["draw", "widen"]


def draw(
    logits: Array,
    vocabulary: Array,
    keys: Key,
    sampling: SamplingParams,
    context: Context,
    vocab_size: int,
    *,
    wide_noise: bool = False,
) -> tuple[Array, Array]:
    """Warps and draws one token a row.

    Args:
      logits: [B, W] any float dtype.
      vocabulary: [W] int32, rising ids.
      keys: [B], each is consumed.
      sampling: the values that the target is warped with.
      context: the rows so far.
      vocab_size: V.
      wide_noise: draws noise for all V tokens, as the target does with the same keys: what the coupled rule
        lives on, and several times the cost.

    Returns:
      Ids [B] int32 of the target's vocabulary, and the warped logits [B, W] that they were drawn from.
    """
    chex.assert_rank([logits, vocabulary], [2, 1])
    chex.assert_equal_shape_suffix([logits, vocabulary], 1)
    if sampling.edits is None and context.allowed is None:
        # Temperature and filters know no ids: what is left out is as good as -inf.
        warped = warp(logits[:, None], sampling, context)[:, 0]
    else:
        wide = widen(logits, vocabulary, vocab_size)
        warped = warp(wide[:, None], sampling, context)[:, 0, vocabulary]
    if wide_noise:
        return sample(keys, widen(warped, vocabulary, vocab_size)), warped
    return vocabulary[sample(keys, warped)], warped


def widen(logits: Array, vocabulary: Array, vocab_size: int) -> Array:
    """Lays [..., W] out over the target's vocabulary: [..., V] float32, -inf where the draft has no token."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    empty = jnp.full((*logits.shape[:-1], vocab_size), -jnp.inf, logits.dtype)
    return empty.at[..., vocabulary].set(logits, mode="drop", unique_indices=True, indices_are_sorted=True)
