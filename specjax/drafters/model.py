"""A small language model as the draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from specjax.drafters.narrow import draw, widen
from specjax.rows import append, put
from specjax.sampling import sample, warp
from specjax.types import Array, Cache, Context, Draft, Key, Model, Params, SamplingParams, pytree

__all__ = ["ModelDraftState", "ModelDrafter"]

CATCH_UP = 16
"""Tokens of a row fed at once where it has fallen behind."""

Carry = tuple[Array, Cache, Context]  # the newest token, not yet fed
Extended = tuple[Carry, tuple[Array, Array]]  # with a token and the logits that it was drawn from


@pytree
class ModelDraftState:
    """What the draft model has read, given or drafted by itself."""

    cache: Cache
    fed: Array  # [B, S] int32: the token whose keys each slot of the cache holds; -1 is none

    def known(self, context: Context) -> Array:
        """The tokens of each row, from its first, that the cache holds, whoever drafted them: [B] int32."""
        slots = jnp.arange(self.fed.shape[1])[None]
        same = (self.fed == context.tokens) & (slots < context.length[:, None])
        return jnp.sum(jnp.cumprod(same, axis=1), axis=1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """Samples K tokens one after the other from a model with the target's vocabulary.

    The first forward of a step feeds two tokens, the last-but-one again and the newest: one fixed shape
    that also fills in the key which a fully accepted block left unwritten (its last token was drafted but
    never fed). Writing it twice changes nothing. A row that has fallen further behind, because steps were
    taken without a draft of this model, is caught up with before.
    """

    model: Model
    num_draft_tokens: int
    vocab_size: int | None = None  # the target's V, where padding makes it another than the model's
    narrow: bool = False  # the model scores the tokens ``params["vocabulary"]`` alone
    wide_noise: bool = False  # of a narrow model, see :func:`specjax.drafters.narrow.draw`

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be at least 1, not {self.num_draft_tokens}")
        if self.narrow and self.vocab_size is None:
            raise ValueError("a narrow draft needs the target's vocab_size")

    @property
    def always_full(self) -> bool:
        """A model can always go on."""
        return True

    def init(self, batch: int, capacity: int) -> ModelDraftState:
        """An empty cache."""
        nothing = jnp.full((batch, capacity), -1, jnp.int32)
        return ModelDraftState(self.model.init_cache(batch, capacity), nothing)

    def read(
        self,
        params: Params,
        state: ModelDraftState,
        tokens: Array,
        positions: Array,
        length: Array,
        features: Array | None,
    ) -> ModelDraftState:
        """Feeds the block; see :class:`specjax.types.Drafter`."""
        del features
        cache = self.model.apply(params, tokens, state.cache, positions).cache
        return ModelDraftState(cache, _note(state.fed, tokens, positions, length))

    def propose(
        self,
        params: Params,
        draft_keys: Callable[[Array], Key],
        state: ModelDraftState,
        context: Context,
        sampling: SamplingParams,
    ) -> tuple[Draft, ModelDraftState]:
        """Draws d_1 .. d_K from q under ``sampling``.

        Args:
          params: the draft model's weights.
          draft_keys: gives the keys [B] of the i-th draw.
          state: what it has read.
          context: the rows so far.
          sampling: the same values that the target is warped with.

        Returns:
          The draft, with the warped logits [B, K, V] that its tokens were drawn from, and the state.
        """

        def extend(i: Array, cache: Cache, context: Context, fed: Array, positions: Array) -> Extended:
            output = self.model.apply(params, fed, cache, positions)
            token, logits = self._draw(params, output.logits[:, -1], draft_keys(i), sampling, context)
            # The next draw's penalties and masks see this one.
            return (token, output.cache, append(context, token)), (token, logits)

        def step(carry: Carry, i: Array) -> Extended:
            token, cache, context = carry
            return extend(i, cache, context, token[:, None], context.length[:, None] - 1)

        length = context.length
        # A prompt of one token has no last-but-one: feeding it twice to the same slot is harmless too.
        positions = jnp.stack([jnp.maximum(length - 2, 0), length - 1], axis=1)
        newest_two = jnp.take_along_axis(context.tokens, positions, axis=1)
        state = self._catch_up(params, state, context)
        carry, first = extend(jnp.int32(0), state.cache, context, newest_two, positions)
        (_, cache, _), rest = lax.scan(step, carry, jnp.arange(1, self.num_draft_tokens))

        drafted, draft_logits = jax.tree.map(
            lambda one, later: jnp.concatenate([one[:, None], jnp.moveaxis(later, 0, 1)], axis=1), first, rest
        )
        if self.narrow:
            draft_logits = widen(draft_logits, params["vocabulary"], self.vocab_size or 0)
        lengths = jnp.full_like(length, self.num_draft_tokens)
        # The last token drafted was never fed.
        fed = jnp.concatenate([newest_two, drafted[:, :-1]], axis=1)
        places = jnp.concatenate([positions, length[:, None] + jnp.arange(fed.shape[1] - 2)[None]], axis=1)
        noted = _note(state.fed, fed, places, length + self.num_draft_tokens - 1)
        return Draft(drafted, draft_logits, lengths), ModelDraftState(cache, noted)

    def _catch_up(self, params: Params, state: ModelDraftState, context: Context) -> ModelDraftState:
        """Reads what is missing before the last-but-one token."""

        def behind(state: ModelDraftState) -> Array:
            return jnp.any(state.known(context) < context.length - 2)

        def feed(state: ModelDraftState) -> ModelDraftState:
            positions = state.known(context)[:, None] + jnp.arange(CATCH_UP)[None]
            tokens = jnp.take_along_axis(context.tokens, positions, axis=1, mode="clip")
            return self.read(params, state, tokens, positions, context.length, None)

        return lax.while_loop(behind, feed, state)

    def _draw(
        self, params: Params, logits: Array, keys: Key, sampling: SamplingParams, context: Context
    ) -> tuple[Array, Array]:
        """A token [B], and the warped logits that it was drawn from: [B, V], or [B, W] of a narrow model."""
        if self.narrow:
            vocabulary, size = params["vocabulary"], self.vocab_size or 0
            return draw(logits, vocabulary, keys, sampling, context, size, wide_noise=self.wide_noise)
        warped = warp(self._fit(logits)[:, None], sampling, context)[:, 0]
        return sample(keys, warped), warped

    def _fit(self, logits: Array) -> Array:
        """Cuts padding off, or forbids what the model doesn't know: [..., V] for the target's V."""
        width = logits.shape[-1]
        wanted = self.vocab_size or width
        logits = logits[..., :wanted].astype(jnp.promote_types(logits.dtype, jnp.float32))
        missing = [(0, 0)] * (logits.ndim - 1) + [(0, max(wanted - width, 0))]
        return jnp.pad(logits, missing, constant_values=-jnp.inf)

    def accept(self, state: ModelDraftState, num_accepted: Array, features: Array | None) -> ModelDraftState:
        """Nothing to do: the next step compares what was fed with what stands there."""
        del num_accepted, features
        return state


def _note(fed: Array, tokens: Array, positions: Array, length: Array) -> Array:
    """Notes the tokens [B, T] fed at ``positions``, those before ``length`` [B]; nothing lies behind."""
    tokens = jnp.where(positions < length[:, None], tokens, -1)
    fed = put(fed, positions, tokens)
    # Keys further on were made behind other tokens, even where the text comes to look the same there.
    return jnp.where(jnp.arange(fed.shape[1])[None] > positions[:, -1:], -1, fed)
