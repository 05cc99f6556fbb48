"""Turns a GGUF file of a Llama-style model into a model and its params.

llama.cpp stores the rows of the query and key weights so that rotary positions turn *neighbouring* pairs
(2i, 2i + 1); here, as in the original checkpoints, the pair is (i, i + Dh/2). The rows are put back head by
head: with H heads for queries, but KV heads for keys.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.config import ModelConfig
from specjax.models.errors import ModelFileError
from specjax.models.functional import FunctionalModel, abstract_model
from specjax.models.gguf_file import GgufFile, open_gguf
from specjax.types import Params

__all__ = ["config_of", "load_gguf", "model_of", "params_of", "unpermute"]

_LAYER_TENSORS = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
_OUTSIDE_TENSORS = ("token_embd.weight", "output_norm.weight")


def load_gguf(
    path: str | os.PathLike[str], dtype: jax.typing.DTypeLike = jnp.float32, *, scan_layers: bool = False
) -> tuple[FunctionalModel, Params]:
    """Loads a Llama-style model from a GGUF file.

    Tensors are dequantized one by one, so that the peak is the weights and one tensor more.

    Args:
      path: the file.
      dtype: what the weights are kept and multiplied in.
      scan_layers: see :class:`~specjax.models.config.ModelConfig`.

    Returns:
      The model and its params.

    Raises:
      ModelFileError: the file is damaged, or of an architecture that is not supported.
    """
    file = open_gguf(path)
    return model_of(file, config_of(file, dtype, scan_layers=scan_layers))


def model_of(file: GgufFile, cfg: ModelConfig) -> tuple[FunctionalModel, Params]:
    """Returns the model of a configuration with the weights of a file."""
    return abstract_model(cfg)[0], params_of(file, cfg)


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's reordering of query or key rows.

    Within a head of four, the stored rows 0 1 2 3 are the original 0 2 1 3: halves were interleaved.

    Args:
      rows: [heads * Dh, D].
      num_heads: H for queries, KV for keys.

    Returns:
      [heads * Dh, D], each head's even rows first, then its odd rows.
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def config_of(
    file: GgufFile, dtype: jax.typing.DTypeLike = jnp.float32, *, scan_layers: bool = False
) -> ModelConfig:
    """Reads the sizes of the model, and makes sure that the file has just the tensors which these imply.

    Raises:
      ModelFileError: another architecture, a missing or senseless size, a missing or unknown tensor.
    """
    entries = file.metadata
    architecture = entries.get("general.architecture")
    if architecture != "llama":
        raise ModelFileError(file.path, f"architecture {architecture!r} is not supported; 'llama' is")

    def entry(name: str, default: Any = None) -> Any:
        value = entries.get(f"llama.{name}", default)
        if value is None:
            raise ModelFileError(
                file.path, f"metadata 'llama.{name}' is missing; the conversion was incomplete"
            )
        if isinstance(value, (bool, str)) or not isinstance(value, (int, float)):
            raise ModelFileError(file.path, f"metadata 'llama.{name}' must be one number, got {value!r:.80}")
        return value

    for name, plain in (("rope.scaling.type", "none"), ("expert_count", 0), ("attention.sliding_window", 0)):
        value = entries.get(f"llama.{name}", plain)
        if not np.array_equal(value, plain):
            raise ModelFileError(
                file.path, f"'llama.{name}' = {value!r:.80} is not supported, only {plain!r}"
            )
    for name in _OUTSIDE_TENSORS:
        _require(file, name)
    width, heads = entry("embedding_length"), entry("attention.head_count")
    sizes = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "num_layers": entry("block_count"),
        "width": width,
        "num_heads": heads,
        "num_kv_heads": entry("attention.head_count_kv", heads),
        "head_dim": entry("attention.key_length", width // max(heads, 1)),
        "mlp_width": entry("feed_forward_length"),
        "context_length": entry("context_length"),
        "rope_base": entry("rope.freq_base", 10_000.0),
        "norm_eps": entry("attention.layer_norm_rms_epsilon"),
    }
    try:
        cfg = ModelConfig(**sizes, tied_embeddings="output.weight" not in file.tensors)
    except ValueError as error:
        raise ModelFileError(file.path, f"its sizes make no model: {error}") from error
    turned = entry("rope.dimension_count", cfg.head_dim)
    if turned != cfg.head_dim:
        raise ModelFileError(
            file.path, f"rotary positions on {turned} of {cfg.head_dim} dimensions are not supported"
        )
    known = {*_OUTSIDE_TENSORS, "output.weight"}
    for layer in range(cfg.num_layers):  # stops at the first that the file lacks, whatever it claims
        for name in _LAYER_TENSORS:
            known.add(_require(file, f"blk.{layer}.{name}.weight"))
    unknown = sorted(set(file.tensors) - known)
    if unknown:
        raise ModelFileError(
            file.path, f"tensors {unknown[:3]} are not part of a plain Llama; it is not supported"
        )
    return dataclasses.replace(cfg, scan_layers=scan_layers, dtype=dtype)


def params_of(file: GgufFile, cfg: ModelConfig) -> Params:
    """Reads the weights, fused as the layers want them.

    Raises:
      ModelFileError: a tensor's shape is not what the configuration says.
    """

    def put(x: np.ndarray) -> jax.Array:
        return jnp.asarray(np.ascontiguousarray(x, jnp.dtype(cfg.dtype)))

    def tensor(name: str, *shape: int) -> np.ndarray:
        return file.read(f"{name}.weight", shape)

    # The largest first: what it needs on the way is then gone before the rest is there.
    params: dict[str, Any] = {"embedding": put(tensor("token_embd", cfg.vocab_size, cfg.width))}
    if not cfg.tied_embeddings:
        params["head"] = put(tensor("output", cfg.vocab_size, cfg.width))
    params["norm"] = {"scale": put(tensor("output_norm", cfg.width))}
    layers = _layers(file, cfg)
    if cfg.scan_layers:
        return params | {"blocks": _stacked(cfg, layers)}
    return params | {"blocks": {i: jax.tree.map(put, layer) for i, layer in enumerate(layers)}}


def _require(file: GgufFile, name: str) -> str:
    if name not in file.tensors:
        raise ModelFileError(
            file.path, f"tensor {name!r} is missing; the file is incomplete or no plain Llama"
        )
    return name


def _layers(file: GgufFile, cfg: ModelConfig) -> Iterator[Any]:
    """Yields the params of one layer after the other, float32 and on the host."""
    queries, keys = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    for layer in range(cfg.num_layers):

        def tensor(name: str, *shape: int, layer: int = layer) -> np.ndarray:
            return file.read(f"blk.{layer}.{name}.weight", shape)

        q = unpermute(tensor("attn_q", queries, cfg.width), cfg.num_heads)
        k = unpermute(tensor("attn_k", keys, cfg.width), cfg.num_kv_heads)
        v = tensor("attn_v", keys, cfg.width)
        # The layer wants together what belongs to one key-value head.
        q, k, v = (x.reshape(cfg.num_kv_heads, -1, cfg.width) for x in (q, k, v))
        gate, up = (tensor(name, cfg.mlp_width, cfg.width) for name in ("ffn_gate", "ffn_up"))
        yield {
            "attention_norm": {"scale": tensor("attn_norm", cfg.width)},
            "attention": {
                "qkv": {"kernel": np.concatenate([q, k, v], axis=1)},
                "out": {"kernel": tensor("attn_output", cfg.width, queries)},
            },
            "mlp_norm": {"scale": tensor("ffn_norm", cfg.width)},
            "mlp": {
                "gate_up": {"kernel": np.stack([gate, up])},
                "down": {"kernel": tensor("ffn_down", cfg.width, cfg.mlp_width)},
            },
        }


def _stacked(cfg: ModelConfig, layers: Iterator[Any]) -> Any:
    """Stacks the params of all layers, filling each buffer as the layers come."""
    buffers: Any = None
    for index, layer in enumerate(layers):
        if buffers is None:
            buffers = jax.tree.map(
                lambda x: np.empty((cfg.num_layers, *x.shape), jnp.dtype(cfg.dtype)), layer
            )
        for buffer, x in zip(jax.tree.leaves(buffers), jax.tree.leaves(layer), strict=True):
            buffer[index] = x
    return jax.tree.map(jnp.asarray, buffers)
