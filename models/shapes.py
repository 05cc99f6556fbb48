"""The sizes of published models, to plan with; weights come from files (:mod:`specjax.models.load`).

From their ``config.json``: meta-llama/Llama-3.1-8B and -70B, Llama-3.2-1B and -3B, Qwen/Qwen3-0.6B to -32B,
HuggingFaceTB/SmolLM2-135M. Llama's scaling of rotary
angles for long contexts changes no shape, and is not here.
"""

from __future__ import annotations

from specjax.models.config import ModelConfig

__all__ = ["SHAPES"]


def _llama(
    layers: int,
    width: int,
    heads: int,
    mlp: int,
    *,
    head_dim: int = 128,
    tied: bool = True,
) -> ModelConfig:
    return ModelConfig(
        vocab_size=128_256,
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        mlp_width=mlp,
        context_length=131_072,
        rope_base=500_000.0,
        tied_embeddings=tied,
        dtype="bfloat16",
    )


def _qwen3(layers: int, width: int, heads: int, mlp: int, *, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        vocab_size=151_936,
        num_layers=layers,
        width=width,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        mlp_width=mlp,
        context_length=40_960,
        rope_base=1e6,
        norm_eps=1e-6,
        tied_embeddings=tied,
        qk_norm=True,
        dtype="bfloat16",
    )


SHAPES = {
    "llama-3.1-8b": _llama(32, 4096, 32, 14_336, tied=False),
    "llama-3.1-70b": _llama(80, 8192, 64, 28_672, tied=False),
    "llama-3.2-1b": _llama(16, 2048, 32, 8192, head_dim=64),
    "llama-3.2-3b": _llama(28, 3072, 24, 8192),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17_408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25_600),
    "smollm2-135m": ModelConfig(
        vocab_size=49_152,
        num_layers=30,
        width=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        mlp_width=1536,
        context_length=8192,
        rope_base=100_000.0,
        dtype="bfloat16",
    ),
}
"""By name, in bfloat16."""
