"""Several engines on one machine: the answers of one, and nothing lost with an engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")
from specjax.scripts._ray import share_of


def start(*argv):
    return subprocess.Popen(
        [sys.executable, "-m", "specjax.scripts", "batch", *map(str, argv)],
        env=os.environ | {"XLA_FLAGS": ""},
        stderr=subprocess.PIPE,
        text=True,
    )


def answers(folder: Path) -> dict[str, dict]:
    """By file and custom_id: what was answered, without when, and without what the choice of K changes."""
    rows = {file.name: map(json.loads, file.read_text().splitlines()) for file in folder.iterdir()}
    return {
        name: {row["custom_id"]: row["error"] or row["response"]["body"]["choices"] for row in lines}
        for name, lines in rows.items()
    }


def num_lines(folder: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in folder.iterdir())


def engines() -> list[int]:
    """The processes of the engines that run."""
    found = subprocess.run(["pgrep", "-f", "ray::.*Answerer"], capture_output=True, text=True, check=False)
    return [int(number) for number in found.stdout.split()]


def test_each_engine_gets_its_share():
    big, small = {"CPU": 16.0, "memory": 8e9}, {"CPU": 8.0, "memory": 3e9}
    # Three engines of 8 processors: two on the big machine, one on the small.
    assert share_of(3, {"CPU": 24.0}, [big, small]) == ({"num_cpus": 8}, int(3e9))
    assert share_of(2, {"CPU": 16.0}, [big]) == ({"num_cpus": 8}, int(4e9))
    assert share_of(2, {"CPU": 16.0, "GPU": 5.0}, [big]) == ({"num_gpus": 2}, None)
    assert share_of(4, {"CPU": 16.0, "TPU": 4.0}, [big]) == ({"resources": {"TPU": 1}}, None)


@pytest.mark.parametrize("kind", ["CPU", "GPU", "TPU"])
def test_more_engines_than_devices_are_refused(kind):
    with pytest.raises(ValueError, match=f"--ray 5: the cluster has 4 {kind}"):
        share_of(5, {"CPU": 4.0, kind: 4.0}, [])


@pytest.mark.slow
def test_two_engines_answer_as_one_does_though_one_is_killed(write_gguf, tmp_path):
    model, source = write_gguf(), tmp_path / "in"
    source.mkdir()
    for shard in range(4):
        with (source / f"part-{shard}.jsonl").open("w") as file:
            for i in range(60):
                body = dict(prompt="he" * (1 + i % 7), max_tokens=40, temperature=0.8 * (i % 2), seed=i)
                print(json.dumps({"custom_id": f"{shard}-{i}"} | body), file=file)
            print("no JSON", file=file)
    options = ["-i", source, "--model", model, "--slots", 2, "--capacity", 128]
    alone = start(*options, "-o", tmp_path / "alone")
    assert alone.wait(timeout=300) == 3, alone.stderr.read()
    alone.stderr.close()

    shared = start(*options, "-o", tmp_path / "shared", "--ray", 2)
    try:
        deadline = time.monotonic() + 200
        while not any(file.stat().st_size for file in (tmp_path / "shared").glob("part-*")):
            assert shared.poll() is None, shared.stderr.read()
            assert time.monotonic() < deadline, "no engine has answered anything"
            time.sleep(0.05)
        victims = engines()
        assert len(victims) == 2
        os.kill(victims[0], signal.SIGKILL)
        _, said = shared.communicate(timeout=300)
    finally:
        shared.kill()
        shared.wait()
        shared.stderr.close()
    assert shared.returncode == 3, said
    assert "4 of 4 files" in said
    expected = answers(tmp_path / "alone")
    assert [len(rows) for rows in expected.values()] == [61] * 4
    assert answers(tmp_path / "shared") == expected
    # Each once: what the lost engine had written wasn't written again.
    assert num_lines(tmp_path / "shared") == 4 * 61
    again = start(*options, "-o", tmp_path / "shared", "--ray", 2)
    _, said = again.communicate(timeout=300)
    assert again.returncode == 3, said
    assert "0 answered, 4 with an error, 244 done before" in said
    assert num_lines(tmp_path / "shared") == 4 * 61
