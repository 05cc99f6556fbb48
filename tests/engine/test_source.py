"""The input's lines: from files, pipes and folders, and what a bad one costs."""

import gzip
import io
import os
import signal
import sys
from pathlib import Path

import pytest

from specjax.engine.requests import RequestError, parse_request
from specjax.engine.source import Source


def texts(path, **options):
    return [line.text for line in Source(path, **options)]


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_lines_keep_their_numbers(tmp_path, name):
    path = tmp_path / name
    data = b"\xef\xbb\xbfone\r\n\n  \ntwo\n\xe2\x80\xa8three"  # a line separator of Unicode ends no line
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    lines = list(Source(path))
    assert [(line.number, line.text) for line in lines] == [(1, "one"), (4, "two"), (5, "\u2028three")]
    assert [line.place for line in lines] == ["line 1", "line 4", "line 5"]
    assert [line.name for line in lines] == ["line-1", "line-4", "line-5"]


def test_a_line_is_known_by_its_content(tmp_path):
    for name, data in (("a", b"\xef\xbb\xbfx\r\ny"), ("b", b"x\ny\n"), ("c", b"x\nz\n")):
        (tmp_path / name).write_bytes(data)
    a, b, c = ([line.digest for line in Source(tmp_path / name)] for name in "abc")
    assert a == b
    assert b[0] == c[0]
    assert b[1] != c[1]


def test_bytes_that_are_no_utf8_cost_their_line_only(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n{"prompt": "h\xc3\xa9"}\n')
    bad, good = Source(path)
    with pytest.raises(RequestError, match="not UTF-8"):
        parse_request(bad.text, bad.name, "m")
    assert parse_request(good.text, good.name, "m").prompt == "hé"


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
@pytest.mark.parametrize("size", [9, 10, 11, 12, 13, 3_000_000])
def test_a_line_may_be_so_long(tmp_path, size, end):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * size + end + (b"y" * 10 if end else b""))
    first, *rest = Source(path, max_line=10)
    assert (first.problem is None) == (size <= 10)
    assert first.text == ("x" * size if size <= 10 else "")
    assert [(line.number, line.text, line.problem) for line in rest] == ([(2, "y" * 10, None)] if end else [])


def test_of_a_line_too_long_every_byte_counts(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 40 + b"\r" * 40 + b"a\n" + b"x" * 40 + b"\r" * 40 + b"b\nshort\n")
    one, two, short = Source(path, max_line=20)
    assert one.problem == "longer than 20 bytes"
    assert one.digest != two.digest
    assert (short.number, short.text) == (3, "short")


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo")))
    source = Source(Path("-"))
    assert source.total_bytes is None
    assert [line.text for line in source] == ["one", "two"]


def test_whoever_waits_for_a_line_can_be_interrupted(monkeypatch):
    reader, writer = os.pipe()
    with open(reader) as stdin, open(writer, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdin", stdin)
        source = Source(Path("-"))
        lines = iter(source)
        pipe.write("one\n")
        assert next(lines).text == "one"
        before = signal.signal(signal.SIGALRM, lambda *_: source.interrupt())
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            with pytest.raises(InterruptedError):
                next(lines)
        finally:
            signal.signal(signal.SIGALRM, before)
        pipe.write("two\n")
        with pytest.raises(InterruptedError):
            next(iter(source))


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "b.jsonl").write_text("three\n")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    (tmp_path / "c.txt").write_text("no\n")
    (tmp_path / "b.jsonl.state.json").write_text("no\n")
    source = Source(tmp_path)
    lines = list(source)
    assert [(line.shard, line.number, line.text) for line in lines] == [
        ("a.jsonl.gz", 1, "one"),
        ("a.jsonl.gz", 2, "two"),
        ("b.jsonl", 1, "three"),
    ]
    assert (lines[2].place, lines[2].name) == ("b.jsonl, line 1", "b.jsonl-line-1")
    assert source.read_bytes == source.total_bytes


def test_a_folder_of_any_names(tmp_path):
    folder = tmp_path / "in"
    (folder / "older.jsonl").mkdir(parents=True)
    (folder / os.fsdecode(b"caf\xe9.jsonl")).write_text('{"prompt": "x"}\n')
    (line,) = Source(folder)
    assert parse_request(line.text, line.name, "m").custom_id == "caf\\xe9.jsonl-line-1"


def test_how_far_it_has_read_is_known(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("x" * 99 + "\n" + "y" * 99 + "\n")
    source = Source(path)
    assert (source.total_bytes, source.read_bytes) == (200, 0)
    lines = iter(source)
    next(lines)
    assert source.read_bytes == 100
    next(lines)
    assert source.read_bytes == 200
    assert next(lines, None) is None


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"has no \*.jsonl"):
        Source(tmp_path)
    with pytest.raises(FileNotFoundError):
        Source(tmp_path / "none.jsonl")


@pytest.mark.parametrize("damage", ["torn", "flipped", "plain"])
def test_a_damaged_gzip_is_said_with_its_place(tmp_path, damage):
    path = tmp_path / "in.jsonl.gz"
    data = bytearray(gzip.compress(b"one\n") + gzip.compress(b"two\n" * 9))
    if damage == "torn":
        del data[-3:]
    elif damage == "flipped":
        data[-6] ^= 1
    else:
        data = bytearray(b"one\ntwo\n")
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"in.jsonl.gz: damaged gzip after line \d"):
        list(Source(path))
