"""Rows through many steps: each like its solo run, whatever its neighbours accept, and up to the cache's end.

The target looks at the whole past (HistoryModel), so a slot that a rejected token left behind, or that
was never filled, changes what it says.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tables
from scripted import Shortened, Spoiled

from specjax.decode import speculative_step, start
from specjax.drafters import LookupDrafter, ModelDrafter
from specjax.generate import generate
from specjax.sampling import make_sampling
from specjax.types import Context
from specjax.verify import RULES

V, K = 11, 4
MODEL = tables.HistoryModel(V)
TABLE, OTHER = jnp.asarray(tables.random_history(0, V)), jnp.asarray(tables.random_history(1, V))
SELF = ModelDrafter(MODEL, K)
PROMPTS = [[3], [1, 2], [6, 5, 4, 3, 2, 1, 0], [9] * 12]
LONG = list(range(11)) * 6 + [4]  # more than one chunk of prefill


def plain_greedy(prompt, num_tokens, stop_tokens=()):
    return tables.greedy_continuation(
        tables.history_logits, np.asarray(TABLE), prompt, num_tokens, stop_tokens
    )


def run(prompts=PROMPTS, max_tokens=20, **how):
    return generate(MODEL, TABLE, prompts, max_tokens=max_tokens, **how)


def texts(rows):
    return [row.tokens for row in rows]


def test_plain_decoding_is_the_loop():
    assert texts(run()) == [plain_greedy(prompt, 20) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("drafter", "params", "prompts"),
    [
        (SELF, OTHER, [*PROMPTS[:3], LONG]),
        (LookupDrafter(K, 1, 3), None, PROMPTS),
        (Shortened(SELF), OTHER, PROMPTS),
    ],
    ids=["model", "lookup", "shortened"],
)
def test_greedy_speculation_is_the_loop(drafter, params, prompts):
    rows = run(prompts, drafter=drafter, draft_params=params)
    assert texts(rows) == [plain_greedy(prompt, 20) for prompt in prompts]
    assert sum(row.num_accepted_tokens for row in rows) > 0


def test_rows_that_accept_0_1_3_and_all():
    right = np.array([0, 1, 3, K])
    rows = run(drafter=Spoiled(SELF), draft_params=(TABLE, right), max_tokens=21)
    for row, prompt, kept in zip(rows, PROMPTS, right, strict=True):
        assert row.tokens == plain_greedy(prompt, 21)
        # Every step keeps exactly what it was made to, until the limit cuts a draft short.
        steps = -(-21 // (kept + 1))
        assert row.num_steps == steps
        assert row.accepted[kept] >= steps - 1


def test_a_batch_of_one_and_of_two_and_another_order():
    right = np.array([0, 1, 3, K])
    drafter = Spoiled(SELF)
    together = texts(run(drafter=drafter, draft_params=(TABLE, right)))
    for chosen in ([2], [3, 1], [1, 3, 0, 2]):
        rows = run([PROMPTS[i] for i in chosen], drafter=drafter, draft_params=(TABLE, right[chosen]))
        assert texts(rows) == [together[i] for i in chosen]


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_sampled_rows_depend_on_their_seed_alone(rule):
    options = {
        "temperature": np.array([1.0, 0.7, 0.0, 1.5]),
        "top_k": np.array([0, 4, 0, 0]),
        "top_p": np.array([1.0, 1.0, 1.0, 0.8]),
        "seed": np.array([11, 2**32 - 1, 5, 11]),
    }

    def decode(chosen):
        sampling = make_sampling(len(chosen), **{name: column[chosen] for name, column in options.items()})
        return texts(
            run([PROMPTS[i] for i in chosen], drafter=SELF, draft_params=OTHER, sampling=sampling, rule=rule)
        )

    together = decode([0, 1, 2, 3])
    assert together[2] == plain_greedy(PROMPTS[2], 20)
    for chosen in ([3, 2, 1, 0], [1])[: 2 if rule == "token" else 1]:
        assert decode(chosen) == [together[i] for i in chosen]


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_a_self_draft_is_accepted_whole_while_lengths_vary(rule):
    # A gap in the draft's cache would leave the output right and the acceptance low.
    sampling = make_sampling(4, temperature=[0.0, 0.8, 1.0, 1.3], top_p=[1.0, 0.9, 1.0, 1.0])
    rows = run(max_tokens=40, drafter=Shortened(SELF), draft_params=TABLE, sampling=sampling, rule=rule)
    assert all(row.draft_acceptance_rate == 1 for row in rows)
    assert np.count_nonzero(sum(row.drafted for row in rows)) == K + 1, "not every length occurred"


def test_the_drafts_cache_outlives_steps_without_a_draft():
    # Alone, the row's steps are now K wide and now one token wide.
    (row,) = run([[3, 1]], 40, drafter=Shortened(SELF), draft_params=TABLE)
    assert row.draft_acceptance_rate == 1
    assert row.drafted[0] > 2
    assert row.drafted[K] > 2


@pytest.mark.parametrize("right", range(K + 1))
@pytest.mark.parametrize("offset", range(K + 1))
def test_a_stop_token_anywhere_in_a_block(offset, right):
    # The block's offset-th token is made a stop token, on one row only.
    prompt, others = PROMPTS[2], [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    free = plain_greedy(prompt, 30)
    first_block = 1 if offset else 0  # a stop at once, or in the second block
    place = first_block * (right + 1) + offset
    stop = free[place]
    prompts = [others[0], prompt, *others[1:]]
    rows = run(
        prompts, 30, drafter=Spoiled(SELF), draft_params=(TABLE, np.full(4, right)), stop_tokens=[stop]
    )
    for row, asked in zip(rows, prompts, strict=True):
        expected = plain_greedy(asked, 30, [stop])
        assert row.tokens == expected
        assert row.stopped == (expected[-1] == stop)
        assert len(row.sources) == len(expected)


@pytest.mark.parametrize("max_tokens", [1, 2, K, K + 1, K + 2, 17])
def test_the_limit_is_exact(max_tokens):
    rows = run(max_tokens=max_tokens, drafter=Spoiled(SELF), draft_params=(TABLE, np.full(4, K)))
    assert texts(rows) == [plain_greedy(prompt, max_tokens) for prompt in PROMPTS]
    assert not any(row.stopped for row in rows)
    # Nothing is drafted that could not be emitted.
    assert all(row.num_accepted_tokens == row.num_draft_tokens for row in rows)


def test_every_row_has_its_own_limit():
    limits = [1, 18, 3, 7]
    rows = run(max_tokens=limits, drafter=Spoiled(SELF), draft_params=(TABLE, np.array([0, 1, 3, K])))
    assert texts(rows) == [plain_greedy(prompt, limit) for prompt, limit in zip(PROMPTS, limits, strict=True)]


def test_a_stop_on_the_last_token_counts_as_a_stop():
    free = plain_greedy(PROMPTS[1], 6)
    first = free.index(free[5])
    assert first > 0
    for cap, stopped in ((first + 1, True), (first, False)):
        how = dict(drafter=Spoiled(SELF), draft_params=(TABLE, np.array([K])), stop_tokens=[free[5]])
        (row,) = run([PROMPTS[1]], cap, **how)
        assert row.tokens == free[:cap]
        assert row.stopped == stopped


SPOILED = Spoiled(SELF)
begin = jax.jit(partial(start, target=MODEL, drafter=SPOILED))
step = jax.jit(partial(speculative_step, target=MODEL, drafter=SPOILED, rule=RULES["greedy"]))


def layout(capacity: int) -> Context:
    tokens = np.zeros((4, capacity), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    length = jnp.array([len(prompt) for prompt in PROMPTS], jnp.int32)
    return Context(jnp.asarray(tokens), length, length, jnp.full((4, 1), -1, jnp.int32))


@pytest.mark.parametrize("spare", [K + 1, 0])
def test_blocks_that_end_at_and_past_the_caches_end(spare):
    # The buffers' last slots: what a block writes past them must be dropped, not moved back over live ones.
    limit, params = 24, (TABLE, (TABLE, jnp.array([0, 1, 3, K])))
    state = begin(*params, layout(limit + spare), jnp.full(4, limit, jnp.int32), make_sampling(4))
    for _ in range(limit):
        state, info = step(state, *params)
    assert state.done.all()
    assert not info.num_emitted.any()
    for row, prompt in enumerate(PROMPTS):
        assert state.context.tokens[row, :limit].tolist() == prompt + plain_greedy(
            prompt, limit - len(prompt)
        )


def test_a_step_reports_what_it_did():
    # Row 0 keeps all, row 1 one token, row 2 meets its limit, row 3 was done before.
    params, context = (TABLE, (TABLE, jnp.array([K, 1, K, K]))), layout(24 + K + 1)
    limit = context.length + jnp.array([20, 20, 3, 0], jnp.int32)
    before = begin(*params, context, limit, make_sampling(4))
    assert before.done.tolist() == [False, False, False, True]
    state, info = step(before, *params)
    assert info.num_drafted.tolist() == [K, K, 2, 0]
    assert info.num_accepted.tolist() == [K, 1, 2, 0]
    assert info.num_emitted.tolist() == [K + 1, 2, 3, 0]
    assert not info.failed.any()
    assert (state.context.length - context.length).tolist() == [K + 1, 2, 3, 0]
    assert state.done.tolist() == [False, False, True, True]
    np.testing.assert_array_equal(state.context.tokens[3], context.tokens[3])


def visited(texts) -> list[int]:
    """The entries of the target's table that decoding these texts looked at."""
    places = [
        (prompt, text, end) for prompt, text in zip(PROMPTS, texts, strict=True) for end in range(len(text))
    ]
    return [tables.history_entry([*prompt, *text[:end]]) for prompt, text, end in places]


@pytest.mark.parametrize("drafter", [None, SELF], ids=["plain", "model"])
def test_a_broken_row_is_reported_and_its_neighbours_are_untouched(drafter):
    sampling = make_sampling(4, temperature=[1.0, 1.0, 0.0, 1.0], seed=[3, 4, 5, 6])
    how = dict(drafter=drafter, draft_params=OTHER, max_tokens=12, sampling=sampling)
    if drafter is None:
        del how["draft_params"]
    healthy = generate(MODEL, TABLE, PROMPTS, **how)
    assert [row.failed for row in healthy] == [False] * 4
    # After its seventh token the second row meets logits that are no numbers.
    broken = tables.history_entry([*PROMPTS[1], *healthy[1].tokens[:7]])
    assert visited(texts(healthy)).count(broken) == 1
    rows = generate(MODEL, TABLE.at[broken].set(jnp.nan), PROMPTS, **how)
    assert [row.failed for row in rows] == [False, True, False, False]
    assert rows[1].tokens == healthy[1].tokens[:7]
    for row in (0, 2, 3):
        assert rows[row].tokens == healthy[row].tokens


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_what_breaks_behind_a_rejected_token_is_never_seen(rule):
    # Every text but those that plain decoding writes is broken; drafts go astray all the time.
    sampling = make_sampling(4, temperature=0.0 if rule == "greedy" else 1.0)
    how = dict(max_tokens=12, sampling=sampling, rule=rule)
    plain = generate(MODEL, TABLE, PROMPTS, **how)
    narrow = jnp.full_like(TABLE, jnp.nan).at[jnp.array(visited(texts(plain)))].set(0)
    rows = generate(MODEL, TABLE + narrow, PROMPTS, drafter=SELF, draft_params=OTHER, **how)
    assert texts(rows) == texts(plain)
    assert not any(row.failed for row in rows)
    assert all(row.draft_acceptance_rate < 0.9 for row in rows)
