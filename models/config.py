"""The sizes of a Llama-style decoder: one frozen value that says everything about its shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

__all__ = ["ModelConfig"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with rotary positions, grouped queries and a gated MLP.

    Hashable, so that it can be a static argument of ``jax.jit``.

    Raises:
      ValueError: a size is no positive number, heads don't divide into groups, the head width is odd
        (rotary turns pairs), or the dtype is no floating type.
    """

    vocab_size: int  # V
    num_layers: int  # L
    width: int  # D, of the residual stream
    num_heads: int  # H
    num_kv_heads: int  # KV; each serves H / KV query heads
    head_dim: int  # Dh
    mlp_width: int  # M, of the hidden layer of the MLP
    context_length: int = 2048  # positions that the model was trained for
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = True  # the head is the embedding
    qk_norm: bool = False  # norms each head's queries and keys before they are rotated (Qwen3)
    scan_layers: bool = False  # one compiled layer in a loop: compiles faster, runs slower on a CPU
    dtype: Any = "float32"  # of weights, cache and products; norms, softmax and logits stay float32

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "num_layers", "width", "num_heads", "num_kv_heads", "head_dim", "mlp_width")
        for name in (*sizes, "context_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name in ("rope_base", "norm_eps"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        object.__setattr__(self, "dtype", _floating_name(self.dtype))


def _floating_name(dtype: Any) -> str:
    """Returns the one name of a floating dtype, so that equal configurations compare equal."""
    try:
        known = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"dtype must name a floating type such as 'bfloat16', got {dtype!r}") from error
    if not jnp.issubdtype(known, jnp.floating):
        raise ValueError(f"dtype must be a floating type, got {known.name!r}")
    return known.name
