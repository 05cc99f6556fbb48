"""Which lines of a batch job are done: known from the output alone, so that a job can go on after any end.

Each line of the input has a key, which its line of the output carries. The first half is a hash of its
custom_id and of how many lines before it had the same one, the second a hash of its content. So a line is
known again wherever it stands; one whose custom_id was answered for another content is noticed; and of lines
that share a custom_id each has its own key: the first is answered and the others are refused, in whatever
order their lines reach the output (a refusal is written at once, an answer when it is done) and whenever the
job was killed in between. Lines without a custom_id go by where they stand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax.engine.requests import Request, RequestError, parse_request
from specjax.engine.sink import Output, repair, replace_file, whole_lines
from specjax.engine.source import Line

__all__ = ["Entry", "Ledger", "admit", "resume"]

_KEY = re.compile(rb'\{"id": "batch-([0-9a-f]{32})"')
_REFUSED = b'"response": null'  # inside a JSON string the quotes would be escaped


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the ledger knows of a line."""

    key: str  # names it in the output
    done: bool  # whether the output has its line, be it an answer or an error
    repeated: bool  # whether an earlier line had its custom_id


class Ledger:
    """Follows the input once, from its beginning, against what the output had when it was opened.

    It keeps 16 bytes for each line of that output until the line is met, and 8 for each line that it has met.

    Attributes:
      num_refused: how many lines of that output are errors.
    """

    def __init__(self) -> None:
        self.num_refused = 0
        self._done: dict[bytes, bytes] = {}  # the halves of the keys in the output, of lines not met so far
        self._met: set[bytes] = set()  # the first halves of the keys of lines that were
        self._repeats: dict[bytes, int] = {}

    @property
    def num_unmet(self) -> int:
        """How many lines of the output have no line in the input so far."""
        return len(self._done)

    @classmethod
    def of(cls, output: Output) -> Ledger:
        """What an output has, after repairing its ends.

        Raises:
          OSError: a file can't be read or written.
          ValueError: one is damaged, or no job has written it.
        """
        ledger = cls()
        for file in _written(output):
            ledger._read(file)
        return ledger

    def enter(self, line: Line, custom_id: str | None) -> Entry:
        """Looks a line up; the lines of the input must be entered in order, each once.

        Args:
          line: the line.
          custom_id: the one it has, even if it is to be refused; None if it has none that can be read.

        Raises:
          ValueError: the output has a line for this custom_id, from an input with another line for it.
        """
        times = 0
        if custom_id is None:
            identity = _hash(f"/{line.name}")
        else:
            identity = first = _hash(f"0/{custom_id}")
            if first in self._met:
                times = self._repeats[first] = self._repeats.get(first, 0) + 1
                identity = _hash(f"{times}/{custom_id}")
            else:
                self._met.add(first)
        known = self._done.get(identity)
        if known is not None and known != line.digest and custom_id is not None:
            raise ValueError(
                f"{line.place}: custom_id {custom_id!r} is in the output already, for a line of other "
                "content: the input has changed; name another output, or give --overwrite"
            )
        done = known == line.digest
        if done:
            del self._done[identity]
        return Entry((identity + line.digest).hex(), done, times > 0)

    def _read(self, path: Path) -> None:
        """Takes in the lines of an output file, after repairing its end."""
        repair(path)
        for number, line in enumerate(whole_lines(path), start=1):
            found = _KEY.match(line)
            if found is None:
                raise ValueError(f"{path}, line {number}: this is no line that a job has written")
            key = bytes.fromhex(found[1].decode())
            self._done[key[:8]] = key[8:]
            self.num_refused += _REFUSED in line


def admit(line: Line, ledger: Ledger, model: str | None) -> tuple[Entry, Request | RequestError]:
    """Reads a line and looks it up.

    Args:
      line: the next line of the input.
      ledger: what is done.
      model: the model of a bare body that names none.

    Returns:
      What the ledger knows, and what the line asks for or why it is refused.

    Raises:
      ValueError: as :meth:`Ledger.enter`.
    """
    request: Request | RequestError
    try:
        if line.problem is not None:
            raise RequestError(line.problem)
        request = parse_request(line.text, line.name, model)
    except RequestError as error:
        request = error
    entry = ledger.enter(line, request.custom_id)
    if entry.repeated:
        request = RequestError("custom_id was used by an earlier line", request.custom_id)
    return entry, request


@contextlib.contextmanager
def resume(output: Output, fingerprint: Mapping[str, Any], *, overwrite: bool = False) -> Iterator[Ledger]:
    """Opens the ledger of an output, for as long as it is written to; no other job can have it then.

    A state file beside the output says with which configuration it was begun. It is there before the first
    line, and outlives the job.

    Args:
      output: where the lines go; not written to so far.
      fingerprint: all that an answer depends on, as JSON (the model and a hash of its content, the rule, the
        dtype, defaults, the version).
      overwrite: forget what was written.

    Raises:
      OSError: a file can't be read or written.
      ValueError: the output was begun with another configuration or by no job, is damaged, or another job
        is writing it.
    """
    ledger = Ledger()
    if output.state is None:
        yield ledger
        return
    wanted = json.loads(json.dumps({"format": 1, "configuration": dict(fingerprint)}, sort_keys=True))
    if _written(output) and not overwrite and not output.state.exists():
        raise ValueError(_stranger(output))
    if output.is_folder:
        output.path.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_lock(output.state, output))
        found = output.state.read_text(encoding="utf-8", errors="replace")
        if _written(output) and not overwrite:
            _compare(output, found, wanted)
            ledger = Ledger.of(output)
        else:
            # The old lines go before their state does: they must never be taken for lines of the new one.
            for file in output.files:
                file.unlink(missing_ok=True)
            replace_file(output.state, json.dumps(wanted, indent=1) + "\n")
            stack.enter_context(_lock(output.state, output))
        yield ledger


def _written(output: Output) -> list[Path]:
    return [file for file in output.files if file.exists() and file.stat().st_size]


def _stranger(output: Output) -> str:
    return f"{output.path} is there already, and no job's that could go on: move it away, or give --overwrite"


def _compare(output: Output, found: str, wanted: dict[str, Any]) -> None:
    """Raises a ValueError that names what differs."""
    try:
        state = json.loads(found)
        old, new = state["configuration"], wanted["configuration"]
        if state["format"] != wanted["format"]:
            raise ValueError("of another version")
        names = sorted(old.keys() | new.keys())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(_stranger(output)) from None
    missing = object()
    changes = [
        f"{name} was {json.dumps(old.get(name))} and is {json.dumps(new.get(name))}"
        for name in names
        if old.get(name, missing) != new.get(name, missing)
    ]
    if changes:
        raise ValueError(
            f"{output.path} was begun with another configuration: {', '.join(changes)}; "
            "go on with that, name another output, or give --overwrite"
        )


@contextlib.contextmanager
def _lock(path: Path, output: Output) -> Iterator[None]:
    """Holds a file, which is made if missing; the system lets go of it when the process ends in any way."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # a device may never end, nor a pipe
            raise ValueError(f"{path} is no file: move it away")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.path.samestat(os.fstat(fd), os.stat(path))  # nobody has put another in its place
        except BlockingIOError:
            free = False
        if not free:
            raise ValueError(f"{output.path} is being written by another job")
        yield
    finally:
        os.close(fd)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
