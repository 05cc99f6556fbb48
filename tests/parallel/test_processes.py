"""Real processes on this machine, over gloo: the ids of one process, and an end for all if one is gone."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from specjax.parallel.processes import joined, parse_processes


def start(command, index=0, count=1, port=0, devices=1):
    """Starts a job as one of ``count`` processes."""
    if count > 1:
        command = [*command, "--processes", f"{index}/{count}@localhost:{port}"]
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-m", "specjax.scripts", *command],
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def stop(processes):
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture
def command(write_gguf):
    """Sampled decoding of a tiny model that drafts for itself."""
    path = str(write_gguf())
    options = "--temperature 1 --seed 3 --num-speculative-tokens 2 --max-tokens 12"
    return ["generate", "he he", "--model", path, "--draft", path, *options.split()]


@pytest.mark.slow
def test_two_processes_give_the_text_of_one(command):
    port = free_port()
    # Two rows' worth of devices for one row, and the model over two devices of other processes.
    mesh = ["--mesh", "data=2,model=2"]
    alone = start(command)
    several = [start([*command, *mesh], index, 2, port, devices=2) for index in range(2)]
    try:
        expected, _ = alone.communicate(timeout=300)
        outputs = [process.communicate(timeout=300) for process in several]
    finally:
        stop([alone, *several])
    assert [process.returncode for process in (alone, *several)] == [0, 0, 0], outputs
    assert len(expected.strip()) > 0
    assert [text for text, _ in outputs] == [expected, ""]  # the first alone prints


def answers(path):
    """The lines of a batch job's output by their custom_id, without what the choice of K changes."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines) == 10  # each once, and the refused one
    return {line["custom_id"]: line["response"]["body"]["choices"] for line in lines if line["response"]}


@pytest.mark.slow
def test_four_processes_answer_a_file_as_one_does(write_gguf, tmp_path):
    path, port = str(write_gguf()), free_port()
    lines = [
        {
            "custom_id": f"{i}",
            "prompt": "he" * (1 + i % 5),
            "max_tokens": 4 + i,
            "temperature": i % 2,
            "seed": i,
        }
        | ({"logprobs": 1} if i == 2 else {"stop": "h"} if i == 3 else {})
        for i in range(9)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "no JSON\n")
    options = ["--model", path, "--draft", path, "--num-speculative-tokens", "2", "--slots", "4"]

    def command(output):
        files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / output)]
        return ["batch", *files, *options, "--capacity", "64"]

    alone = start(command("alone.jsonl"))
    mesh = ["--mesh", "data=2,model=2"]
    several = [start([*command("several.jsonl"), *mesh], index, 4, port) for index in range(4)]
    try:
        ends = [process.communicate(timeout=300) for process in (alone, *several)]
    finally:
        stop([alone, *several])
    # The first has read the line that is none.
    assert [process.returncode for process in (alone, *several)] == [3, 3, 0, 0, 0], ends
    assert [out for out, _ in ends[2:]] == [""] * 3
    assert sorted(file.name for file in tmp_path.glob("several*")) == sorted(
        file.name.replace("alone", "several") for file in tmp_path.glob("alone*")
    )
    expected = answers(tmp_path / "alone.jsonl")
    assert len(expected) == 9
    got = answers(tmp_path / "several.jsonl")
    for choices in (*expected.values(), *got.values()):
        for choice in choices:
            if choice.get("logprobs"):
                del choice["logprobs"]  # equal to rounding
    assert got == expected


@pytest.mark.slow
def test_if_one_is_killed_the_other_ends_and_says_so(write_gguf):
    path, port = str(write_gguf(metadata={"llama.context_length": 1 << 20})), free_port()
    endless = [
        "generate",
        "he",
        "--model",
        path,
        "--draft",
        "none",
        "--max-tokens",
        "200000",
        "--stream",
        "--mesh",
        "model=2",
    ]
    processes = [start(endless, index, 2, port) for index in range(2)]
    try:
        assert processes[0].stdout.read(1)  # it decodes
        processes[1].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        _, complaint = processes[0].communicate(timeout=60)
        assert time.monotonic() - begin < 60
    finally:
        stop(processes)
    assert processes[0].returncode not in (0, None)
    assert re.search(r"process 0 of 2: another process is gone|unhealthy|heartbeat", complaint), complaint


FAILS = """
import sys, time
from specjax.parallel.processes import joined
with joined(sys.argv[1]) as first:
    if sys.argv[2] == "fails":
        raise ValueError("the disk is full")
    time.sleep(300)  # it waits for the other
"""


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_if_one_fails_the_other_ends_with_its_message(failing):
    port = free_port()
    roles = ["fails" if index == failing else "waits" for index in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", FAILS, f"{index}/2@localhost:{port}", role],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, role in enumerate(roles)
    ]
    try:
        complaints = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        stop(processes)
    # 1; or the runtime's own abort, where the other process, which the store is in, was faster to leave.
    assert all(process.returncode for process in processes)
    for index, complaint in enumerate(complaints):
        assert f"process {index} of 2: process {failing} failed: the disk is full" in complaint


@pytest.mark.parametrize("text", ["2", "2/2@host:1", "0/2", "0/2@host", "-1/2@host:1", "a/b@c:d"])
def test_processes_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="0/4@host:1234"):
        parse_processes(text)


def test_they_are_read():
    assert parse_processes("auto") == {}
    assert parse_processes("1/4@node-0.cluster:1234") == dict(
        process_id=1, num_processes=4, coordinator_address="node-0.cluster:1234"
    )


def test_alone_there_is_nothing_to_join():
    with joined("") as first:
        assert first
