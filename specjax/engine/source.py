"""The input of a batch job: its lines, one at a time, from a file, a pipe or a folder of files.

What is wrong with one line costs that line only: bytes that are no UTF-8, or too many of them.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["MAX_LINE", "Line", "Source"]

MAX_LINE = 64 * 2**20
"""The most bytes that a line may have."""

_BOM = b"\xef\xbb\xbf"
_SKIP = 2**20  # bytes of a line too long that are held while it is passed over


@dataclasses.dataclass(frozen=True)
class Line:
    """A line that is not empty."""

    shard: str  # the name of its file in a folder; empty where the input is one file
    number: int  # from 1, in its file
    text: str  # without its end; a byte that is no UTF-8 is half a surrogate pair
    digest: bytes  # a hash of its bytes
    problem: str | None = None  # why there is no text

    @property
    def place(self) -> str:
        """``line 17``, or ``part-0.jsonl, line 17``."""
        return f"{self.shard}, line {self.number}" if self.shard else f"line {self.number}"

    @property
    def name(self) -> str:
        """``line-17``, or ``part-0.jsonl-line-17``: a custom_id for a line that has none."""
        # Linux takes any bytes for a file's name; what goes on from here must be text.
        shard = os.fsencode(self.shard).decode(errors="backslashreplace")
        return f"{shard}-line-{self.number}" if shard else f"line-{self.number}"


class Source:
    """The lines of an input, read as they are asked for.

    Attributes:
      path: the input as it was given.
      files: what is read, in order; for a folder its ``*.jsonl`` and ``*.jsonl.gz`` by name.
      is_folder: whether the input is a folder.
      total_bytes: the size of all files as they lie on the disk; None for a pipe.
      read_bytes: how far into these it has read.
    """

    def __init__(self, path: Path, max_line: int = MAX_LINE, only: str | None = None) -> None:
        """Looks at what there is; reads nothing.

        Args:
          path: a file, a folder, or ``-`` for standard input. What ends in ``.gz`` is unpacked.
          max_line: the most bytes a line may have.
          only: the name of one file in a folder, to leave the others out.

        Raises:
          OSError: there is no such file.
          ValueError: there is nothing to read in the folder.
        """
        self.path, self._max_line = path, max_line
        self.is_folder = path.is_dir()
        self.files: tuple[Path, ...] = (path,)
        if self.is_folder:
            named = (file for file in path.iterdir() if file.name.endswith((".jsonl", ".jsonl.gz")))
            self.files = tuple(sorted(file for file in named if not file.is_dir()))
            if only is not None:
                self.files = tuple(file for file in self.files if file.name == only)
            if not self.files:
                raise ValueError(f"{path} has no *.jsonl or *.jsonl.gz in it")
        self.total_bytes: int | None = None
        if path == Path("-") and sys.stdin is None:
            raise ValueError("there is no standard input: name a file")
        if path != Path("-"):
            sizes = [file.stat().st_size for file in self.files]
            self.total_bytes = sum(sizes) if all(file.is_file() for file in self.files) else None
        self.read_bytes = 0
        self._is_waiting, self._is_interrupted = False, False

    def interrupt(self) -> None:
        """Ends the reading, from a signal's handler: a pipe may have nothing to say for hours.

        Raises:
          InterruptedError: in whoever waits for a line now; else in whoever asks for the next.
        """
        self._is_interrupted = True
        if self._is_waiting:
            raise InterruptedError

    def __iter__(self) -> Iterator[Line]:
        """Reads from the beginning.

        Raises:
          OSError: a file can't be read.
          InterruptedError: :meth:`interrupt` was called.
          ValueError: a ``.gz`` is damaged.
        """
        if self.path == Path("-"):
            yield from self._lines("", sys.stdin.buffer)
            return
        before = 0
        for path in self.files:
            with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw as file:
                number = 0
                try:
                    for line in self._lines(path.name if self.is_folder else "", file):
                        number = line.number
                        if self.total_bytes is not None:
                            self.read_bytes = before + raw.tell()
                        yield line
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    raise ValueError(f"{path}: damaged gzip after line {number}: {error}") from None
                if self.total_bytes is not None:
                    before += raw.tell()

    def _lines(self, shard: str, file: BinaryIO | gzip.GzipFile) -> Iterator[Line]:
        number = 0
        while raw := self._read(file, self._max_line + 2):  # with its end, \r\n at most
            number += 1
            whole = raw.endswith(b"\n") or len(raw) < self._max_line + 2
            if number == 1:
                raw = raw.removeprefix(_BOM)
            raw = raw.rstrip(b"\r\n")
            digest = hashlib.blake2b(raw, digest_size=8)
            if len(raw) > self._max_line or not whole:
                raw = b""
                while not whole and (more := self._read(file, _SKIP)):
                    digest.update(more)
                    whole = more.endswith(b"\n")
                problem = f"longer than {self._max_line} bytes"
                yield Line(shard, number, "", digest.digest(), problem)
            elif raw.strip():
                yield Line(shard, number, raw.decode("utf-8", "surrogateescape"), digest.digest())

    def _read(self, file: BinaryIO | gzip.GzipFile, size: int) -> bytes:
        self._is_waiting = True
        try:
            if self._is_interrupted:
                raise InterruptedError
            return file.readline(size)
        finally:
            self._is_waiting = False
