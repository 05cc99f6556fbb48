"""From logits to a token: addressed noise, the one warp, and the draw.

Target, draft and baseline all pass through :func:`warp`, so that "the target's distribution" means
the same thing everywhere, and every draw takes its key from :func:`keys_at`, so that it depends on
the request and the place in it, never on the batch around it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import ArrayLike

from specjax.types import Address, Array, Context, Edits, Filters, Key, SamplingParams

__all__ = ["Role", "argmax", "is_token", "keys_at", "likeliest", "make_sampling", "sample", "uniform", "warp"]


_MOST = 1e9
"""The largest temperature or penalty: beyond it float32 overflows, and nothing is left of the logits."""


class Role(enum.IntEnum):
    """What a draw is for; two roles never share noise."""

    DRAFT = 0
    ACCEPT = 1
    SAMPLE = 2  # the token that a step ends with, and every token of plain decoding


def make_sampling(
    batch: int,
    *,
    temperature: ArrayLike = 0.0,
    top_k: ArrayLike = 0,
    top_p: ArrayLike = 1.0,
    min_p: ArrayLike = 0.0,
    presence_penalty: ArrayLike = 0.0,
    frequency_penalty: ArrayLike = 0.0,
    repetition_penalty: ArrayLike = 1.0,
    min_tokens: ArrayLike = 0,
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]] = (),
    seed: ArrayLike | None = None,
    num_biases: int | None = None,
) -> SamplingParams:
    """Makes the sampling values of a batch from single values or one value a row.

    Args:
      batch: ``B``, the number of rows.
      temperature: at least 0; 0 is greedy.
      top_k: at least 0; the k likeliest tokens stay, ties with the last of them included; 0 keeps all.
      top_p: in (0, 1]; the smallest set of likeliest tokens with at least this mass stays, after top_k.
      min_p: in [0, 1]; tokens at least this share as likely as the likeliest stay.
      presence_penalty: taken off the logit of every token that was decoded before.
      frequency_penalty: the same for each time that it was.
      repetition_penalty: above 0; divides positive and multiplies negative logits of tokens that stand in
        the prompt or were decoded.
      min_tokens: at least 0; stop tokens can't come before so many tokens.
      logit_bias: token ids to what is added to their logits, for all rows or a mapping for each.
      seed: at least 0 and below 2**32. None gives row i the seed i; one number gives it to every row.
      num_biases: makes filters and edits whether they are needed or not, with room for so many biases a
        row: all batches are then of one kind. A batch of the plain kind compiles to less.

    Returns:
      :class:`SamplingParams` with arrays [B], without filters or edits if no row has any. Biases are
      padded to the next power of two, 16 at least, so that their number compiles few programs.

    Raises:
      ValueError: a value is out of its range, or a sequence isn't ``batch`` long.
    """

    def column(name: str, value: ArrayLike, dtype: type, good: str, low: float, high: float = _MOST) -> Any:
        try:
            array = np.asarray(value, np.float64)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{name} must be {good}, not {value!s}") from None
        if array.ndim > 1 or (array.ndim == 1 and len(array) != batch):
            raise ValueError(
                f"{name} needs one value, or one for each of {batch} rows, not shape {array.shape}"
            )
        whole = np.issubdtype(dtype, np.floating) or bool(np.all(array == np.floor(array)))
        if not whole or not bool(np.all((array >= low) & (array <= high) & np.isfinite(array))):
            raise ValueError(f"{name} must be {good}, not {value!s}")
        return np.broadcast_to(array, (batch,)).astype(dtype)

    tiny = float(np.finfo(np.float32).tiny)
    biases = [logit_bias] * batch if isinstance(logit_bias, Mapping) else list(logit_bias) or [{}] * batch
    if len(biases) != batch:
        raise ValueError(f"logit_bias needs one mapping, or one for each of {batch} rows, not {len(biases)}")
    widest = max(map(len, biases), default=0)
    room = (max(16, 1 << (widest - 1).bit_length()) if widest else 0) if num_biases is None else num_biases
    if widest > room:
        raise ValueError(f"logit_bias has {widest} tokens, more than {room}")
    bias_tokens: Any = np.full((batch, room), -1, np.int32)
    bias_values: Any = np.zeros(bias_tokens.shape, np.float32)
    for row, bias in enumerate(biases):
        for token, value in bias.items():
            if not 0 <= token < 2**31 or not abs(value) <= _MOST:
                raise ValueError(
                    f"logit_bias must map token ids to numbers in -1e9 .. 1e9, not {token} to {value}"
                )
        bias_tokens[row, : len(bias)] = list(bias.keys())
        bias_values[row, : len(bias)] = list(bias.values())
    filters: Any = Filters(
        min_p=column("min_p", min_p, np.float32, "in [0, 1]", 0, 1),
        top_k=column("top_k", top_k, np.int32, "at least 0", 0, 2**31 - 1),
        top_p=column("top_p", top_p, np.float32, "in (0, 1]", tiny, 1),
    )
    edits: Any = Edits(
        bias_tokens=bias_tokens,
        bias_values=bias_values,
        presence_penalty=column("presence_penalty", presence_penalty, np.float32, "in -1e9 .. 1e9", -_MOST),
        frequency_penalty=column(
            "frequency_penalty", frequency_penalty, np.float32, "in -1e9 .. 1e9", -_MOST
        ),
        repetition_penalty=column("repetition_penalty", repetition_penalty, np.float32, "above 0", tiny),
        min_tokens=column("min_tokens", min_tokens, np.int32, "at least 0", 0, 2**31 - 1),
    )
    seeds = np.arange(batch) if seed is None else seed
    temperatures: Any = column("temperature", temperature, np.float32, "at least 0", 0)
    if num_biases is None:
        if not _any_differs(filters, min_p=0, top_k=0, top_p=1):
            filters = None
        penalties = dict(presence_penalty=0, frequency_penalty=0, repetition_penalty=1, min_tokens=0)
        if not widest and not _any_differs(edits, **penalties):
            edits = None
    top_k_column = np.broadcast_to(np.asarray(top_k), (batch,))
    sampling: Any = SamplingParams(
        # One token that stays is the likeliest.
        temperature=temperatures * (np.asarray(top_k_column) != 1).astype(np.float32),
        seed=column("seed", seeds, np.uint32, "at least 0 and below 2**32", 0, 2**32 - 1),
        filters=filters,
        edits=edits,
    )
    return jax.tree.map(jnp.asarray, sampling)


def _any_differs(values: Edits | Filters, **neutral: float) -> bool:
    return any(bool(np.any(getattr(values, name) != value)) for name, value in neutral.items())


def keys_at(address: Address, offset: Array, role: Role) -> Key:
    """The key of each row's draw at (seed, start, offset, role).

    Args:
      address: seed and start, [B] each.
      offset: [B] or [B, N] int32, the place in the block.
      role: what the draw is for.

    Returns:
      Typed keys of ``offset``'s shape.
    """
    chex.assert_rank([address.seed, address.start], 1)

    def one(seed: Array, start: Array, offset: Array) -> Key:
        key = jax.random.fold_in(jax.random.key(seed), start)
        return jax.random.fold_in(key, offset * len(Role) + role)

    if offset.ndim == 2:
        one = jax.vmap(one, in_axes=(None, None, 0))
    return jax.vmap(one)(address.seed, address.start, offset)


def uniform(keys: Key) -> Array:
    """Uniforms in [0, 1), one for each key, float32 of the keys' shape."""
    return jax.vmap(jax.random.uniform)(keys.reshape(-1)).reshape(keys.shape)


def sample(keys: Key, logits: Array) -> Array:
    """Draws one token a row: argmax(logits + g), g standard Gumbel (Gumbel 1954).

    Where no row has a choice (greedy ones have none), no noise is made: it would cost more than all else.

    Args:
      keys: [...], each is consumed.
      logits: [..., V] float, unnormalised; -inf forbids a token.

    Returns:
      [...] int32.
    """
    chex.assert_equal_shape_prefix([keys, logits], keys.ndim)
    vocab_size = logits.shape[-1]

    def draw(logits: Array) -> Array:
        # "high" spends two random words a value: with one, nothing rarer than 2**-23 is ever drawn.
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), logits.dtype, mode="high"))(
            keys.reshape(-1)
        )
        return argmax(logits + noise.reshape(logits.shape))

    choices = jnp.sum(logits > -jnp.inf, axis=-1)
    return lax.cond(jnp.any(choices > 1), draw, argmax, logits)


def argmax(logits: Array) -> Array:
    """The likeliest token, the lowest id among equals: [..., V] float -> [...] int32.

    As two plain reductions, which XLA vectorises on a CPU, where it walks through ``jnp.argmax`` (and all
    that is fused into it) one number at a time: a draw takes 1.0 ms in place of 2.6 at V = 49,152.
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    # Only a row with a NaN has no maximum; it still gets an id within the vocabulary.
    return jnp.min(jnp.where(logits == best, ids, logits.shape[-1] - 1), axis=-1)


def likeliest(logits: Array, count: int) -> tuple[Array, Array]:
    """The likeliest tokens in falling order, the lowest id among equals.

    First within groups, then among what these give: a vocabulary that is spread over devices need not be
    gathered for it.

    Args:
      logits: [..., V] float.
      count: how many, at most V.

    Returns:
      Their logits and ids, [..., count] each.
    """
    vocab_size = logits.shape[-1]
    groups = math.gcd(vocab_size, 64)
    size = vocab_size // groups
    if not 0 < count <= size:
        values, ids = lax.top_k(logits, count)
        return values, ids
    best, ids = lax.top_k(logits.reshape(*logits.shape[:-1], groups, size), count)
    ids = ids + size * lax.broadcasted_iota(ids.dtype, ids.shape, ids.ndim - 2)
    best, ids = (x.reshape(*logits.shape[:-1], groups * count) for x in (best, ids))
    top, place = lax.top_k(best, count)
    return top, jnp.take_along_axis(ids, place, axis=-1)


def is_token(tokens: Array, shape: tuple[int, ...]) -> Array:
    """Where the vocabulary's index is ``tokens`` [...], as booleans of ``shape`` [..., V]."""
    return lax.broadcasted_iota(tokens.dtype, shape, len(shape) - 1) == tokens[..., None]


def warp(logits: Array, sampling: SamplingParams, context: Context) -> Array:
    """Turns a model's logits into those that tokens are drawn from.

    In vLLM's order: bias, penalties, what is forbidden (stop tokens before min_tokens, the context's
    mask), temperature, min-p, top-k, and top-p over what these left. Greedy rows (temperature 0; top_k 1
    is made that) become one-hot at the argmax, the lowest id among equals, so that every rule treats them
    exactly and in the same batch as sampled rows.

    Args:
      logits: [B, T, V], any float dtype; row t scores the token at position length + t, and what it may
        depend on are the tokens before that, those past ``length`` (drafted ones) included.
      sampling: one value a row.
      context: the text so far.

    Returns:
      [B, T, V] float32 (float64 stays): the largest of each row is 0, and what can't be drawn is -inf. A
      row without a law (a NaN or an infinity in it, or every token forbidden) is NaN.
    """
    chex.assert_rank(logits, 3)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if sampling.edits is not None:
        edits = sampling.edits
        logits = lax.cond(_any_edit(edits), lambda x: _edit(x, edits, context), lambda x: x, logits)
    if context.allowed is not None:
        logits = jnp.where(context.allowed(context, logits.shape[1]), logits, -jnp.inf)

    # Below the smallest normal float a CPU may take a number for 0, and divide by it.
    greedy = sampling.temperature < jnp.finfo(jnp.float32).tiny
    # A factor, not a divisor: XLA recomputes a product where it is read, but keeps a quotient in memory.
    factor = 1 / jnp.where(greedy, 1, sampling.temperature).astype(logits.dtype)
    # The best is taken off before, so that the smallest temperature can't overflow it.
    largest = jnp.max(logits, axis=-1, keepdims=True)
    scaled = (logits - largest) * factor[:, None, None]
    if sampling.filters is not None:
        scaled = _filter(scaled, sampling.filters)

    # A batch without a greedy row shouldn't look for its argmax.
    best = lax.cond(jnp.any(greedy), argmax, lambda x: jnp.zeros(x.shape[:2], jnp.int32), logits)
    number = logits.dtype.type
    one_hot = jnp.where(is_token(best, logits.shape), number(0), number(-jnp.inf))
    one_hot = jnp.where(jnp.isfinite(largest), one_hot, number(jnp.nan))
    return jnp.where(greedy[:, None, None], one_hot, scaled)


def _any_edit(edits: Edits) -> Array:
    """Whether any row has one that is not neutral."""
    changes = (
        edits.bias_tokens >= 0,
        edits.presence_penalty != 0,
        edits.frequency_penalty != 0,
        edits.repetition_penalty != 1,
        edits.min_tokens > 0,
    )
    return jnp.any(jnp.stack([jnp.any(change) for change in changes]))


def _edit(logits: Array, edits: Edits, context: Context) -> Array:
    """Bias, penalties and min_tokens: what changes the argmax too."""
    batch, count, vocab_size = logits.shape
    rows = jnp.arange(batch)[:, None]
    bias = jnp.zeros((batch, vocab_size), logits.dtype)
    # Filler is sent past the end, where a scatter drops it.
    ids = jnp.where(edits.bias_tokens < 0, vocab_size, edits.bias_tokens)
    bias = bias.at[rows, ids].add(edits.bias_values.astype(logits.dtype), mode="drop")
    logits = logits + bias[:, None]

    slots = jnp.arange(context.tokens.shape[1])[None]
    given = slots < context.prompt_length[:, None]
    decoded = (slots < context.length[:, None]) & ~given
    none = jnp.zeros((batch, vocab_size), jnp.int32)
    in_prompt = none.at[rows, context.tokens].max(given.astype(jnp.int32), mode="drop")
    counts = none.at[rows, context.tokens].add(decoded.astype(jnp.int32), mode="drop")
    counts = jnp.broadcast_to(counts[:, None], logits.shape)
    place = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    for i in range(count - 1):  # a drafted token counts for the positions after it
        token = jnp.take_along_axis(context.tokens, context.length[:, None] + i, axis=1, mode="clip")
        counts = counts + (is_token(token, logits.shape) & (place > i))
    seen = (counts > 0) | (in_prompt > 0)[:, None]

    def each(value: Array) -> Array:
        return value.astype(logits.dtype)[:, None, None]

    repetition = each(edits.repetition_penalty)
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - each(edits.frequency_penalty) * counts.astype(logits.dtype)
    logits = logits - each(edits.presence_penalty) * (counts > 0).astype(logits.dtype)

    position = context.length[:, None] + jnp.arange(count)[None] - context.prompt_length[:, None]
    early = position < edits.min_tokens[:, None]
    is_stop = none.at[rows, jnp.where(context.stop_tokens < 0, vocab_size, context.stop_tokens)].set(
        1, mode="drop"
    )
    return jnp.where(early[:, :, None] & (is_stop > 0)[:, None], -jnp.inf, logits)


def _filter(logits: Array, filters: Filters) -> Array:
    """Min-p, top-k and top-p, of logits whose largest is 0."""
    min_p, top_k, top_p = (x[:, None, None] for x in (filters.min_p, filters.top_k, filters.top_p))
    logits = jnp.where(logits < jnp.log(min_p).astype(logits.dtype), -jnp.inf, logits)

    vocab_size = logits.shape[-1]
    # Asked for while running, since one search costs as many passes as a number has bits.
    logits = lax.cond(
        jnp.any(top_k > 0),
        lambda x: _keep(
            x,
            lambda x: jnp.ones_like(x),
            jnp.where(top_k == 0, vocab_size, jnp.minimum(top_k, vocab_size))[..., 0].astype(x.dtype),
        ),
        lambda x: x,
        logits,
    )
    goal = top_p[..., 0].astype(logits.dtype) * jnp.sum(jnp.exp(logits), axis=-1)
    kept = lax.cond(jnp.any(top_p < 1), lambda x: _keep(x, jnp.exp, goal), lambda x: x, logits)
    return jnp.where(top_p < 1, kept, logits)


def _keep(logits: Array, weigh: Callable[[Array], Array], goal: Array) -> Array:
    """Keeps the likeliest tokens, as few as together weigh ``goal`` [B, T] or [B, 1], and masks the rest.

    The threshold is searched bit by bit over the floats' order: exact, no sort, one pass a bit.
    """
    bits = jnp.finfo(logits.dtype).bits
    integer = jnp.dtype(f"int{bits}")
    raw = lax.bitcast_convert_type(logits, integer)
    # Negative floats order backwards as integers: flipping all but their sign mends that.
    order = raw ^ (lax.shift_right_arithmetic(raw, integer.type(bits - 1)) & jnp.iinfo(integer).max)
    weights = weigh(logits)

    def narrow(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # weight(order >= low) reaches the goal, weight(order >= high) does not
        middle = (low & high) + lax.shift_right_arithmetic(low ^ high, integer.type(1))  # no overflow
        reached = jnp.sum(jnp.where(order >= middle[..., None], weights, 0), axis=-1) >= goal
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    # Where rounding keeps the whole vocabulary's weight below the goal, the lowest token bounds it.
    low = jnp.min(order, axis=-1)
    high = jnp.max(order, axis=-1) + 1
    low, _ = lax.fori_loop(0, bits, narrow, (low, high))
    return jnp.where(order >= low[..., None], logits, -jnp.inf)
