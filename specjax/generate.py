"""From prompts to tokens: the jit around the step, as one call or as a stream.

Both compile two programs, ``start`` and ``advance``, for a batch size and a power-of-two capacity, and
nothing more for other prompts of that size.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.decode import autoregressive_step, speculative_step, start
from specjax.sampling import make_sampling
from specjax.types import (
    Allowed,
    Array,
    Context,
    DecodeState,
    Drafter,
    Model,
    Params,
    Rule,
    SamplingParams,
    StepInfo,
    pytree,
)
from specjax.verify import RULES

__all__ = ["Decoding", "Generation", "Record", "Source", "generate", "lay_out", "stream"]


class Source(enum.IntEnum):
    """Where a token came from."""

    PROMPT = 0
    PLAIN = 1  # a step without a draft
    ACCEPTED = 2  # drafted, and kept
    CORRECTED = 3  # drawn in place of a rejected one
    BONUS = 4  # drawn after a whole draft was kept


@pytree
class Record:
    """What the steps of a generation did, added up on the device."""

    source: Array  # [B, S] int8: a Source for each token
    failed: Array  # [B] bool: the target's logits were no numbers
    num_steps: Array  # [B] int32: steps in which the row was live
    drafted: Array  # [B, K+1] int32: how many of these drafted 0, 1, .. K tokens
    accepted: Array  # [B, K+1] int32: how many kept 0, 1, .. K of them


@dataclasses.dataclass(frozen=True)
class Generation:
    """One row's output, on the host."""

    tokens: list[int]  # what was decoded, a stop token included
    sources: list[Source]  # one for each token
    stopped: bool  # whether a stop token ended it, rather than the limit
    failed: bool  # whether the target's logits stopped being numbers; the tokens are those before
    num_steps: int
    drafted: np.ndarray  # [K+1]: steps by the number of tokens drafted
    accepted: np.ndarray  # [K+1]: steps by the number of tokens kept

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that the target was asked to verify."""
        return int(self.drafted @ np.arange(len(self.drafted)))

    @property
    def num_accepted_tokens(self) -> int:
        """How many of these were kept."""
        return int(self.accepted @ np.arange(len(self.accepted)))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step, the rule's own token included."""
        return len(self.tokens) / max(self.num_steps, 1)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted; 0 where nothing was drafted."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)


class Decoding:
    """A batch in the middle of decoding, held on the device, between two calls of :meth:`advance`.

    Making one reads the prompts. :func:`generate` and :func:`stream` are two ways to drive it.

    Args:
      target: the model whose law the output has.
      target_params: its weights.
      prompts: ``B`` sequences of token ids, each at least one long.
      max_tokens: how many tokens to add at most, for all rows or for each.
      drafter: what proposes; None decodes plainly.
      draft_params: the drafter's weights, where it has any.
      rule: a name in :data:`specjax.verify.RULES`. A batch of greedy rows is always judged by ``greedy``,
        which gives the same tokens without drawing noise.
      sampling: one value a row, from :func:`~specjax.sampling.make_sampling`; None is greedy.
      stop_tokens: ids that end a row.
      allowed: constrains what is decoded, by a pure function; see :data:`specjax.types.Allowed`.

    Raises:
      ValueError: an empty prompt, a token outside the vocabulary, a prompt that leaves no room in the
        context, max_tokens below 1, or an unknown rule.
    """

    def __init__(
        self,
        target: Model,
        target_params: Params,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int | Sequence[int],
        drafter: Drafter | None = None,
        draft_params: Params = None,
        rule: str = "token",
        sampling: SamplingParams | None = None,
        stop_tokens: Sequence[int] = (),
        allowed: Allowed | None = None,
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"no rule is named {rule!r}; there are {', '.join(RULES)}")
        batch = len(prompts)
        num_draft_tokens = 0 if drafter is None else drafter.num_draft_tokens
        tokens, length, limit = lay_out(target, prompts, max_tokens, num_draft_tokens)
        sampling = make_sampling(batch) if sampling is None else sampling
        all_greedy = bool(np.all((np.asarray(sampling.temperature) == 0) | (np.asarray(sampling.top_k) == 1)))
        if sampling.seed.shape != (batch,):
            raise ValueError(
                f"sampling has {sampling.seed.shape[0]} rows, not one for each of {batch} prompts"
            )
        if sampling.bias_tokens.size and int(sampling.bias_tokens.max()) >= target.vocab_size:
            raise ValueError(f"logit_bias has a token outside the vocabulary of {target.vocab_size}")
        if rule == "greedy" and not all_greedy:
            raise ValueError("rule 'greedy' needs temperature 0 or top_k 1 in every row; take another")
        self._static = dict(target=target, drafter=drafter)
        self._rule = RULES["greedy" if all_greedy else rule]
        self._params = (target_params, draft_params)
        self._prompt_length = [len(prompt) for prompt in prompts]
        self._stop_tokens = frozenset(stop_tokens)
        stops = np.broadcast_to(np.asarray(stop_tokens or [-1], np.int32), (batch, max(len(stop_tokens), 1)))
        context = Context(tokens, length, length, jnp.asarray(stops), allowed)
        self._state = _start(*self._params, context, limit, sampling, **self._static)
        bins = (batch, num_draft_tokens + 1)
        self._record = Record(
            source=jnp.zeros(tokens.shape, jnp.int8),
            failed=jnp.zeros(batch, bool),
            num_steps=jnp.zeros(batch, jnp.int32),
            drafted=jnp.zeros(bins, jnp.int32),
            accepted=jnp.zeros(bins, jnp.int32),
        )

    def advance(self, num_steps: int | None = None) -> bool:
        """Runs the steps that are left, or ``num_steps`` at most; says whether all rows have ended."""
        count = np.iinfo(np.int32).max if num_steps is None else num_steps
        self._state, self._record = _advance(
            *self._params, self._state, self._record, count, rule=self._rule, **self._static
        )
        return bool(self._state.done.all())

    def rows(self) -> list[Generation]:
        """What each row has by now."""
        tokens, length, record = jax.device_get(
            (self._state.context.tokens, self._state.context.length, self._record)
        )
        return [
            self._row(tokens[i], slice(begin, end), jax.tree.map(operator.itemgetter(i), record))
            for i, (begin, end) in enumerate(zip(self._prompt_length, length, strict=True))
        ]

    def _row(self, tokens: np.ndarray, decoded: slice, record: Record) -> Generation:
        ids = tokens[decoded].tolist()
        return Generation(
            tokens=ids,
            sources=[Source(source) for source in record.source[decoded].tolist()],
            stopped=bool(ids) and ids[-1] in self._stop_tokens,
            failed=bool(record.failed),
            num_steps=int(record.num_steps),
            drafted=np.asarray(record.drafted),
            accepted=np.asarray(record.accepted),
        )


def generate(
    target: Model, target_params: Params, prompts: Sequence[Sequence[int]], **options: Any
) -> list[Generation]:
    """Decodes a batch of prompts; nothing comes back from the device until every row has ended.

    Arguments and errors are those of :class:`Decoding`.

    Returns:
      One :class:`Generation` a row.
    """
    decoding = Decoding(target, target_params, prompts, **options)
    decoding.advance()
    return decoding.rows()


def stream(
    target: Model, target_params: Params, prompt: Sequence[int], *, steps: int = 4, **options: Any
) -> Iterator[Generation]:
    """Decodes one prompt, and yields the generation so far after every few steps and at the end.

    The tokens are those of :func:`generate`. Arguments and errors are those of :class:`Decoding`, but:

    Args:
      prompt: one sequence of token ids.
      steps: how many steps run on the device between two yields.
    """
    decoding = Decoding(target, target_params, [prompt], **options)
    done = False
    while not done:
        done = decoding.advance(steps)
        yield decoding.rows()[0]


def lay_out(
    target: Model, prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int], num_draft_tokens: int
) -> tuple[Array, Array, Array]:
    """Checks the prompts and packs them into [B, S], S a power of two; with length and limit [B]."""
    if not prompts:
        raise ValueError("there is no prompt")
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    if not length.all():
        raise ValueError("an empty prompt: give at least one token")
    if length.max() >= target.context_length:
        raise ValueError(
            f"a prompt of {length.max()} tokens leaves no room in a context of {target.context_length}: "
            "shorten it"
        )
    budget = np.broadcast_to(np.asarray(max_tokens, np.int64), length.shape)
    if budget.min() < 1:
        raise ValueError(f"max_tokens must be at least 1, not {budget.min()}")
    limit = np.minimum(length + budget, target.context_length).astype(np.int32)
    # Room for the draft of a row that is one short of its limit: no slot is ever written past the end.
    needed = int(limit.max()) + num_draft_tokens + 1
    tokens = np.zeros((len(prompts), max(64, 1 << (needed - 1).bit_length())), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    if tokens.min() < 0 or tokens.max() >= target.vocab_size:
        raise ValueError(f"a token id is outside the vocabulary of {target.vocab_size}")
    return jnp.asarray(tokens), jnp.asarray(length), jnp.asarray(limit)


_start = partial(jax.jit, static_argnames=("target", "drafter"))(start)


@partial(jax.jit, static_argnames=("target", "drafter", "rule"), donate_argnames=("state", "record"))
def _advance(
    target_params: Params,
    draft_params: Params,
    state: DecodeState,
    record: Record,
    num_steps: Array,
    *,
    target: Model,
    drafter: Drafter | None,
    rule: Rule,
) -> tuple[DecodeState, Record]:
    """Steps until every row is done, ``num_steps`` times at most."""

    def more(carry: tuple[DecodeState, Record, Array]) -> Array:
        state, _, count = carry
        return (count < num_steps) & ~jnp.all(state.done)

    def body(carry: tuple[DecodeState, Record, Array]) -> tuple[DecodeState, Record, Array]:
        before, record, count = carry
        if drafter is None:
            state, info = autoregressive_step(before, target_params, target=target, rule=rule)
        else:
            state, info = speculative_step(
                before, target_params, draft_params, target=target, drafter=drafter, rule=rule
            )
        return state, _add(record, before, info), count + 1

    state, record, _ = lax.while_loop(more, body, (state, record, jnp.int32(0)))
    return state, record


def _add(record: Record, before: DecodeState, info: StepInfo) -> Record:
    live = ~before.done
    capacity = before.context.tokens.shape[1]
    bins = jnp.arange(record.drafted.shape[1])[None]
    whole = info.verdict.num_accepted == info.num_drafted
    last = jnp.where(info.num_drafted == 0, Source.PLAIN, jnp.where(whole, Source.BONUS, Source.CORRECTED))
    source = jnp.where(bins < info.verdict.num_accepted[:, None], Source.ACCEPTED, last[:, None])
    slots = jnp.where(bins < info.num_emitted[:, None], before.context.length[:, None] + bins, capacity)
    rows = jnp.arange(slots.shape[0])[:, None]
    return Record(
        source=record.source.at[rows, slots].set(source.astype(jnp.int8), mode="drop"),
        failed=record.failed | info.failed,
        num_steps=record.num_steps + live,
        drafted=record.drafted + (live[:, None] & (bins == info.num_drafted[:, None])),
        accepted=record.accepted + (live[:, None] & (bins == info.num_accepted[:, None])),
    )
