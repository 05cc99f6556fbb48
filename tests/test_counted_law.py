"""What a rule says follows the target's law, counted over many seeds through ``generate``'s own loop.

All runs go through a few programs of one size: V = 4, K = 2, and ``ROWS`` rows at a time.
"""

from __future__ import annotations

import numpy as np
import pytest
import tables
from exact import Tables, expected_tokens
from runs import assert_counts_follow, count_sequences, decode_rows, full_compile  # noqa: F401

from specjax.drafters import LookupDrafter, ModelDrafter

MODEL = tables.TableModel(4)
TABLE, OTHER = tables.random_table(2, 4, 1.0), tables.random_table(3, 4, 1.0)
PROMPT = [1, 0, 2, 0, 1]
ROWS = 1 << 16
DRAFTERS = {"model": (ModelDrafter(MODEL, 2), OTHER), "lookup": (LookupDrafter(2, 1, 2), None)}


def count(
    target, rule, drafter, draft, num_tokens, trials, prompt=PROMPT, **options
) -> tuple[np.ndarray, np.ndarray]:
    """Counts what ``trials`` seeds say: [V] * num_tokens, and [K+1] the steps that kept 0 .. K tokens."""
    counts, accepted = 0, 0
    for begin in range(0, trials, ROWS):
        seeds = np.arange(begin, begin + ROWS)
        how = dict(drafter=drafter, draft_params=draft, rule=rule, **options)
        tokens, record = decode_rows(MODEL, target, prompt, seeds, num_tokens, **how)
        counts = counts + count_sequences(tokens, 4)
        accepted = accepted + record.accepted.sum(axis=0)
    return counts, accepted


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_counted_law_of_three_tokens(rule, drafter):
    options = {"temperature": 0.7, "top_p": 0.9}
    counts, accepted = count(TABLE, rule, *DRAFTERS[drafter], 3, 2 * ROWS, **options)
    assert_counts_follow(counts, tables.sequence_law(TABLE, PROMPT, 3, **options))
    assert accepted.min() > 1000, "the steps don't stop everywhere"


def test_what_a_step_throws_away_does_not_bend_the_next():
    # Noise that comes back in a later step shows in the joint law only, under the block rule.
    target, draft = (tables.constant_table([*probs, 0]) for probs in ((0.1, 0.6, 0.3), (0.6, 0.38, 0.02)))
    counts, _ = count(target, "block", ModelDrafter(MODEL, 2), draft, 3, 8 * ROWS, temperature=1.0)
    assert_counts_follow(counts, tables.sequence_law(target, PROMPT, 3))


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_a_perfect_draft_is_accepted_whole(rule):
    counts, accepted = count(TABLE, rule, ModelDrafter(MODEL, 2), TABLE, 3, ROWS, temperature=1.0)
    assert accepted.tolist() == [0, 0, ROWS]
    assert_counts_follow(counts, tables.sequence_law(TABLE, PROMPT, 3))


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_a_garbage_draft_costs_speed_only(rule):
    low, high = np.where(np.arange(4) < 2, TABLE, -np.inf), np.where(np.arange(4) < 2, -np.inf, OTHER)
    counts, accepted = count(low, rule, ModelDrafter(MODEL, 2), high, 3, ROWS, temperature=1.0)
    assert accepted.tolist() == [3 * ROWS, 0, 0]
    assert_counts_follow(counts, tables.sequence_law(low, PROMPT, 3))


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_what_the_draft_never_says_is_still_reached(rule):
    narrow = np.where(np.arange(4) == 3, -np.inf, OTHER)
    counts, _ = count(TABLE, rule, ModelDrafter(MODEL, 2), narrow, 3, ROWS, temperature=1.3)
    law = tables.sequence_law(TABLE, PROMPT, 3, temperature=1.3)
    assert law[3].sum() > 0.05
    assert_counts_follow(counts, law)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_a_step_are_those_of_the_formulas(temperature):
    given = Tables(TABLE, OTHER)
    for prompt in ([1, 2], [3, 0], [2]):
        means = {}
        for rule in ("token", "block"):
            options = dict(temperature=temperature, steps=1, prompt=prompt)
            _, accepted = count(TABLE, rule, ModelDrafter(MODEL, 2), OTHER, 3, ROWS, **options)
            kept = np.repeat(np.arange(3), accepted)
            means[rule] = expected_tokens(rule, given, prompt, 2, temperature=temperature)
            assert abs(1 + kept.mean() - means[rule]) < 4.5 * kept.std() / np.sqrt(ROWS)
        assert means["block"] >= means["token"]
