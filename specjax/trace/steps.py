"""What speculation did, token by token: each proposal, its hearing, and what stood in the end.

:func:`trace` decodes one prompt as :func:`specjax.generate.generate` does, token for token, but step by step
from the host, and keeps what every step knew: the draft, the chances that the rule compared, the noise that
it compared them with, the alternatives. :mod:`specjax.trace.page` shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import ArrayLike

from specjax.decode import autoregressive_step, speculative_step
from specjax.generate import Decoding
from specjax.record import Generation, Record, Source, add_step
from specjax.sampling import Role, keys_at, uniform
from specjax.types import (
    Address,
    Array,
    DecodeState,
    Draft,
    Drafter,
    Model,
    Params,
    Rule,
    StepInfo,
    Verdict,
    pytree,
)

__all__ = ["Choice", "Proposal", "Step", "Trace", "TracedDecoding", "trace"]

Choice = tuple[int, float]
"""A token and its probability."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """One drafted token before the rule."""

    token: int
    stood: bool  # whether it became part of the text
    target_prob: float  # p, after the warp, given what was drafted before it
    draft_prob: float  # q, what it was drawn with, after the warp; 1 of a deterministic draft
    accept_prob: float  # what the rule held its uniform against
    uniform: float | None  # None under rules that draw none
    target_choices: list[Choice]  # the target's likeliest there, before the warp
    draft_choices: list[Choice]  # the draft's, after the warp; empty of a deterministic draft


@dataclasses.dataclass(frozen=True)
class Step:
    """One step: the proposals and the tokens that it added."""

    start: int  # length of the text before it, prompt included
    proposals: list[Proposal]
    tokens: list[int]  # what it added: proposals that stood, then the rule's own token if no stop came first
    sources: list[Source]  # one for each
    probs: list[float]  # the target's own, before the warp, one for each
    next_choices: list[Choice]  # the likeliest of what the rule's own token was drawn from
    target_choices: list[Choice]  # the target's likeliest at that place, before the warp


@dataclasses.dataclass(frozen=True)
class Trace:
    """A whole generation and how it came about."""

    prompt: list[int]
    generation: Generation
    steps: list[Step]


@pytree
class _Heard(Verdict):
    """A verdict with what the rule was told, for K proposals whatever the width of the step."""

    uniforms: Array  # [B, K] float32
    target_chances: Array  # [B, K]: p of each drafted token
    draft_chances: Array  # [B, K]: q of it
    draft_top: tuple[Array, Array]  # [B, K, n] probabilities and ids
    next_top: tuple[Array, Array]  # [B, n]


class TracedDecoding(Decoding):
    """A :class:`~specjax.generate.Decoding` of one prompt that tells what each step did.

    Args:
      target: as the arguments after it.
      target_params: ditto.
      prompt: one sequence of token ids.
      num_choices: how many alternatives to keep at each place, 1 or more.
      options: as for :class:`~specjax.generate.Decoding`.

    Raises:
      ValueError: as there, or num_choices below 1.
    """

    def __init__(
        self,
        target: Model,
        target_params: Params,
        prompt: Sequence[int],
        *,
        num_choices: int = 5,
        **options: Any,
    ) -> None:
        if num_choices < 1:
            raise ValueError(f"num_choices must be at least 1, not {num_choices}")
        super().__init__(
            target,
            target_params,
            [prompt],
            **options | dict(num_logprobs=min(num_choices, target.vocab_size)),
        )
        self._end = len(prompt)

    def steps(self) -> Iterator[Step]:
        """Runs the steps that are left, one at a time, and tells of each."""
        while not bool(self._state.done.all()):
            self._state, self._record, info = _traced_step(
                *self._params,
                self._state,
                self._record,
                target=self._how["target"],
                drafter=self._how["drafter"],
                rule=self._how["rule"],
                num_choices=self._how["num_logprobs"],
            )
            info = jax.tree.map(lambda x: np.asarray(x[0]), info)
            step = _to_step(self._end, info, draws=self._how["rule"].name in ("token", "block"))
            self._end += len(step.tokens)
            yield step


def trace(target: Model, target_params: Params, prompt: Sequence[int], **options: Any) -> Trace:
    """Decodes one prompt and tells how every token came about.

    Args:
      target: the model whose law the output has.
      target_params: its weights.
      prompt: token ids.
      options: those of :class:`TracedDecoding`: drafter, max_tokens, rule, sampling, num_choices and so on.

    Returns:
      The trace; its generation has the tokens of :func:`specjax.generate.generate`.

    Raises:
      ValueError: as :class:`TracedDecoding`.
    """
    decoding = TracedDecoding(target, target_params, prompt, **options)
    steps = list(decoding.steps())
    return Trace(list(prompt), decoding.rows()[0], steps)


@partial(
    jax.jit,
    static_argnames=("target", "drafter", "rule", "num_choices"),
    donate_argnames=("state", "record"),
)
def _traced_step(
    target_params: Params,
    draft_params: Params,
    state: DecodeState,
    record: Record,
    *,
    target: Model,
    drafter: Drafter | None,
    rule: Rule,
    num_choices: int,
) -> tuple[DecodeState, Record, StepInfo]:
    """The real step under a rule that takes notes."""
    num_drafted = 0 if drafter is None else drafter.num_draft_tokens
    noting = Rule(rule.name, partial(_take_notes, rule, num_drafted, num_choices), rule.draft_keys)
    if drafter is None:
        after, info = autoregressive_step(
            state, target_params, target=target, rule=noting, num_logprobs=num_choices
        )
    else:
        after, info = speculative_step(
            state,
            target_params,
            draft_params,
            target=target,
            drafter=drafter,
            rule=noting,
            num_logprobs=num_choices,
        )
    record = add_step(record, state, info)
    # What is as wide as the vocabulary stays on the device.
    small = dataclasses.replace(
        info,
        draft=dataclasses.replace(info.draft, logits=None),
        verdict=dataclasses.replace(info.verdict, next_logits=jnp.zeros((1, 0))),
    )
    return after, record, small


def _take_notes(
    rule: Rule, num_drafted: int, num_choices: int, address: Address, draft: Draft, target_logits: Array
) -> _Heard:
    """The rule's verdict, with what it was told."""
    verdict = rule.verify(address, draft, target_logits)
    batch, width = draft.tokens.shape
    target = jax.nn.softmax(target_logits[:, :-1], axis=-1)
    chosen = jnp.take_along_axis(target, draft.tokens[..., None], axis=-1)[..., 0]
    # The rule's own noise: the same address gives the same number.
    noise = uniform(keys_at(address, lax.broadcasted_iota(jnp.int32, (batch, width), 1), Role.ACCEPT))
    if draft.logits is None:
        drawn = jnp.ones((batch, width))
        draft_top = (
            jnp.zeros((batch, width, num_choices)),
            jnp.zeros((batch, width, num_choices), jnp.int32),
        )
    else:
        probs = jax.nn.softmax(draft.logits, axis=-1)
        drawn = jnp.take_along_axis(probs, draft.tokens[..., None], axis=-1)[..., 0]
        draft_top = lax.top_k(probs, num_choices)

    def fill(x: Array) -> Array:
        """A step's width may be 0 where it has no draft; notes are of one shape."""
        return jnp.pad(x, ((0, 0), (0, num_drafted - width), *[(0, 0)] * (x.ndim - 2)))

    return _Heard(
        **{field.name: getattr(verdict, field.name) for field in dataclasses.fields(Verdict)},
        uniforms=fill(noise),
        target_chances=fill(chosen),
        draft_chances=fill(drawn),
        draft_top=jax.tree.map(fill, draft_top),
        next_top=lax.top_k(jax.nn.softmax(verdict.next_logits, axis=-1), num_choices),
    )


def _to_step(start: int, info: StepInfo, *, draws: bool) -> Step:
    """One row's notes, NumPy, as a step for people."""
    heard = info.verdict
    assert isinstance(heard, _Heard)
    assert info.logprobs is not None
    target_top = np.exp(info.logprobs.top), info.logprobs.top_tokens
    num_drafted, num_emitted = int(info.num_drafted), int(info.num_emitted)
    num_accepted = int(heard.num_accepted)
    proposals = [
        Proposal(
            token=int(info.draft.tokens[i]),
            stood=i < int(info.num_accepted),
            target_prob=float(heard.target_chances[i]),
            draft_prob=float(heard.draft_chances[i]),
            accept_prob=float(heard.accept_probs[i]),
            uniform=float(heard.uniforms[i]) if draws else None,
            target_choices=_choices(target_top, i),
            draft_choices=_choices(heard.draft_top, i),
        )
        for i in range(num_drafted)
    ]
    whole = num_accepted == num_drafted
    last = Source.PLAIN if num_drafted == 0 else Source.BONUS if whole else Source.CORRECTED
    emitted = [*(int(token) for token in info.draft.tokens[:num_accepted]), int(heard.next_token)]
    sources = [Source.ACCEPTED] * num_accepted + [last]
    return Step(
        start=start,
        proposals=proposals,
        tokens=emitted[:num_emitted],
        sources=sources[:num_emitted],
        probs=np.exp(info.logprobs.chosen[:num_emitted]).tolist(),
        next_choices=_choices(heard.next_top),
        target_choices=_choices(target_top, num_accepted),
    )


def _choices(top: tuple[ArrayLike, ArrayLike], *place: int) -> list[Choice]:
    """The tokens that can be drawn, likeliest first."""
    probs, tokens = (np.asarray(x)[place] for x in top)
    return [(int(t), float(p)) for p, t in zip(probs, tokens, strict=True) if p > 0]
