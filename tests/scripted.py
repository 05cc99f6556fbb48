"""Drafters that do as a test says."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax.drafters import ModelDrafter
from specjax.types import Draft


@dataclasses.dataclass(frozen=True)
class Spoiled:
    """Another's draft, made one-hot and wrong from a token on.

    Its params are the inner drafter's and ``right`` [B]: how many of each draft's tokens stay as they are.
    """

    inner: ModelDrafter

    @property
    def num_draft_tokens(self):
        return self.inner.num_draft_tokens

    @property
    def always_full(self):
        return self.inner.always_full

    def init(self, batch, capacity):
        return self.inner.init(batch, capacity)

    def read(self, params, *block):
        return self.inner.read(params[0], *block)

    def propose(self, params, draft_keys, state, context, sampling):
        inner_params, right = params
        draft, state = self.inner.propose(inner_params, draft_keys, state, context, sampling)
        wrong = (draft.tokens + 1) % self.inner.model.vocab_size
        keep = jnp.arange(draft.tokens.shape[1])[None] < right[:, None]
        return Draft(jnp.where(keep, draft.tokens, wrong), None, draft.lengths), state

    def accept(self, state, num_accepted, features):
        return self.inner.accept(state, num_accepted, features)


@dataclasses.dataclass(frozen=True)
class Shortened:
    """Another's draft, cut to lengths that go through 0 .. K as the row grows."""

    inner: ModelDrafter

    @property
    def num_draft_tokens(self):
        return self.inner.num_draft_tokens

    @property
    def always_full(self):
        return False

    def init(self, batch, capacity):
        return self.inner.init(batch, capacity)

    def read(self, params, *block):
        return self.inner.read(params, *block)

    def propose(self, params, draft_keys, state, context, sampling):
        draft, state = self.inner.propose(params, draft_keys, state, context, sampling)
        lengths = (context.length * 7 + context.length // 3) % (self.num_draft_tokens + 1)
        return Draft(draft.tokens, draft.logits, lengths), state

    def accept(self, state, num_accepted, features):
        return self.inner.accept(state, num_accepted, features)
