"""What a generation did: on the device while it runs, on the host when it is read."""

from __future__ import annotations

import dataclasses
import enum
import operator

import jax
import jax.numpy as jnp
import numpy as np

from specjax.rows import put
from specjax.types import Array, DecodeState, Logprobs, StepInfo, pytree

__all__ = ["DraftCounts", "Generation", "Record", "Source", "add_step", "empty_record", "to_generation"]


class Source(enum.IntEnum):
    """Where a token came from."""

    PROMPT = 0
    PLAIN = 1  # a step without a draft
    ACCEPTED = 2  # drafted, and kept
    CORRECTED = 3  # drawn in place of a rejected one
    BONUS = 4  # drawn after a whole draft was kept


@pytree
class Record:
    """What the steps of a generation did, added up on the device."""

    source: Array  # [B, S] int8: a Source for each token
    failed: Array  # [B] bool: the target's logits were no numbers
    num_steps: Array  # [B] int32: steps in which the row was live
    drafted: Array  # [B, K+1] int32: how many of these drafted 0, 1, .. K tokens
    accepted: Array  # [B, K+1] int32: how many kept 0, 1, .. K of them
    logprobs: Logprobs | None  # of the row's tokens, [B, S] and [B, S, n]


class DraftCounts:
    """What a row's drafts came to, for whoever has the two histograms."""

    drafted: np.ndarray  # [K+1]: steps by the number of tokens drafted
    accepted: np.ndarray  # [K+1]: steps by the number of tokens kept

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that the target was asked to verify."""
        return int(self.drafted @ np.arange(len(self.drafted)))

    @property
    def num_accepted_tokens(self) -> int:
        """How many of these were kept."""
        return int(self.accepted @ np.arange(len(self.accepted)))


@dataclasses.dataclass(frozen=True)
class Generation(DraftCounts):
    """One row's output, on the host."""

    tokens: list[int]  # what was decoded, a stop token included
    sources: list[Source]  # one for each token
    stopped: bool  # whether a stop token ended it, rather than the limit
    failed: bool  # whether the target's law broke off (NaN, or all forbidden); the tokens are those before
    num_steps: int
    drafted: np.ndarray  # [K+1]: steps by the number of tokens drafted
    accepted: np.ndarray  # [K+1]: steps by the number of tokens kept
    logprobs: Logprobs | None = None  # NumPy, one for each token: [N], and [N, n] for the likeliest

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step, the rule's own token included."""
        return len(self.tokens) / max(self.num_steps, 1)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted; 0 where nothing was drafted."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)


def empty_record(shape: tuple[int, ...], num_draft_tokens: int, num_logprobs: int | None) -> Record:
    """A record of no step yet, for tokens of ``shape`` [B, S]."""
    bins = (shape[0], num_draft_tokens + 1)
    logprobs = None
    if num_logprobs is not None:
        top = (*shape, num_logprobs)
        logprobs = Logprobs(jnp.zeros(shape), jnp.zeros(top, jnp.int32), jnp.zeros(top))
    return Record(
        source=jnp.zeros(shape, jnp.int8),
        failed=jnp.zeros(shape[0], bool),
        num_steps=jnp.zeros(shape[0], jnp.int32),
        drafted=jnp.zeros(bins, jnp.int32),
        accepted=jnp.zeros(bins, jnp.int32),
        logprobs=logprobs,
    )


def add_step(record: Record, before: DecodeState, info: StepInfo) -> Record:
    """Adds what a step from ``before`` did."""
    live = ~before.done
    capacity = before.context.tokens.shape[1]
    bins = jnp.arange(record.drafted.shape[1])[None]
    whole = info.verdict.num_accepted == info.num_drafted
    last = jnp.where(info.num_drafted == 0, Source.PLAIN, jnp.where(whole, Source.BONUS, Source.CORRECTED))
    source = jnp.where(bins < info.verdict.num_accepted[:, None], Source.ACCEPTED, last[:, None])
    slots = jnp.where(bins < info.num_emitted[:, None], before.context.length[:, None] + bins, capacity)

    def note(rows: Array, block: Array) -> Array:
        return put(rows, slots, block)

    return Record(
        source=note(record.source, source),
        failed=record.failed | info.failed,
        num_steps=record.num_steps + live,
        drafted=record.drafted + (live[:, None] & (bins == info.num_drafted[:, None])),
        accepted=record.accepted + (live[:, None] & (bins == info.num_accepted[:, None])),
        logprobs=jax.tree.map(note, record.logprobs, info.logprobs),
    )


def to_generation(
    tokens: np.ndarray, decoded: slice, stop_tokens: frozenset[int], record: Record
) -> Generation:
    """One row on the host: its ``tokens`` [S], which of them were decoded, and its part of the record."""
    ids = tokens[decoded].tolist()
    return Generation(
        tokens=ids,
        sources=[Source(source) for source in record.source[decoded].tolist()],
        stopped=bool(ids) and ids[-1] in stop_tokens,
        failed=bool(record.failed),
        num_steps=int(record.num_steps),
        drafted=np.asarray(record.drafted),
        accepted=np.asarray(record.accepted),
        logprobs=jax.tree.map(operator.itemgetter(decoded), record.logprobs),
    )
