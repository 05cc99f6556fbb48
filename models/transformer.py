"""A Llama-style decoder as a Flax NNX module, its layers unrolled or scanned."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from specjax import cache as kv
from specjax.models.config import ModelConfig
from specjax.models.layers import Block, RMSNorm, rotary_angles
from specjax.models.products import project
from specjax.parallel.sharding import shard
from specjax.types import Array, ModelOutput

__all__ = ["Transformer", "init_cache"]

_LANES = 128


def init_cache(cfg: ModelConfig, batch: int, capacity: int) -> kv.KVCache:
    """Makes an empty cache for ``batch`` rows of ``capacity`` positions, laid out as the layers need it.

    Scanned layers are for accelerators: their cache holds vectors as wide as a TPU's registers, which it
    would fill up to that width in any case. Said openly, it writes them in place.
    """
    width = -(-cfg.head_dim // _LANES) * _LANES if cfg.scan_layers else cfg.head_dim
    return kv.init_cache(
        cfg.num_layers, batch, cfg.num_kv_heads, capacity, width, cfg.dtype, stacked=cfg.scan_layers
    )


class Transformer(nnx.Module):
    """Embedding, L blocks, a last norm and the head (Touvron et al., "LLaMA", 2023).

    Args:
      cfg: the sizes.
      rngs: draws the initial weights.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs) -> None:
        self.cfg = cfg
        init = nnx.initializers.normal(cfg.width**-0.5)
        table = ("vocab", None)
        self.embedding = nnx.Param(init(rngs.params(), (cfg.vocab_size, cfg.width), cfg.dtype), names=table)
        self.blocks: Any  # a list of blocks, or one whose weights are stacked [L, ...]
        if cfg.scan_layers:
            keys = jax.random.split(rngs.params(), cfg.num_layers)
            self.blocks = nnx.vmap(lambda key: Block(cfg, nnx.Rngs(params=key)))(keys)
        else:
            self.blocks = nnx.List([Block(cfg, rngs) for _ in range(cfg.num_layers)])
        self.norm = RMSNorm(cfg.width, cfg.norm_eps, cfg.dtype)
        if not cfg.tied_embeddings:
            self.head = nnx.Param(init(rngs.params(), (cfg.vocab_size, cfg.width), cfg.dtype), names=table)

    def __call__(self, tokens: Array, cache: kv.KVCache, positions: Array) -> ModelOutput:
        """Scores tokens that stand at the given positions; see :class:`specjax.types.Model`.

        Args:
          tokens: [B, T] int32.
          cache: from :func:`init_cache`, or as an earlier call returned it.
          positions: [B, T] int32 >= 0.

        Returns:
          Logits [B, T, V] float32; features [B, T, D], the states that the head multiplies; the cache.
        """
        chex.assert_rank([tokens, positions], 2)
        chex.assert_equal_shape([tokens, positions])
        angles = rotary_angles(positions, self.cfg.head_dim, self.cfg.rope_base)
        x = shard(self.embedding[...][tokens], "rows", None, None)
        x, cache = self._layers(x, cache, positions, angles, jnp.max(positions))
        x = self.norm(x)
        logits = shard(project(x, self.output_rows(), jnp.float32), "rows", None, "vocab")
        return ModelOutput(logits=logits, features=x, cache=cache)

    def output_rows(self) -> Array:
        """The head: one row [D] for each token that is scored."""
        return (self.embedding if self.cfg.tied_embeddings else self.head)[...]

    def _layers(
        self, x: Array, cache: kv.KVCache, positions: Array, angles: tuple[Array, Array], newest: Array
    ) -> tuple[Array, kv.KVCache]:
        """Runs the blocks over ``x`` [B, T, D]."""
        if not self.cfg.scan_layers:
            for layer, block in enumerate(self.blocks):
                x, cache = block(x, cache, layer, positions, angles, newest)
            return x, cache
        graphdef, weights = nnx.split(self.blocks)

        # The cache is carried: as xs and ys of the scan it would be held twice.
        def body(
            carry: tuple[Array, kv.KVCache], scanned: tuple[nnx.State, Array]
        ) -> tuple[tuple[Array, kv.KVCache], None]:
            (x, cache), (state, layer) = carry, scanned
            block = nnx.merge(graphdef, state)
            return block(x, cache, layer, positions, angles, newest), None

        (x, cache), _ = jax.lax.scan(body, (x, cache), (weights, jnp.arange(self.cfg.num_layers)))
        return x, cache
