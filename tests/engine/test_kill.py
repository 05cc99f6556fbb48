"""A job killed at random moments, again and again, ends with what it would have written undisturbed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import toy_job

from specjax.engine.sink import whole_lines


def lines_of(i):
    """Some lines of a file: good ones, a torn one, one refused, ids used twice, a bare one."""
    yield {"custom_id": f"c{i}", "prompt": f"prompt {i}"}
    yield {"prompt": f"bare {i % 3}", "n": 1 + i % 3}
    if i % 5 == 0:
        yield {"custom_id": f"c{i}", "prompt": f"prompt {i}"}
        yield {"custom_id": f"c{i + 1}", "prompt": f"the first of two {i}"}
    if i % 7 == 0:
        yield {"custom_id": f"bad{i}", "prompt": "x", "stream": True}
        yield None


def write_source(path, count, start=0):
    rows = [row for i in range(start, start + count) for row in lines_of(i)]
    path.write_text("".join("{torn\n" if row is None else json.dumps(row) + "\n" for row in rows))
    return len(rows)


def answered(sink):
    paths = sorted(sink.glob("*.jsonl*")) if sink.is_dir() else [sink]
    return sorted(line for path in paths for line in whole_lines(path))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kills"), [("out.jsonl", 100), ("out.jsonl.gz", 60), ("out", 40)])
def test_killed_at_random_moments(tmp_path, kind, kills):
    source = tmp_path / "in.jsonl"
    if kind == "out":
        source = tmp_path / "in"
        source.mkdir()
        count = sum(write_source(source / f"{i}.jsonl", 100, 100 * i) for i in range(3))
    else:
        count = write_source(source, 5 * kills)
    toy_job.run_job(source, tmp_path / "whole" / kind if kind == "out" else tmp_path / f"whole-{kind}")
    whole = answered(tmp_path / "whole" / kind if kind == "out" else tmp_path / f"whole-{kind}")
    assert len(whole) == len(set(whole)) == count

    command = [sys.executable, Path(toy_job.__file__), source, tmp_path / kind, str(kills), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    killed, torn = map(int, done.stdout.split())
    assert killed == kills
    assert answered(tmp_path / kind) == whole
    if kind == "out.jsonl":
        assert torn > 0  # so that the moments were worth something
