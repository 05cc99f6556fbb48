"""From logits to a token: addressed noise, the one warp, and the draw.

Target, draft and baseline all pass through :func:`warp`, so that "the target's distribution" means
the same thing everywhere, and every draw takes its key from :func:`keys_at`, so that it depends on
the request and the place in it, never on the batch around it.
"""

from __future__ import annotations

import enum

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.types import Address, Array, Key, SamplingParams

__all__ = ["Role", "keys_at", "make_sampling", "sample", "uniform", "warp"]


class Role(enum.IntEnum):
    """What a draw is for; two roles never share noise."""

    DRAFT = 0
    ACCEPT = 1
    SAMPLE = 2  # the token that a step ends with, and every token of plain decoding


def make_sampling(
    batch: int,
    *,
    temperature: float | np.ndarray | list[float] = 0.0,
    top_k: int | np.ndarray | list[int] = 0,
    top_p: float | np.ndarray | list[float] = 1.0,
    seed: int | np.ndarray | list[int] | None = None,
) -> SamplingParams:
    """Makes the sampling values of a batch from single values or one value a row.

    Args:
      batch: ``B``, the number of rows.
      temperature: at least 0; 0 is greedy.
      top_k: at least 0; the k likeliest tokens stay, ties with the last of them included; 0 keeps all.
      top_p: in (0, 1]; the smallest set of likeliest tokens with at least this mass stays, after top_k.
      seed: at least 0 and below 2**32. None gives row i the seed i; one number gives it to every row.

    Returns:
      :class:`SamplingParams` with arrays [B].

    Raises:
      ValueError: a value is out of its range, or a sequence isn't ``batch`` long.
    """

    def column(name: str, value: object, dtype: type, good: str, ok) -> Array:
        array = np.asarray(value)
        if array.ndim > 1 or (array.ndim == 1 and len(array) != batch):
            raise ValueError(f"{name} needs one value, or one for each of {batch} rows, not shape {array.shape}")
        if not bool(np.all(ok(array))):
            raise ValueError(f"{name} must be {good}, not {value}")
        return jnp.asarray(np.broadcast_to(array, (batch,)).astype(dtype))

    return SamplingParams(
        temperature=column("temperature", temperature, np.float32, "at least 0", lambda x: (x >= 0) & np.isfinite(x)),
        top_k=column("top_k", top_k, np.int32, "at least 0", lambda x: (x >= 0) & (x < 2**31)),
        top_p=column("top_p", top_p, np.float32, "in (0, 1]", lambda x: (x > 0) & (x <= 1)),
        seed=column(
            "seed",
            np.arange(batch) if seed is None else seed,
            np.uint32,
            "at least 0 and below 2**32",
            lambda x: (x >= 0) & (x < 2**32),
        ),
    )


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

    Args:
      keys: [...], each is consumed.
      logits: [..., V] float, unnormalised; -inf forbids a token.

    Returns:
      [...] int32.
    """
    chex.assert_equal_shape_prefix([keys, logits], keys.ndim)
    vocab_size = logits.shape[-1]
    # "high" spends two random words a value: with one, nothing rarer than 2**-23 is ever drawn.
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), logits.dtype, mode="high"))(keys.reshape(-1))
    return jnp.argmax(logits + noise.reshape(logits.shape), axis=-1).astype(jnp.int32)


def warp(logits: Array, sampling: SamplingParams) -> Array:
    """Turns a model's logits into those that tokens are drawn from.

    Temperature first, then top-k, then top-p over what top-k left (the order of vLLM). Greedy rows
    (temperature 0, or top_k 1) become one-hot at the argmax, the lowest id among equals, so that every
    rule treats them exactly and in the same batch as sampled rows.

    Args:
      logits: [B, T, V], any float dtype.
      sampling: one value a row.

    Returns:
      [B, T, V] float32 (float64 stays), with -inf at tokens that cannot be drawn.
    """
    chex.assert_rank(logits, 3)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    greedy = (sampling.temperature == 0) | (sampling.top_k == 1)
    temperature = jnp.where(greedy, 1, sampling.temperature).astype(logits.dtype)
    scaled = logits / temperature[:, None, None]

    top_k = jnp.where(greedy | (sampling.top_k == 0), logits.shape[-1], sampling.top_k)
    top_p = jnp.where(greedy, 1, sampling.top_p).astype(logits.dtype)
    # A batch without filters shouldn't pay for their searches.
    scaled = lax.cond(
        jnp.any(top_k < logits.shape[-1]),
        lambda x: _keep(x, jnp.ones_like(x), jnp.broadcast_to(top_k[:, None], x.shape[:2]).astype(x.dtype)),
        lambda x: x,
        scaled,
    )
    scaled = lax.cond(jnp.any(top_p < 1), lambda x: _top_p(x, top_p), lambda x: x, scaled)

    best = jnp.argmax(logits, axis=-1)
    tokens = lax.broadcasted_iota(best.dtype, logits.shape, 2)
    one_hot = jnp.where(tokens == best[..., None], 0, -jnp.inf).astype(logits.dtype)
    return jnp.where(greedy[:, None, None], one_hot, scaled)


def _top_p(logits: Array, top_p: Array) -> Array:
    mass = jax.nn.softmax(logits, axis=-1)
    kept = _keep(logits, mass, top_p[:, None] * jnp.sum(mass, axis=-1))
    return jnp.where(top_p[:, None, None] < 1, kept, logits)


def _keep(logits: Array, weights: Array, goal: Array) -> Array:
    """Keeps the likeliest tokens, as few as together weigh ``goal`` [B, T], and masks the rest.

    The threshold is searched bit by bit over the floats' order: exact, no sort, one pass a bit.
    """
    bits = jnp.finfo(logits.dtype).bits
    integer = jnp.dtype(f"int{bits}")
    raw = lax.bitcast_convert_type(logits, integer)
    # Negative floats order backwards as integers: flipping all but their sign mends that.
    order = raw ^ (lax.shift_right_arithmetic(raw, integer.type(bits - 1)) & jnp.iinfo(integer).max)

    def narrow(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # weight(order >= low) reaches the goal, weight(order >= high) does not
        middle = (low & high) + lax.shift_right_arithmetic(low ^ high, integer.type(1))  # no overflow
        reached = jnp.sum(jnp.where(order >= middle[..., None], weights, 0), axis=-1) >= goal
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    # Where rounding keeps the whole vocabulary's weight below the goal, the lowest token bounds it.
    low = jnp.min(order, axis=-1)
    high = jnp.max(order, axis=-1) + 1
    low, _ = lax.fori_loop(0, bits, narrow, (low, high))
    return jnp.where(order >= low[..., None], logits, -jnp.inf)
