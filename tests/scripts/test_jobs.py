"""The jobs from the command line, on a tiny model file."""

import json

import pytest
from runs import quick_compile  # noqa: F401

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
        (["--seed", -1], "seed must be"),
        (["--temprature", 1], "unknown option --temprature; did you mean --temperature?"),
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


def line(custom_id, prompt, **body):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0} | body
    return json.dumps({"custom_id": custom_id, "url": "/v1/completions", "body": body})


def answers(path):
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    return {row["custom_id"]: row for row in rows}


def test_one_bad_line_costs_that_line_only(model, tmp_path, capsys):
    lines = [
        line("one", "the hehehe"),
        "{torn",
        "[]",
        line("two", "hehe", temperature=0.8, seed=3),
        line("one", "again"),
        line("long", "h" * 300),
        line("other", "x", model="gpt-5"),
        line("stop", "x", stream=True),
        line("tiny", "x", top_p=1e-40),
        '{"custom_id": "half", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x\\ud800y"}}',
        "",
        line("three", "a", max_tokens=3),
    ]
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    assert run("batch", "-i", source, "-o", sink, "--model", model, "--batch-size", 2) == 3
    assert "3 answered, 8 refused" in capsys.readouterr().err
    rows = [json.loads(text) for text in sink.read_text().splitlines()]
    assert len(rows) == 11
    good = {row["custom_id"] for row in rows if row["error"] is None}
    assert good == {"one", "two", "three"}
    messages = " / ".join(row["error"]["message"] for row in rows if row["error"])
    for words in (
        "line 2: not JSON",
        "line 3: ",
        "line 5: custom_id was used",
        "line 6: a prompt of",
        "line 7: model 'gpt-5'",
    ):
        assert words in messages
    assert answers(sink)["three"]["response"]["body"]["usage"]["completion_tokens"] == 3


def test_a_row_is_answered_alike_in_any_batch(model, tmp_path):
    lines = [line(f"r{i}", "the he" * (i % 4 + 1), temperature=0.7 * (i % 2), seed=i) for i in range(6)]
    source = tmp_path / "in.jsonl"
    texts = []
    for number, (size, order, draft) in enumerate([(1, 1, "lookup"), (4, -1, "lookup"), (3, 1, "none")]):
        source.write_text("\n".join(lines[::order]))
        sink = tmp_path / f"out{number}.jsonl"
        options = ["--model", model, "--batch-size", size, "--draft", draft, "--rule", "coupled"]
        assert run("batch", "-i", source, "-o", sink, *options) == 0
        texts.append({key: row["response"]["body"]["choices"] for key, row in answers(sink).items()})
    assert texts[0] == texts[1] == texts[2]


def test_options_of_a_line_change_its_answer(model, tmp_path):
    options = [
        {},
        {"logit_bias": {"100": 100}},
        {"repetition_penalty": 5},
        {"presence_penalty": 50},
        {"frequency_penalty": 50},
        {"temperature": 5, "seed": 1},
        {"temperature": 5, "seed": 2},
        {"temperature": 5, "seed": 1, "top_k": 2},
        {"temperature": 5, "seed": 1, "top_p": 0.01},
        {"temperature": 5, "seed": 1, "min_p": 0.9},
    ]
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(str(i), "the hehe", **body) for i, body in enumerate(options)))
    assert run("batch", "-i", source, "-o", sink, "--model", model, "--batch-size", 10) == 0
    texts = {int(key): row["response"]["body"]["choices"][0]["text"] for key, row in answers(sink).items()}
    for i in (1, 2, 3, 4, 5, 6):
        assert texts[i] != texts[0], options[i]
    for i in (6, 7, 8, 9):
        assert texts[i] != texts[5], options[i]


def test_an_audit_reports(model, tmp_path, capsys):
    prompts, report = tmp_path / "in.jsonl", tmp_path / "report.json"
    prompts.write_text("\n".join([line("a", "hehe"), line("b", "the he")]))
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


def test_an_output_that_is_there_is_not_replaced_unasked(model, tmp_path, capsys):
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("one", "hehe"))
    sink.write_text("precious")
    assert run("batch", "-i", source, "-o", sink, "--model", model) == 2
    assert sink.read_text() == "precious"
    assert "is there already" in capsys.readouterr().err
    assert run("batch", "-i", source, "-o", source, "--overwrite", "--model", model) == 2
    assert source.read_text()
    assert "is the input too" in capsys.readouterr().err
    assert run("batch", "-i", tmp_path / "none.jsonl", "-o", sink, "--model", model) == 2
    assert "none.jsonl: No such file" in capsys.readouterr().err


def test_every_job_explains_itself(capsys):
    for job in (generate, batch, spec_bench):
        with pytest.raises(SystemExit) as stopped:
            job.main(["--help"])
        assert not stopped.value.code
        assert "--" in capsys.readouterr().out
