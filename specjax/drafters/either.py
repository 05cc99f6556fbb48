"""Two drafters in one: the first where it has a draft, the second in the other rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.sampling import is_token
from specjax.types import Array, Context, Draft, Drafter, Key, Params, SamplingParams, pytree

__all__ = ["EitherDrafter", "EitherState"]


@pytree
class EitherState:
    """That of the second drafter."""

    inner: Any


@dataclasses.dataclass(frozen=True)
class EitherDrafter:
    """A cheap, deterministic drafter such as lookup where it finds something, and a model elsewhere.

    Which of the two drafts a row depends on its text alone, so every rule stays exact. A row of the first
    has one-hot logits. The second isn't run where the first serves every row; it must be able to catch up.

    Its params are the second drafter's.
    """

    first: Drafter
    second: Drafter

    def __post_init__(self) -> None:
        if self.first.num_draft_tokens != self.second.num_draft_tokens:
            raise ValueError(
                "both drafters must propose as many tokens, not "
                f"{self.first.num_draft_tokens} and {self.second.num_draft_tokens}"
            )

    @property
    def num_draft_tokens(self) -> int:
        """That of both."""
        return self.second.num_draft_tokens

    @property
    def always_full(self) -> bool:
        """Where the first has nothing, the second has."""
        return self.second.always_full

    def init(self, batch: int, capacity: int) -> EitherState:
        """The second's state; the first has none."""
        return EitherState(self.second.init(batch, capacity))

    def read(
        self,
        params: Params,
        state: EitherState,
        tokens: Array,
        positions: Array,
        length: Array,
        features: Array | None,
    ) -> EitherState:
        """See :class:`specjax.types.Drafter`."""
        return EitherState(self.second.read(params, state.inner, tokens, positions, length, features))

    def propose(
        self,
        params: Params,
        draft_keys: Callable[[Array], Key],
        state: EitherState,
        context: Context,
        sampling: SamplingParams,
    ) -> tuple[Draft, EitherState]:
        """Drafts with the first, and with the second where rows are left over.

        Returns:
          A draft with logits, and the state.
        """
        first, _ = self.first.propose(None, draft_keys, None, context, sampling)
        found = first.lengths > 0

        def propose(inner: Any) -> tuple[Draft, Any]:
            return self.second.propose(params, draft_keys, inner, context, sampling)

        shape = jax.eval_shape(propose, state.inner)[0].logits
        if shape is None:
            raise ValueError("the second drafter must give the logits that its tokens are drawn from")
        number = shape.dtype.type
        one_hot = jnp.where(is_token(first.tokens, shape.shape), number(0), number(-jnp.inf))
        first = Draft(first.tokens, one_hot, first.lengths)

        # A loop of at most one turn, not a cond: what it carries is updated in place.
        def rows_are_left(carry: tuple[Array, Draft, Any]) -> Array:
            return carry[0]

        def fill(carry: tuple[Array, Draft, Any]) -> tuple[Array, Draft, Any]:
            second, inner = propose(carry[2])
            mixed = jax.tree.map(
                lambda a, b: jnp.where(found.reshape(-1, *[1] * (a.ndim - 1)), a, b), first, second
            )
            return jnp.zeros((), bool), mixed, inner

        _, draft, inner = lax.while_loop(rows_are_left, fill, (~jnp.all(found), first, state.inner))
        return draft, EitherState(inner)

    def accept(self, state: EitherState, num_accepted: Array, features: Array | None) -> EitherState:
        """Tells the second what stood, whoever drafted it."""
        return EitherState(self.second.accept(state.inner, num_accepted, features))
