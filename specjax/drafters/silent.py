"""A draft of nothing, at full width."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from specjax.types import Array, Context, Draft, Key, Params, SamplingParams

__all__ = ["SilentDrafter"]


@dataclasses.dataclass(frozen=True)
class SilentDrafter:
    """Proposes no token, but has the target fed K fillers all the same.

    Decoding with it is plain decoding through the forward that a speculative step makes. Where rounding
    depends on a product's shape, as in bfloat16, this is the baseline that speculation equals to the bit.
    """

    num_draft_tokens: int

    @property
    def always_full(self) -> bool:
        """The width is the point."""
        return True

    def init(self, batch: int, capacity: int) -> None:
        """There is no state of its own."""
        del batch, capacity

    def read(
        self,
        params: Params,
        state: Any,
        tokens: Array,
        positions: Array,
        length: Array,
        features: Array | None,
    ) -> Any:
        """The state is another drafter's, which rests: it stays as it is."""
        del params, tokens, positions, length, features
        return state

    def propose(
        self,
        params: Params,
        draft_keys: Callable[[Array], Key],
        state: Any,
        context: Context,
        sampling: SamplingParams,
    ) -> tuple[Draft, Any]:
        """A deterministic draft of which no token counts."""
        del params, draft_keys, sampling
        filler = jnp.zeros((context.length.shape[0], self.num_draft_tokens), jnp.int32)
        return Draft(filler, None, jnp.zeros_like(context.length)), state

    def accept(self, state: Any, num_accepted: Array, features: Array | None) -> Any:
        """Nothing was drafted."""
        del num_accepted, features
        return state
