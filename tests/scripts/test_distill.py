"""`specjax distill` from the command line, on a tiny model file."""

from __future__ import annotations

import json

import pytest

from specjax.distill.checkpoints import CheckpointNotWritten
from specjax.scripts import __main__ as specjax_command
from specjax.scripts import _distill_data, _distill_options, distill


def run(*argv):
    return specjax_command.main([str(x) for x in argv])


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"he {chr(97 + i)}"} for i in range(20)]
    lines.append({"messages": [{"role": "user", "content": "hehe"}]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_from_nothing_to_a_draft_that_decodes(write_gguf, prompts, tmp_path, capsys):
    model, out = write_gguf(), tmp_path / "out"
    options = ["--model", model, "--out", out, "--prompts", prompts, "--capacity", 64, "--held-out", 0.2]
    sizes = ["--num-tokens", 1, "--scored", 100, "--batch", 4, "--steps", 4, "--per-task", 0]
    assert run("distill", *options, *sizes, "--passes", 1) == 0
    said = capsys.readouterr().out
    assert "step 4 of 4: loss" in said
    assert "held out: tokens_a_step_T0" in said
    figures = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in figures] == [4, 4]
    assert "held out, T = 0" in (out / "curves.svg").read_text()
    assert len(list((out / "tensorboard").iterdir())) == 1
    # Asked again, everything is there.
    assert run("distill", *options, *sizes, "--passes", 1) == 0
    assert "resumed at step 4" in capsys.readouterr().out
    # With other options it would be another draft.
    assert run("distill", *options, *sizes, "--passes", 1, "--losses", "tv:1") == 2
    assert "out was begun with --losses forward_kl:1, not tv:1: go on" in capsys.readouterr().err

    # On four devices the losses are the same, to rounding.
    two = tmp_path / "two"  # what is given twice counts as given last
    more = ["--passes", 1, "--mesh", "data=2,model=2", "--data", out / "data", "--out", two]
    assert run("distill", *options, *sizes, *more) == 0
    capsys.readouterr()
    lines = [json.loads(line) for line in (two / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(figures[0]["loss"], rel=1e-3)
    assert lines[0]["grad_norm"] == pytest.approx(figures[0]["grad_norm"], rel=1e-3)

    texts = set()
    for draft in ("none", out / "draft.safetensors", f"lookup+{out / 'draft.safetensors'}"):
        assert run("generate", "the hehehe", "--model", model, "--draft", draft, "--max-tokens", 16) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


@pytest.mark.slow
def test_layers_are_chosen_and_the_draft_writes_for_itself(write_gguf, prompts, tmp_path, capsys):
    model, data = write_gguf(), tmp_path / "data"
    options = ["--model", model, "--data", data, "--capacity", 64, "--held-out", 0.2, "--num-tokens", 1]
    options += ["--batch", 4, "--steps", 2, "--per-task", 0, "--kind", "layers", "--num-layers", 1]
    first = ["--out", tmp_path / "first", "--prompts", prompts, "--scored", 100]
    assert run("distill", *options, *first) == 0
    said = capsys.readouterr().out
    assert "of 2 layers the draft gets" in said
    chosen = json.loads((tmp_path / "first" / "layers.json").read_text())
    assert len(chosen) == 1
    # Asked again, it doesn't search again.
    assert run("distill", *options, *first) == 0
    assert "the draft gets" not in capsys.readouterr().out

    # Another draft goes on from it, and writes half of the responses.
    draft = tmp_path / "first" / "draft.safetensors"
    second = ["--out", tmp_path / "second", "--prompts", prompts, "--init", draft, "--on-policy", 0.5]
    assert run("distill", *options, *second) == 0
    said = capsys.readouterr().out
    assert "the draft writes 50% of the sampled responses" in said
    assert "the draft gets" not in said
    (folder,) = data.glob("on-policy-0.5-*/")
    assert list(folder.glob("*.arrayrecord"))
    written = sorted(path.name for path in data.iterdir() if path != folder)

    # Texts lie apart as well.
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"hehe {i} " * 40}) + "\n" for i in range(30)))
    assert run("distill", *options, "--out", tmp_path / "third", "--texts", texts, "--num-tokens", 900) == 0
    assert "tokens of text in" in capsys.readouterr().out
    assert written == sorted(p.name for p in data.iterdir() if not p.is_dir() or "scored" in p.name)

    head = ["--kind", "head", "--init", draft, "--prompts", prompts]
    assert run("distill", *options, "--out", tmp_path / "fourth", *head) == 2
    assert "is no head: give another --kind" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on-policy", 0.5], "needs the --init of a draft that speaks alone: no head"),
        (["--on-policy", 2, "--init", "x", "--kind", "small"], "--on-policy is a share in 0 .. 1"),
        (["--texts", "missing.jsonl"], "missing.jsonl: No such file"),
        (["--init", "missing.safetensors"], "missing.safetensors: No such file"),
        (["--texts", "a", "--prompts", "b"], "--texts goes without --prompts"),
        (["--num-layers", 0], "--num-layers must be at least 1"),
        (["--losses", "forwardkl:1"], "no loss is named 'forwardkl'; there are forward_kl"),
        (["--losses", "tv:much"], "--losses are written name:weight, not tv:much"),
        (["--mesh", "model=two"], "a mesh is written like data=2,model=4"),
        (["--mesh", "data=3"], "--batch must be a multiple of the mesh's data=3"),
        (["--steps", 0], "--steps must be at least 1"),
        (["--held-out", 1], "--held-out between 0 and 1"),
        (["--model", "missing.gguf"], "missing.gguf"),
        (["--prompts", "missing.jsonl"], "missing.jsonl: No such file"),
    ],
)
def test_bad_options_get_one_line(write_gguf, tmp_path, options, message, capsys):
    given = [] if "--model" in options else ["--model", write_gguf()]
    assert run("distill", "--out", tmp_path / "out", *given, *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("specjax distill: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_without_its_extra_nothing_is_begun(write_gguf, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_distill_options.importlib.util, "find_spec", lambda name: None)
    assert run("distill", "--out", tmp_path / "out", "--model", write_gguf()) == 2
    assert "array_record and grain missing: pip install -e '.[distill]'" in capsys.readouterr().err


def test_a_folder_that_is_a_file_is_named(write_gguf, tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert run("distill", "--out", tmp_path / "out", "--model", write_gguf()) == 2
    assert "/out is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "x"}', '{"prompt": 5}'])
def test_a_line_that_is_no_prompt_is_named(write_gguf, tmp_path, line, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "he"}\n' + line + "\n")
    assert run("distill", "--out", tmp_path / "out", "--model", write_gguf(), "--prompts", path) == 2
    assert "prompts.jsonl, line 2: " in capsys.readouterr().err


def test_a_full_disk_gets_one_line_and_an_exit_code(write_gguf, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise CheckpointNotWritten(
            "out/checkpoints: a checkpoint couldn't be written: No space left on device"
        )

    monkeypatch.setattr(_distill_data, "write_data", lambda *_: [])
    monkeypatch.setattr(distill, "train", full)
    assert run("distill", "--out", tmp_path / "out", "--model", write_gguf()) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "specjax distill: error: out/checkpoints: a checkpoint couldn't be written: No space"
    )
    assert said.count("\n") == 1
