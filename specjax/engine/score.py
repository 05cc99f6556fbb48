"""Log-probabilities of text that is there already: the target's own, before the warp, teacher-forced."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Array, Cache, Logprobs, Model, Params

__all__ = ["Scorer"]

CHUNK = 64


class Scorer:
    """Scores one text at a time, in chunks of one compiled shape, with a cache of its own.

    Requests that ask for log-probabilities are scored when they are done: those that don't ask pay nothing.

    Args:
      target: the target.
      target_params: its weights.
      capacity: the longest text.
      num_top: how many of the likeliest tokens there can be asked for.
    """

    def __init__(self, target: Model, target_params: Params, capacity: int, num_top: int) -> None:
        self.num_top = min(num_top, target.vocab_size)
        self._score = partial(_score, target=target, num_top=self.num_top)
        self._params, self._capacity = target_params, capacity
        self._cache = target.init_cache(1, capacity)

    def __call__(self, prompt: Sequence[int], tokens: Sequence[int], num_top: int) -> Logprobs:
        """The log-probabilities of ``tokens`` after the prompt and each other, NumPy [N] and [N, num_top]."""
        text = np.asarray([*prompt, *tokens], np.int32)
        parts = []
        for start in range(0, len(text) - 1, CHUNK):
            block = np.zeros((3, 1, CHUNK), np.int32)
            fed, following = text[start:-1][:CHUNK], text[start + 1 :][:CHUNK]
            block[0, 0, : len(fed)], block[1, 0, : len(fed)] = fed, following
            block[2, 0] = np.where(np.arange(CHUNK) < len(fed), start + np.arange(CHUNK), self._capacity)
            self._cache, scores = self._score(self._cache, self._params, *block)
            if start + CHUNK >= len(prompt):
                parts.append(scores)
        if not parts:  # one token of prompt and none after it
            none = jnp.zeros((0, self.num_top))
            return Logprobs(none[:, 0], none[:, :num_top].astype(jnp.int32), none[:, :num_top])
        whole = jax.tree.map(lambda *x: np.concatenate(x), *jax.device_get(parts))
        first = (len(prompt) - 1) % CHUNK
        rows = slice(first, first + len(tokens))
        return Logprobs(whole.chosen[rows], whole.top_tokens[rows, :num_top], whole.top[rows, :num_top])


@partial(jax.jit, static_argnames=("target", "num_top"), donate_argnames="cache")
def _score(
    cache: Cache,
    params: Params,
    tokens: Array,
    following: Array,
    positions: Array,
    *,
    target: Model,
    num_top: int,
) -> tuple[Cache, Logprobs]:
    output = target.apply(params, tokens, cache, positions)
    log_probs = jax.nn.log_softmax(output.logits[0].astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(log_probs, following[0][:, None], axis=-1)[:, 0]
    top, top_tokens = jax.lax.top_k(log_probs, num_top)
    return output.cache, Logprobs(chosen, top_tokens, top)
