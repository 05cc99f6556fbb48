"""Drafts that were made by distillation, on eight devices: the tokens of one."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest
import tiny_target
from jax.sharding import PartitionSpec

from specjax.distill.train import join_params
from specjax.drafters import FeatureDrafter, ModelDrafter
from specjax.generate import Decoding
from specjax.models.derive import feature_head
from specjax.models.draft_file import save_draft
from specjax.models.load import load_model
from specjax.parallel.sharding import make_placement
from specjax.sampling import make_sampling
from specjax.scripts import _jobs

VOCABULARY = np.flatnonzero(np.arange(48) % 6 != 3).astype(np.int32)  # 40 of 48: eight devices divide both
PROMPTS = [[5], [7, 8, 9], [1, 2, 3, 4] * 5]
TEMPERATURE = np.array([0.0, 1.0, 0.7])


def parts(kind):
    """The draft's model and params."""
    _, trained, frozen, model = tiny_target.draft(kind, VOCABULARY)
    params = join_params(trained, frozen)
    del params["target_head"]
    return model, params


def prepare(kind, mesh=None):
    """Three rows before their first step."""
    target, target_params = tiny_target.target()
    draft, params = parts(kind)
    placement = None if mesh is None else make_placement(mesh)
    if placement is not None:
        target, target_params = placement.target.lay(target, target_params)
        draft, params = placement.draft.lay(draft, params)
    drafter = FeatureDrafter(draft, 2, 48) if kind == "head" else ModelDrafter(draft, 2, 48, narrow=True)
    return Decoding(
        target,
        target_params,
        PROMPTS,
        max_tokens=8,
        drafter=drafter,
        draft_params=params,
        sampling=make_sampling(3, temperature=TEMPERATURE),
        placement=placement,
    )


@pytest.mark.parametrize("kind", ["head", pytest.param("layers", marks=pytest.mark.slow)])
def test_the_ids_are_those_of_one_device(kind):
    alone, spread = prepare(kind), prepare(kind, "data=2,model=4")
    assert alone.advance()
    assert spread.advance()
    assert sum(row.num_accepted_tokens for row in alone.rows()) > 0
    for row, other in zip(spread.rows(), alone.rows(), strict=True):
        assert (row.tokens, row.sources) == (other.tokens, other.sources)
    # Its weights and what it remembers are spread, and no device holds the target's whole vocabulary.
    draft = spread._params[1]
    assert draft["head"].sharding.spec == PartitionSpec(("model",), None)
    assert draft["blocks"][0]["mlp"]["down"]["kernel"].sharding.spec == PartitionSpec(None, ("model",))
    state = spread._state.draft_state
    assert {x.sharding.shard_shape(x.shape)[0] for x in jax.tree.leaves(state.cache)} == {2}  # of 4 rows
    arguments = *spread._params, spread._state, spread._record, np.int32(9)
    text = spread._advance.lower(*arguments).compile().as_text()
    assert 48 not in {int(n) for dims in re.findall(r"f32\[([\d,]+)\]", text) for n in dims.split(",")}


@pytest.mark.parametrize("draft_shards", [0, 1])
def test_a_job_lays_the_draft_of_a_file(draft_shards, write_gguf, tmp_path):
    path, file = str(write_gguf()), tmp_path / "draft.safetensors"
    whole = load_model(path)
    vocabulary = np.arange(0, whole.model.vocab_size, 2, dtype=np.int32)
    model, params = feature_head(whole.model, whole.params, 1, vocabulary)
    trained = {name: x for name, x in params.items() if name != "embedding"}  # that is the target's
    save_draft(file, "head", model.config, trained, {}, dtype="float32")
    options = dict(model=path, draft=str(file))
    alone = _jobs.load_decoder(_jobs.DecoderOptions(**options))
    mesh = dict(mesh="data=2,model=2", draft_shards=draft_shards)
    spread = _jobs.load_decoder(_jobs.MeshOptions(**options, **mesh))
    assert dataclasses.replace(spread.drafter, model=spread.drafter.model.model) == alone.drafter
    jax.tree.map(np.testing.assert_array_equal, spread.draft_params, alone.draft_params)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(spread.draft_params)} == {4}
    whole_on_each = spread.draft_params["blocks"][0]["mlp"]["down"]["kernel"].sharding.is_fully_replicated
    assert whole_on_each == (draft_shards == 1)


def test_a_head_with_a_long_cache_keeps_it_where_it_lies():
    # One that a single device reads block by block, a few rows at a time.
    rows, capacity = 8, 1024
    layout = make_placement("data=4,model=2").draft
    head, params = layout.lay(*parts("head"))
    cache = jax.jit(lambda: head.init_cache(rows, capacity))()
    tokens, positions = np.zeros((2, rows, 1), np.int32)
    features = np.zeros((rows, 1, head.feature_width), np.float32)
    text = jax.jit(head.apply).lower(params, tokens, features, cache, positions).compile().as_text()
    assert "while" in text
    moved = re.findall(r"^ *(?:ROOT )?%\S+ = (.*?) all-\S+\(", text, re.MULTILINE)
    sizes = [
        np.prod([*map(int, dims.split(","))]) for each in moved for dims in re.findall(r"\[([\d,]+)\]", each)
    ]
    assert max(sizes) <= rows * head.feature_width
