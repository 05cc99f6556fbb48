"""The jobs from the command line, on a tiny model file."""

import json

import pytest

from specjax.scripts import __main__ as specjax_command
from specjax.scripts import batch, generate, spec_bench


def run(*argv):
    return specjax_command.main([str(x) for x in argv])


@pytest.fixture
def model(write_gguf):
    return write_gguf()


def test_drafts_and_streaming_change_no_character(model, capsys):
    outputs = set()
    for options in (["--draft", "none"], ["--draft", "lookup"], ["--draft", model], ["--stream"]):
        assert run("generate", "the hehehe", "--model", model, "--max-tokens", 24, *options) == 0
        captured = capsys.readouterr()
        outputs.add(captured.out)
        assert "tokens a step" in captured.err
    assert len(outputs) == 1


def test_the_coupled_rule_changes_no_sampled_character(model, capsys):
    sampled = ["--temperature", 0.9, "--seed", 5, "--rule", "coupled", "--model", model, "--max-tokens", 24]
    outputs = set()
    for draft in ("none", "lookup", model):
        assert run("generate", "the hehehe", "--draft", draft, *sampled) == 0
        outputs.add(capsys.readouterr().out)
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "missing.gguf"], "missing.gguf"),
        (["--prompt-lookup-max", 0], "--prompt-lookup-min"),
        (["--num-speculative-tokens", 0], "--num-speculative-tokens must be at least 1"),
        (["--temperature", -1], "temperature must be at least 0"),
        (["--top-p", 0], "top_p must be in"),
        (["--top-p", 1.5], "top_p must be in"),
        (["--max-tokens", 0], "max_tokens must be at least 1"),
        (["--min-tokens", 200], "--min-tokens is 200, more than --max-tokens, 128"),
        (["--seed", -1], "seed must be"),
        (["--temprature", 1], "unknown option --temprature; did you mean --temperature?"),
        (["--draft", "lookup+"], "names no model"),
        (["--draft", "nope"], "--draft 'nope' names no model; give lookup, none, smollm2-draft"),
        (["--rule", "tree"], "rule"),
    ],
)
def test_bad_options_get_one_line(model, options, message, capsys):
    given = [] if "--model" in options else ["--model", model]
    assert run("generate", "hello", *given, *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("specjax generate: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("prompt", "message"), [("", "empty"), (" \n", "empty"), ("h" * 200, "context of 128")]
)
def test_bad_prompts_get_one_line(model, prompt, message, capsys):
    assert run("generate", prompt, "--model", model) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_a_damaged_model_file_gets_one_line(model, capsys):
    model.write_bytes(model.read_bytes()[:5000])
    assert run("generate", "hello", "--model", model) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(model) in error


def test_spec_bench_writes_what_batch_reads(capsys):
    assert run("spec-bench", "--per-task", 3, "--tasks", "rag", "qa") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["custom_id"].split("-")[0] for row in rows] == ["qa"] * 3 + ["rag"] * 3
    assert run("spec-bench") == 0
    assert len(capsys.readouterr().out.splitlines()) == 240
    assert run("spec-bench", "--tasks", "poetry") == 2
    assert "no task is named 'poetry'" in capsys.readouterr().err


def test_an_audit_reports(model, tmp_path, capsys):
    prompts, report = tmp_path / "in.jsonl", tmp_path / "report.json"
    texts = {"a": "hehe", "b": "the he"}
    bodies = [{"custom_id": name, "prompt": text, "model": "tiny"} for name, text in texts.items()]
    prompts.write_text("\n".join(map(json.dumps, bodies)))
    options = ["--prompts", prompts, "--draws", 64, "--max-tokens", 8, "--json", report]
    assert run("audit", "--model", model, *options) == 0
    assert "pass  greedy identity: " in capsys.readouterr().out
    found = json.loads(report.read_text())
    assert found["passed"]
    assert {"greedy identity", "law of every token", "coupled identity"} <= {
        c["name"] for c in found["checks"]
    }
    assert run("audit", "--model", model, "--temperature", 0) == 2
    assert "--temperature must be above 0" in capsys.readouterr().err


def test_every_job_explains_itself(capsys):
    for job in (generate, batch, spec_bench):
        with pytest.raises(SystemExit) as stopped:
            job.main(["--help"])
        assert not stopped.value.code
        assert "--" in capsys.readouterr().out
