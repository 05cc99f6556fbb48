"""The prefill lane: a few rows in which prompts are read, chunk by chunk, while the slots decode.

A row of the lane is moved to a slot once its prompt is read, and what it read stays where it was: the next
prompt that begins alike, with the same system prompt for instance, is read from where it parts. Work with
the very same prompt (the n choices of a request) shares one row.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque

import jax
import numpy as np

from specjax.engine.programs import Programs
from specjax.engine.work import Work

__all__ = ["Lane", "default_rows"]


def default_rows(slots: int, ways: int = 1) -> int:
    """P: enough rows to keep prompts ready, on each of the devices that rows are spread over; no more than
    there are slots."""
    return min(4 * ways, slots)


@dataclasses.dataclass
class _Row:
    tokens: tuple[int, ...] = ()  # the prompt in it, the newest one or the last
    position: int = 0  # how much of it was read
    waiting: deque[tuple[int, Work]] = dataclasses.field(default_factory=deque)  # who wants it, numbered
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


class Lane:
    """Rows on their way to the slots.

    Args:
      programs: what reads.
      rows: P, how many prompts are read at once.
      chunk: C, tokens of each that one call reads.
    """

    def __init__(self, programs: Programs, *, rows: int, chunk: int) -> None:
        self._programs, self._chunk = programs, chunk
        self.caches = programs.empty_caches(rows)
        self._rows = [_Row() for _ in range(rows)]
        self._numbers = itertools.count()
        self._has_state = bool(jax.tree.leaves(self.caches[1]))
        self.tokens_read = 0

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits in it."""
        return not any(row.waiting for row in self._rows)

    @property
    def num_waiting(self) -> int:
        """Work in it."""
        return sum(len(row.waiting) for row in self._rows)

    def chunks_to_ready(self) -> int | None:
        """Calls of :meth:`read` until some row is ready: 0 if one is, None if the lane is empty."""
        missing = [row.num_missing for row in self._rows if row.waiting]
        return min((-(-tokens // self._chunk) for tokens in missing), default=None)

    def load(self, work: Work) -> bool:
        """Takes work to the row with its prompt, or the free one that begins most alike; False if full."""
        for row in self._rows:
            if row.waiting and row.tokens == work.prompt:
                row.waiting.append((next(self._numbers), work))
                return True
        free = [row for row in self._rows if not row.waiting]
        if not free:
            return False
        shared = [_common(row.tokens[: row.position], work.prompt[:-1]) for row in free]
        best = max(range(len(free)), key=shared.__getitem__)
        row = free[best]
        row.is_settled = row.is_settled and (row.position == shared[best] or not self._has_state)
        row.tokens, row.position = work.prompt, shared[best]
        row.waiting.append((next(self._numbers), work))
        return True

    def read(self) -> None:
        """Reads a chunk of every prompt that isn't read yet, on the device; returns at once."""
        shape = (len(self._rows), self._chunk)
        tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        length = np.ones(shape[0], np.int32)
        for i, row in enumerate(self._rows):
            # A row with nothing to read is given filler, which lands past what it has read.
            positions[i] = row.position + np.arange(self._chunk)
            length[i] = max(len(row.tokens), 1)
            if row.waiting and not row.is_ready:
                block = row.tokens[row.position : row.position + self._chunk]
                tokens[i, : len(block)] = block
                row.position += len(block)
                self.tokens_read += len(block)
            row.is_settled = True
        self.caches = self._programs.read(self.caches, tokens, positions, length)

    def clear(self) -> None:
        """Forgets who waits; what was read stays."""
        for row in self._rows:
            row.waiting.clear()

    def take(self) -> tuple[int, Work] | None:
        """Gives the work that is ready and has waited longest, and its row; None if there is none."""
        ready = [i for i, row in enumerate(self._rows) if row.is_ready]
        if not ready:
            return None
        first = min(ready, key=lambda i: self._rows[i].waiting[0][0])
        return first, self._rows[first].waiting.popleft()[1]


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens two texts share from their first."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return int(np.argmax(np.not_equal(a[:length], b[:length])))
