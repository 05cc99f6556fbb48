"""A small language model as the draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax import lax

from specjax.prefill import prefill
from specjax.sampling import sample, warp
from specjax.types import Array, Cache, Draft, Key, Model, Params, SamplingParams

__all__ = ["ModelDrafter"]


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """Samples K tokens one after the other from a model with the target's vocabulary.

    Its state is the model's cache. The first forward of a step feeds two tokens, the last-but-one again
    and the newest: one fixed shape that also fills in the key which a fully accepted block left
    unwritten (its last token was drafted but never fed). Writing it twice changes nothing.
    """

    model: Model
    num_draft_tokens: int

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be at least 1, not {self.num_draft_tokens}")

    @property
    def always_full(self) -> bool:
        """A model can always go on."""
        return True

    def init(self, params: Params, tokens: Array, length: Array) -> Cache:
        """Prefills the draft's cache with ``tokens`` [B, S] up to ``length`` [B]."""
        return prefill(self.model, params, tokens, length)

    def propose(
        self,
        params: Params,
        draft_keys: Callable[[Array], Key],
        state: Cache,
        tokens: Array,
        length: Array,
        sampling: SamplingParams,
    ) -> tuple[Draft, Cache]:
        """Draws d_1 .. d_K from q under ``sampling``.

        Args:
          params: the draft model's weights.
          draft_keys: gives the keys [B] of the i-th draw.
          state: its cache.
          tokens: [B, S] int32.
          length: [B] int32.
          sampling: the same values that the target is warped with.

        Returns:
          The draft, with the warped logits [B, K, V] that its tokens were drawn from, and the cache.
        """
        chex.assert_rank([tokens, length], [2, 1])

        def extend(i: Array, cache: Cache, fed: Array, positions: Array) -> tuple[Array, Array, Cache]:
            output = self.model.apply(params, fed, cache, positions)
            logits = warp(output.logits[:, -1:], sampling)[:, 0]
            return sample(draft_keys(i), logits), logits, output.cache

        def step(carry: tuple[Array, Cache], i: Array) -> tuple[tuple[Array, Cache], tuple[Array, Array]]:
            token, cache = carry
            token, logits, cache = extend(i, cache, token[:, None], length[:, None] + i - 1)
            return (token, cache), (token, logits)

        # A prompt of one token has no last-but-one: feeding it twice to the same slot is harmless too.
        positions = jnp.stack([jnp.maximum(length - 2, 0), length - 1], axis=1)
        newest_two = jnp.take_along_axis(tokens, positions, axis=1)
        token, logits, cache = extend(jnp.int32(0), state, newest_two, positions)
        (_, cache), rest = lax.scan(step, (token, cache), jnp.arange(1, self.num_draft_tokens))

        drafted, draft_logits = jax.tree.map(
            lambda first, later: jnp.concatenate([first[:, None], jnp.moveaxis(later, 0, 1)], axis=1),
            (token, logits),
            rest,
        )
        lengths = jnp.full_like(length, self.num_draft_tokens)
        return Draft(drafted, draft_logits, lengths), cache

    def accept(self, state: Cache, num_accepted: Array, features: Array | None) -> Cache:
        """Nothing to do: slots past the new length are invisible until they are written anew."""
        del num_accepted, features
        return state
