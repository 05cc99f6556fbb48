"""The call around the step: layout, records, streams, and what it refuses."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import tables
from scripted import Shortened, Spoiled

from specjax.drafters import LookupDrafter, ModelDrafter
from specjax.generate import Generation, Source, generate, stream
from specjax.sampling import make_sampling

V, K = 11, 4
MODEL = tables.HistoryModel(V)
TABLE, OTHER = jnp.asarray(tables.random_history(0, V)), jnp.asarray(tables.random_history(1, V))
SELF = ModelDrafter(MODEL, K)
PROMPTS = [[3], [1, 2], [6, 5, 4, 3, 2, 1, 0], [9] * 12]
P, A, C, B = Source.PLAIN, Source.ACCEPTED, Source.CORRECTED, Source.BONUS


def run(prompts=PROMPTS, max_tokens=20, **how):
    return generate(MODEL, TABLE, prompts, max_tokens=max_tokens, **how)


def test_plain_decoding_records_plain_steps():
    for row in run():
        assert row.sources == [P] * 20
        assert (row.num_steps, row.drafted.tolist(), row.accepted.tolist()) == (20, [20], [20])
        assert (row.mean_acceptance_length, row.draft_acceptance_rate) == (1, 0)
        assert (row.num_draft_tokens, row.num_accepted_tokens) == (0, 0)
        assert not row.stopped
        assert not row.failed


def test_records_of_rows_that_keep_0_1_3_and_all():
    # 12 tokens each. A draft is cut to what can still be emitted besides the step's own token.
    rows = run(max_tokens=12, drafter=Spoiled(SELF), draft_params=(TABLE, np.array([0, 1, 3, K])))
    none, one, three, whole = rows
    # Drafts of 4 down to 0, one token a step: room is 11, 10, .., 4 for eight steps, then 3, 2, 1, 0.
    assert none.sources == [C] * 11 + [P]
    assert none.drafted.tolist() == [1, 1, 1, 1, 8]
    assert none.accepted.tolist() == [12, 0, 0, 0, 0]
    # Two tokens a step: room is 11, 9, 7, 5, 3 and 1; the last draft, of one token, is kept whole.
    assert one.sources == [A, C] * 5 + [A, B]
    assert one.drafted.tolist() == [0, 1, 0, 1, 4]
    assert one.accepted.tolist() == [0, 6, 0, 0, 0]
    # Four a step: room is 11, 7 and 3.
    assert three.sources == [A, A, A, C] * 2 + [A, A, A, B]
    assert three.drafted.tolist() == [0, 0, 0, 1, 2]
    assert three.accepted.tolist() == [0, 0, 0, 3, 0]
    # Five a step: room is 11, 6 and 1.
    assert whole.sources == [A, A, A, A, B] * 2 + [A, B]
    assert whole.drafted.tolist() == [0, 1, 0, 0, 2]
    assert whole.accepted.tolist() == [0, 1, 0, 0, 2]
    assert [row.num_steps for row in rows] == [12, 6, 3, 3]
    assert [row.mean_acceptance_length for row in rows] == [1, 2, 4, 4]
    assert [row.num_draft_tokens for row in rows] == [38, 20, 11, 9]
    assert [row.num_accepted_tokens for row in rows] == [0, 6, 9, 9]
    assert whole.draft_acceptance_rate == 1
    assert one.draft_acceptance_rate == pytest.approx(0.3)


def test_a_block_that_a_stop_cuts_records_what_was_emitted():
    (free,) = run([PROMPTS[1]], 12, drafter=Spoiled(SELF), draft_params=(TABLE, np.array([K])))
    place = next(i for i in range(1, K) if free.tokens[i] not in free.tokens[:i])
    (row,) = run(
        [PROMPTS[1]],
        12,
        drafter=Spoiled(SELF),
        draft_params=(TABLE, np.array([K])),
        stop_tokens=[free.tokens[place]],
    )
    assert row.tokens == free.tokens[: place + 1]
    assert row.sources == [A] * (place + 1)
    assert row.accepted[place + 1] == 1
    assert row.num_steps == 1
    assert row.stopped


def consistent(row: Generation) -> None:
    """What must hold of any record."""
    assert len(row.tokens) == len(row.sources)
    assert row.num_steps == row.drafted.sum() == row.accepted.sum()
    assert row.num_accepted_tokens == row.sources.count(A)
    assert row.num_accepted_tokens <= row.num_draft_tokens
    if not row.stopped:  # each step ends with a token of its own
        assert row.num_steps == len(row.tokens) - row.sources.count(A)


@pytest.mark.parametrize(
    ("drafter", "params", "rule"),
    [
        (Shortened(SELF), OTHER, "token"),
        (Shortened(SELF), OTHER, "block"),
        (Shortened(SELF), OTHER, "coupled"),
        (LookupDrafter(K, 1, 3), None, "token"),
    ],
    ids=["token", "block", "coupled", "lookup"],
)
def test_records_add_up(drafter, params, rule):
    sampling = make_sampling(4, temperature=[0.7, 1.0, 0.0, 1.3], top_p=0.9)
    for stop_tokens in ([5], [0]):
        rows = run(
            max_tokens=30,
            drafter=drafter,
            draft_params=params,
            rule=rule,
            sampling=sampling,
            stop_tokens=stop_tokens,
        )
        for row in rows:
            consistent(row)


@pytest.mark.parametrize("steps", [1, 3, 100])
def test_a_stream_is_the_same_text_in_parts(steps):
    how = dict(
        drafter=Shortened(SELF), draft_params=OTHER, sampling=make_sampling(1, temperature=0.8, seed=5)
    )
    (whole,) = run([PROMPTS[2]], 25, **how)
    parts = list(stream(MODEL, TABLE, PROMPTS[2], max_tokens=25, steps=steps, **how))
    assert len(parts) == -(-whole.num_steps // steps)
    for part, longer in zip(parts, [*parts[1:], whole], strict=True):
        assert longer.tokens[: len(part.tokens)] == part.tokens
        assert longer.sources[: len(part.tokens)] == part.sources
    last = parts[-1]
    assert (last.tokens, last.sources, last.num_steps) == (whole.tokens, whole.sources, whole.num_steps)
    np.testing.assert_array_equal(last.accepted, whole.accepted)


def test_sampling_values_can_be_used_again():
    # The state is donated; what the caller handed in must not be.
    sampling = make_sampling(4, temperature=1.0)
    first, again = (run(sampling=sampling) for _ in range(2))
    assert [row.tokens for row in first] == [row.tokens for row in again]
    assert TABLE.shape == (997, V)


def test_another_seed_is_another_text():
    texts = {tuple(row.tokens) for row in run([PROMPTS[1]] * 4, sampling=make_sampling(4, temperature=1.0))}
    assert len(texts) == 4
    alike = run([PROMPTS[1]] * 4, sampling=make_sampling(4, temperature=1.0, seed=3))
    assert len({tuple(row.tokens) for row in alike}) == 1


@pytest.mark.parametrize("drafter", [None, LookupDrafter(K, 1, 3)], ids=["plain", "lookup"])
def test_every_step_draws_anew(drafter):
    # All tokens are equally likely everywhere, so rows that repeat themselves drew with the same noise.
    even = jnp.zeros((997, V))
    how = dict(drafter=drafter, sampling=make_sampling(4, temperature=1.0))
    for row in generate(MODEL, even, PROMPTS, max_tokens=20, **how):
        assert len(set(row.tokens)) > 5


def test_one_greedy_row_among_sampled_ones_is_exact():
    sampling = make_sampling(4, temperature=[1.0, 0.0, 1.0, 2.0], top_k=[0, 0, 1, 0])
    rows, greedy = run(drafter=SELF, draft_params=OTHER, sampling=sampling), run()
    assert rows[1].tokens == greedy[1].tokens
    assert rows[2].tokens == greedy[2].tokens


@pytest.mark.parametrize("num_draft_tokens", [0, K])
@pytest.mark.parametrize("beyond", [0, 1])
def test_texts_at_the_edge_of_a_bucket(beyond, num_draft_tokens):
    # 64 slots hold prompt, text, draft and one: a token more takes 128.
    how = {} if not num_draft_tokens else dict(drafter=Spoiled(SELF), draft_params=(TABLE, np.full(4, K)))
    prompts = [list(range(10))] * 4
    num_tokens = 64 - 10 - num_draft_tokens - 1 + beyond
    expected = tables.greedy_continuation(tables.history_logits, np.asarray(TABLE), prompts[0], num_tokens)
    assert run(prompts, num_tokens, **how)[3].tokens == expected


def test_a_text_ends_where_the_context_does():
    short = tables.HistoryModel(V, context_length=20)
    drafter = ModelDrafter(short, K)
    (row,) = generate(short, TABLE, [PROMPTS[3]], max_tokens=100, drafter=drafter, draft_params=TABLE)
    assert row.tokens == tables.greedy_continuation(tables.history_logits, np.asarray(TABLE), PROMPTS[3], 8)
    assert not row.stopped


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"prompts": []}, "there is no prompt"),
        ({"prompts": [[1], []]}, "an empty prompt: give at least one token"),
        ({"prompts": [[1], [0] * 30]}, "a prompt of 30 tokens leaves no room in a context of 30"),
        ({"prompts": [[1], [V]]}, f"a token id is outside the vocabulary of {V}"),
        ({"prompts": [[-1]]}, f"a token id is outside the vocabulary of {V}"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"max_tokens": [3, -2]}, "max_tokens must be at least 1, not -2"),
        ({"rule": "tokens"}, "no rule is named 'tokens'; there are token, block, greedy, coupled"),
        (
            {"rule": "greedy", "sampling": make_sampling(2, temperature=[0, 1])},
            "rule 'greedy' needs temperature 0",
        ),
        ({"sampling": make_sampling(3)}, "sampling has 3 rows, not one for each of 2 prompts"),
        ({"sampling": make_sampling(2, logit_bias={V: 1.0})}, f"logit_bias has a token outside .* of {V}"),
    ],
)
def test_what_cannot_be_done_is_refused(how, message):
    how = {"prompts": [[1], [2]], "max_tokens": 5} | how
    with pytest.raises(ValueError, match=message):
        generate(tables.HistoryModel(V, 30), TABLE, **how)
