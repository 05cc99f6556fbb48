"""The parts of a Llama-style block: norm, rotary positions, grouped-query attention, gated MLP.

Products that read the same input are fused into one weight (queries, keys and values; gate and up):
with few tokens a forward does little but stream weights, and fewer, larger products stream faster.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as kv
from specjax.models.attend import attend
from specjax.models.config import ModelConfig
from specjax.models.products import project
from specjax.parallel.sharding import Names
from specjax.types import Array

__all__ = ["Attention", "Block", "Linear", "Mlp", "RMSNorm", "rotary_angles", "rotate"]


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
