"""Drafts made from a target's weights, to be trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models.config import ModelConfig
from specjax.models.drafts import FeatureHead, FeatureModel, NarrowTransformer, to_feature_model
from specjax.models.functional import FunctionalModel, to_model
from specjax.types import Array, Params

__all__ = ["cut_layers", "feature_head", "narrow_model", "output_rows", "small_model"]


def output_rows(params: Params) -> Array:
    """The head [V, D] of a transformer's params, which may be its embedding."""
    return params["head"] if "head" in params else params["embedding"]


def narrow_model(cfg: ModelConfig, scored: int) -> tuple[FunctionalModel, Params]:
    """A transformer that scores ``scored`` tokens, and its params as ``jax.ShapeDtypeStruct``."""
    model, params = to_model(nnx.eval_shape(lambda: NarrowTransformer(cfg, scored, nnx.Rngs(0))))
    return model, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


def cut_layers(
    model: FunctionalModel, params: Params, layers: Sequence[int], vocabulary: np.ndarray
) -> tuple[FunctionalModel, Params]:
    """A draft of some of the target's own layers, its embedding, and some rows of its head.

    Args:
      model: the target, layers unrolled.
      params: its weights.
      layers: which, rising.
      vocabulary: [W] int32, rising: the tokens that the draft scores.

    Raises:
      ValueError: the target has no such layer, or its layers are scanned.
    """
    cfg = model.config
    if cfg.scan_layers or not layers or not all(0 <= i < cfg.num_layers for i in layers):
        raise ValueError(
            f"layers must be among 0 .. {cfg.num_layers - 1} of an unrolled target, not {layers}"
        )
    draft, _ = narrow_model(dataclasses.replace(cfg, num_layers=len(layers)), len(vocabulary))
    return draft, {
        "blocks": {place: params["blocks"][layer] for place, layer in enumerate(layers)},
        "embedding": params["embedding"],
        "head": output_rows(params)[vocabulary],
        "norm": params["norm"],
        "vocabulary": jnp.asarray(vocabulary, jnp.int32),
    }


def feature_head(
    model: FunctionalModel, params: Params, num_layers: int, vocabulary: np.ndarray, seed: int = 0
) -> tuple[FeatureModel, Params]:
    """A head on the target's states; its layers start as the target's last.

    Args:
      model: the target, layers unrolled.
      params: its weights.
      num_layers: of the head.
      vocabulary: as above.
      seed: of the fusing weight.
    """
    cfg = dataclasses.replace(model.config, num_layers=num_layers)
    head, fresh = to_feature_model(FeatureHead(cfg, len(vocabulary), nnx.Rngs(seed)))
    first = model.config.num_layers - num_layers
    # State and token are added at first, each normed to about 1, a little noise on top.
    fuse = fresh["fuse"]["kernel"] * 0.3 + jnp.tile(jnp.eye(cfg.width, dtype=cfg.dtype), (1, 2))
    values: dict[str, Any] = {
        "fuse": {"kernel": fuse},
        "blocks": {i: params["blocks"][first + i] for i in range(num_layers)},
        "embedding": params["embedding"],
        "head": output_rows(params)[vocabulary],
        "norm": params["norm"],
        "vocabulary": jnp.asarray(vocabulary, jnp.int32),
    }
    return head, {**fresh, **values}


def small_model(
    model: FunctionalModel, num_layers: int, width: int, vocabulary: np.ndarray, seed: int = 0
) -> tuple[FunctionalModel, Params]:
    """A transformer from scratch, ``width`` wide, with an embedding of its own."""
    cfg = model.config
    heads = max(width // cfg.head_dim, 1)
    cfg = dataclasses.replace(
        cfg, num_layers=num_layers, width=width, num_heads=heads, num_kv_heads=1, mlp_width=width * 8 // 3
    )
    draft, params = to_model(NarrowTransformer(cfg, len(vocabulary), nnx.Rngs(seed)))
    return draft, {**params, "vocabulary": jnp.asarray(vocabulary, jnp.int32)}
