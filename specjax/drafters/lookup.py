"""Prompt lookup: what followed the last time these tokens stood here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import chex
import jax.numpy as jnp
from jax import lax

from specjax.types import Array, Context, Draft, Key, Params, SamplingParams

__all__ = ["LookupDrafter"]


@dataclasses.dataclass(frozen=True)
class LookupDrafter:
    """Copies the K tokens after the newest earlier occurrence of the row's last n-gram.

    The longest n-gram within ``prompt_lookup_min .. prompt_lookup_max`` that occurs before wins, the
    newest occurrence among equals (Saxena 2023, prompt lookup decoding). A copy that reaches the end of
    the row goes on with itself: a text that repeats with period m is continued with period m. A row
    without a match drafts nothing. Deterministic, no weights, no state.
    """

    num_draft_tokens: int
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    always_full: bool = False  # True has the target fed K tokens even when no row has a match

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be at least 1, not {self.num_draft_tokens}")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                "prompt_lookup_min must be at least 1 and at most prompt_lookup_max, "
                f"not {self.prompt_lookup_min} and {self.prompt_lookup_max}"
            )

    def init(self, batch: int, capacity: int) -> None:
        """There is no state."""
        del batch, capacity

    def read(
        self,
        params: Params,
        state: None,
        tokens: Array,
        positions: Array,
        length: Array,
        features: Array | None,
    ) -> None:
        """There is no state."""
        del params, state, tokens, positions, length, features

    def propose(
        self,
        params: Params,
        draft_keys: Callable[[Array], Key],
        state: None,
        context: Context,
        sampling: SamplingParams,
    ) -> tuple[Draft, None]:
        """Finds the match among the context's live tokens and copies what followed it.

        Returns:
          A deterministic draft (no logits) with ``lengths`` K or 0, and None.
        """
        del params, draft_keys, sampling
        tokens, length = context.tokens, context.length
        chex.assert_rank([tokens, length], [2, 1])
        capacity = tokens.shape[1]
        slots = jnp.arange(capacity)[None]

        # matched[b, j]: how many tokens ending at j equal those ending at the row's end.
        running = slots < length[:, None] - 1
        matched = jnp.zeros(tokens.shape, jnp.int32)
        for back in range(self.prompt_lookup_max):
            last = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - back, 0)[:, None], axis=1)
            shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :capacity]
            running &= (shifted == last) & (back < length[:, None])
            matched += running
        # One number orders the candidates: longer first, then newer.
        best = jnp.argmax(matched * capacity + slots, axis=1)
        found = jnp.take_along_axis(matched, best[:, None], axis=1)[:, 0] >= self.prompt_lookup_min

        period = jnp.maximum(length - 1 - best, 1)[:, None]
        ahead = lax.broadcasted_iota(jnp.int32, (tokens.shape[0], self.num_draft_tokens), 1)
        source = best[:, None] + 1 + ahead % period
        drafted = jnp.take_along_axis(tokens, jnp.minimum(source, capacity - 1), axis=1)
        return Draft(drafted, None, jnp.where(found, self.num_draft_tokens, 0)), None

    def accept(self, state: None, num_accepted: Array, features: Array | None) -> None:
        """There is no state."""
        del state, num_accepted, features
