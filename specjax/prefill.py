"""Reading prompts in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import chex
import jax.numpy as jnp
from jax import lax

from specjax.types import Array

__all__ = ["CHUNK", "prefill"]

S = TypeVar("S")

CHUNK = 64
"""Tokens of a row fed at once: enough to keep a CPU's products busy, few enough to waste little."""


def prefill(read: Callable[[S, Array, Array], S], state: S, tokens: Array, length: Array) -> S:
    """Reads every token of each prompt but the newest.

    Prompts are fed in chunks, as many as the longest needs, so one compiled program serves all lengths.
    What a short row writes past its length stays invisible until it is written anew.

    Args:
      read: ``read(state, tokens [B, T], positions [B, T])`` -> state, which has read that block too.
      state: caches of at least ``S`` slots.
      tokens: [B, S] int32, prompts from the left.
      length: [B] int32, at least 1.

    Returns:
      The state, with slots 0 .. length - 2 of each row live.
    """
    chex.assert_rank([tokens, length], [2, 1])
    batch, capacity = tokens.shape
    chunk = min(CHUNK, capacity)
    # A slice that overhangs the end would be moved back by JAX, silently: give it something to read.
    padded = jnp.pad(tokens, ((0, 0), (0, -capacity % chunk)))

    def feed(i: Array, state: S) -> S:
        block = lax.dynamic_slice_in_dim(padded, i * chunk, chunk, axis=1)
        positions = jnp.broadcast_to(i * chunk + jnp.arange(chunk), (batch, chunk))
        return read(state, block, positions)

    num_chunks = -(-(jnp.max(length) - 1) // chunk)
    return lax.fori_loop(0, num_chunks, feed, state)
