"""Log-probabilities of text that is there already: the target's own, before the warp, teacher-forced."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specjax.engine.programs import Programs
from specjax.types import Logprobs

__all__ = ["Scorer"]

CHUNK = 64


class Scorer:
    """Scores one text at a time, in chunks of one compiled shape, with a cache of its own.

    Requests that ask for log-probabilities are scored when they are done: those that don't ask pay nothing.

    Args:
      programs: where :meth:`~specjax.engine.programs.Programs.score` is.
      capacity: the longest text.
      num_top: how many of the likeliest tokens there can be asked for.
    """

    def __init__(self, programs: Programs, capacity: int, num_top: int) -> None:
        self.num_top, self._capacity = num_top, capacity
        self._score = partial(programs.score, num_top=num_top)
        self._cache = programs.empty_score_cache()

    def __call__(self, prompt: Sequence[int], tokens: Sequence[int], num_top: int) -> Logprobs:
        """The log-probabilities of ``tokens`` after the prompt and each other, NumPy [N] and [N, num_top]."""
        text = np.asarray([*prompt, *tokens], np.int32)
        parts = []
        for start in range(0, len(text) - 1, CHUNK):
            block = np.zeros((3, 1, CHUNK), np.int32)
            fed, following = text[start:-1][:CHUNK], text[start + 1 :][:CHUNK]
            block[0, 0, : len(fed)], block[1, 0, : len(fed)] = fed, following
            block[2, 0] = np.where(np.arange(CHUNK) < len(fed), start + np.arange(CHUNK), self._capacity)
            self._cache, scores = self._score(self._cache, *block)
            if start + CHUNK >= len(prompt):
                parts.append(scores)
        if not parts:  # one token of prompt and none after it
            none = jnp.zeros((0, self.num_top))
            return Logprobs(none[:, 0], none[:, :num_top].astype(jnp.int32), none[:, :num_top])
        whole = jax.tree.map(lambda *x: np.concatenate(x), *jax.device_get(parts))
        first = (len(prompt) - 1) % CHUNK
        rows = slice(first, first + len(tokens))
        return Logprobs(whole.chosen[rows], whole.top_tokens[rows, :num_top], whole.top[rows, :num_top])
