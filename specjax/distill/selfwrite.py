"""Data from nothing but the target: it writes conversations, and answers its own prompts greedily.

A chat model that is given the opening of a user's turn writes what a user might say, ends the turn and goes
on as the assistant: one pass of plain sampling gives prompts and responses at temperature 1, all of it the
target's own law. So no corpus is needed (compare Zhou et al. 2023, "DistillSpec", 2310.08461: a target's
own responses are what transfers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.distill.sequences import TokenSequence, read_shards, shard_path, write_shard
from specjax.generate import Decoding, Generation
from specjax.sampling import make_sampling
from specjax.types import Model, Params

__all__ = [
    "answer_prompts",
    "fill_shards",
    "prompts_of",
    "row_seeds",
    "split_turns",
    "write_conversations",
]

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
    """Finds the user's turn and the response in what was written after ``opening``, or None."""
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
    model: Model,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | list[int],
    **options: Any,
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


def fill_shards(
    folder: Path,
    model: Model,
    params: Params,
    opening: Sequence[int],
    closing: Sequence[int],
    *,
    num_tokens: int,
    capacity: int,
    batch: int,
    seed: int,
    special: Iterable[int],
    stop_tokens: Sequence[int],
    given: Sequence[Sequence[int]] = (),
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Writes shards of half sampled, half greedy responses until a folder has enough of them.

    What is there already stays, so a run that was killed goes on with the next shard: shard i is a function
    of the seed and i alone.

    Args:
      folder: where the shards go.
      model: the target.
      params: its weights.
      opening: see :func:`write_conversations`.
      closing: likewise.
      num_tokens: tokens of responses that are enough.
      capacity: tokens of a sequence at most; prompts of more than half of that aren't answered.
      batch: rows decoded at once.
      seed: of everything.
      special: see :func:`write_conversations`.
      stop_tokens: ids that end a response.
      given: prompts to answer, in order, instead of those that the target writes.
      say: told about progress, one line at a time.

    Returns:
      The shards, in order.

    Raises:
      ValueError: the target writes no turn that ends as its chat template says.
    """
    shards: list[Path] = []
    special, total = frozenset(special), 0

    def answer(prompts: list[list[int]], temperature: float, seeds: np.ndarray) -> list[TokenSequence]:
        rows = (prompts * batch)[:batch]  # one compiled shape
        answers = answer_prompts(
            model,
            params,
            rows,
            capacity=capacity,
            temperature=temperature,
            seeds=seeds,
            stop_tokens=stop_tokens,
        )
        return answers[: len(prompts)]

    while total < num_tokens:
        index = len(shards)
        path = shard_path(folder, index)
        if not path.exists():
            seeds = [row_seeds(seed, index, phase, count=batch) for phase in (1, 2)]
            if given:
                own = given[index * batch : (index + 1) * batch]
                prompts = [list(prompt) for prompt in own if len(prompt) <= capacity // 2]
                sampled = answer(prompts, 1.0, seeds[0]) if prompts else []
            else:
                sampled = write_conversations(
                    model, params, opening, closing, capacity=capacity, seeds=seeds[0], special=special
                )
                prompts = [prompt for prompt in prompts_of(sampled) if len(prompt) <= capacity // 2]
            if given and not own:
                break  # every prompt has been answered
            greedy = answer(prompts, 0.0, seeds[1]) if prompts else []
            write_shard(path, [*sampled, *greedy])
        shards.append(path)
        found = sum(len(s.tokens) - s.prompt_length for s in read_shards([path]))
        if not found:
            raise ValueError(f"{path} came out empty: the target writes no conversations, give it prompts")
        total += found
        say(f"data: {total} of {num_tokens} tokens in {len(shards)} shards")
    return shards
