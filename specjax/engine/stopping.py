"""Stop strings: where in the text of a row it ends, while its tokens come in.

The text is cut before the first place at which a stop string stands in it, and the tokens to the fewest whose
text covers what is left. Both are what one would get from the whole text at once: how the tokens came in, one
at a time or in blocks, makes no difference. So where two stops overlap, the one that starts first wins, even
if the other was whole before it; a row may have to go on for some tokens until that is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["Detokenizer", "Ending", "StopWatch"]


class Detokenizer(Protocol):
    """Turns a growing sequence of ids into pieces of text that end in no half character."""

    def feed(self, ids: Iterable[int]) -> str:
        """Returns the text that these further ids complete."""
        ...

    def finish(self) -> str:
        """Returns what is still held back."""
        ...


@dataclasses.dataclass(frozen=True)
class Ending:
    """What is left of a row."""

    text: str
    rest: str  # the end of text, which no feed has returned
    num_tokens: int  # how many of the row's tokens are kept
    offsets: tuple[int, ...]  # where in text the characters of each of these begin
    stopped: bool  # whether a stop string ended it


class StopWatch:
    """Follows the text of one row.

    Attributes:
      stopped: whether a stop string has been found; what is fed after that is of no effect.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """Begins with an empty text.

        Args:
          detokenizer: a new one, for this row alone.
          stop: the strings that end it, none of them empty.
          min_tokens: a stop string that ends within the text of so many tokens is passed over, as in vLLM.
        """
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self.stopped = False
        self._detokenizer, self._stop, self._min_tokens = detokenizer, tuple(stop), min_tokens
        self._shown: list[str] = []  # what feed has returned
        self._shown_length = 0
        self._held = ""  # what follows it: the beginning of a stop, for all that is known
        self._ends: list[int] = []  # the length of the text after each token
        self._floor = 0  # the length of the text of the first min_tokens tokens

    def feed(self, ids: Iterable[int]) -> str:
        """Takes further tokens.

        Returns:
          The text that they make certain: none of it can become part of a stop string.
        """
        before = len(self._shown)
        for token in ids:
            if self.stopped:
                break
            self._held += self._detokenizer.feed([token])
            self._ends.append(self._shown_length + len(self._held))
            if len(self._ends) <= self._min_tokens:
                self._floor = self._ends[-1]
            self._look(more=True)
        return "".join(self._shown[before:])

    def finish(self) -> Ending:
        """Ends the row, if no stop string has: no more tokens will come."""
        before = len(self._shown)
        if not self.stopped:
            tail = self._detokenizer.finish()
            self._held += tail
            if tail and len(self._ends) <= self._min_tokens:
                self._floor += len(tail)
            self._look(more=False)
        text = "".join(self._shown)
        count = len(self._ends)
        if self.stopped:
            count = next((i for i in range(count) if (self._ends[i - 1] if i else 0) >= len(text)), count)
        offsets = (0, *self._ends)[:count]
        return Ending(text, "".join(self._shown[before:]), count, offsets, self.stopped)

    def _look(self, *, more: bool) -> None:
        """Shows what no stop can begin in; stops at the first that nothing can come before."""
        found = self._first_stop()
        pending = self._first_beginning() if more else len(self._held)
        if found is not None and found <= pending:
            self.stopped = True
            self._show(found)
            self._held = ""
        else:
            self._show(pending)

    def _show(self, length: int) -> None:
        if length:
            self._shown.append(self._held[:length])
            self._shown_length += length
            self._held = self._held[length:]

    def _first_stop(self) -> int | None:
        """Where in the held text the first stop stands that ends past the floor."""
        floor = self._floor - self._shown_length
        places = (self._held.find(text, max(0, floor - len(text) + 1)) for text in self._stop)
        return min((place for place in places if place >= 0), default=None)

    def _first_beginning(self) -> int:
        """Where the longest suffix of the held text begins that a stop begins with, and goes on from."""
        size = len(self._held)
        longest = max(map(len, self._stop), default=0)
        for place in range(max(0, size - longest + 1), size):
            tail = self._held[place:]
            if any(len(tail) < len(text) and text.startswith(tail) for text in self._stop):
                return place
        return size
