"""One program on several processes, over one host or many: the start, and the end.

Every process runs the same program over the same inputs; JAX makes one machine of their devices, and a mesh
goes over all of them. The first process alone writes. Where one fails, all end, with its message. Where one
is killed, the others notice because an exchange breaks off, or because its heartbeat stops.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import distributed  # the store that processes share has no public name

__all__ = ["joined", "parse_processes"]

HEARTBEAT = 20
"""Seconds without a sign of life after which a process counts as dead."""
_CAUSE = "specjax/cause"


def parse_processes(text: str) -> dict[str, object]:
    """``1/4@host:1234``: process 1 of 4, of which process 0 listens there; ``auto`` asks the cluster.

    Returns:
      The arguments of ``jax.distributed.initialize``.

    Raises:
      ValueError: it can't be read.
    """
    if text == "auto":
        return {}
    found = re.fullmatch(r"(\d+)/(\d+)@([\w.\-]+:\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ValueError(
            "processes are written like 0/4@host:1234 (this is process 0 of 4, and process 0 listens there), "
            f"or 'auto' on TPU pods, Slurm and Open MPI, not {text!r}"
        )
    return dict(process_id=int(found[1]), num_processes=int(found[2]), coordinator_address=found[3])


@contextlib.contextmanager
def joined(text: str) -> Iterator[bool]:
    """Runs what is inside as one of several processes; with an empty ``text``, alone.

    Enter it before anything else has used JAX. An error inside ends this process at once, with the exit code
    that the error has (``exit_code``) or 1, and the other processes with it; each says why on standard error.

    Args:
      text: as :func:`parse_processes` reads it.

    Yields:
      Whether this is the first process, the one that writes.

    Raises:
      ValueError: ``text`` can't be read, or the others can't be reached.
    """
    if not text:
        yield True
        return
    arguments = parse_processes(text)
    stderr = sys.stderr  # as it is now: what is inside may turn it elsewhere
    # On a CPU there is no exchange between processes unless one is named.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**arguments, heartbeat_timeout_seconds=HEARTBEAT)  # type: ignore[arg-type]
    except Exception as error:
        raise ValueError(f"the processes cannot find each other: {_first_line(error)}") from error

    def complain(cause: str) -> None:
        me = f"process {jax.process_index()} of {jax.process_count()}"
        print(f"{me}: {cause}", file=stderr, flush=True)

    try:
        with _own_stdout(), _watching(complain):
            yield jax.process_index() == 0
        jax.distributed.shutdown()
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        complain(_tell(error))
        if jax.process_index() == 0:
            time.sleep(3)  # the store is in this process: let the others read
        # The usual way out would wait for the others, who wait for this one.
        sys.stdout.flush()
        os._exit(getattr(error, "exit_code", 1))


@contextlib.contextmanager
def _watching(complain: Callable[[str], None]) -> Iterator[None]:
    """Ends this process as soon as another one has told what went wrong, whatever this one waits for."""
    client: Any = distributed.global_state.client
    done = threading.Event()

    def watch() -> None:
        while not done.wait(1):
            with contextlib.suppress(Exception):  # no cause yet, or the store is gone
                cause = client.key_value_try_get(_CAUSE)
                if not done.is_set():
                    complain(cause)
                    os._exit(1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _tell(error: BaseException) -> str:
    """What ended this process; its own errors the others are told of."""
    client: Any = distributed.global_state.client
    message = _first_line(error)
    if isinstance(error, jax.errors.JaxRuntimeError):  # an exchange with another process, most likely
        with contextlib.suppress(Exception):
            return client.blocking_key_value_get(_CAUSE, 2000)
        return f"another process is gone, or the exchange with it broke off ({message})"
    cause = f"process {jax.process_index()} failed: {message}"
    with contextlib.suppress(Exception):  # two may fail at once: the first is the cause
        client.key_value_set(_CAUSE, cause)
    return cause


@contextlib.contextmanager
def _own_stdout() -> Iterator[None]:
    """Keeps standard output for Python: what gloo tells of its connections goes to standard error."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(own), "w", encoding="utf-8") as stdout, contextlib.redirect_stdout(stdout):
            yield
    finally:
        os.dup2(own, 1)
        os.close(own)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
