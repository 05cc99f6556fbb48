"""Attention over the cache: all of it at once, block by block, or rows of like length together."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax.parallel.sharding import is_spread
from specjax.types import Array

__all__ = ["attend"]

_BLOCK, _WIDE_BLOCK = 128, 512
"""Slots of the cache that attention reads at once, where it need not read all. A CPU gains from few; for an
accelerator, whose caches are stacked, a turn of a loop is dear."""
_GROUPS, _ROWS = 4, 4
"""Rows of like length go together there on a CPU, to read no further than the longest of them: in so many
groups, of so many rows at least."""


def attend(queries: Array, cache: kv.KVCache, layer: int | Array, positions: Array, newest: Array) -> Array:
    r"""Scaled dot-product attention, :math:`softmax(q k^T / \sqrt{Dh})\, v`, with grouped queries.

    Vaswani et al., 2017; groups: Ainslie et al., "GQA", 2023. The softmax is taken in float32, and what is
    masked gets a large *finite* negative score, so that no row can come out NaN.

    A few tokens read a long cache block by block, with a running softmax (Milakov and Gimelshein, 2018),
    and no further than the longest row has come: what a step reads grows with the text, not the capacity.
    On a CPU rows of like length go together, so that a long one doesn't make all others read as far;
    where rows are spread over devices they stay where they lie.

    Args:
      queries: [B, T, H, Dh]; head h reads key-value head h // (H / KV).
      cache: of S slots; the keys and values of the T tokens are in it.
      layer: which layer of it to read.
      positions: [B, T] int32; a query sees the slots up to its own.
      newest: int32, the largest of them.

    Returns:
      [B, T, H * Dh], in the dtype of the queries.
    """
    rows, tokens, heads, head_dim = queries.shape
    kv_heads, capacity = kv.num_heads(cache), kv.capacity(cache)
    is_stacked = not isinstance(cache.keys, tuple)
    block = _WIDE_BLOCK if is_stacked else _BLOCK
    groups = heads // kv_heads
    together = max(_ROWS, rows // _GROUPS)
    # The queries that read one key-value head form one matrix, and the cache is used as it lies.
    grouped = queries.reshape(rows, tokens, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(rows, kv_heads, groups * tokens, head_dim)
    # Where the cache is wider than a head its vectors end in zeros; queries as wide read it as it lies.
    grouped = jnp.pad(grouped, [(0, 0)] * 3 + [(0, kv.width(cache) - head_dim)])

    def weigh(grouped: Array, positions: Array, keys: Array, first: int | Array) -> Array:
        scores = jnp.einsum("bkqd,bksd->bkqs", grouped, keys, preferred_element_type=jnp.float32)
        by_token = scores.reshape(-1, kv_heads, groups, tokens, keys.shape[2]) * head_dim**-0.5
        visible = kv.mask(positions, keys.shape[2], first)[:, None, None]
        return jnp.where(visible, by_token, jnp.finfo(jnp.float32).min).reshape(scores.shape)

    def mix(weights: Array, values: Array) -> Array:
        weights = weights.astype(values.dtype)
        return jnp.einsum("bkqs,bksd->bkqd", weights, values, preferred_element_type=jnp.float32)

    def read_blocks(grouped: Array, positions: Array, newest: Array, some: Array | None = None) -> Array:
        def read_block(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, total, mixed = carry
            keys, values = kv.read(cache, layer, (i * block, block), some)
            scores = weigh(grouped, positions, keys, i * block)
            new = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
            weights, shrink = jnp.exp(scores - new), jnp.exp(largest - new)
            total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
            return new, total, mixed * shrink + mix(weights, values)

        # What lies past the end is not written, and not read: no more blocks than there are.
        num_blocks = jnp.minimum(newest // block + 1, capacity // block)
        column = jnp.zeros((*grouped.shape[:3], 1), jnp.float32)
        start = (column + jnp.finfo(jnp.float32).min, column, jnp.zeros(grouped.shape, jnp.float32))
        _, total, mixed = jax.lax.fori_loop(0, num_blocks, read_block, start)
        return mixed / total

    def read_all(grouped: Array, positions: Array) -> Array:
        return read_blocks(grouped, positions, newest)

    def read_by_length(grouped: Array, positions: Array) -> Array:
        order = jnp.argsort(positions[:, -1])

        def read_some(i: Array, mixed: Array) -> Array:
            some = jax.lax.dynamic_slice_in_dim(order, i * together, together)
            own = positions[some]
            return mixed.at[some].set(read_blocks(grouped[some], own, jnp.max(own), some))

        return jax.lax.fori_loop(0, rows // together, read_some, jnp.zeros(grouped.shape, jnp.float32))

    if capacity % block or capacity <= max(block, 2 * tokens):  # a whole text, as in training: all at once
        keys, values = kv.read(cache, layer)
        mixed = mix(jax.nn.softmax(weigh(grouped, positions, keys, 0), axis=-1), values)
    elif is_stacked or rows % together or rows == together or is_spread("rows"):
        mixed = read_all(grouped, positions)
    else:
        mixed = jax.lax.platform_dependent(grouped, positions, cpu=read_by_length, default=read_all)
    mixed = mixed[..., :head_dim].reshape(rows, kv_heads, groups, tokens, head_dim).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(rows, tokens, heads * head_dim).astype(queries.dtype)
