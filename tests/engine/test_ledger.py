"""What is done is known from the output; what isn't is done, once."""

import gzip
import json
import os
import random

import pytest
from toy_job import run_job

from specjax.engine.ledger import Ledger, resume
from specjax.engine.sink import Output, whole_lines
from specjax.engine.source import Line, Source

LINES = [
    {"custom_id": "a", "prompt": "one"},
    {"custom_id": "b", "prompt": "two"},
    {"custom_id": "a", "prompt": "another"},
    {"prompt": "bare"},
    "{torn",
    {"custom_id": "a", "prompt": "one"},
    {"custom_id": "c", "prompt": "three", "stream": True},
    {"custom_id": "c", "prompt": "three"},
    {"prompt": "bare"},
    "{torn",
    {"custom_id": "d", "prompt": "last"},
]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def write_lines(path, rows):
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture
def source(tmp_path):
    return write_lines(tmp_path / "in.jsonl", LINES)


def content(path):
    return [line.decode() for line in whole_lines(path)]


def results(path):
    """For each output line its custom_id and the error's words, if it is one."""
    rows = [json.loads(line) for line in content(path)]
    assert len({row["id"] for row in rows}) == len(rows)
    return sorted((row["custom_id"] or "", row["error"]["message"] if row["error"] else "ok") for row in rows)


def test_each_line_is_answered_or_refused_once(source, tmp_path):
    ledger = run_job(source, tmp_path / "out.jsonl")
    found = results(tmp_path / "out.jsonl")
    torn = [message for custom_id, message in found if not custom_id]
    assert [message.split(": not JSON")[0] for message in torn] == ["line 10", "line 5"]
    assert found[2:] == [
        ("a", "line 3: custom_id was used by an earlier line"),
        ("a", "line 6: custom_id was used by an earlier line"),
        ("a", "ok"),
        ("b", "ok"),
        ("c", "line 7: option 'stream' is not supported"),
        ("c", "line 8: custom_id was used by an earlier line"),
        ("d", "ok"),
        ("line-4", "ok"),
        ("line-9", "ok"),
    ]
    assert ledger.num_refused == 0  # none when it was opened
    before = (tmp_path / "out.jsonl").read_bytes()
    ledger = run_job(source, tmp_path / "out.jsonl")
    assert (ledger.num_refused, ledger.num_unmet) == (6, 0)
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_cut_at_every_byte_of_the_last_line(source, tmp_path, name):
    sink = tmp_path / name
    run_job(source, sink, slots=1)
    whole, data = sorted(content(sink)), sink.read_bytes()
    last = gzip.compress(content(sink)[-1].encode(), mtime=0) if name.endswith("gz") else content(sink)[-1]
    for size in range(len(data) - len(last), len(data) + 1):
        sink.write_bytes(data[:size])
        run_job(source, sink, slots=1)
        assert sorted(content(sink)) == whole


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_cut_anywhere_whatever_the_order_of_the_answers(source, tmp_path, name):
    sink, rng = tmp_path / name, random.Random(0)
    run_job(source, sink)
    whole = sorted(content(sink))
    for order in range(40):
        sink.unlink()
        run_job(source, sink, order=order, slots=rng.randint(1, 12))
        for _ in range(3):  # and again, in the middle of what was resumed
            data = sink.read_bytes()
            sink.write_bytes(data[: rng.randrange(len(data))])
            run_job(source, sink, order=rng.random(), slots=rng.randint(1, 12))
            assert sorted(content(sink)) == whole


def test_a_line_is_known_wherever_it_stands(source, tmp_path):
    rows = [{"custom_id": str(i), "prompt": str(i)} for i in range(20)]
    write_lines(source, rows)
    run_job(source, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    write_lines(source, rows[::-1])
    run_job(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == before
    write_lines(source, [*rows[3:], {"custom_id": "new", "prompt": "x"}])
    ledger = run_job(source, tmp_path / "out.jsonl")
    assert ledger.num_unmet == 3
    assert len(content(tmp_path / "out.jsonl")) == 21


def test_another_content_under_an_id_that_is_done_stops_the_job(source, tmp_path):
    run_job(source, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    write_lines(source, [{"custom_id": "b", "prompt": "changed"}])
    with pytest.raises(ValueError, match="line 1: custom_id 'b' is in the output already"):
        run_job(source, tmp_path / "out.jsonl")
    write_lines(source, ["", "", "", {"prompt": "changed"}])  # bare lines go by their number
    with pytest.raises(ValueError, match="line 4: custom_id 'line-4' is in the output already"):
        run_job(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == before
    write_lines(source, ["", "", "", "", "{mended, badly"])  # a line that has no id is only done anew
    run_job(source, tmp_path / "out.jsonl")
    assert len(content(tmp_path / "out.jsonl")) == 12


def test_another_configuration_is_refused_by_what_differs(source, tmp_path):
    sink = tmp_path / "out.jsonl"
    run_job(source, sink, fingerprint={"model": "m", "max_tokens": 128, "rule": "token", "k": (1, 2)})
    before = sink.read_bytes()
    run_job(source, sink, fingerprint={"k": [1, 2], "rule": "token", "max_tokens": 128, "model": "m"})
    other = {"model": "m", "max_tokens": 64, "k": (1, 2), "dtype": "float32"}
    with pytest.raises(ValueError, match="another configuration") as caught:
        run_job(source, sink, fingerprint=other)
    for words in ("max_tokens was 128 and is 64", 'rule was "token" and is null', "dtype was null and is"):
        assert words in str(caught.value)
    assert "model" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sink.read_bytes() == before
    run_job(source, sink, fingerprint=other, overwrite=True)
    assert len(content(sink)) == len(LINES)
    run_job(source, sink, fingerprint=other)


def test_a_line_is_overwritten_for_good(source, tmp_path):
    sink = tmp_path / "out.jsonl"
    run_job(source, sink, fingerprint={"model": "old"})
    output = Output(sink, Source(source))
    with resume(output, {"model": "new"}, overwrite=True):
        pass  # and here it was killed
    assert not sink.exists()


def test_an_output_of_no_job_is_refused_and_kept(source, tmp_path):
    sink = tmp_path / "out.jsonl"
    state = tmp_path / "out.jsonl.state.json"
    sink.write_text("precious")
    nested = b"[" * 200_000
    for text in (
        None,
        b"",
        b"[]",
        b"{",
        b"\xff",
        nested,
        b'{"format": 1}',
        b'{"format": 9, "configuration": {}}',
    ):
        if text is not None:
            state.write_bytes(text)
        with pytest.raises(ValueError, match="is there already"):
            run_job(source, sink)
        assert sink.read_text() == "precious"
        assert state.exists() == (text is not None)
    run_job(source, sink, overwrite=True)
    assert len(content(sink)) == len(LINES)
    sink.write_text("foreign\n")
    with pytest.raises(ValueError, match=r"out\.jsonl, line 1: this is no line that a job has written"):
        run_job(source, sink)


def test_a_state_that_is_no_file_is_refused(source, tmp_path):
    # Not the device without an end, which this is for: on a fault the test would take the machine with it.
    (tmp_path / "out.jsonl.state.json").symlink_to("/dev/null")
    with pytest.raises(ValueError, match=r"out\.jsonl\.state\.json is no file: move it away"):
        run_job(source, tmp_path / "out.jsonl")


def test_an_empty_file_is_no_loss(source, tmp_path):
    (tmp_path / "out.jsonl").touch()
    run_job(source, tmp_path / "out.jsonl")
    assert len(content(tmp_path / "out.jsonl")) == len(LINES)


def test_a_state_whose_output_is_gone_is_no_hindrance(source, tmp_path):
    run_job(source, tmp_path / "out.jsonl")
    (tmp_path / "out.jsonl").unlink()
    run_job(source, tmp_path / "out.jsonl", fingerprint={"model": "other"})
    assert len(content(tmp_path / "out.jsonl")) == len(LINES)


def test_the_state_is_there_before_the_first_line(source, tmp_path):
    output = Output(tmp_path / "out.jsonl", Source(source))
    with resume(output, {"model": "toy"}):
        assert json.loads(output.state.read_text())["configuration"] == {"model": "toy"}
        assert not output.path.exists()


def test_two_jobs_do_not_write_one_output(source, tmp_path):
    for overwrite in (False, True):
        with resume(Output(tmp_path / "out.jsonl", Source(source)), {"model": "toy"}, overwrite=overwrite):
            for other in (False, True):
                with pytest.raises(ValueError, match="is being written by another job"):
                    run_job(source, tmp_path / "out.jsonl", overwrite=other)
    run_job(source, tmp_path / "out.jsonl")


def test_a_folder_is_resumed_file_by_file(tmp_path):
    folder, sink = tmp_path / "in", tmp_path / "far" / "out"
    folder.mkdir()
    names = ["a.jsonl", "b.jsonl.gz"]
    for name in names:
        write_lines(folder / name, LINES)
    run_job(folder, sink)
    assert sorted(file.name for file in sink.iterdir()) == names
    whole = [sorted(content(sink / name)) for name in names]
    assert [len(lines) for lines in whole] == [len(LINES)] * 2
    # An id of the first file is used again in the second.
    assert {row[1] for row in results(sink / names[1]) if row[0] == "b"} == {
        "b.jsonl.gz, line 2: custom_id was used by an earlier line"
    }
    for name in names:
        data = (sink / name).read_bytes()
        (sink / name).write_bytes(data[: len(data) // 2])
        run_job(folder, sink, order=1)
        assert [sorted(content(sink / name)) for name in names] == whole
        (sink / name).unlink()
        run_job(folder, sink, order=2)
        assert [sorted(content(sink / name)) for name in names] == whole


def test_ids_of_any_kind_have_keys_of_their_own():
    def line(number):
        return Line("", number, "", b"12345678")

    ledger = Ledger()
    ids = ["a", "a", "a", "1/a", "0/a", "/line-8", None, "line-8", "\ud800", ""]
    keys = [ledger.enter(line(number), custom_id).key for number, custom_id in enumerate(ids, start=1)]
    assert len(set(keys)) == len(ids)
    assert all(len(key) == 32 for key in keys)


def test_what_is_met_is_forgotten(tmp_path):
    rows = [{"custom_id": str(i), "prompt": "x"} for i in range(100)]
    run_job(write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    source = Source(tmp_path / "in.jsonl")
    with resume(Output(tmp_path / "out.jsonl", source), {"model": "toy"}) as ledger:
        assert ledger.num_unmet == 100
        for count, line in enumerate(source, start=1):
            assert ledger.enter(line, json.loads(line.text)["custom_id"]).done
            assert ledger.num_unmet == 100 - count
