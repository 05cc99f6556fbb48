"""The shapes, seams and states that every other room is written in.

The dimension alphabet, used everywhere:

====  =======================================================
``B``   rows (independent requests) in a batch
``S``   slots of a cache, and of the token buffer: its capacity
``T``   tokens fed to a model in one forward pass
``K``   drafted tokens
``V``   vocabulary
``E``   stop tokens a row
``F``   width of the features that a model hands on
====  =======================================================

Positions count from 0. ``length`` is always a number of tokens *including* the newest one, whose
keys and values no cache holds yet: it is the first token of the next forward.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, Protocol

import jax

__all__ = [
    "Address",
    "Allowed",
    "Array",
    "Cache",
    "Context",
    "DecodeState",
    "Draft",
    "Drafter",
    "Edits",
    "Filters",
    "Key",
    "Logprobs",
    "Model",
    "ModelOutput",
    "Params",
    "Rule",
    "SamplingParams",
    "StepInfo",
    "Verdict",
    "pytree",
]

C = typing.TypeVar("C")
Array = jax.Array
Key = jax.Array
"""A typed key, or an array of them (``jax.random.key``)."""
Params = Any
"""A pytree of weights. Always an argument of a jitted function, never closed over."""
Cache = Any
"""A pytree that only its model looks into. It has no length: see :class:`Model`."""


@typing.dataclass_transform(frozen_default=True)
def pytree(cls: type[C]) -> type[C]:
    """Makes a frozen dataclass whose fields are all pytree children."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@pytree
class ModelOutput:
    """What one forward pass returns."""

    logits: Array  # [B, T, V]: row t scores the token after the t-th token fed
    features: Array | None  # [B, T, F]: hidden states that a target-conditioned drafter may want
    cache: Cache  # with the keys and values of the T tokens written


class Model(Protocol):
    """A model is a function; this pairs it with the making of its cache.

    Implementations are hashable by value, so that one may be a static argument of ``jax.jit``.
    """

    @property
    def vocab_size(self) -> int:
        """``V``, the width of the logits."""
        ...

    @property
    def context_length(self) -> int:
        """The most positions it was made for."""
        ...

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Makes an empty cache for ``batch`` rows of ``capacity`` positions."""
        ...

    def apply(self, params: Params, tokens: Array, cache: Cache, positions: Array) -> ModelOutput:
        """Scores ``tokens`` [B, T] int32 standing at ``positions`` [B, T] int32.

        The contract of the cache: keys and values are stored at slot = position; a query at position
        ``i`` sees the slots ``<= i`` and no other. So whatever lies past the newest position is
        invisible until it is written anew, and taking tokens back is nothing but a smaller position
        in the next call. A write at a position past the capacity is dropped.
        """
        ...


@pytree
class Edits:
    """What is done to each row's logits before the temperature, and so to greedy rows too."""

    bias_tokens: Array  # [B, N] int32 ids whose logits get a bias; -1 is filler
    bias_values: Array  # [B, N] float32
    presence_penalty: Array  # [B] float32, off the logits of tokens decoded before
    frequency_penalty: Array  # [B] float32, the same for each time they were
    repetition_penalty: Array  # [B] float32 > 0, divides the logits of tokens in prompt or output
    min_tokens: Array  # [B] int32; stop tokens are forbidden before so many are decoded


@pytree
class Filters:
    """Which tokens stay, after the temperature."""

    min_p: Array  # [B] float32 in [0, 1]; tokens of at least this share of the likeliest one's stay
    top_k: Array  # [B] int32; the k likeliest tokens stay; 0 keeps all
    top_p: Array  # [B] float32 in (0, 1]; the smallest set of at least this mass stays


@pytree
class SamplingParams:
    """How each row is sampled. A batch in which no row has an edit, or a filter, has None there.

    That makes four kinds of batch to compile for, and the plain ones pay nothing for the others.
    """

    temperature: Array  # [B] float32 >= 0; 0 is greedy
    seed: Array  # [B] uint32; the only source of the row's randomness
    filters: Filters | None
    edits: Edits | None


Allowed = Callable[["Context", int], Array]
"""``allowed(context, T)`` -> [B, T, V] bool: which tokens may stand at length, length + 1, ..."""


@pytree
class Context:
    """The text of each row: what a drafter reads, and what the warp may depend on."""

    tokens: Array  # [B, S] int32: the prompt and what was decoded, then filler
    length: Array  # [B] int32 >= 1: live tokens, the newest included
    prompt_length: Array  # [B] int32: how many of these were given
    stop_tokens: Array  # [B, E] int32: ids that end a row; -1 is filler
    # A pure function of the context that constrains what is decoded; None allows everything.
    allowed: Allowed | None = dataclasses.field(default=None, metadata={"static": True})


@pytree
class Draft:
    """K proposed tokens a row."""

    tokens: Array  # [B, K] int32
    logits: Array | None  # [B, K, V] float32: what tokens were really sampled from, after warping;
    #                       None says that the draft is deterministic, its q one-hot
    lengths: Array  # [B] int32 in 0..K: how many of the K are proposals at all


class Drafter(Protocol):
    """A drafter is four functions. Implementations are hashable by value, like models."""

    @property
    def num_draft_tokens(self) -> int:
        """``K``, the most tokens it proposes a step."""
        ...

    @property
    def always_full(self) -> bool:
        """Whether every draft has K tokens, so that a step needs only one width."""
        ...

    def init(self, batch: int, capacity: int) -> Any:
        """The state of ``batch`` rows of ``capacity`` positions of which nothing has been read."""
        ...

    def read(
        self,
        params: Params,
        state: Any,
        tokens: Array,
        positions: Array,
        length: Array,
        features: Array | None,
    ) -> Any:
        """Reads a block of given text, when the target does.

        Args:
          params: the drafter's weights.
          state: it has read each row up to where the block starts.
          tokens: [B, T] int32.
          positions: [B, T] int32, where they stand, one after the other.
          length: [B] int32, the length of each row's text; what the block has past it is filler.
          features: the target's, [B, T, F].
        """
        ...

    def propose(
        self,
        params: Params,
        draft_keys: Callable[[Array], Key],
        state: Any,
        context: Context,
        sampling: SamplingParams,
    ) -> tuple[Draft, Any]:
        """Proposes what follows the context's live tokens.

        ``draft_keys(i)`` gives the keys [B] that the i-th token, from 0, is drawn with.
        """
        ...

    def accept(self, state: Any, num_accepted: Array, features: Array | None) -> Any:
        """Learns how many of its tokens stood ([B]) and the target's features [B, K+1, F] over them."""
        ...


@pytree
class Address:
    """Where in a row's life a step stands: with an offset and a role it names one draw of noise."""

    seed: Array  # [B] uint32: the request's own
    start: Array  # [B] int32: length of the row when its step starts


@pytree
class Verdict:
    """What a rule decides."""

    num_accepted: Array  # [B] int32 in 0..lengths
    next_token: Array  # [B] int32: corrected or bonus, drawn by the rule
    accept_probs: Array  # [B, K] float: what the uniform of each drafted token was held against
    next_logits: Array  # [B, V] float: what next_token was drawn from


@dataclasses.dataclass(frozen=True)
class Rule:
    """A way to judge a draft; see :mod:`specjax.verify`."""

    name: str
    verify: Callable[[Address, Draft, Array], Verdict]
    """``verify(address, draft, target_logits [B, K+1, V])``."""
    draft_keys: Callable[[Address, Array], Key]
    """``draft_keys(address, i)``: the keys [B] that the drafter draws token i with, counting from 0."""


@pytree
class Logprobs:
    """The target's own log-probabilities, before the warp, of the tokens of a block; n of them on top."""

    chosen: Array  # [B, K+1] float32: of each token that the step may emit
    top_tokens: Array  # [B, K+1, n] int32: the likeliest ids there, in falling order
    top: Array  # [B, K+1, n] float32


@pytree
class DecodeState:
    """A batch in the middle of decoding: all that a step needs, and nothing that it only reports."""

    context: Context
    limit: Array  # [B] int32 <= S - K - 1: the length at which the row must end
    done: Array  # [B] bool: the row met a stop token or its limit, or failed; it no longer changes
    sampling: SamplingParams
    target_cache: Cache
    draft_state: Any


@pytree
class StepInfo:
    """What one step did; diagnostics ride here, never in the state."""

    num_drafted: Array  # [B] int32: tokens that the target was asked to verify
    num_accepted: Array  # [B] int32: how many of these the rule kept
    num_emitted: Array  # [B] int32: tokens added to the row, after stops and limits; 0 if it was done
    failed: Array  # [B] bool: the warped logits are no law there (NaN, or all forbidden); the row ends
    verdict: Verdict
    draft: Draft
    logprobs: Logprobs | None  # None where none were asked for
