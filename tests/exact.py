"""The exact law of what a rule says, by enumeration through the library's own compiled step.

A step's chances are three: which draft, how many of its tokens are kept, which token follows. Here each
row of a batch is told its draft, its uniforms and its last token, so that every outcome occurs once, and
its probability is computed: that of the draft from the draft's law, in NumPy; that of the kept length
from ``accept_probs``; that of the last token from ``next_logits``. Steps follow one another on the real
states: the rows of a step start from states that the steps before left behind, picked at random among all
that hold the same text, so that what a step threw away and left in a cache would show.

That ``accept_probs`` are what the step really goes by is checked along the way: the uniforms are put right
below them (kept) or right at them (not kept).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tables

from specjax import decode, verify
from specjax.drafters import ModelDrafter, model
from specjax.sampling import make_sampling
from specjax.types import Context, Draft, Rule

PLAIN = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
}
CHUNK = 2048  # rows of one call; the last call of a wave is filled up


@dataclasses.dataclass(frozen=True)
class Tables:
    """A target and a draft of it."""

    target: np.ndarray  # [V, V, V] logits
    draft: np.ndarray  # [V, V, V] logits
    one_hot: bool = False  # draft by argmax, without logits


@dataclasses.dataclass(frozen=True)
class Case:
    """How a row is sampled, and whether it drafts K tokens or 0 .. K, by what its text says."""

    options: dict  # as make_sampling takes them
    ragged: bool = False

    def draft_length(self, text: Sequence[int], num_draft_tokens: int) -> int:
        return (2 * sum(text) + len(text)) % (num_draft_tokens + 1) if self.ragged else num_draft_tokens


@dataclasses.dataclass(frozen=True)
class Told:
    """A drafter that is told its tokens; its logits are those of a real one, or None."""

    tokens: Any
    lengths: Any
    inner: ModelDrafter
    one_hot: bool

    always_full = True  # one width serves every length, and compiles once

    @property
    def num_draft_tokens(self):
        return self.inner.num_draft_tokens

    def propose(self, params, draft_keys, state, context, sampling):
        if self.one_hot:
            return Draft(self.tokens, None, self.lengths), state
        draft, state = self.inner.propose(params, draft_keys, state, context, sampling)
        return Draft(self.tokens, draft.logits, self.lengths), state

    def accept(self, state, num_accepted, features):
        return state


def expected_tokens(
    rule: str, given: Tables, prompt: Sequence[int], num_draft_tokens: int, **options
) -> float:
    """The mean number of tokens that a step adds after ``prompt``, from the rules' formulas."""
    total = 1.0
    for drafted in itertools.product(range(len(given.target)), repeat=num_draft_tokens):
        chance, kept, prefix = 1.0, 1.0, 0.0
        for i, token in enumerate(drafted):
            context = [*prompt, *drafted[:i]]
            p, q = (
                tables.next_probs(table, context, len(prompt), **options)[token]
                for table in (given.target, given.draft)
            )
            chance *= q
            if chance == 0:
                break
            # token: all ratios must hold; block: P_i = min(1, P_{i-1} r_i)
            kept = kept * min(1.0, p / q) if rule == "token" else min(1.0, kept * p / q)
            prefix += kept
        total += chance * prefix
    return total


@functools.cache
def compiled(rule_name: str, vocab_size: int, num_draft_tokens: int, one_hot: bool):
    """The step with its draws as arguments, and the start."""
    table_model = tables.TableModel(vocab_size)
    inner = ModelDrafter(table_model, num_draft_tokens)

    def step(state, target_params, draft_params, tokens, lengths, uniforms, last):
        # The key of a draft's draw is the token itself.
        rule = Rule(rule_name, verify.RULES[rule_name].verify, lambda _, i: jnp.take(tokens, i, axis=1))
        with (
            mock.patch.object(verify, "uniform", lambda keys: uniforms[:, : keys.shape[1]]),
            mock.patch.object(verify, "sample", return_value=last),
            mock.patch.object(model, "sample", lambda token, _: token),
        ):
            drafter = Told(tokens, lengths, inner, one_hot)
            state, info = decode.speculative_step(
                state, target_params, draft_params, target=table_model, drafter=drafter, rule=rule
            )
        return state, info.verdict, info.num_emitted

    start = functools.partial(decode.start, target=table_model, drafter=None if one_hot else inner)
    return jax.jit(step), jax.jit(start)


def output_laws(
    rule: str,
    given: Tables,
    cases: Sequence[Case],
    prompt: Sequence[int],
    num_tokens: int,
    num_draft_tokens: int,
) -> list[np.ndarray]:
    """For each case, the probabilities [V] * num_tokens of the texts that steps write after ``prompt``."""
    with jax.enable_x64(True):
        return _Enumeration(rule, given, cases, prompt, num_tokens, num_draft_tokens).run()


class _Enumeration:
    """Texts of all cases side by side; a text is (case, token, token, ...)."""

    def __init__(self, rule, given, cases, prompt, num_tokens, num_draft_tokens):
        self.rule, self.given, self.cases, self.prompt = rule, given, cases, tuple(prompt)
        self.num_tokens, self.num_drafted = num_tokens, num_draft_tokens
        self.vocab_size = len(given.target)
        self.step, self.start = compiled(rule, self.vocab_size, num_draft_tokens, given.one_hot)
        self.params = jnp.asarray(given.target, jnp.float64), jnp.asarray(given.draft, jnp.float64)
        self.known_probs: dict[tuple, np.ndarray] = {}
        self.random = np.random.default_rng(0)

    def run(self) -> list[np.ndarray]:
        first = [(case,) for case in range(len(self.cases))]
        self.weight = dict.fromkeys(first, 1.0)  # the probability that a text is written
        self.places = {text: [i] for i, text in enumerate(first)}  # where in the pool states hold it
        self.pool, self.num_placed = self.first_states(), len(first)
        for length in range(self.num_tokens):
            # Steps only make texts longer, so the weights of these are complete.
            self.wave([text for text in self.weight if len(text) == 1 + length])
        laws = [np.zeros((self.vocab_size,) * self.num_tokens) for _ in self.cases]
        for (case, *text), probability in self.weight.items():
            if len(text) == self.num_tokens:
                laws[case][tuple(text)] = probability
        return laws

    def first_states(self):
        begin, batch = len(self.prompt), len(self.cases)
        tokens = np.zeros((batch, begin + self.num_tokens + self.num_drafted + 1), np.int32)
        tokens[:, :begin] = self.prompt
        length = np.full(batch, begin, np.int32)
        context = Context(tokens, length, length.copy(), np.full((batch, 1), -1, np.int32))
        options = [PLAIN | case.options for case in self.cases]
        sampling = make_sampling(batch, **{name: [row[name] for row in options] for name in PLAIN})
        return jax.device_get(self.start(*self.params, context, length + np.int32(self.num_tokens), sampling))

    def draft_probs(self, case, context):
        """The draft's law [V] after ``context``."""
        options = self.cases[case].options
        # Without penalties the last two tokens say it all.
        key = (case, *(context if any("penalty" in name for name in options) else (0, *context)[-2:]))
        if key not in self.known_probs:
            self.known_probs[key] = tables.next_probs(self.given.draft, context, len(self.prompt), **options)
        return self.known_probs[key]

    def drafts(self, case, context, length):
        """Every draft of that length after ``context``, with its probability."""
        if self.given.one_hot:
            drafted = list(context)
            while len(drafted) < len(context) + length:
                drafted.append(int(np.argmax(tables.table_logits(self.given.draft, drafted))))
            return [(tuple(drafted[len(context) :]), 1.0)]
        found = [((), 1.0)]
        for _ in range(length):
            found = [
                ((*drafted, token), chance * probability)
                for drafted, chance in found
                for token, probability in enumerate(self.draft_probs(case, (*context, *drafted)))
                if probability > 0
            ]
        return found

    def outcomes(self, text):
        """Every draft after ``text``, with its probability, number of tokens kept, and last token."""
        case, *written = text
        length = self.cases[case].draft_length(written, self.num_drafted)
        drafts = self.drafts(case, (*self.prompt, *written), length)
        # What stands in a draft past its length must not matter.
        filler = (self.vocab_size - 1,) * (self.num_drafted - length)
        for (drafted, p), kept, last in itertools.product(drafts, range(length + 1), range(self.vocab_size)):
            yield (*drafted, *filler), length, kept, last, p

    def wave(self, texts) -> None:
        """Takes one step from every text of one length."""
        rows = [(text, *outcome) for text in texts for outcome in self.outcomes(text)]
        left = [self.chunk(rows[begin : begin + CHUNK]) for begin in range(0, len(rows), CHUNK)]
        self.pool = jax.tree.map(lambda *x: np.concatenate(x), self.pool, *left)

    def chunk(self, rows):
        """Takes the steps of ``rows``, adds up what they say, and returns the states they lead to."""
        filled = rows + rows[:1] * (CHUNK - len(rows))
        texts, drafted, lengths, kept, last, draft_probs = zip(*filled, strict=True)
        picked = np.array([self.random.choice(self.places[text]) for text in texts])
        state = jax.tree.map(lambda x: x[picked], self.pool)
        drafted, lengths, last = (np.array(x, np.int32) for x in (drafted, lengths, last))
        kept = np.array(kept)

        keep = np.arange(self.num_drafted) < kept[:, None]
        run = functools.partial(self.step, state, *self.params, drafted, lengths)
        _, verdict, _ = run(np.where(keep, 0.0, 1.0), last)
        accept = np.asarray(verdict.accept_probs)
        assert accept.min() >= 0
        assert accept.max() <= 1
        uniforms = np.where(keep, np.maximum(np.nextafter(accept, 0), 0), accept)
        next_state, verdict, num_emitted = jax.device_get(run(uniforms, last))
        padded = np.pad(accept, ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0)))
        chance = np.take_along_axis(self.chance_of_stopping(padded), kept[:, None], axis=1)[:, 0]
        chance *= np.take_along_axis(tables.softmax(verdict.next_logits), last[:, None], axis=1)[:, 0]
        # A row told to stay below an accept probability of 0 did something else, at no weight.
        np.testing.assert_array_equal(verdict.num_accepted[chance > 0], kept[chance > 0])

        survivors = []
        for i in np.flatnonzero(chance[: len(rows)] > 0):
            end = len(self.prompt) + len(texts[i]) - 1
            added = next_state.context.tokens[i, end : end + num_emitted[i]]
            text = (*texts[i], *map(int, added))
            assert len(text) > len(texts[i])
            self.weight[text] = (
                self.weight.get(text, 0.0) + self.weight[texts[i]] * draft_probs[i] * chance[i]
            )
            if len(text) <= self.num_tokens:
                self.places.setdefault(text, []).append(self.num_placed)
                self.num_placed += 1
                survivors.append(i)
        return jax.tree.map(lambda x: x[survivors], next_state)

    def chance_of_stopping(self, accept: np.ndarray) -> np.ndarray:
        """[B, K+1]: the chance that 0 .. K tokens are kept, the uniforms integrated out.

        ``accept`` [B, K+2] has the chances to pass the test of token 0 (1, by convention) .. K, and a 0.
        """
        if self.rule == "token":  # all up to the stop pass, the next one fails
            return np.cumprod(accept[:, :-1], axis=1) * (1 - accept[:, 1:])
        # The last one to pass is the stop: all after it fail.
        fail_after = np.cumprod((1 - accept[:, ::-1]), axis=1)[:, ::-1]
        return accept[:, :-1] * fail_after[:, 1:]
