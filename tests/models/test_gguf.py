"""Importing GGUF: the weights come out as they went in, and a bad file costs one quick, clear error."""

import contextlib
import struct
import time
import tracemalloc

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.errors import ModelFileError
from specjax.models.functional import abstract_model
from specjax.models.gguf import config_of, load_gguf, unpermute
from specjax.models.gguf_file import open_gguf

HUGE = 2**32 - 1


def weights_of(path, **options):
    """The params of a tiny file, its layers as a list."""
    model, params = load_gguf(path, **options)
    shapes = abstract_model(model.config)[1]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    blocks = params["blocks"]
    if model.config.scan_layers:
        blocks = [jax.tree.map(lambda x, i=i: x[i], blocks) for i in range(model.config.num_layers)]
    return model, params, blocks


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_arrive_where_they_belong(write_gguf, tiny_weights, scan_layers, tied):
    given = tiny_weights(tied=tied)
    model, params, blocks = weights_of(write_gguf(given), scan_layers=scan_layers)
    assert (model.config.num_heads, model.config.num_kv_heads, model.config.head_dim) == (4, 2, 16)
    assert model.context_length == 128
    assert model.config.tied_embeddings == tied
    np.testing.assert_array_equal(params["embedding"], given["token_embd"])
    np.testing.assert_array_equal(params["norm"]["scale"], given["output_norm"])
    if not tied:
        np.testing.assert_array_equal(params["head"], given["output"])
    for i, block in enumerate(blocks if scan_layers else blocks.values()):
        of = {key.removeprefix(f"blk.{i}."): x for key, x in given.items()}
        # Queries and keys in the original order of rows: the file holds them in llama.cpp's.
        # For each of two key-value heads: its two query heads, its key, its value.
        heads = [of[name].reshape(2, -1, 64) for name in ("attn_q", "attn_k", "attn_v")]
        qkv = np.stack([np.concatenate([part[head] for part in heads]) for head in range(2)])
        np.testing.assert_array_equal(block["attention"]["qkv"]["kernel"], qkv)
        np.testing.assert_array_equal(block["attention"]["out"]["kernel"], of["attn_output"])
        np.testing.assert_array_equal(block["attention_norm"]["scale"], of["attn_norm"])
        np.testing.assert_array_equal(block["mlp_norm"]["scale"], of["ffn_norm"])
        gate_up = np.stack([of["ffn_gate"], of["ffn_up"]])
        np.testing.assert_array_equal(block["mlp"]["gate_up"]["kernel"], gate_up)
        np.testing.assert_array_equal(block["mlp"]["down"]["kernel"], of["ffn_down"])


def test_rows_are_put_back_head_by_head():
    stored = np.arange(8.0)[:, None]
    np.testing.assert_array_equal(unpermute(stored, 1)[:, 0], [0, 2, 4, 6, 1, 3, 5, 7])
    np.testing.assert_array_equal(unpermute(stored, 2)[:, 0], [0, 2, 1, 3, 4, 6, 5, 7])


@pytest.mark.parametrize(
    "kind", [gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.Q8_0]
)
def test_quantized_matrices_are_dequantized(write_gguf, tiny_weights, kind):
    given = tiny_weights()
    _, params, blocks = weights_of(write_gguf(given, kind=kind))
    np.testing.assert_allclose(params["embedding"], given["token_embd"], atol=0.02)
    np.testing.assert_allclose(blocks[1]["mlp"]["down"]["kernel"], given["blk.1.ffn_down"], atol=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float16])
def test_the_dtype_is_chosen_by_the_caller(write_gguf, tiny_weights, dtype):
    model, params, _ = weights_of(write_gguf(), dtype=dtype)
    assert model.config.dtype == jnp.dtype(dtype).name
    np.testing.assert_array_equal(params["embedding"], tiny_weights()["token_embd"].astype(jnp.dtype(dtype)))


def test_a_dtype_that_makes_no_sense_is_the_callers_fault(write_gguf):
    with pytest.raises(ValueError, match="dtype") as error:
        load_gguf(write_gguf(), dtype="int8")
    assert not isinstance(error.value, ModelFileError)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba'"),
        ({"metadata": {"llama.block_count": None}}, "block_count"),
        ({"metadata": {"llama.block_count": HUGE}}, r"blk\.2\.attn_norm"),
        ({"metadata": {"llama.block_count": "two"}}, "block_count"),
        ({"metadata": {"llama.attention.head_count": 3}}, "num_heads"),
        ({"metadata": {"llama.attention.head_count_kv": [2, 1]}}, "head_count_kv"),
        ({"metadata": {"llama.attention.head_count_kv": 4}}, r"attn_k.*shape \(32, 64\)"),
        ({"metadata": {"llama.feed_forward_length": 97}}, r"ffn_gate.*shape \(96, 64\)"),
        ({"metadata": {"llama.embedding_length": 2**32 - 64}}, "shape"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
        ({"metadata": {"llama.rope.scaling.type": [1, 2]}}, "scaling"),
        ({"metadata": {"llama.expert_count": 8}}, "expert_count"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "8 of 16"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(write_gguf, changes, match):
    path = write_gguf(**changes)
    with pytest.raises(ModelFileError, match=match) as error:
        load_gguf(path)
    assert str(path) in str(error.value)


def test_missing_and_unknown_tensors_are_named(write_gguf, tiny_weights):
    for missing in ("token_embd", "blk.1.ffn_up"):
        with pytest.raises(ModelFileError, match=f"'{missing}.weight' is missing"):
            load_gguf(write_gguf({k: v for k, v in tiny_weights().items() if k != missing}))
    with pytest.raises(ModelFileError, match="rope_freqs"):
        load_gguf(write_gguf(tiny_weights() | {"rope_freqs": np.ones(8, np.float32)}))


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelFileError, match=str(path)):
            open_gguf(path)


def test_a_file_cut_anywhere_is_refused(write_gguf):
    data = write_gguf().read_bytes()
    cut = write_gguf().with_name("cut.gguf")
    header = min(len(data), 20_000)
    for size in [*range(0, header, 97), *range(header, len(data), len(data) // 7), len(data) - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(ModelFileError, match="download it again"):
            open_gguf(cut)


def text(value):
    return struct.pack("<Q", len(value)) + value


def gguf_bytes(entries=b"", count=0, tensors=b"", num_tensors=0, magic=b"GGUF", version=3):
    return magic + struct.pack("<IQQ", version, num_tensors, count) + entries + tensors


def tensor_bytes(*shape, kind=0, offset=0, rank=None, name=b"x"):
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", rank or len(shape)) + dims + struct.pack("<IQ", kind, offset)


U32, STRING, ARRAY = (struct.pack("<I", kind) for kind in (4, 8, 9))
HOSTILE = {
    "empty": b"",
    "another magic": gguf_bytes(magic=b"GGML"),
    "version 1": gguf_bytes(version=1),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "endless entries": gguf_bytes(count=2**64 - 1),
    "endless tensors": gguf_bytes(num_tensors=2**64 - 1),
    "a key of 2^63 bytes": gguf_bytes(struct.pack("<Q", 2**63) + b"abc", 1),
    "a string of 2^64 - 1 bytes": gguf_bytes(text(b"k") + STRING + struct.pack("<Q", 2**64 - 1), 1),
    "2^62 bytes": gguf_bytes(text(b"k") + ARRAY + struct.pack("<IQ", 0, 2**62), 1),
    "2^61 longs, wrapping": gguf_bytes(text(b"k") + ARRAY + struct.pack("<IQ", 10, 2**61), 1),
    "2^40 strings": gguf_bytes(text(b"k") + ARRAY + struct.pack("<IQ", 8, 2**40), 1),
    "arrays of arrays": gguf_bytes(text(b"k") + (ARRAY + struct.pack("<Q", 1)) * 50, 1),
    "an unknown type": gguf_bytes(text(b"k") + struct.pack("<IQ", 77, 0), 1),
    "alignment 0": gguf_bytes(text(b"general.alignment") + U32 + struct.pack("<I", 0), 1),
    "alignment 2^31": gguf_bytes(
        text(b"general.alignment") + U32 + struct.pack("<I", 2**31), 1, tensor_bytes(1), num_tensors=1
    ),
    "2^32 - 1 dimensions": gguf_bytes(tensors=tensor_bytes(rank=HUGE), num_tensors=1),
    "dimensions of 2^32 - 1": gguf_bytes(tensors=tensor_bytes(*[HUGE] * 4), num_tensors=1),
    "a product that wraps to 0": gguf_bytes(tensors=tensor_bytes(2**32, 2**32), num_tensors=1),
    "a product that wraps to 4": gguf_bytes(tensors=tensor_bytes(2**62 + 1, 4), num_tensors=1),
    "a size of 0": gguf_bytes(tensors=tensor_bytes(0, 4), num_tensors=1),
    "an offset of 2^64 - 1": gguf_bytes(tensors=tensor_bytes(1, offset=2**64 - 1), num_tensors=1),
    "blocks that don't divide": gguf_bytes(tensors=tensor_bytes(33, kind=8), num_tensors=1),
    "an unknown quantization": gguf_bytes(tensors=tensor_bytes(32, kind=999), num_tensors=1),
    "a tensor twice": gguf_bytes(tensors=tensor_bytes(1) * 2, num_tensors=2) + bytes(64),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_costs_little(tmp_path, data):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    assert len(data) < 1024
    tracemalloc.start()
    try:
        start = time.perf_counter()
        with pytest.raises(ModelFileError, match=r"hostile\.gguf"):
            open_gguf(path)
        assert time.perf_counter() - start < 2
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_damaged_bytes_never_end_in_another_exception(write_gguf):
    path = write_gguf()
    data, rng = path.read_bytes(), np.random.default_rng(0)
    damaged = path.with_name("damaged.gguf")
    for _ in range(150):
        copy = bytearray(data)
        for at in rng.integers(0, 12_000, 3):
            copy[at] = rng.integers(256)
        damaged.write_bytes(copy)
        with contextlib.suppress(ModelFileError):
            config_of(open_gguf(damaged))


def test_a_type_that_cannot_be_dequantized_is_named(write_gguf, tiny_weights):
    path = write_gguf()
    info = open_gguf(path).tensors["blk.0.attn_q.weight"]
    data = path.read_bytes()
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 16  # after the rank and two dimensions
    assert struct.unpack("<I", data[at : at + 4]) == (0,)
    path.write_bytes(data[:at] + struct.pack("<I", gguf.GGMLQuantizationType.Q8_1) + data[at + 4 :])
    assert info.shape == (64, 64)
    with pytest.raises(ModelFileError, match="Q8_1"):
        load_gguf(path)
