"""A tiny random target that is sure of itself, and drafts for it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.distill.sequences import TokenSequence
from specjax.distill.targets import target_laws
from specjax.distill.train import Batch, split_params
from specjax.generate import generate
from specjax.models import ModelConfig, Transformer, to_model
from specjax.models.derive import cut_layers, feature_head, output_rows
from specjax.models.unroll import HeadStudent, ModelStudent
from specjax.sampling import make_sampling

CONFIG = ModelConfig(
    vocab_size=48,
    num_layers=3,
    width=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    mlp_width=48,
    context_length=256,
)


@functools.cache
def target():
    """The model and its params; scaled so that its laws are neither flat nor certain."""
    model, params = to_model(Transformer(CONFIG, nnx.Rngs(3)))
    params["embedding"] = params["embedding"] * 2.5
    return model, params


def sequences(count: int, length: int, seed: int = 0) -> list[TokenSequence]:
    """Half sampled, half greedy responses of the target to random prompts of three tokens."""
    model, params = target()
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, CONFIG.vocab_size, (count, 3)).tolist()
    temperatures = np.arange(count) % 2
    rows = generate(
        model,
        params,
        prompts,
        max_tokens=length - 3,
        sampling=make_sampling(count, temperature=temperatures.astype(float)),
    )
    return [
        TokenSequence(np.array([*prompt, *row.tokens], np.int32), 3, float(t))
        for prompt, row, t in zip(prompts, rows, temperatures, strict=True)
    ]


def draft(kind: str, vocabulary: np.ndarray, passes: int = 2):
    """The student, its trained and its frozen params, its model, and the names that are frozen."""
    model, params = target()
    names = frozenset({"embedding", "vocabulary"})
    if kind == "head":
        made, own = feature_head(model, params, 1, vocabulary)
        student = HeadStudent(made, passes)
    else:
        made, own = cut_layers(model, params, (0, 2), vocabulary)
        student = ModelStudent(made)
    trained, frozen = split_params(own, names)
    return student, trained, {**frozen, "target_head": output_rows(params)[vocabulary]}, made


def batch_of(rows: list[TokenSequence], vocabulary: np.ndarray) -> Batch:
    """One batch [B, ...] of sequences of one length."""
    model, params = target()
    tokens = np.stack([row.tokens for row in rows])
    features, normalizer, best = target_laws(params, output_rows(params), jnp.asarray(tokens), model=model)
    row_of = np.full(CONFIG.vocab_size, -1, np.int32)
    row_of[vocabulary] = np.arange(len(vocabulary))
    positions = np.arange(tokens.shape[1])
    starts = np.array([row.prompt_length for row in rows])[:, None]
    mask = (positions[None] >= starts - 1) & (positions[None] < tokens.shape[1] - 1)
    return Batch(
        tokens=jnp.asarray(tokens),
        features=features,
        log_normalizer=normalizer,
        labels=jnp.asarray(np.where(mask, row_of[np.roll(tokens, -1, axis=1)], -1)),
        best=jnp.asarray(np.where(mask, row_of[np.asarray(best)], -1)),
        mask=jnp.asarray(mask),
        lengths=jnp.full(len(rows), tokens.shape[1], jnp.int32),
    )


def in_parts(batch: Batch, parts: int) -> Batch:
    """[A, B / A, ...] of [B, ...]."""
    return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
