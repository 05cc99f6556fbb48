"""Drafts made for a target: fewer layers, fewer tokens to score, the target's own embedding.

The head is most of a small draft's cost, so it scores only ``W`` of the target's ``V`` tokens, the most
frequent (Zhao et al. 2025, "FR-Spec", 2502.14856): lossless, since q = 0 elsewhere. Which ones lies with the
weights, as ``vocabulary``. The embedding is the target's array itself, so a draft's file needn't hold it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax.numpy as jnp
from flax import nnx

from specjax import cache as kv
from specjax.models.config import ModelConfig
from specjax.models.functional import names_of
from specjax.models.layers import Block, Linear, RMSNorm, rotary_angles
from specjax.models.products import project
from specjax.models.transformer import Transformer, init_cache
from specjax.types import Array, Cache, Params

__all__ = ["FeatureHead", "FeatureModel", "NarrowTransformer", "to_feature_model"]

_TABLE = ("vocab", None)


class NarrowTransformer(Transformer):
    """A transformer that reads all tokens, and scores those in its ``vocabulary``.

    Args:
      cfg: the sizes; ``vocab_size`` is V, that of the embedding.
      scored: W.
      rngs: draws the initial weights.
    """

    def __init__(self, cfg: ModelConfig, scored: int, rngs: nnx.Rngs) -> None:
        super().__init__(dataclasses.replace(cfg, tied_embeddings=True), rngs)
        init = nnx.initializers.normal(cfg.width**-0.5)
        self.head = nnx.Param(init(rngs.params(), (scored, cfg.width), cfg.dtype), names=_TABLE)
        self.vocabulary = nnx.Variable(jnp.arange(scored, dtype=jnp.int32), names=(None,))  # rising ids

    def output_rows(self) -> Array:
        """[W, D]."""
        return self.head[...]


class FeatureHead(nnx.Module):
    r"""Layers over the target's last states: :math:`\hat f_i = g(f_{<i}, t_{\le i})`.

    At position i it reads the token there and the target's state at i - 1, and guesses the state at i, which
    the target's head would turn into the law of the next token; further on it is fed its own guesses (Li et
    al. 2024, "EAGLE", 2401.15077).

    Args:
      cfg: the target's sizes, but for ``num_layers``.
      scored: W.
      rngs: draws the initial weights.
    """

    def __init__(self, cfg: ModelConfig, scored: int, rngs: nnx.Rngs) -> None:
        self.cfg = cfg
        init = nnx.initializers.normal(cfg.width**-0.5)
        self.embedding = nnx.Param(init(rngs.params(), (cfg.vocab_size, cfg.width), cfg.dtype), names=_TABLE)
        self.feature_norm = RMSNorm(cfg.width, cfg.norm_eps, cfg.dtype)
        self.token_norm = RMSNorm(cfg.width, cfg.norm_eps, cfg.dtype)
        self.fuse = Linear((None, None), (cfg.width, 2 * cfg.width), cfg.dtype, rngs)
        self.blocks = nnx.List([Block(cfg, rngs) for _ in range(cfg.num_layers)])
        self.norm = RMSNorm(cfg.width, cfg.norm_eps, cfg.dtype)
        self.head = nnx.Param(init(rngs.params(), (scored, cfg.width), cfg.dtype), names=_TABLE)
        self.vocabulary = nnx.Variable(jnp.arange(scored, dtype=jnp.int32), names=(None,))

    def __call__(
        self, tokens: Array, features: Array, cache: kv.KVCache, positions: Array
    ) -> tuple[Array, kv.KVCache]:
        """See :class:`specjax.drafters.features.FeatureModel`."""
        chex.assert_rank([tokens, positions, features], [2, 2, 3])
        chex.assert_equal_shape_prefix([tokens, positions, features], 2)
        angles = rotary_angles(positions, self.cfg.head_dim, self.cfg.rope_base)
        newest = jnp.max(positions)
        x = self.join(tokens, features)
        for layer, block in enumerate(self.blocks):
            x, cache = block(x, cache, layer, positions, angles, newest)
        return self.norm(x), cache

    def join(self, tokens: Array, features: Array) -> Array:
        """What the layers read, [B, T, D]."""
        embedded = self.token_norm(self.embedding[...][tokens])
        states = self.feature_norm(features.astype(embedded.dtype))
        return self.fuse(jnp.concatenate([states, embedded], axis=-1))


@dataclasses.dataclass(frozen=True)
class FeatureModel:
    """A :class:`specjax.drafters.features.FeatureModel` over a :class:`FeatureHead`."""

    config: ModelConfig
    graphdef: nnx.GraphDef[Any]

    @property
    def feature_width(self) -> int:
        """F, the target's width."""
        return self.config.width

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Makes an empty cache for ``batch`` rows of ``capacity`` positions."""
        return init_cache(self.config, batch, capacity)

    def apply(
        self, params: Params, tokens: Array, features: Array, cache: Cache, positions: Array
    ) -> tuple[Array, Cache]:
        """Guesses the target's states; see :meth:`FeatureHead.__call__`."""
        return self.module(params)(tokens, features, cache, positions)

    def score(self, params: Params, features: Array) -> Array:
        """The head's product: [B, T, D] -> [B, T, W] float32."""
        return project(features, params["head"], jnp.float32)

    def param_names(self, params: Params) -> Any:
        """The logical names of each weight's dimensions."""
        return names_of(self.graphdef, params)

    def module(self, params: Params) -> FeatureHead:
        """The module with these weights."""
        return nnx.merge(self.graphdef, params)


def to_feature_model(module: FeatureHead) -> tuple[FeatureModel, Params]:
    """As :func:`specjax.models.functional.to_model`."""
    graphdef, state = nnx.split(module)
    return FeatureModel(module.cfg, graphdef), nnx.to_pure_dict(state)
