r"""Training a draft as it will be used: some steps ahead, fed with its own states.

Pass 0 of a feature head reads the target's states at all positions. Pass s reads what pass s-1 guessed, as
if the newest s states were its own: a query at position i sees keys of pass 0 at j <= i-s, and one key of
each later pass r at i-s+r, the trail of its own guesses (Li et al. 2025, "EAGLE-3", 2503.01840).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.drafts import FeatureModel
from specjax.models.functional import FunctionalModel
from specjax.models.layers import Block, rotary_angles
from specjax.types import Array, Params

__all__ = ["HeadStudent", "ModelStudent", "run_block"]

Pair = tuple[Array, Array]  # keys and values of one pass, [B, T, KV, Dh] each


@dataclasses.dataclass(frozen=True)
class ModelStudent:
    """A transformer as a student: one pass, whose every position the draft has in use too."""

    model: FunctionalModel

    def states(self, params: Params, tokens: Array, features: Array) -> tuple[Array, Array]:
        """The states [1, B, T, D] that the draft's head multiplies, and where they count [1, T] bool."""
        del features
        batch, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
        output = self.model.apply(params, tokens, self.model.init_cache(batch, length), positions)
        assert output.features is not None
        return output.features[None], jnp.ones((1, length), bool)


@dataclasses.dataclass(frozen=True)
class HeadStudent:
    """A feature head as a student: ``passes`` steps ahead."""

    model: FeatureModel
    passes: int

    def states(self, params: Params, tokens: Array, features: Array) -> tuple[Array, Array]:
        """The guesses [P, B, T, D] of the target's states at each position, and where they count [P, T].

        Pass s says nothing of the first s positions.
        """
        module = self.model.module(params)
        positions = jnp.arange(tokens.shape[1])[None]
        angles = rotary_angles(positions, module.cfg.head_dim, module.cfg.rope_base)
        past: list[list[Pair]] = [[] for _ in module.blocks]
        guesses = []
        for _ in range(self.passes):
            before = jnp.where(positions[..., None] > 0, jnp.roll(features, 1, axis=1), 0)
            x = module.join(tokens, before)
            for layer, block in enumerate(module.blocks):
                x = run_block(block, x, past[layer], angles)
            features = module.norm(x)
            guesses.append(features)
        return jnp.stack(guesses), positions >= jnp.arange(self.passes)[:, None]


def run_block(block: Block, x: Array, past: list[Pair], angles: Any) -> Array:
    """As :class:`specjax.models.layers.Block` over whole sequences, without a cache.

    Args:
      block: the layer.
      x: [B, T, D].
      past: keys and values of the passes before; this one's are added.
      angles: of the positions 0 .. T-1.

    Returns:
      [B, T, D].
    """
    attention = block.attention
    queries, keys, values = attention.parts(block.attention_norm(x), angles)
    past.append((keys, values))
    x = x + attention.out(_attend(queries, past))
    return x + block.mlp(block.mlp_norm(x))


def _attend(queries: Array, past: list[Pair]) -> Array:
    """Queries [B, T, H, Dh] of the last pass over the keys of all."""
    rows, length, heads, head_dim = queries.shape
    ahead = len(past) - 1
    keys, values = past[0]
    grouped = queries.reshape(rows, length, keys.shape[2], -1, head_dim)
    scale = head_dim**-0.5
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, keys, preferred_element_type=jnp.float32) * scale
    positions = jnp.arange(length)
    seen = positions[None, :] <= positions[:, None] - ahead
    scores = jnp.where(seen[None, None, None], scores, jnp.finfo(jnp.float32).min)
    # One key a query: sums of products, which a compiler fuses; as batches of tiny dots a CPU crawls.
    trail = [
        tuple(jnp.roll(x, ahead - r, axis=1)[:, :, :, None] for x in past[r]) for r in range(1, ahead + 1)
    ]
    own = [
        jnp.sum(grouped * key, axis=-1, dtype=jnp.float32).transpose(0, 2, 3, 1)[..., None] * scale
        for key, _ in trail
    ]
    weights = jax.nn.softmax(jnp.concatenate([scores, *own], axis=-1), axis=-1).astype(values.dtype)
    mixed = jnp.einsum("bkgts,bskd->btkgd", weights[..., :length], values)
    for r, (_, value) in enumerate(trail):
        mixed = mixed + weights[..., length + r].transpose(0, 3, 1, 2)[..., None] * value
    return mixed.reshape(rows, length, heads * head_dim).astype(queries.dtype)
