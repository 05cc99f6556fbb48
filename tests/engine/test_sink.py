"""The output's lines are whole or not there: on torn files, full disks and pipes."""

import errno
import gzip
import io
import os
import resource
import sys
from pathlib import Path

import pytest

from specjax.engine import sink as sink_module
from specjax.engine.sink import Output, Sink, repair, replace_file, whole_lines
from specjax.engine.source import Source

NAMES = ["out.jsonl", "out.jsonl.gz"]


def content(path):
    return [line.decode() for line in whole_lines(path)]


def pack(path, text):
    return gzip.compress(text, mtime=0) if path.suffix == ".gz" else text


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_in_the_file_when_write_returns(tmp_path, name):
    path = tmp_path / name
    with Sink(path) as sink:
        sink.write("one")
        assert content(path) == ["one\n"]
        sink.write("two", "three")
        assert content(path) == ["one\n", "two\n", "three\n"]
        sink.write()
    with Sink(path) as sink:  # another goes on where it was
        sink.write("four")
    assert content(path) == ["one\n", "two\n", "three\n", "four\n"]


def test_the_same_lines_are_the_same_bytes(tmp_path, monkeypatch):
    for name, now in (("a.gz", 1e9), ("b.gz", 2e9)):
        monkeypatch.setattr(gzip.time, "time", lambda now=now: now)
        with Sink(tmp_path / name) as sink:
            sink.write("one")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_a_line_end_inside_of_a_line_is_refused(tmp_path):
    with Sink(tmp_path / "out.jsonl") as sink, pytest.raises(ValueError, match="line end"):
        sink.write("a\nb")


def test_a_closed_sink_writes_nowhere(tmp_path, capsysbinary):
    sink = Sink(tmp_path / "out.jsonl")
    sink.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        sink.write("a")
    assert capsysbinary.readouterr().out == b""


@pytest.mark.parametrize("name", NAMES)
def test_a_torn_tail_is_cut_at_every_byte(tmp_path, name):
    path = tmp_path / name
    first, second = pack(path, b"one\ntwo\n"), pack(path, b"and the third line\n")
    for size in range(len(first), len(first) + len(second)):
        path.write_bytes((first + second)[:size])
        assert repair(path) == size - len(first)
        assert path.read_bytes() == first
    for size in range(len(first)):
        path.write_bytes(first[:size])
        repair(path)
        whole = first[:4] if name == "out.jsonl" and size >= 4 else b""
        assert path.read_bytes() == whole
    path.write_bytes(first + second)
    assert repair(path) == 0
    assert content(path) == ["one\n", "two\n", "and the third line\n"]


def test_a_tail_of_any_length_is_found(tmp_path):
    path = tmp_path / "out.jsonl"
    for tail in (1, 65535, 65536, 65537, 200_000):
        path.write_bytes(b"one\n" + b"x" * tail)
        assert repair(path) == tail
        assert path.read_bytes() == b"one\n"


def test_members_of_any_size_are_walked(tmp_path):
    path = tmp_path / "out.jsonl.gz"
    noise = os.urandom(300_000).hex().encode() + b"\n"  # more than a piece, packed and unpacked
    members = [gzip.compress(b"x" * 10**6 + b"\n"), gzip.compress(noise), gzip.compress(b"y\n")]
    path.write_bytes(b"".join(members) + members[1][:200_000])
    assert repair(path) == 200_000
    assert path.read_bytes() == b"".join(members)
    # A member that ends inside of a line stands if another finishes it.
    path.write_bytes(gzip.compress(b"a\nb") + gzip.compress(b"c\n") + gzip.compress(b"d"))
    repair(path)
    assert content(path) == ["a\n", "bc\n"]


def test_damage_before_the_end_is_no_torn_tail(tmp_path):
    path = tmp_path / "out.jsonl.gz"
    data = bytearray(gzip.compress(b"one\n") * 2)
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged before its end"):
        repair(path)
    assert path.read_bytes() == data


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_what_a_full_disk_took_of_a_line_is_cut_off(tmp_path, monkeypatch, name, code):
    path, write = tmp_path / name, os.write
    with Sink(path) as sink:
        sink.write("one")
        calls = []

        def full(fd, data):
            calls.append(len(data))
            if len(calls) > 1:
                raise OSError(code, os.strerror(code))
            return write(fd, data[: len(data) // 2])

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(OSError, match=os.strerror(code)) as caught:
                sink.write("a longer line, of which a part gets through")
        assert caught.value.filename == str(path)
        assert len(calls) == 2
        assert content(path) == ["one\n"]
        sink.write("two")  # there is room again
    assert content(path) == ["one\n", "two\n"]


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_on_the_size_of_files(tmp_path, name):
    path = tmp_path / name
    line = os.urandom(500).hex()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Sink(path) as sink:
        sink.write(line)
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                sink.write(line)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.stat().st_size == size
        sink.write("two")
    assert content(path) == [f"{line}\n", "two\n"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_device_that_is_full():
    with Sink(Path("/dev/full")) as sink, pytest.raises(OSError, match="No space left"):
        sink.write("one")


def test_it_is_forced_to_the_disk_every_so_often(tmp_path, monkeypatch):
    synced, now = [], [0.0]
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(sink_module.time, "monotonic", lambda: now[0])
    with Sink(tmp_path / "out.jsonl") as sink:
        for _ in range(120):  # half a minute
            now[0] += 0.25
            sink.write("x")
        assert len(synced) == 5
    assert len(synced) == 6


def test_standard_output(monkeypatch, tmp_path):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw))
    (tmp_path / "in.jsonl").write_text("x\n")
    with Output(Path("-"), Source(tmp_path / "in.jsonl")) as output:
        output.write("", "one", "two")
        assert raw.getvalue() == b"one\ntwo\n"
        assert (output.files, output.state) == ((), None)


def test_a_pipe_has_no_state(tmp_path):
    (tmp_path / "in.jsonl").write_text("x\n")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with Output(tmp_path / "pipe", Source(tmp_path / "in.jsonl")) as output:
        assert output.state is None
        output.write("", "one")
    assert os.read(reader, 99) == b"one\n"
    os.close(reader)


def test_a_folder_answers_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sink_module, "MOST_OPEN", 2)
    folder, other = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    names = ["a.jsonl", "b.jsonl.gz", "c.jsonl"]
    for name in names:
        (folder / name).write_bytes(pack(folder / name, b"x\n"))
    with Output(other, Source(folder)) as output:
        assert output.files == tuple(other / name for name in names)
        assert output.state == tmp_path / "out.state.json"
        other.mkdir()
        before = len(os.listdir("/dev/fd"))
        for i in range(9):
            output.write(names[i % 3], f"{i}")
            assert len(os.listdir("/dev/fd")) <= before + 2
    for i, name in enumerate(names):
        assert content(other / name) == [f"{i}\n", f"{i + 3}\n", f"{i + 6}\n"]


def test_the_output_must_be_another_than_the_input(tmp_path, monkeypatch):
    path, link = tmp_path / "in.jsonl", tmp_path / "link.jsonl"
    path.write_text("x\n")
    link.symlink_to(path)
    for output in (path, link):
        with pytest.raises(ValueError, match="is the input too"):
            Output(output, Source(path))
    with pytest.raises(ValueError, match="is the input too"):
        Output(tmp_path, Source(tmp_path))
    with path.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(ValueError, match="is the input too"):
            Output(path, Source(Path("-")))
    with pytest.raises(ValueError, match="name a file"):
        Output(tmp_path, Source(path))
    with pytest.raises(ValueError, match="name a folder"):
        Output(path, Source(tmp_path))


def test_a_file_is_replaced_whole_or_not(tmp_path, monkeypatch):
    path = tmp_path / "state"
    replace_file(path, "one")

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space") as caught:
            replace_file(path, "two")
    assert caught.value.filename == str(path)
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]
    with path.open() as reader:
        replace_file(path, "two")
        assert reader.read() == "one"  # who has the old one open keeps it
    assert path.read_text() == "two"
