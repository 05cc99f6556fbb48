"""From prompts to tokens: the jit around the step, as one call or as a stream.

Both compile two programs, ``start`` and ``advance``, for a batch size and a power-of-two capacity, and
nothing more for other prompts of that size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.decode import autoregressive_step, speculative_step, start
from specjax.parallel.sharding import Placement, fetch, sharded_jit, shardings_of
from specjax.record import Generation, Record, Source, add_step, empty_record, to_generation
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
)
from specjax.verify import RULES

__all__ = ["Decoding", "Generation", "Record", "Source", "generate", "lay_out", "steps_while", "stream"]


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
      num_logprobs: reports the target's log-probability of each token (before the warp) and so many of the
        likeliest ones; None reports none.
      allowed: constrains what is decoded, by a pure function; see :data:`specjax.types.Allowed`.
      placement: how the batch lies on many devices; target and drafter are then wrapped, and their weights
        laid, by :meth:`specjax.parallel.sharding.Layout.lay`.

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
        num_logprobs: int | None = None,
        allowed: Allowed | None = None,
        placement: Placement | None = None,
    ) -> None:
        if num_logprobs is not None and not 0 <= num_logprobs <= target.vocab_size:
            raise ValueError(f"num_logprobs must be in 0 .. {target.vocab_size}, not {num_logprobs}")
        stop_tokens = list(stop_tokens)
        if rule not in RULES:
            raise ValueError(f"no rule is named {rule!r}; there are {', '.join(RULES)}")
        batch = len(prompts)
        num_draft_tokens = 0 if drafter is None else drafter.num_draft_tokens
        tokens, length, limit = lay_out(target, prompts, max_tokens, num_draft_tokens)
        sampling = make_sampling(batch) if sampling is None else sampling
        all_greedy = bool(np.all(np.asarray(sampling.temperature) == 0))
        if sampling.seed.shape != (batch,):
            raise ValueError(
                f"sampling has {sampling.seed.shape[0]} rows, not one for each of {batch} prompts"
            )
        edits = sampling.edits
        if edits is not None and int(edits.bias_tokens.max(initial=-1)) >= target.vocab_size:
            raise ValueError(f"logit_bias has a token outside the vocabulary of {target.vocab_size}")
        if rule == "greedy" and not all_greedy:
            raise ValueError("rule 'greedy' needs temperature 0 or top_k 1 in every row; take another")
        models: dict[str, Any] = dict(target=target, drafter=drafter)
        how = models | dict(rule=RULES["greedy" if all_greedy else rule], num_logprobs=num_logprobs)
        self._how = how
        self._params = (target_params, draft_params)
        self._prompt_length = [len(prompt) for prompt in prompts]
        self._stop_tokens = frozenset(stop_tokens)
        stops = np.broadcast_to(np.asarray(stop_tokens or [-1], np.int32), (batch, max(len(stop_tokens), 1)))
        context = Context(tokens, length, length, jnp.asarray(stops), allowed)
        self._record = empty_record(tokens.shape, num_draft_tokens, num_logprobs)
        if placement is None:
            begin: Callable[..., Any] = partial(_start, **models)
            self._advance: Callable[..., Any] = partial(_advance, **how)
        else:
            # Rows that only make the number divide have no token to decode.
            limit = placement.lay_rows(limit, fill=0)
            context, sampling, self._record = placement.lay_rows((context, sampling, self._record))
            rows = shardings_of((*self._params, context, limit, sampling))
            state = placement.state(
                jax.eval_shape(partial(start, **models), *self._params, context, limit, sampling)
            )
            record = shardings_of(self._record)
            begin = sharded_jit(start, rows, state, **models)
            self._advance = sharded_jit(
                _steps,
                (*rows[:2], state, record, placement.everywhere),
                (state, record),
                donate=(2, 3),
                **how,
            )
        self._state = begin(*self._params, context, limit, sampling)

    def advance(self, num_steps: int | None = None) -> bool:
        """Runs the steps that are left, or ``num_steps`` at most; says whether all rows have ended."""
        count = np.int32(np.iinfo(np.int32).max if num_steps is None else num_steps)
        self._state, self._record = self._advance(*self._params, self._state, self._record, count)
        return bool(fetch(self._state.done).all())

    def rows(self) -> list[Generation]:
        """What each row has by now."""
        tokens, length, record = fetch((self._state.context.tokens, self._state.context.length, self._record))
        return [
            to_generation(
                tokens[i], slice(begin, end), self._stop_tokens, jax.tree.map(operator.itemgetter(i), record)
            )
            for i, (begin, end) in enumerate(zip(self._prompt_length, length, strict=False))
        ]


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
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    decoding = Decoding(target, target_params, [prompt], **options)
    done = False
    while not done:
        done = decoding.advance(steps)
        yield decoding.rows()[0]


def lay_out(
    target: Model, prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int], num_draft_tokens: int
) -> tuple[Array, Array, Array]:
    """Checks the prompts and packs them into [B, S], S a power of two; with length and limit [B]."""
    if len(prompts) == 0:
        raise ValueError("there is no prompt")
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    if not length.all():
        raise ValueError("an empty prompt: give at least one token")
    if length.max() >= target.context_length:
        raise ValueError(
            f"a prompt of {length.max()} tokens leaves no room in a context of {target.context_length}: "
            "shorten it"
        )
    budgets = list(max_tokens) if isinstance(max_tokens, Sequence) else [max_tokens] * len(prompts)
    if len(budgets) != len(prompts):
        raise ValueError(f"max_tokens needs one value, or one for each of {len(prompts)} prompts")
    if min(budgets) < 1:
        raise ValueError(f"max_tokens must be at least 1, not {min(budgets)}")
    budget = np.array([min(int(count), target.context_length) for count in budgets])
    limit = np.minimum(length + budget, target.context_length).astype(np.int32)
    # Room for the draft of a row that is one short of its limit: no slot is ever written past the end.
    needed = int(limit.max()) + num_draft_tokens + 1
    for prompt in prompts:
        if min(prompt) < 0 or max(prompt) >= target.vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {target.vocab_size}")
    tokens = np.zeros((len(prompts), max(64, 1 << (needed - 1).bit_length())), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(tokens), jnp.asarray(length), jnp.asarray(limit)


def _steps(
    target_params: Params,
    draft_params: Params,
    state: DecodeState,
    record: Record,
    num_steps: Array,
    *,
    target: Model,
    drafter: Drafter | None,
    rule: Rule,
    num_logprobs: int | None,
) -> tuple[DecodeState, Record]:
    """Steps until every row is done, ``num_steps`` times at most."""
    state, record, _ = steps_while(
        lambda state, count: (count < num_steps) & ~jnp.all(state.done),
        target_params,
        draft_params,
        state,
        record,
        target=target,
        drafter=drafter,
        rule=rule,
        num_logprobs=num_logprobs,
    )
    return state, record


def steps_while(
    goes_on: Callable[[DecodeState, Array], Array],
    target_params: Params,
    draft_params: Params,
    state: DecodeState,
    record: Record,
    *,
    target: Model,
    drafter: Drafter | None,
    rule: Rule,
    num_logprobs: int | None = None,
) -> tuple[DecodeState, Record, Array]:
    """Takes steps on the device, and keeps their record, for as long as ``goes_on(state, count)`` says.

    Args:
      goes_on: of the state and the number of steps taken; a bool of no shape.
      target_params: the target's weights.
      draft_params: the drafter's.
      state: where to begin.
      record: what was done before.
      target: the target.
      drafter: what proposes; None for plain decoding.
      rule: how drafts are judged.
      num_logprobs: as in :func:`specjax.decode.speculative_step`.

    Returns:
      The state, the record, and the number of steps, int32.
    """

    def more(carry: tuple[DecodeState, Record, Array]) -> Array:
        return goes_on(carry[0], carry[2])

    def step(state: DecodeState) -> tuple[DecodeState, StepInfo]:
        if drafter is None:
            return autoregressive_step(
                state, target_params, target=target, rule=rule, num_logprobs=num_logprobs
            )
        return speculative_step(
            state,
            target_params,
            draft_params,
            target=target,
            drafter=drafter,
            rule=rule,
            num_logprobs=num_logprobs,
        )

    def body(carry: tuple[DecodeState, Record, Array]) -> tuple[DecodeState, Record, Array]:
        before, record, count = carry
        state, info = step(before)
        return state, add_step(record, before, info), count + 1

    return lax.while_loop(more, body, (state, record, jnp.int32(0)))


_start = partial(jax.jit, static_argnames=("target", "drafter"))(start)
_advance = partial(
    jax.jit,
    static_argnames=("target", "drafter", "rule", "num_logprobs"),
    donate_argnames=("state", "record"),
)(_steps)
