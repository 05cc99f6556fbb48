"""A batch job whose decoder is a hash: the file side of the real one, in no time and without JAX.

    python toy_job.py SOURCE SINK KILLS SEED

runs it in a child process, kills that at a random moment, lets another go on, and so on; the last one is let
be. Prints how many were killed, and how many of these left half a line behind.
"""

import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path

from specjax.engine.ledger import admit, resume
from specjax.engine.requests import RequestError
from specjax.engine.responses import Choice, error_line, response_line
from specjax.engine.sink import Output
from specjax.engine.source import Source


def answer(entry, request):
    """The line of a request: a function of it alone."""
    text = hashlib.blake2b(str(request.prompt).encode()).hexdigest() * (1 + len(request.prompt) % 5)
    return response_line(
        entry.key,
        request,
        [Choice(text, "length", range(len(text)))] * request.n,
        usage={"prompt_tokens": len(request.prompt), "completion_tokens": len(text)},
        speculation={"num_spec_steps": 1},
        token_bytes=bytes,
    )


def run_job(source, sink, *, fingerprint=None, overwrite=False, pause=0.0, slots=4, order=0):
    """Answers the lines of a file, late and in another order; refuses at once. Returns the ledger."""
    rng = random.Random(order)
    waiting = []
    source = Source(Path(source))
    fingerprint = {"model": "toy"} if fingerprint is None else fingerprint
    with (
        Output(Path(sink), source) as output,
        resume(output, fingerprint, overwrite=overwrite) as ledger,
    ):

        def leave(most):
            while len(waiting) > most:
                if pause:
                    time.sleep(rng.random() * 2 * pause)
                count = rng.randint(1, len(waiting) - most)
                done = [waiting.pop(rng.randrange(len(waiting))) for _ in range(count)]
                for shard in dict.fromkeys(shard for shard, _ in done):
                    output.write(shard, *(text for its, text in done if its == shard))

        for line in source:
            entry, request = admit(line, ledger, "toy")
            if entry.done:
                continue
            if isinstance(request, RequestError):
                output.write(line.shard, error_line(entry.key, request, line.place))
            else:
                waiting.append((line.shard, answer(entry, request)))
            leave(slots - 1)
        leave(0)
    return ledger


def in_pieces(fd, data, write=os.write):
    """A write that takes a part of what it is given, after a while: half lines are there to be seen."""
    done = write(fd, data[:500])
    time.sleep(0.001)
    return done


def kill_often(source, sink, kills, seed):
    rng = random.Random(seed)
    killed = torn = 0
    for life in range(kills + 1):
        pid = os.fork()
        if not pid:
            try:
                if life == kills:
                    run_job(source, sink, order=life)
                else:
                    os.write = in_pieces
                    run_job(source, sink, pause=0.002, order=life)
            except BaseException as error:
                print(error, file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        if life < kills:
            time.sleep(rng.random() * 0.05)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if status == 0 and life < kills:
            sys.exit(f"the job was done after {life} lives: give it more lines")
        if status not in (0, signal.SIGKILL):
            sys.exit(f"life {life} ended with status {status}")
        killed += status == signal.SIGKILL
        for path in [sink, *sink.glob("*.jsonl")] if sink.exists() else []:
            if path.is_file() and path.suffix == ".jsonl":
                data = path.read_bytes()
                torn += bool(data) and not data.endswith(b"\n")
    print(killed, torn)


if __name__ == "__main__":
    kill_often(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
