"""Language models with known laws, and plain NumPy for what they and the sampling options should give.

Both keep a cache by the contract of ``specjax.types.Model`` and answer out of it, so a cache that is
filled wrongly, rolled back wrongly or read past its length changes what they say; a slot that was read
but never written makes the logits NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from specjax.types import ModelOutput


@dataclasses.dataclass(frozen=True)
class TableModel:
    """``params`` is a table [V, V, V] of logits: [last but one, last, next]. Before the first stands 0."""

    vocab_size: int
    context_length: int = 1 << 20

    def init_cache(self, batch: int, capacity: int):
        return jnp.full((batch, capacity), -1, jnp.int32)

    def apply(self, params, tokens, cache, positions):
        rows = jnp.arange(tokens.shape[0])[:, None]
        cache = cache.at[rows, positions].set(tokens, mode="drop")
        before = jnp.where(positions > 0, cache[rows, positions - 1], 0)
        logits = params[before, tokens]
        # A slot that nobody wrote must be seen to be wrong.
        logits = jnp.where((before < 0)[..., None], jnp.nan, logits)
        return ModelOutput(logits, jnp.stack([before, tokens], -1).astype(jnp.float32), cache)


@dataclasses.dataclass(frozen=True)
class HistoryModel:
    """``params`` is a table [M, V] of logits, looked up by a hash of every token up to the newest.

    Attention's worst case: one wrong slot anywhere in a row's past changes the answer.
    """

    vocab_size: int
    context_length: int = 1 << 20

    def init_cache(self, batch: int, capacity: int):
        return jnp.full((batch, capacity), -1, jnp.int32)

    def apply(self, params, tokens, cache, positions):
        rows = jnp.arange(tokens.shape[0])[:, None]
        cache = cache.at[rows, positions].set(tokens, mode="drop")
        slots = jnp.arange(cache.shape[1])[None, None]
        seen = slots <= positions[..., None]
        weighted = jnp.where(seen, (cache[:, None] + 1) * (2 * slots + 1), 0)
        logits = params[jnp.sum(weighted, axis=-1) % params.shape[0]]
        unwritten = jnp.any(seen & (cache[:, None] < 0), axis=-1)
        return ModelOutput(jnp.where(unwritten[..., None], jnp.nan, logits), None, cache)


def history_entry(context: Sequence[int], size: int = 997) -> int:
    """Where in its table a HistoryModel looks after ``context``."""
    return sum((token + 1) * (2 * slot + 1) for slot, token in enumerate(context)) % size


def history_logits(table: np.ndarray, context: Sequence[int]) -> np.ndarray:
    """What HistoryModel says after ``context``."""
    return table[history_entry(context, len(table))]


def table_logits(table: np.ndarray, context: Sequence[int]) -> np.ndarray:
    """What TableModel says after ``context``."""
    return table[(0, *context)[-2], context[-1]]


def greedy_continuation(
    logits_after: Callable[[np.ndarray, Sequence[int]], np.ndarray],
    table: np.ndarray,
    prompt: Sequence[int],
    num_tokens: int,
    stop_tokens: Sequence[int] = (),
) -> list[int]:
    """Plain greedy decoding in a loop, a stop token included."""
    context = list(prompt)
    while len(context) < len(prompt) + num_tokens:
        context.append(int(np.argmax(logits_after(table, context))))
        if context[-1] in stop_tokens:
            break
    return context[len(prompt) :]


def random_table(seed: int, vocab_size: int, scale: float = 2.0) -> np.ndarray:
    """Skewed random logits for a TableModel."""
    return np.random.default_rng(seed).normal(0, scale, (vocab_size,) * 3).astype(np.float32)


def random_history(seed: int, vocab_size: int, size: int = 997, scale: float = 2.0) -> np.ndarray:
    """Skewed random logits for a HistoryModel."""
    return np.random.default_rng(seed).normal(0, scale, (size, vocab_size)).astype(np.float32)


def constant_table(probs: Sequence[float]) -> np.ndarray:
    """The logits of a TableModel that says ``probs`` everywhere."""
    with np.errstate(divide="ignore"):
        return np.broadcast_to(np.log(probs), (len(probs),) * 3).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def warp(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The warp of one position in float64, with loops: probabilities [V]. Equals stay or go together."""
    vocab_size = len(logits)
    if temperature == 0 or top_k == 1:
        return np.eye(vocab_size)[int(np.argmax(logits))]
    # The options are float32 in the library whatever the logits are.
    temperature, top_p, min_p = (float(np.float32(x)) for x in (temperature, top_p, min_p))
    scaled = np.asarray(logits, np.float64) / temperature
    order = sorted(range(vocab_size), key=lambda token: -scaled[token])
    likely = softmax(scaled) >= min_p * softmax(scaled).max()
    order = [token for token in order if likely[token]]
    if 0 < top_k < len(order):
        last = scaled[order[top_k - 1]]
        order = [token for token in order if scaled[token] >= last]
    probs = np.zeros(vocab_size)
    probs[order] = softmax(scaled[order])
    if top_p < 1:
        mass, nucleus = 0.0, []
        for token in order:
            if mass >= top_p and probs[token] < probs[nucleus[-1]]:
                break
            nucleus.append(token)
            mass += probs[token]
        probs[[token for token in order if token not in nucleus]] = 0
    return probs / probs.sum()


def edit(
    logits: np.ndarray,
    context: Sequence[int],
    prompt_length: int,
    *,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
) -> np.ndarray:
    """Bias and penalties of one position in float64, with loops: logits [V] after ``context``."""
    edited = np.array(logits, np.float64)
    for token, bias in (logit_bias or {}).items():
        edited[token] += np.float32(bias)
    decoded = list(context[prompt_length:])
    for token in range(len(edited)):
        if token in context:
            penalty = float(np.float32(repetition_penalty))
            edited[token] = edited[token] / penalty if edited[token] > 0 else edited[token] * penalty
        edited[token] -= decoded.count(token) * float(np.float32(frequency_penalty))
        if token in decoded:
            edited[token] -= float(np.float32(presence_penalty))
    return edited


WARPS = {"temperature", "top_k", "top_p", "min_p"}


def next_probs(table: np.ndarray, context: Sequence[int], prompt_length: int, **options) -> np.ndarray:
    """What is drawn from after ``context``, [V], under any sampling options."""
    edits = {name: value for name, value in options.items() if name not in WARPS}
    warps = {name: value for name, value in options.items() if name in WARPS}
    return warp(edit(table_logits(table, context), context, prompt_length, **edits), **warps)


def sequence_law(table: np.ndarray, prompt: Sequence[int], num_tokens: int, **options) -> np.ndarray:
    """Probabilities [V] * num_tokens of what plain decoding says after ``prompt``, by enumeration."""
    law = {(): 1.0}
    for _ in range(num_tokens):
        law = {
            (*text, token): chance * probability
            for text, chance in law.items()
            for token, probability in enumerate(next_probs(table, [*prompt, *text], len(prompt), **options))
        }
    return np.reshape(list(law.values()), (len(table),) * num_tokens)
