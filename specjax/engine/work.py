"""What goes into the engine and what comes out of it."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np

from specjax.engine.slots import MAX_BIASES, MAX_STOPS, Row
from specjax.record import DraftCounts, Source
from specjax.sampling import make_sampling
from specjax.types import Logprobs

__all__ = ["Finish", "Limits", "Result", "Work", "WorkQueue"]


Finish = Literal["stop", "length", "failed"]


@dataclasses.dataclass(frozen=True)
class Work:
    """One prompt to continue."""

    prompt: tuple[int, ...]  # token ids, at least one
    max_tokens: int | None = None  # None: as many as there is room for
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of make_sampling; greedy if empty
    stop_tokens: tuple[int, ...] = ()  # ids that end it, besides the engine's own
    ignore_eos: bool = False  # the engine's own stop tokens don't end it
    stop: tuple[str, ...] = ()  # strings that end it; needs an engine with a detokenizer
    num_logprobs: int | None = None  # reports the target's log-probabilities, and so many of the likeliest
    tag: Any = None  # the caller's own

    def packed(self) -> dict[str, Any]:
        """All but the tag, for ``Work(**packed)`` in another process."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"sampling": dict(self.sampling), "tag": None}


@dataclasses.dataclass(frozen=True)
class Result(DraftCounts):
    """What became of a piece of work; without a ``finish`` it isn't over yet."""

    work: Work
    tokens: list[int]  # what was decoded; a stop token included, a stop string not
    sources: list[Source]  # one for each token
    finish: Finish | None  # failed: the target's logits were no law
    num_steps: int
    drafted: np.ndarray  # [K+1]: steps by the number of tokens drafted
    accepted: np.ndarray  # [K+1]: steps by the number of tokens kept
    text: str | None = None  # where the engine has a detokenizer; of a row that goes on, what is certain
    offsets: tuple[int, ...] = ()  # where in the text of a row that is over each token's characters begin
    logprobs: Logprobs | None = None  # NumPy, [N] and [N, n]


class WorkQueue(deque[Work]):
    """An iterator that gives its work away, and has more again when more is added."""

    def __iter__(self) -> Iterator[Work]:
        return self

    def __next__(self) -> Work:
        if not self:
            raise StopIteration
        return self.popleft()


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an engine can do."""

    vocab_size: int
    context_length: int  # positions that the target was made for
    capacity: int  # S, positions of a slot
    reserve: int  # of these, kept free for the widest draft of a row that is about to end
    stop_tokens: tuple[int, ...]  # that end every row
    has_text: bool
    max_logprobs: int | None

    def check(self, work: Work) -> None:
        """Says whether work can be done.

        Raises:
          ValueError: a prompt that is empty, has a token outside the vocabulary, or leaves no room; a stop
            string without a detokenizer; more biases, stop tokens or log-probabilities than there is room
            for; a sampling value out of its range.
        """
        if not work.prompt:
            raise ValueError("the prompt is empty: give at least one token")
        if not 0 <= min(work.prompt) <= max(work.prompt) < self.vocab_size:
            raise ValueError(f"the prompt has a token outside the vocabulary of {self.vocab_size}")
        room, length = self.room_after(len(work.prompt)), len(work.prompt)
        if room < 1:
            raise ValueError(f"a prompt of {length} tokens leaves no room in slots of {self._size}")
        if work.max_tokens is not None and not 1 <= work.max_tokens <= room:
            raise ValueError(
                f"max_tokens must be in 1..{room} after a prompt of {length} tokens, in slots of "
                f"{self._size}, not {work.max_tokens}"
            )
        least = work.sampling.get("min_tokens", 0)
        if least > (room if work.max_tokens is None else work.max_tokens):
            raise ValueError(f"min_tokens is {least}, more than the {work.max_tokens or room} there may be")
        if len(self.stop_ids(work)) > MAX_STOPS:
            raise ValueError(f"more than {MAX_STOPS} stop tokens, the model's own included")
        if max(work.sampling.get("logit_bias", ()), default=0) >= self.vocab_size:
            raise ValueError(f"logit_bias has a token outside the vocabulary of {self.vocab_size}")
        if work.stop and not self.has_text:
            raise ValueError("stop strings need an engine with a detokenizer")
        if not all(work.stop):
            raise ValueError("a stop string must not be empty")
        most = -1 if self.max_logprobs is None else self.max_logprobs
        if work.num_logprobs is not None and not 0 <= work.num_logprobs <= most:
            raise ValueError(f"{work.num_logprobs} log-probabilities are more than this engine gives")
        self.row(work)  # refuses sampling values that are out of their range

    @property
    def usable(self) -> int:
        """Tokens that a slot can hold, prompt and output."""
        return min(self.capacity - self.reserve, self.context_length)

    @property
    def _size(self) -> str:
        """The same, and what could be changed about it."""
        if self.usable == self.context_length:
            return f"{self.usable} tokens, the model's context"
        return f"{self.usable} tokens (a capacity of {self.capacity}, less {self.reserve} for a step)"

    def room_after(self, prompt_length: int) -> int:
        """How many tokens can be decoded after a prompt."""
        return self.usable - prompt_length

    def stop_ids(self, work: Work) -> frozenset[int]:
        """The tokens that end it."""
        return frozenset(work.stop_tokens) | frozenset(() if work.ignore_eos else self.stop_tokens)

    def row(self, work: Work) -> Row:
        """The work as it comes into a slot."""
        length = len(work.prompt)
        tokens = np.zeros(self.capacity, np.int32)
        tokens[:length] = work.prompt
        stop_ids = sorted(self.stop_ids(work))
        stop_tokens = np.full(MAX_STOPS, -1, np.int32)
        stop_tokens[: len(stop_ids)] = stop_ids
        room = self.room_after(length)
        sampling = make_sampling(1, **{"seed": 0} | dict(work.sampling), num_biases=MAX_BIASES)
        return Row(
            tokens=tokens,
            length=np.int32(length),
            limit=np.int32(length + min(room, work.max_tokens or room)),
            stop_tokens=stop_tokens,
            sampling=jax.tree.map(lambda x: np.asarray(x)[0], sampling),
        )
