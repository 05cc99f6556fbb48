"""The output of a batch job: whole lines, or nothing of them, whatever happens.

A killed process may leave half a line at the end of a file; a full disk is met by cutting it off at once.
So a file holds whole lines and at most one torn tail, and :func:`repair` takes that away. Gzip files are a
series of members, one a write, so that the same holds of them.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import stat
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from specjax.engine.source import Source

__all__ = ["Output", "Sink", "naming", "repair", "replace_file", "whole_lines"]

SYNC_SECONDS = 5.0
"""How often a file is forced to the disk. What a killed process has written is safe without it; should the
machine itself fail, so many seconds of work are done again; a sync of some 10 ms costs 0.2% of them."""

MOST_OPEN = 64
"""Files of a folder that are open at a time."""

_CHUNK = 2**16


class Sink:
    """One file, to whose end whole lines are added."""

    def __init__(self, path: Path) -> None:
        """Opens it, and makes it if it is missing; ``-`` is standard output, what ends in ``.gz`` is packed.

        Raises:
          OSError: it can't be opened.
        """
        self._path, self._gzip = path, path.suffix == ".gz"
        self._fd: int | None = None  # None is standard output
        self._regular = False  # whether it is a file on a disk, which can be cut and synced
        self._end = 0
        self._synced = time.monotonic()
        if path != Path("-"):
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            status = os.fstat(self._fd)
            self._regular, self._end = stat.S_ISREG(status.st_mode), status.st_size

    def write(self, *lines: str) -> None:
        """Adds lines, which the system has got when this returns.

        Raises:
          OSError: they could not be written (a full disk, a size limit, a reader gone away). The file is as
            it was before.
        """
        if not lines:
            return
        if any("\n" in line for line in lines):
            raise ValueError("a line must not have a line end inside")
        data = "".join(f"{line}\n" for line in lines).encode()
        data = gzip.compress(data, compresslevel=6, mtime=0) if self._gzip else data
        if self._fd is None:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            return
        try:
            with naming(self._path):
                view = memoryview(data)
                while view:  # a disk that fills up takes a part first, and fails at the next
                    view = view[os.write(self._fd, view) :]
        except BaseException:
            if self._regular:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Waits until the disk has all of it."""
        if self._fd is not None and self._regular:
            with naming(self._path):
                os.fsync(self._fd)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Ends the writing, on the disk as well."""
        if self._fd is not None:
            try:
                self.sync()
            finally:
                os.close(self._fd)

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Output:
    """Where the answers go: a file, a pipe, or a folder with a file for each of the input's.

    Attributes:
      path: the output as it was given.
      is_folder: whether it is a folder, which :func:`specjax.engine.ledger.resume` makes if it is missing.
      files: the files that it may write; none for a pipe.
      state: what the ledger keeps beside them; None for a pipe, after which no job can go on.
    """

    def __init__(self, path: Path, source: Source) -> None:
        """Looks at what there is; writes nothing.

        Args:
          path: a file, which is packed if it ends in ``.gz``, or ``-``; where the input is a folder, another.
          source: the input.

        Raises:
          ValueError: the output is the input too, or is a folder where a file is needed or the other way.
        """
        self.path, self.is_folder = path, source.is_folder and path != Path("-")
        self.files: tuple[Path, ...] = ()
        self.state: Path | None = None
        self._shards: dict[str, Path] = {}
        self._open: dict[str, Sink] = {}
        if path == Path("-") and sys.stdout is None:
            raise ValueError("there is no standard output: name a file")
        if path == Path("-") or (path.exists() and not path.is_file() and not path.is_dir()):
            return
        if path.is_dir() and not source.is_folder:
            raise ValueError(f"{path} is a folder and the input is none: name a file")
        if path.is_file() and source.is_folder:
            raise ValueError(f"{path} is a file and the input is a folder: name a folder")
        if source.is_folder:
            self._shards = {file.name: path / file.name for file in source.files}
        self.files = tuple(self._shards.values()) or (path,)
        self.state = path.absolute().with_name(path.absolute().name + ".state.json")
        for mine, its in zip(self.files, source.files, strict=True):
            if mine.exists() and _is_same(mine, its):
                raise ValueError(f"{mine} is the input too: name another output")

    def write(self, shard: str, *lines: str) -> None:
        """Adds lines to the file that answers this file of the input (empty where the input is none's).

        Raises:
          OSError: as :meth:`Sink.write`.
        """
        sink = self._open.pop(shard, None)
        if sink is None:
            if len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()  # the one that has waited longest
            sink = Sink(self._shards.get(shard, self.path))
        self._open[shard] = sink
        sink.write(*lines)

    def close(self) -> None:
        """Ends the writing, on the disk as well."""
        with contextlib.ExitStack() as stack:
            for sink in self._open.values():
                stack.callback(sink.close)
            self._open = {}

    def create(self) -> None:
        """Makes the files that are missing: an input without a line has an empty answer.

        Raises:
          OSError: one can't be made.
        """
        for shard in self._shards or ("",):
            self.write(shard)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def repair(path: Path) -> int:
    """Cuts off what stands after the last whole line.

    Returns:
      How many bytes that were.

    Raises:
      OSError: the file can't be read or written.
      ValueError: a ``.gz`` is damaged elsewhere than at its end.
    """
    with path.open("r+b") as file:
        try:
            end = _end_of_members(file) if path.suffix == ".gz" else _end_of_lines(file)
        except zlib.error as error:
            raise ValueError(f"{path} is damaged before its end: {error}") from None
        size = file.seek(0, os.SEEK_END)
        if end < size:
            file.truncate(end)
        return size - end


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a repaired file, with their ends."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        yield from file


def replace_file(path: Path, text: str) -> None:
    """Puts a text in a file's place: whoever reads it finds the old one or the new one, whole."""
    new = path.with_name(path.name + ".new")
    try:
        with naming(path), new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the disk knows the file by its name, too
    finally:
        os.close(folder)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Around the writing of a file: what the system says of a full disk doesn't name it, this does."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _is_same(mine: Path, its: Path) -> bool:
    """Whether a file that is there is also the input."""
    if its != Path("-"):
        return its.exists() and mine.samefile(its)
    try:
        return os.path.samestat(mine.stat(), os.fstat(sys.stdin.fileno()))
    except io.UnsupportedOperation:  # no file of the system's
        return False


def _end_of_lines(file: BinaryIO) -> int:
    """Past the last line end, looked for from the back."""
    stop = file.seek(0, os.SEEK_END)
    while stop > 0:
        start = max(0, stop - _CHUNK)
        file.seek(start)
        found = file.read(stop - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        stop = start
    return 0


def _end_of_members(file: BinaryIO) -> int:
    """Past the last whole member after which no line is unfinished."""
    end, at_line_end = 0, True
    member: Any = zlib.decompressobj(wbits=31)
    while data := file.read(_CHUNK):
        while data:
            text = member.decompress(data, _CHUNK)
            at_line_end = text.endswith(b"\n") if text else at_line_end
            if member.eof:
                data = member.unused_data
                end = file.tell() - len(data) if at_line_end else end
                member = zlib.decompressobj(wbits=31)
            else:
                data = member.unconsumed_tail
    return end
