"""The parts of a Llama-style block: norm, rotary positions, grouped-query attention, gated MLP.

Products that read the same input are fused into one weight (queries, keys and values; gate and up):
with few tokens a forward does little but stream weights, and fewer, larger products stream faster.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as kv
from specjax.models.config import ModelConfig
from specjax.models.products import project
from specjax.parallel.sharding import Names, is_spread
from specjax.types import Array

__all__ = ["Attention", "Block", "Linear", "Mlp", "RMSNorm", "attend", "rotary_angles", "rotate"]

_BLOCK, _WIDE_BLOCK = 128, 512
"""Slots of the cache that attention reads at once, where it need not read all. A CPU gains from few; for an
accelerator, whose caches are stacked, a turn of a loop is dear."""
_GROUPS, _ROWS = 4, 4
"""Rows of like length go together there on a CPU, to read no further than the longest of them: in so many
groups, of so many rows at least."""


class RMSNorm(nnx.Module):
    r"""Divides by the root mean square, in float32: :math:`y = g\, x / \sqrt{\overline{x^2} + \epsilon}`.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    def __init__(self, width: int, eps: float, dtype: str) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((width,), dtype), names=(None,))

    def __call__(self, x: Array) -> Array:
        """Normalizes ``x`` [.., D] over its last axis, keeping its dtype."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = jnp.expand_dims(self.scale[...].astype(jnp.float32), tuple(range(x.ndim - 1)))
        return (wide * scale).astype(x.dtype)


class Linear(nnx.Module):
    """A product without bias; the kernel is [out, in], as checkpoints store it.

    Args:
      names: one for each dimension of the kernel, by which it may be spread over devices (see
        :mod:`specjax.parallel.sharding`), or None.
      shape: of the kernel, [.., in]; what is fused keeps an axis of its own, so that it can be split apart
        again where the others are spread.
    """

    def __init__(self, names: Names, shape: tuple[int, ...], dtype: str, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=tuple(range(len(shape) - 1)))
        self.kernel = nnx.Param(init(rngs.params(), shape, dtype), names=names)

    def __call__(self, x: Array) -> Array:
        """Maps ``x`` [B, T, in] to [B, T, ..]."""
        return project(x, self.kernel[...])


def rotary_angles(positions: Array, head_dim: int, base: float) -> tuple[Array, Array]:
    r"""Returns the cosines and sines of :math:`p\, b^{-2i/Dh}` for the pairs :math:`i < Dh/2`.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Args:
      positions: [B, T] int32.
      head_dim: Dh.
      base: b.

    Returns:
      Two arrays [B, T, 1, Dh/2] float32, ready to turn [B, T, heads, Dh/2].
    """
    frequencies = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, angles: tuple[Array, Array]) -> Array:
    """Turns the pairs (i, i + Dh/2) of ``x`` [B, T, .., heads, Dh] by their angles, in float32."""
    cos, sin = (jnp.expand_dims(part, tuple(range(2, x.ndim - 2))) for part in angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


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


class Attention(nnx.Module):
    """Grouped-query self-attention that writes its keys and values to the cache, then reads the cache."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs) -> None:
        self.groups, self.head_dim = cfg.num_heads // cfg.num_kv_heads, cfg.head_dim
        # For each key-value head: the query heads that read it, the key, the value.
        fused = (self.groups + 2) * cfg.head_dim
        self.qkv = Linear(("kv_heads", None, None), (cfg.num_kv_heads, fused, cfg.width), cfg.dtype, rngs)
        self.out = Linear((None, "heads"), (cfg.width, cfg.num_heads * cfg.head_dim), cfg.dtype, rngs)
        self.qk_norm = cfg.qk_norm
        if cfg.qk_norm:
            self.query_norm = RMSNorm(cfg.head_dim, cfg.norm_eps, cfg.dtype)
            self.key_norm = RMSNorm(cfg.head_dim, cfg.norm_eps, cfg.dtype)

    def __call__(
        self,
        x: Array,
        cache: kv.KVCache,
        layer: int | Array,
        positions: Array,
        angles: tuple[Array, Array],
        newest: Array,
    ) -> tuple[Array, kv.KVCache]:
        """Mixes ``x`` [B, T, D] with what its row has seen; returns that and the cache with T tokens more."""
        queries, keys, values = self.parts(x, angles)
        cache = kv.write(cache, layer, keys, values, positions)
        return self.out(attend(queries, cache, layer, positions, newest)), cache

    def parts(self, x: Array, angles: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Queries [B, T, H, Dh], keys and values [B, T, KV, Dh] of ``x``, turned to their positions."""
        fused = self.qkv(x)  # [B, T, KV, (H / KV + 2) Dh]
        fused = fused.reshape(*fused.shape[:3], self.groups + 2, self.head_dim)
        queries, keys = fused[..., : self.groups, :], fused[..., self.groups : -1, :]
        if self.qk_norm:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        queries, keys = rotate(queries, angles), rotate(keys, angles)
        return queries.reshape(*x.shape[:2], -1, self.head_dim), keys[..., 0, :], fused[..., -1, :]


class Mlp(nnx.Module):
    r"""The gated MLP :math:`W_d (silu(W_g x) \odot W_u x)` (Shazeer, "GLU Variants", 2020)."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs) -> None:
        shape = (2, cfg.mlp_width, cfg.width)  # gate, up
        self.gate_up = Linear((None, "mlp", None), shape, cfg.dtype, rngs)
        self.down = Linear((None, "mlp"), (cfg.width, cfg.mlp_width), cfg.dtype, rngs)

    def __call__(self, x: Array) -> Array:
        """Maps ``x`` [B, T, D] to [B, T, D]."""
        gate_up = self.gate_up(x)
        return self.down(jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1])


class Block(nnx.Module):
    """One layer: attention and MLP, each on a normed input and added to the residual stream."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(cfg.width, cfg.norm_eps, cfg.dtype)
        self.attention = Attention(cfg, rngs)
        self.mlp_norm = RMSNorm(cfg.width, cfg.norm_eps, cfg.dtype)
        self.mlp = Mlp(cfg, rngs)

    def __call__(
        self,
        x: Array,
        cache: kv.KVCache,
        layer: int | Array,
        positions: Array,
        angles: tuple[Array, Array],
        newest: Array,
    ) -> tuple[Array, kv.KVCache]:
        """Maps ``x`` [B, T, D] to [B, T, D] and the cache with this layer's keys and values written."""
        mixed, cache = self.attention(self.attention_norm(x), cache, layer, positions, angles, newest)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache
