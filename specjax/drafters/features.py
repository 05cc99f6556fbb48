"""A head on the target's own states as the draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from specjax.drafters.model import CATCH_UP
from specjax.drafters.narrow import draw, widen
from specjax.rows import append, put
from specjax.types import Array, Cache, Context, Draft, Key, Params, SamplingParams, pytree

__all__ = ["FeatureDraftState", "FeatureDrafter", "FeatureModel"]

Carry = tuple[Array, Array, Cache, Context]  # the newest token [B], the guess before it; cache; rows
Extended = tuple[Carry, tuple[Array, Array]]  # with a token and the logits that it was drawn from


class FeatureModel(Protocol):
    """What guesses the target's states; hashable by value, like models."""

    @property
    def feature_width(self) -> int:
        """F."""
        ...

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Makes an empty cache for ``batch`` rows of ``capacity`` positions."""
        ...

    def apply(
        self, params: Params, tokens: Array, features: Array, cache: Cache, positions: Array
    ) -> tuple[Array, Cache]:
        """Guesses the target's states [B, T, F] at ``positions``, from the tokens [B, T] there and the
        states [B, T, F] at the positions *before* these, the target's own or guesses; 0 before the first.
        The cache keeps the contract of :class:`specjax.types.Model`."""
        ...

    def score(self, params: Params, features: Array) -> Array:
        """The logits [B, T, W] of the next token, over ``params["vocabulary"]`` [W]."""
        ...


@pytree
class FeatureDraftState:
    """What the head has read."""

    cache: Cache
    features: Array  # [B, S, F]: the target's states at positions 0 .. seen - 1
    seen: Array  # [B] int32
    known: Array  # [B] int32: positions from the first that the cache holds, read with the target's states


@dataclasses.dataclass(frozen=True)
class FeatureDrafter:
    """Drafts K tokens from the target's last states (Li et al. 2024, "EAGLE", 2401.15077).

    The first forward of a step reads the row's newest K + 1 tokens with the target's states, and replaces in
    the cache what the head had only guessed; the others feed the head its own guess and the token drawn. A
    row that has fallen further behind is caught up with before.
    """

    model: FeatureModel
    num_draft_tokens: int
    vocab_size: int  # the target's V
    wide_noise: bool = False  # see :func:`specjax.drafters.narrow.draw`

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be at least 1, not {self.num_draft_tokens}")

    @property
    def always_full(self) -> bool:
        """A head can always go on."""
        return True

    def init(self, batch: int, capacity: int) -> FeatureDraftState:
        """Nothing read."""
        features = jnp.zeros((batch, capacity, self.model.feature_width))
        # Two arrays, so that both can be donated.
        seen, known = (jnp.zeros(batch, jnp.int32) for _ in range(2))
        return FeatureDraftState(self.model.init_cache(batch, capacity), features, seen, known)

    def read(
        self,
        params: Params,
        state: FeatureDraftState,
        tokens: Array,
        positions: Array,
        length: Array,
        features: Array | None,
    ) -> FeatureDraftState:
        """Keeps the block's states, and reads the block; see :class:`specjax.types.Drafter`."""
        state = dataclasses.replace(state, features=_put(state.features, positions[:, 0], _given(features)))
        _, cache = self._feed(params, state, tokens, positions)
        end = positions[:, -1] + 1
        # The newest token's state isn't taken from here: the first step feeds that token to the target again.
        seen = jnp.minimum(end, jnp.maximum(length - 1, 0))
        return dataclasses.replace(state, cache=cache, seen=seen, known=jnp.minimum(end, length))

    def propose(
        self,
        params: Params,
        draft_keys: Callable[[Array], Key],
        state: FeatureDraftState,
        context: Context,
        sampling: SamplingParams,
    ) -> tuple[Draft, FeatureDraftState]:
        """Draws d_1 .. d_K from q under ``sampling``.

        Args:
          params: the head's weights, with ``vocabulary`` [W].
          draft_keys: gives the keys [B] of the i-th draw.
          state: what it has read.
          context: the rows so far.
          sampling: the same values that the target is warped with.

        Returns:
          The draft, with the warped logits [B, K, V] that its tokens were drawn from, and the state.
        """
        vocabulary = params["vocabulary"]

        def extend(i: Array, guess: Array, cache: Cache, context: Context) -> Extended:
            logits = self.model.score(params, guess)[:, 0]
            token, warped = draw(
                logits,
                vocabulary,
                draft_keys(i),
                sampling,
                context,
                self.vocab_size,
                wide_noise=self.wide_noise,
            )
            # The next draw's penalties and masks see this one.
            return (token, guess, cache, append(context, token)), (token, warped)

        def step(carry: Carry, i: Array) -> Extended:
            token, guess, cache, context = carry
            place = context.length[:, None] - 1
            return extend(i, *self.model.apply(params, token[:, None], guess, cache, place), context)

        def tokens_at(positions: Array) -> Array:
            return jnp.take_along_axis(context.tokens, positions, axis=1, mode="clip")

        def behind(state: FeatureDraftState) -> Array:
            return jnp.any(state.known < context.length - self.num_draft_tokens - 1)

        def catch_up(state: FeatureDraftState) -> FeatureDraftState:
            positions = state.known[:, None] + jnp.arange(CATCH_UP)[None]
            _, cache = self._feed(params, state, tokens_at(positions), positions)
            known = jnp.minimum(positions[:, -1] + 1, context.length)
            return dataclasses.replace(state, cache=cache, known=known)

        state = lax.while_loop(behind, catch_up, state)
        # Rows shorter than the block read their first token more than once: the same keys each time.
        newest = context.length[:, None] - 1 + jnp.arange(-self.num_draft_tokens, 1)[None]
        newest = jnp.maximum(newest, 0)
        guesses, cache = self._feed(params, state, tokens_at(newest), newest)
        carry, first = extend(jnp.int32(0), guesses[:, -1:], cache, context)
        (_, _, cache, _), rest = lax.scan(step, carry, jnp.arange(1, self.num_draft_tokens))
        drafted, warped = jax.tree.map(
            lambda one, later: jnp.concatenate([one[:, None], jnp.moveaxis(later, 0, 1)], axis=1), first, rest
        )
        draft = Draft(
            drafted,
            widen(warped, vocabulary, self.vocab_size),
            jnp.full_like(context.length, self.num_draft_tokens),
        )
        return draft, dataclasses.replace(state, cache=cache, known=context.length)

    def _feed(
        self, params: Params, state: FeatureDraftState, tokens: Array, positions: Array
    ) -> tuple[Array, Cache]:
        """Reads tokens with the target's states before them."""
        before = jnp.maximum(positions - 1, 0)[..., None]
        features = jnp.take_along_axis(state.features, before, axis=1, mode="clip")
        features = jnp.where(positions[..., None] > 0, features, 0)
        return self.model.apply(params, tokens, features, state.cache, positions)

    def accept(
        self, state: FeatureDraftState, num_accepted: Array, features: Array | None
    ) -> FeatureDraftState:
        """Keeps the target's states over the block: those of the newest token and of what stood."""
        kept = _put(state.features, state.seen, _given(features))
        return dataclasses.replace(state, features=kept, seen=state.seen + num_accepted + 1)


def _given(features: Array | None) -> Array:
    if features is None:
        raise ValueError("the target hands no features on: a head on them can't draft for it")
    return features


def _put(rows: Array, begin: Array, block: Array) -> Array:
    """Writes ``block`` [B, T, F] into ``rows`` [B, S, F] from ``begin`` [B] on; beyond S it is dropped."""
    slots = begin[:, None] + jnp.arange(block.shape[1])[None]
    return put(rows, slots, block)
