"""The prefill lane: a few rows in which prompts are read, chunk by chunk, while the slots decode.

A row of the lane is moved to a slot once its prompt is read, and what it read stays where it was: the next
prompt that begins alike, with the same system prompt for instance, is read from where it parts. One that
begins as a prompt that is still being read comes after it in the same row. Work with the very same prompt
(the n choices of a request) shares one row.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from specjax.decode import Caches
from specjax.engine.programs import Programs
from specjax.engine.work import Work

__all__ = ["Lane", "default_rows"]


def default_rows(slots: int, ways: int = 1) -> int:
    """P: enough rows to keep prompts ready, on each of the devices that rows are spread over; no more than
    there are slots."""
    return min(4 * ways, slots)


@dataclasses.dataclass
class _Row:
    tokens: tuple[int, ...] = ()  # the prompt in it: that of the first who waits, or the last
    position: int = 0  # how much of it was read
    waiting: deque[tuple[int, Work]] = dataclasses.field(default_factory=deque)  # by turns, numbered
    # Whether the drafter knows where the row stands: it is told by what it reads, so a row that was taken
    # back must read something, if only its newest token.
    is_settled: bool = True

    @property
    def num_missing(self) -> int:
        # The newest token is the first that a step feeds.
        return max(len(self.tokens) - 1 - self.position, 0 if self.is_settled else 1)

    @property
    def is_ready(self) -> bool:
        return bool(self.waiting) and not self.num_missing

    def shared(self, work: Work) -> int:
        """How much of what was read is the work's as well, its newest token aside."""
        return _common(self.tokens[: self.position], work.prompt[:-1])

    def to_come(self, work: Work) -> int:
        """The same, once those who wait have gone."""
        return _common(self.waiting[-1][1].prompt, work.prompt[:-1])


class Lane:
    """Rows on their way to the slots.

    Each is read alone, so that a lone prompt costs no more than its own tokens; where rows are spread over
    devices, as many are read together as there are devices.

    Args:
      programs: what reads.
      rows: P, how many prompts are held at once.
      chunks: how many tokens of a prompt one call reads, rising: the least that hold what is missing.
    """

    def __init__(self, programs: Programs, *, rows: int, chunks: Sequence[int]) -> None:
        self._programs, self._chunks = programs, tuple(chunks)
        self._together = programs.ways if rows % programs.ways == 0 else rows
        self.caches = [programs.empty_caches(self._together) for _ in range(rows // self._together)]
        self._rows = [_Row() for _ in range(rows)]
        self._numbers = itertools.count()
        self._last = -1  # the group that was read last
        self._has_state = bool(jax.tree.leaves(self.caches[0][1]))
        self.tokens_read = 0

    def warm_up(self) -> None:
        """Compiles what reads, and waits for it."""
        for chunk in self._chunks:
            self.caches[0] = self._programs.read(self.caches[0], *self._filler(chunk))
        self._rows[: self._together] = [_Row() for _ in range(self._together)]  # what they had is gone
        jax.block_until_ready(self.caches)

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits in it."""
        return not any(row.waiting for row in self._rows)

    @property
    def num_waiting(self) -> int:
        """Work in it."""
        return sum(len(row.waiting) for row in self._rows)

    @property
    def is_ready(self) -> bool:
        """Whether what has waited longest can be taken."""
        waiting = [row for row in self._rows if row.waiting]
        return bool(waiting) and min(waiting, key=lambda row: row.waiting[0][0]).is_ready

    def load(self, work: Work) -> bool:
        """Takes work to the row with its prompt, or the free one that begins most alike; of those that do so
        equally, the one that loses least. Where a row that is not free will save a whole chunk more, the work
        comes after what is there.

        Returns:
          False if no row is free, nor has its prompt.
        """
        entry = next(self._numbers), work
        busy, free = ([row for row in self._rows if bool(row.waiting) is wanted] for wanted in (True, False))
        for row in busy:
            if row.waiting[-1][1].prompt == work.prompt:
                row.waiting.append(entry)
                return True
        if not free:
            return False
        row = max(free, key=lambda row: (row.shared(work), -row.position))
        # Rows that are read together don't wait: the same beginning in each takes no longer than in one.
        if busy and self._together == 1:
            other = max(busy, key=lambda row: row.to_come(work))
            row = other if other.to_come(work) >= row.shared(work) + self._chunks[-1] else row
        row.waiting.append(entry)
        if len(row.waiting) == 1:
            self._begin(row)
        return True

    def _begin(self, row: _Row) -> None:
        """Goes over to the prompt of the first who waits."""
        work = row.waiting[0][1]
        row.is_settled = not self._has_state or (row.is_settled and row.tokens == work.prompt)
        row.tokens, row.position = work.prompt, row.shared(work)

    def read(self) -> bool:
        """Reads a chunk of one prompt, by turns, on the device, and returns at once.

        By turns, so that a long prompt doesn't hold up the short ones behind it, nor they it.

        Returns:
          False if nothing is to be read.
        """
        unread = [i for i, row in enumerate(self._rows) if row.waiting and not row.is_ready]
        if not unread:
            return False
        groups = [i // self._together for i in unread]
        self._last = group = next((group for group in groups if group > self._last), groups[0])
        rows = self._rows[group * self._together :][: self._together]
        most = max(row.num_missing for row in rows if row.waiting)
        chunk = next((chunk for chunk in self._chunks if chunk >= most), self._chunks[-1])
        tokens, positions, length = self._filler(chunk)
        for i, row in enumerate(rows):
            positions[i] += row.position
            if row.waiting and not row.is_ready:
                length[i] = len(row.tokens)
                block = row.tokens[row.position : row.position + chunk]
                tokens[i, : len(block)] = block
                row.position += len(block)
                self.tokens_read += len(block)
                row.is_settled = True
            else:  # filler, which lands past what it has read, and tells the drafter nothing new
                length[i] = max(min(row.position + 1, len(row.tokens)), 1)
        self.caches[group] = self._programs.read(self.caches[group], tokens, positions, length)
        return True

    def _filler(self, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A chunk without a text, from the first position on: tokens, positions, lengths."""
        shape = (self._together, chunk)
        positions = np.broadcast_to(np.arange(chunk, dtype=np.int32), shape).copy()
        return np.zeros(shape, np.int32), positions, np.ones(self._together, np.int32)

    def clear(self) -> None:
        """Forgets who waits; what was read stays."""
        for row in self._rows:
            row.waiting.clear()

    def take(self) -> tuple[Caches, int, Work] | None:
        """Gives the work that is ready and has waited longest, and where its row is: in which caches, and
        where there. None if there is none."""
        ready = [i for i, row in enumerate(self._rows) if row.is_ready]
        if not ready:
            return None
        first = min(ready, key=lambda i: self._rows[i].waiting[0][0])
        group, row = divmod(first, self._together)
        _, work = self._rows[first].waiting.popleft()
        if self._rows[first].waiting:
            self._begin(self._rows[first])
        return self.caches[group], row, work


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens two texts share from their first."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(a), len(b)))
