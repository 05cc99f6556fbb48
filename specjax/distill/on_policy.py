"""The draft's own responses, scored by the target like all others.

Where a draft goes wrong it reads its own words, which the target's texts never show it (Zhou et al. 2023,
"DistillSpec", 2310.08461; Agarwal et al. 2023, "GKD", 2306.13649).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specjax.distill.selfwrite import answer_prompts, row_seeds
from specjax.distill.sequences import TokenSequence, read_shards, shard_path, write_shard
from specjax.drafters.narrow import widen
from specjax.types import Array, Cache, Model, ModelOutput, Params

__all__ = ["NarrowSpeaker", "rewrite_shards"]


@dataclasses.dataclass(frozen=True)
class NarrowSpeaker:
    """A narrow model that speaks for itself: what it can't say has logits of -inf."""

    model: Model

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.model.vocab_size

    @property
    def context_length(self) -> int:
        """Of the model."""
        return self.model.context_length

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """The model's."""
        return self.model.init_cache(batch, capacity)

    def apply(self, params: Params, tokens: Array, cache: Cache, positions: Array) -> ModelOutput:
        """See :class:`specjax.types.Model`; ``params["vocabulary"]`` lists the tokens that it scores."""
        output = self.model.apply(params, tokens, cache, positions)
        return dataclasses.replace(output, logits=widen(output.logits, params["vocabulary"], self.vocab_size))


def rewrite_shards(
    folder: Path,
    shards: Sequence[Path],
    speaker: Model,
    params: Params,
    *,
    rate: float,
    capacity: int,
    batch: int,
    seed: int,
    stop_tokens: Sequence[int],
) -> list[Path]:
    """Has a draft answer the prompts of some of the sampled responses anew, at temperature 1.

    Shard i is a function of the shard that it is made from, the draft, the rate and the seed. The draft's
    responses bear the temperature NaN, so that nothing is predicted from them.

    Args:
      folder: of this draft and this rate alone; shards that lie there stay.
      shards: by :func:`specjax.distill.selfwrite.fill_shards`.
      speaker: the draft, as a model of the target's vocabulary.
      params: its weights.
      rate: share of the sampled responses.
      capacity: tokens of a sequence at most; prompts of more than half of that keep the target's response.
      batch: rows decoded at once.
      seed: of everything.
      stop_tokens: ids that end a response.

    Returns:
      The shards, in order.
    """
    made = []
    for index, source in enumerate(shards):
        path = shard_path(folder, index)
        made.append(path)
        if path.exists():
            continue
        rows = read_shards([source])
        chance = np.random.default_rng(row_seeds(seed, index, 3, count=4)).random(len(rows))
        chosen = [
            place
            for place, row in enumerate(rows)
            if row.temperature > 0 and row.prompt_length <= capacity // 2 and chance[place] < rate
        ]
        said: list[TokenSequence] = []
        for begin in range(0, len(chosen), batch):
            prompts = [
                rows[i].tokens[: rows[i].prompt_length].tolist() for i in chosen[begin : begin + batch]
            ]
            said += answer_prompts(
                speaker,
                params,
                (prompts * batch)[:batch],  # one compiled shape
                capacity=capacity,
                temperature=1.0,
                seeds=row_seeds(seed, index, 4, begin, count=batch),
                stop_tokens=stop_tokens,
            )[: len(prompts)]
        kept = [row for place, row in enumerate(rows) if place not in set(chosen)]
        write_shard(path, [*kept, *(dataclasses.replace(row, temperature=math.nan) for row in said)])
    return made
