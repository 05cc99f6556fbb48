"""Bias, penalties, minimum lengths and masks: position by position inside a block, and in whole texts."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tables

from specjax import sampling
from specjax.drafters import LookupDrafter, ModelDrafter
from specjax.generate import generate
from specjax.sampling import make_sampling
from specjax.types import Context

V, K = 11, 4
MODEL = tables.HistoryModel(V)
TABLE, OTHER = jnp.asarray(tables.random_history(0, V)), jnp.asarray(tables.random_history(1, V))
PROMPTS = [[3], [1, 2], [6, 5, 4, 3, 2, 1, 0], [9] * 12]
OPTIONS = [
    {},
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0, "temperature": 0.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.4, "top_k": 5},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "top_p": 0.7},
    {"logit_bias": {3: 4.0, 7: -100.0}},
    {"logit_bias": {0: -1.5}, "temperature": 0.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.3, "top_k": 3, "temperature": 1.4},
    {"min_tokens": 12},
    {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {1: 2.0},
        "min_p": 0.05,
    },
]
DEFAULTS = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "logit_bias": {0: 0.0},  # biases of any number up to 16 share their programs with this one
}


def batch_of(options: list[dict], **more):
    rows = [DEFAULTS | row for row in options]
    return make_sampling(len(rows), **{name: [row[name] for row in rows] for name in DEFAULTS}, **more)


def test_every_position_of_a_block_sees_what_stands_before_it():
    rng = np.random.default_rng(0)
    batch, count, capacity = len(OPTIONS), 4, 24
    logits = rng.normal(0, 3, (batch, count, V)).astype(np.float32)
    prompt_length = rng.integers(1, 8, batch)
    length = prompt_length + rng.integers(0, 10, batch)
    # Behind the length stand drafted tokens, one fewer than positions, and then filler.
    tokens = rng.integers(0, V, (batch, capacity))
    stops = np.tile([4, -1], (batch, 1))
    context = Context(*(jnp.asarray(x, jnp.int32) for x in (tokens, length, prompt_length, stops)))
    warped = np.asarray(jax.jit(sampling.warp)(jnp.asarray(logits), batch_of(OPTIONS), context))
    for row, options in enumerate(OPTIONS):
        warps = {name: value for name, value in options.items() if name in tables.WARPS}
        edits = {name: value for name, value in options.items() if name not in warps and name != "min_tokens"}
        for place in range(count):
            before = tokens[row, : length[row] + place].tolist()
            edited = tables.edit(logits[row, place], before, prompt_length[row], **edits)
            if len(before) - prompt_length[row] < options.get("min_tokens", 0):
                edited[4] = -np.inf
            expected = tables.warp(edited, **warps)
            np.testing.assert_array_equal(np.isfinite(warped[row, place]), expected > 0, err_msg=str(options))
            np.testing.assert_allclose(
                tables.softmax(warped[row, place]), expected, atol=1e-5, err_msg=str(options)
            )


def decode(options: dict, drafter=None, params=None, rule="coupled", **how):
    rows = batch_of([options] * 4, seed=np.arange(4))
    how = dict(max_tokens=24, sampling=rows, rule=rule, drafter=drafter, draft_params=params) | how
    return generate(MODEL, TABLE, PROMPTS, **how)


def texts(rows):
    return [row.tokens for row in rows]


def test_speculation_honours_every_option_as_plain_decoding_does():
    free = texts(decode({}, stop_tokens=[5]))
    for options in OPTIONS[1:]:
        plain = decode(options, stop_tokens=[5])
        assert texts(plain) != free, "the option does nothing"
        for drafter, params in ((ModelDrafter(MODEL, K), OTHER), (LookupDrafter(K, 1, 3), None)):
            assert texts(decode(options, drafter, params, stop_tokens=[5])) == texts(plain)


def test_greedy_texts_with_penalties_are_the_loops():
    options = {
        "temperature": 0.0,
        "frequency_penalty": 0.9,
        "repetition_penalty": 1.3,
        "logit_bias": {4: 1.0},
    }
    edits = {name: value for name, value in options.items() if name != "temperature"}
    rows = decode(options, ModelDrafter(MODEL, K), TABLE)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        context = list(prompt)
        for _ in range(24):
            logits = tables.history_logits(np.asarray(TABLE), context)
            context.append(int(np.argmax(tables.edit(logits, context, len(prompt), **edits))))
        assert row.tokens == context[len(prompt) :]
    # The draft is the target under the same options: what is drafted is kept, whatever stands before it.
    assert all(row.draft_acceptance_rate == 1 for row in rows)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_a_self_draft_is_kept_whole_under_every_option(rule):
    for options in (OPTIONS[-1], OPTIONS[2], {"min_tokens": 20}):
        rows = decode(options, ModelDrafter(MODEL, K), TABLE, rule, stop_tokens=[5])
        assert all(row.draft_acceptance_rate > 0.99 for row in rows if not row.stopped)


@pytest.mark.parametrize("min_tokens", [0, 1, 2, K, K + 1, 13, 24])
def test_no_stop_before_min_tokens(min_tokens):
    # Tokens, not steps: all that is accepted counts.
    how = dict(stop_tokens=[5])
    plain = decode({"min_tokens": min_tokens}, **how)
    rows = decode({"min_tokens": min_tokens}, ModelDrafter(MODEL, K), OTHER, **how)
    assert texts(rows) == texts(plain)
    for row in rows:
        stops = [i for i, token in enumerate(row.tokens) if token == 5]
        assert all(i >= min_tokens for i in stops)
        assert row.stopped == bool(stops)
        assert len(row.tokens) == (stops[0] + 1 if stops else 24)
    assert any(row.stopped for row in rows) or min_tokens > 13


def only_even_after_odd(context: Context, count: int):
    """After an odd token only even ones are allowed."""
    places = jnp.clip(context.length[:, None] - 1 + jnp.arange(count)[None], 0, context.tokens.shape[1] - 1)
    odd = jnp.take_along_axis(context.tokens, places, axis=1) % 2 == 1
    even = (jnp.arange(V) % 2 == 0)[None, None]
    return even | ~odd[:, :, None]


def test_a_mask_constrains_every_position():
    how = dict(allowed=only_even_after_odd)
    plain = decode({}, **how)
    assert texts(plain) != texts(decode({}))
    for drafter, params in ((ModelDrafter(MODEL, K), OTHER), (LookupDrafter(K, 1, 3), None)):
        assert texts(decode({}, drafter, params, **how)) == texts(plain)
    for row, prompt in zip(plain, PROMPTS, strict=True):
        text = [prompt[-1], *row.tokens]
        assert all(after % 2 == 0 for before, after in itertools.pairwise(text) if before % 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_p": 1.2}, r"min_p must be in \[0, 1\], not 1\.2"),
        ({"min_p": -0.1}, "min_p must be in"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be in -1e9"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty must be in -1e9"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, not 0"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, not -1"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": [{}]}, "logit_bias needs one mapping, or one for each of 2 rows, not 1"),
    ],
)
def test_a_value_out_of_range_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        make_sampling(2, **values)
