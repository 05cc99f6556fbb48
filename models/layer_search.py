"""Which of a target's layers make the best draft: a greedy search, without training."""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.functional import FunctionalModel
from specjax.models.layers import Block, RMSNorm, rotary_angles
from specjax.models.unroll import run_block
from specjax.types import Array, Params

__all__ = ["search_layers"]


def search_layers(
    model: FunctionalModel, params: Params, tokens: Array, keep: int, overlap: Callable[[Array], float]
) -> tuple[int, ...]:
    """Drops the layer whose absence costs least, one at a time, until ``keep`` are left.

    Of L layers it runs about L^3 / 6, by one compiled program: drafts that differ in one layer share what
    comes before it.

    Args:
      model: the target, layers unrolled.
      params: its weights.
      tokens: [B, T] int32, a few whole sequences.
      keep: layers that stay.
      overlap: how near the laws of states [B, T, D], which the head multiplies, are to the target's.

    Returns:
      The layers, rising.

    Raises:
      ValueError: the target hasn't so many layers, or they are scanned.
    """
    chex.assert_rank(tokens, 2)
    cfg = model.config
    if cfg.scan_layers or not 1 <= keep <= cfg.num_layers:
        raise ValueError(f"a draft has 1 .. {cfg.num_layers} layers of an unrolled target, not {keep}")
    block_of, _ = nnx.split(nnx.eval_shape(lambda: Block(cfg, nnx.Rngs(0))))
    norm_of, _ = nnx.split(nnx.eval_shape(lambda: RMSNorm(cfg.width, cfg.norm_eps, cfg.dtype)))
    angles = rotary_angles(jnp.arange(tokens.shape[1])[None], cfg.head_dim, cfg.rope_base)

    @jax.jit
    def run(layer: Params, x: Array) -> Array:
        return run_block(nnx.merge(block_of, layer), x, [], angles)

    @jax.jit
    def finish(norm: Params, x: Array) -> Array:
        return nnx.merge(norm_of, norm)(x)

    start = params["embedding"][tokens]
    left = list(range(cfg.num_layers))
    while len(left) > keep:
        before, found = start, []
        for place, layer in enumerate(left):
            x = before
            for later in left[place + 1 :]:
                x = run(params["blocks"][later], x)
            found.append(overlap(finish(params["norm"], x)))
            before = run(params["blocks"][layer], before)
        del left[max(range(len(left)), key=found.__getitem__)]
    return tuple(left)
