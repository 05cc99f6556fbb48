"""Drafts in files: what is kept, what is the target's, and what is refused."""

from __future__ import annotations

import json
import resource
import signal

import jax
import numpy as np
import pytest
import tiny_target
from safetensors import safe_open
from safetensors.numpy import save_file

from specjax.distill.train import join_params
from specjax.models.derive import output_rows
from specjax.models.draft_file import load_draft, save_draft
from specjax.models.errors import ModelFileError

VOCABULARY = np.arange(1, 48, 2, dtype=np.int32)


def saved(path, kind="head", *, with_head=True):
    """A draft in a file, and the params that it was made of."""
    _, trained, frozen, model = tiny_target.draft(kind, VOCABULARY)
    params = join_params(trained, frozen)
    del params["target_head"]
    if not with_head:
        trained = {name: x for name, x in trained.items() if name != "head"}
    own = {**trained, "vocabulary": params["vocabulary"]}
    save_draft(path, "head" if kind == "head" else "model", model.config, own, {"step": 7}, dtype="float32")
    return params, model


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("kind", ["head", "layers"])
def test_what_is_read_is_what_was_written(tmp_path, kind, with_head):
    params, model = saved(tmp_path / "draft.safetensors", kind, with_head=with_head)
    with safe_open(tmp_path / "draft.safetensors", framework="numpy") as file:
        assert "embedding" not in file.keys()  # noqa: SIM118
        assert ("head" in file.keys()) == with_head  # noqa: SIM118
    target, target_params = tiny_target.target()
    draft = load_draft(str(tmp_path / "draft.safetensors"), target, target_params)
    jax.tree.map(np.testing.assert_array_equal, draft.params, params)
    assert draft.model == model
    assert draft.about == {"step": 7}
    # No second copy of the largest array.
    assert draft.params["embedding"] is target_params["embedding"]


@pytest.mark.parametrize("with_head", [True, False])
def test_only_a_draft_with_the_targets_head_takes_other_tokens(tmp_path, with_head):
    saved(tmp_path / "draft.safetensors", with_head=with_head)
    target, target_params = tiny_target.target()
    other = np.arange(0, 48, 3, dtype=np.int32)
    params = load_draft(str(tmp_path / "draft.safetensors"), target, target_params, other).params
    np.testing.assert_array_equal(params["vocabulary"], VOCABULARY if with_head else other)
    if not with_head:
        np.testing.assert_array_equal(params["head"], output_rows(target_params)[other])


def altered(path, change):
    """Writes the file anew with its header and tensors changed."""
    with safe_open(path, framework="numpy") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header, tensors)
    save_file(tensors, path, metadata=header)


def resize(**sizes):
    def change(header, tensors):
        header["config"] = json.dumps(json.loads(header["config"]) | sizes)

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda h, t: h.update(format="other"), "is no draft of specjax"),
        (lambda h, t: h.update(kind="tree"), "is no draft of specjax"),
        (lambda h, t: h.update(config="{"), "its sizes make no model"),
        (resize(vocab_size=49), "made for a target of vocab_size 49, not 48"),
        (resize(width=64), "made for a target of width 64, not 32"),
        (resize(num_layers=2), "claims 2 layers and has fewer"),
        (resize(num_layers=2**31 - 1), "claims 2147483647 layers and has fewer"),
        (resize(mlp_width=64), r"down.kernel' is \(32, 48\), not \(32, 64\)"),
        (lambda h, t: t.pop("vocabulary"), "lacks the list of tokens"),
        (lambda h, t: t.update(vocabulary=VOCABULARY[::-1].copy()), "in no rising order"),
        (lambda h, t: t.update(vocabulary=VOCABULARY + 5), "tokens that the target doesn't have"),
        (lambda h, t: t.pop("fuse.kernel"), "lacks the tensor 'fuse.kernel'"),
        (lambda h, t: t.update(extra=np.zeros(1)), "has a tensor 'extra'"),
        (lambda h, t: t["norm.scale"].__setitem__(0, np.nan), "values that are no numbers"),
    ],
)
def test_a_file_that_is_not_for_this_target_is_refused_by_name(tmp_path, change, complaint):
    path = tmp_path / "draft.safetensors"
    saved(path)
    altered(path, change)
    with pytest.raises(ModelFileError, match=complaint):
        load_draft(str(path), *tiny_target.target())


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x10" + bytes(7) + b"{}", (1 << 62).to_bytes(8, "little")]
)
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "draft.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"draft\.safetensors: is (damaged|cut short)"):
        load_draft(str(path), *tiny_target.target())


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelFileError, match=r"nowhere\.safetensors: No such file"):
        load_draft(str(tmp_path / "nowhere.safetensors"), *tiny_target.target())


def test_a_draft_that_can_not_be_written_leaves_the_one_before(tmp_path):
    path = tmp_path / "draft.safetensors"
    path.write_bytes(b"before")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(OSError, match=r"draft\.safetensors"):
            save_draft(path, "model", tiny_target.CONFIG, {"vocabulary": np.arange(400, dtype=np.int32)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"before"
    assert [file.name for file in tmp_path.iterdir()] == ["draft.safetensors"]
