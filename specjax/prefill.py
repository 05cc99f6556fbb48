"""Reading a prompt into a model's cache."""

from __future__ import annotations

import chex
import jax.numpy as jnp
from jax import lax

from specjax.types import Array, Cache, Model, Params

__all__ = ["CHUNK", "prefill"]

CHUNK = 64
"""Tokens of a row fed at once: enough to keep a CPU's products busy, few enough to waste little."""


def prefill(model: Model, params: Params, tokens: Array, length: Array) -> Cache:
    """Makes a cache that holds every token of each prompt but the newest.

    Prompts are fed in chunks, as many as the longest needs, so one compiled program serves all lengths.
    What a short row writes past its length stays invisible until it is written anew.

    Args:
      model: the model to read with.
      params: its weights.
      tokens: [B, S] int32, prompts from the left; the cache gets ``S`` slots.
      length: [B] int32, at least 1.

    Returns:
      The cache, with slots 0 .. length - 2 of each row live.
    """
    chex.assert_rank([tokens, length], [2, 1])
    batch, capacity = tokens.shape
    chunk = min(CHUNK, capacity)
    # A slice that overhangs the end would be moved back by JAX, silently: give it something to read.
    padded = jnp.pad(tokens, ((0, 0), (0, -capacity % chunk)))

    def feed(i: Array, cache: Cache) -> Cache:
        block = lax.dynamic_slice_in_dim(padded, i * chunk, chunk, axis=1)
        positions = jnp.broadcast_to(i * chunk + jnp.arange(chunk), (batch, chunk))
        return model.apply(params, block, cache, positions).cache

    num_chunks = -(-(jnp.max(length) - 1) // chunk)
    return lax.fori_loop(0, num_chunks, feed, model.init_cache(batch, capacity))
