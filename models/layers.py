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
from specjax.types import Array

__all__ = ["Attention", "Block", "Linear", "Mlp", "RMSNorm", "attend", "rotary_angles", "rotate"]


class RMSNorm(nnx.Module):
    r"""Divides by the root mean square, in float32: :math:`y = g\, x / \sqrt{\overline{x^2} + \epsilon}`.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    def __init__(self, width: int, eps: float, dtype: str) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((width,), dtype))

    def __call__(self, x: Array) -> Array:
        """Normalizes ``x`` [B, T, D] over its last axis, keeping its dtype."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)[None, None, :]).astype(x.dtype)


class Linear(nnx.Module):
    """A product without bias; the kernel is [out, in], as checkpoints store it."""

    def __init__(self, inputs: int, outputs: int, dtype: str, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal(in_axis=1, out_axis=0)
        self.kernel = nnx.Param(init(rngs.params(), (outputs, inputs), dtype))

    def __call__(self, x: Array) -> Array:
        """Maps ``x`` [B, T, in] to [B, T, out]."""
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
    """Turns the pairs (i, i + Dh/2) of ``x`` [B, T, heads, Dh] by their angles, in float32."""
    cos, sin = angles
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(queries: Array, keys: Array, values: Array, visible: Array) -> Array:
    r"""Scaled dot-product attention, :math:`softmax(q k^T / \sqrt{Dh})\, v`, with grouped queries.

    Vaswani et al., 2017; groups: Ainslie et al., "GQA", 2023. The softmax is taken in float32, and what is
    masked gets a large *finite* negative score, so that no row can come out NaN.

    Args:
      queries: [B, T, H, Dh]; head h reads key-value head h // (H / KV).
      keys: [B, KV, S, Dh].
      values: [B, KV, S, Dh].
      visible: [B, T, S] bool.

    Returns:
      [B, T, H * Dh], in the dtype of the queries.
    """
    rows, tokens, heads, head_dim = queries.shape
    groups = heads // keys.shape[1]
    # The queries that read one key-value head form one matrix, and the cache is used as it lies.
    grouped = queries.reshape(rows, tokens, -1, groups, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(rows, -1, groups * tokens, head_dim)
    scores = jnp.einsum("bkqd,bksd->bkqs", grouped, keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(rows, -1, groups, tokens, keys.shape[2]) * head_dim**-0.5
    scores = jnp.where(visible[:, None, None, :, :], scores, jnp.finfo(jnp.float32).min)
    weights = (
        jax.nn.softmax(scores, axis=-1).astype(values.dtype).reshape(rows, -1, groups * tokens, keys.shape[2])
    )
    mixed = jnp.einsum("bkqs,bksd->bkqd", weights, values, preferred_element_type=jnp.float32)
    mixed = mixed.reshape(rows, -1, groups, tokens, head_dim).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(rows, tokens, heads * head_dim).astype(queries.dtype)


class Attention(nnx.Module):
    """Grouped-query self-attention that writes its keys and values to the cache, then reads the cache."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs) -> None:
        self.heads, self.kv_heads, self.head_dim = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        width = cfg.num_heads * cfg.head_dim
        fused = width + 2 * cfg.num_kv_heads * cfg.head_dim
        self.qkv = Linear(cfg.width, fused, cfg.dtype, rngs)  # outputs: queries, keys, values
        self.out = Linear(width, cfg.width, cfg.dtype, rngs)

    def __call__(
        self,
        x: Array,
        cache: kv.KVCache,
        layer: int | Array,
        positions: Array,
        angles: tuple[Array, Array],
        visible: Array,
    ) -> tuple[Array, kv.KVCache]:
        """Mixes ``x`` [B, T, D] with what its row has seen; returns that and the cache with T tokens more."""
        heads = self.qkv(x).reshape(*x.shape[:2], -1, self.head_dim)
        turned = rotate(heads[:, :, : self.heads + self.kv_heads], angles)
        queries, keys = jnp.split(turned, [self.heads], axis=2)
        cache = kv.write(cache, layer, keys, heads[:, :, self.heads + self.kv_heads :], positions)
        return self.out(attend(queries, *kv.read(cache, layer), visible)), cache


class Mlp(nnx.Module):
    r"""The gated MLP :math:`W_d (silu(W_g x) \odot W_u x)` (Shazeer, "GLU Variants", 2020)."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs) -> None:
        self.gate_up = Linear(cfg.width, 2 * cfg.mlp_width, cfg.dtype, rngs)  # outputs: gate, up
        self.down = Linear(cfg.mlp_width, cfg.width, cfg.dtype, rngs)

    def __call__(self, x: Array) -> Array:
        """Maps ``x`` [B, T, D] to [B, T, D]."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


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
        visible: Array,
    ) -> tuple[Array, kv.KVCache]:
        """Maps ``x`` [B, T, D] to [B, T, D] and the cache with this layer's keys and values written."""
        mixed, cache = self.attention(self.attention_norm(x), cache, layer, positions, angles, visible)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache
