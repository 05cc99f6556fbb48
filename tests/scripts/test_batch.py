"""The batch job from the command line, on a tiny model file."""

from __future__ import annotations

import array
import fcntl
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from specjax.engine.engine import Engine
from specjax.engine.metrics import Totals
from specjax.scripts import __main__ as specjax_command


def run(*argv):
    return specjax_command.main([str(x) for x in argv])


@pytest.fixture
def model(write_gguf):
    return write_gguf()


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
    assert run("batch", "-i", source, "-o", sink, "--model", model, "--slots", 2) == 3
    assert "with an error" in capsys.readouterr().err
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
        options = ["--model", model, "--slots", size, "--draft", draft, "--rule", "coupled"]
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
    assert run("batch", "-i", source, "-o", sink, "--model", model, "--slots", 2) == 0
    texts = {int(key): row["response"]["body"]["choices"][0]["text"] for key, row in answers(sink).items()}
    for i in (1, 2, 3, 4, 5, 6):
        assert texts[i] != texts[0], options[i]
    for i in (6, 7, 8, 9):
        assert texts[i] != texts[5], options[i]


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


def test_a_choice_is_what_a_request_of_its_own_would_get(model, tmp_path):
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = dict(temperature=1.5, seed=7, max_tokens=16, n=3, logprobs=2, return_token_sources=True)
    lines = [line("many", "the he", **asked), line("one", "the he", temperature=1.5, seed=7, max_tokens=16)]
    source.write_text("\n".join(lines))
    assert run("batch", "-i", source, "-o", sink, "--model", model, "--slots", 2) == 0
    many, one = (answers(sink)[name]["response"]["body"] for name in ("many", "one"))
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2]
    assert many["choices"][0]["text"] == one["choices"][0]["text"]
    assert len({choice["text"] for choice in many["choices"]}) == 3
    assert many["usage"] == {"prompt_tokens": 4, "completion_tokens": 48, "total_tokens": 52}
    for choice in many["choices"]:
        spoken, logprobs = choice["token_ids"], choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(choice["token_sources"]) == len(spoken) == 16
        assert all(len(top) >= 2 for top in logprobs["top_logprobs"])
    histogram = many["acceptance_histogram"]
    assert sum(histogram) == many["num_spec_steps"]
    assert sum(i * count for i, count in enumerate(histogram)) == many["num_accepted_draft_tokens"]


def test_a_stop_string_cuts_the_text_wherever_it_stands(model, tmp_path):
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    options = ["--model", model, "--slots", 2]
    source.write_text(line("whole", "the hehe", max_tokens=40, temperature=2.0, seed=1, ignore_eos=True))
    assert run("batch", "-i", source, "-o", sink, *options) == 0
    whole = answers(sink)["whole"]["response"]["body"]["choices"][0]["text"]
    stops = {str(i): whole[i : i + 3] for i in range(0, len(whole) - 3, 7)}
    bodies = dict(max_tokens=40, temperature=2.0, seed=1, ignore_eos=True, return_token_sources=True)
    source.write_text("\n".join(line(name, "the hehe", stop=stop, **bodies) for name, stop in stops.items()))
    assert run("batch", "-i", source, "-o", sink, "--overwrite", *options) == 0
    for name, row in answers(sink).items():
        choice = row["response"]["body"]["choices"][0]
        assert choice["text"] == whole[: whole.index(stops[name])]
        assert choice["finish_reason"] == "stop"
        assert row["response"]["body"]["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_a_job_goes_on_where_it_was(model, tmp_path, capsys, monkeypatch):
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(f"r{i}", "the he" * (i % 5 + 1), temperature=0.7 * (i % 2)) for i in range(9)] + ["{torn"]
    options = ["-i", source, "-o", sink, "--model", model, "--slots", 2, "--no-adaptive"]
    source.write_text("\n".join(lines))
    assert run("batch", *options) == 3
    whole = sorted(sink.read_text().splitlines())
    for kept in (0, 300, 2000, len(sink.read_text()) - 1):  # in the middle of a line, or of the last one
        sink.write_text(sink.read_text()[:kept])
        assert run("batch", *options) == 3
        assert sorted(sink.read_text().splitlines()) == whole
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "warm_up", None)  # nothing is left, so nothing is compiled
        assert run("batch", *options, "--metrics", tmp_path / "run.jsonl") == 3
    assert "done before" in capsys.readouterr().err
    assert json.loads((tmp_path / "run.jsonl").read_text())["refused"] == 0  # it counts from zero
    assert sorted(sink.read_text().splitlines()) == whole

    assert run("batch", *options, "--max-tokens", 7) == 2
    assert "max_tokens was 128 and is 7" in capsys.readouterr().err
    # What a wider draft needs at the end of a row isn't there for the answer.
    assert run("batch", *options, "--num-speculative-tokens", 5) == 2
    assert "reserve was 3 and is 5" in capsys.readouterr().err
    source.write_text("\n".join([line("r0", "other"), *lines[1:]]))
    assert run("batch", *options) == 2
    assert "custom_id 'r0' is in the output already" in capsys.readouterr().err


def test_gzip_folders_and_pipes(model, tmp_path, capsysbinary, monkeypatch):
    folder, sink = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    (folder / "a.jsonl").write_text(line("a", "hehe") + "\n" + line("b", "the"))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(line("c", "he").encode()))
    options = ["--model", model, "--slots", 2]
    assert run("batch", "-i", folder, "-o", sink, *options) == 0
    assert answers(sink / "a.jsonl").keys() == {"a", "b"}
    packed = json.loads(gzip.decompress((sink / "b.jsonl.gz").read_bytes()))
    assert packed["custom_id"] == "c"

    with (folder / "a.jsonl").open() as piped:
        monkeypatch.setattr("sys.stdin", piped)
        capsysbinary.readouterr()
        assert run("batch", *options) == 0
    rows = [json.loads(text) for text in capsysbinary.readouterr().out.splitlines()]
    assert {row["custom_id"]: row for row in rows} == answers(sink / "a.jsonl")


def test_what_a_damaged_file_still_has_is_answered(model, tmp_path, capsys):
    source, sink = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl"
    lines = "\n".join(line(f"r{i}", "hehe", max_tokens=1) for i in range(5))
    source.write_bytes(gzip.compress(lines.encode())[:-8])  # without the end, a checksum
    options = ["-i", source, "-o", sink, "--model", model, "--slots", 2]
    assert run("batch", *options) == 2
    assert "damaged gzip after line" in capsys.readouterr().err
    assert sorted(answers(sink)) == ["r0", "r1", "r2", "r3"]  # of the last nobody knows whether it is whole


@pytest.mark.parametrize("text", ["", "\n  \n\n"])
def test_an_input_without_a_line_is_answered_by_an_empty_file(model, tmp_path, text):
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    for _ in range(2):  # and once more
        assert run("batch", "-i", source, "-o", sink, "--model", model, "--slots", 2) == 0
        assert sink.read_text() == ""


def test_figures_for_others(model, tmp_path):
    pytest.importorskip("matplotlib")
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(f"r{i}", "hehe" * 5, max_tokens=40) for i in range(6)))
    metrics, report = tmp_path / "run.jsonl", tmp_path / "run.html"
    # The draft is used whether it pays or not: half of the figures are of drafts.
    options = ["--model", model, "--slots", 2, "--metrics", metrics, "--report", report, "--no-adaptive"]
    assert run("batch", "-i", source, "-o", sink, *options) == 0
    last = json.loads(metrics.read_text().splitlines()[-1])
    usage = [row["response"]["body"]["usage"] for row in answers(sink).values()]
    assert last["answered"] == 6
    assert last["tokens"] == sum(row["completion_tokens"] for row in usage)
    assert last["prompt_tokens"] == sum(row["prompt_tokens"] for row in usage)
    figures = (tmp_path / "run.prom").read_text()
    assert f'vllm:generation_tokens_total{{model_name="{model}",engine="0"}} {last["tokens"]}' in figures
    page = report.read_text()
    assert page.count("<svg") == page.count("</svg>") >= 2
    assert "tokens a step" in page
    assert not re.search(r"(src|href)=.http|url\(.?http", page)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slots", 0], "--slots must be at least 1"),
        (["--capacity", 2], "a capacity of 2 positions"),
        (["--slots", 10**9], "too little memory: weights"),
        (["--rule", "best"], "rule"),
        (["-o", "nowhere/out.jsonl"], "nowhere/out.jsonl can't be made: there is no folder nowhere"),
    ],
)
def test_what_cannot_be_started_gets_one_line(model, tmp_path, options, message, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text(line("a", "hehe"))
    assert run("batch", "-i", source, "-o", tmp_path / "out.jsonl", "--model", model, *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("specjax batch: error: ")
    assert error.count("\n") == 1


def test_a_page_may_have_any_title(tmp_path):
    pytest.importorskip("matplotlib")
    from specjax.scripts._report import write_report

    title = "<b> " + os.fsdecode(b"caf\xe9")  # what a path may be
    write_report(tmp_path / "page.html", title, {}, Totals(), [], [], [])
    assert "<h1>&lt;b&gt; caf\\udce9</h1>" in (tmp_path / "page.html").read_text()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_under_a_page_names_the_page():
    pytest.importorskip("matplotlib")
    from specjax.scripts._report import write_report

    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_report(Path("/dev/full"), "title", {}, Totals(), [], [], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--metrics", "run.prom"], "run.prom is --metrics too"),
        (["--metrics", "out.jsonl"], "--metrics: out.jsonl is the output too"),
        (["--metrics", "in.jsonl"], "--metrics: in.jsonl is the input too"),
        (["--report", "out.jsonl"], "--report: out.jsonl is the output too"),
        (["--report", "../here/in.jsonl"], "--report: ../here/in.jsonl is the input too"),
        (["--report", "none/page.html"], "--report: none/page.html can't be a file"),
    ],
)
def test_figures_are_written_over_nothing(tmp_path, monkeypatch, options, message, capsys):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "in.jsonl").write_text(line("a", "hehe"))
    assert run("batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", "none.gguf", *options) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_a_closed_stream_gets_one_line(tmp_path, monkeypatch, stream, capsys):
    (tmp_path / "in.jsonl").write_text(line("a", "hehe"))
    monkeypatch.setattr(f"sys.{stream}", None)
    path = ["-i", tmp_path / "in.jsonl"] if stream == "stdout" else ["-o", tmp_path / "out.jsonl"]
    assert run("batch", *path, "--model", "none.gguf") == 2
    assert f"there is no standard {'in' if stream == 'stdin' else 'out'}put" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_job_that_is_ended_loses_nothing(model, tmp_path, number):
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = {"max_tokens": 100, "ignore_eos": True}
    source.write_text("\n".join(line(f"r{i}", "hehe" * (i % 7 + 1), **bodies) for i in range(60)))
    command = [sys.executable, "-m", "specjax.scripts", "batch", "-i", str(source), "-o", str(sink)]
    command += ["--model", str(model), "--slots", "2", "--no-adaptive"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not sink.exists() or sink.read_text().count("\n") < 3:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(60) == (-9 if number == signal.SIGKILL else 128 + number)
    before = sink.read_text()
    assert 3 <= before.count("\n") < 60
    assert run(*command[3:]) == 0
    assert sink.read_text().startswith(before[: before.rindex("\n") + 1])
    assert sorted(answers(sink)) == sorted(f"r{i}" for i in range(60))
    assert sink.read_text().count("\n") == 60


def test_a_job_that_waits_for_a_pipe_can_be_ended(model, tmp_path, monkeypatch, capsys):
    reader, writer = os.pipe()
    ended = threading.Event()
    in_time = []

    def send():
        os.write(writer, line("one", "hehe").encode() + b"\n")
        while array.array("i", fcntl.ioctl(reader, termios.FIONREAD, bytes(4)))[0]:  # until it was read
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        in_time.append(ended.wait(60))
        os.close(writer)

    thread = threading.Thread(target=send)
    with open(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        thread.start()
        code = run("batch", "-o", tmp_path / "out.jsonl", "--model", model, "--slots", 2, "--no-adaptive")
        ended.set()
        thread.join()
    assert in_time == [True]
    assert code == 143
    assert "SIGTERM: run it again to go on" in capsys.readouterr().err
