"""Data from nothing but the target: it writes conversations, and answers its own prompts greedily.

A chat model that is given the opening of a user's turn writes what a user might say, ends the turn and goes
on as the assistant: one pass of plain sampling gives prompts and responses at temperature 1, all of it the
target's own law. So no corpus is needed (compare Zhou et al. 2023, "DistillSpec", 2310.08461: a target's
own responses are what transfers).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from specjax.distill.sequences import TokenSequence
from specjax.generate import Decoding, Generation
from specjax.sampling import make_sampling
from specjax.types import Model, Params

__all__ = ["answer_prompts", "prompts_of", "row_seeds", "split_turns", "write_conversations"]

_STRIDE = 16  # steps between two looks at how many rows are still live
_ENOUGH = 0.15  # of the rows live, and no more: waiting for these costs more than they bring


def row_seeds(*address: int, count: int) -> np.ndarray:
    """Seeds [count] uint32 for the rows of a batch at an address such as (seed, shard, phase)."""
    return np.random.SeedSequence(address).generate_state(count)


def write_conversations(
    model: Model,
    params: Params,
    opening: Sequence[int],
    closing: Sequence[int],
    *,
    capacity: int,
    seeds: np.ndarray,
    special: Iterable[int],
) -> list[TokenSequence]:
    """Has the target write a user's turn and its own, at temperature 1.

    Args:
      model: the target.
      params: its weights.
      opening: the chat template up to where the user speaks.
      closing: from where the user has spoken to where the assistant does; its first token ends a turn.
      capacity: tokens of a conversation, the opening included.
      seeds: [B] uint32, one for each.
      special: tokens that must not stand inside a user's turn.

    Returns:
      Conversations whose first turn ended as it should, with a response of at least one token.
    """
    sampling = make_sampling(len(seeds), temperature=1.0, seed=seeds)
    budget = capacity - 1 - len(opening)
    rows = _decode(model, params, [list(opening)] * len(seeds), max_tokens=budget, sampling=sampling)
    found = [split_turns(opening, closing, row.tokens, special) for row in rows if not row.failed]
    return [sequence for sequence in found if sequence is not None]


def split_turns(
    opening: Sequence[int], closing: Sequence[int], written: Sequence[int], special: Iterable[int]
) -> TokenSequence | None:
    """Finds the user's turn and the response in what was written after ``opening``; None if they aren't there."""
    written, closing = list(written), list(closing)
    if closing[0] not in written:
        return None
    end = written.index(closing[0])
    response = written[end + len(closing) :]
    if end < 2 or not response or written[end : end + len(closing)] != closing:
        return None
    if not set(written[:end]).isdisjoint(special):
        return None
    if closing[0] in response:
        response = response[: response.index(closing[0]) + 1]
    prompt = [*opening, *written[:end], *closing]
    return TokenSequence(np.array([*prompt, *response], np.int32), len(prompt), 1.0)


def prompts_of(sequences: Iterable[TokenSequence]) -> list[list[int]]:
    """The prompts, each once."""
    prompts = (tuple(s.tokens[: s.prompt_length].tolist()) for s in sequences)
    return [list(prompt) for prompt in dict.fromkeys(prompts)]


def answer_prompts(
    model: Model,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    capacity: int,
    temperature: float,
    seeds: np.ndarray,
    stop_tokens: Sequence[int],
) -> list[TokenSequence]:
    """Has the target answer prompts, up to ``capacity`` tokens with the prompt.

    When few rows are left they are cut where they stand: a text that is cut short is still the target's.
    """
    sampling = make_sampling(len(prompts), temperature=temperature, seed=seeds)
    budgets = [capacity - 1 - len(prompt) for prompt in prompts]
    rows = _decode(model, params, prompts, max_tokens=budgets, sampling=sampling, stop_tokens=stop_tokens)
    return [
        TokenSequence(np.array([*prompt, *row.tokens], np.int32), len(prompt), temperature)
        for prompt, row in zip(prompts, rows, strict=True)
        if row.tokens and not row.failed
    ]


def _decode(
    model: Model, params: Params, prompts: Sequence[Sequence[int]], *, max_tokens: int | list[int], **options: Any
) -> list[Generation]:
    budgets = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
    decoding = Decoding(model, params, prompts, max_tokens=budgets, **options)
    while not decoding.advance(_STRIDE):
        rows = decoding.rows()
        live = sum(
            not row.stopped and not row.failed and len(row.tokens) < budget
            for row, budget in zip(rows, budgets, strict=True)
        )
        if live <= _ENOUGH * len(prompts):
            break
    return decoding.rows()
