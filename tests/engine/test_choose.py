"""K follows what pays, and is found again when that changes."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.engine.choose import Chooser

SLOTS, STEPS = 4, 8
LIVE = np.ones(SLOTS, bool)


def play(chooser: Chooser, runs: int, chance: float, rng: np.random.Generator) -> list[int]:
    """Runs of rows whose drafted tokens are each accepted with this chance; the widths that were chosen."""
    chosen = []
    for _ in range(runs):
        width = chooser.choose(LIVE)
        chosen.append(width)
        accepted = rng.random((SLOTS, STEPS, 3)) < chance
        kept = np.cumprod(accepted, axis=2) * (np.arange(3) < width)
        chooser.see(width, kept.sum(axis=1), np.full(SLOTS, STEPS))
    return chosen


def chooser(costs) -> Chooser:
    made = Chooser([0, 1, 3], SLOTS)
    made.seconds = dict(zip(made.widths, costs, strict=True))
    return made


@pytest.mark.parametrize(
    ("chance", "costs", "best"),
    [
        (0.9, (1.0, 1.1, 1.2), 3),  # verifying is cheap and the draft is good
        (0.0, (1.0, 1.1, 1.2), 0),  # a draft that is worth nothing
        (0.9, (1.0, 2.1, 4.5), 0),  # many rows: verifying costs as much as decoding
        (0.5, (1.0, 1.1, 1.9), 1),  # in between
    ],
)
def test_what_pays_is_chosen(chance, costs, best):
    chosen = play(chooser(costs), 400, chance, np.random.default_rng(0))
    assert chosen[30:].count(best) > 0.95 * len(chosen[30:])


def test_a_useless_draft_costs_next_to_nothing():
    # Wherever plain decoding is best, what is spent on looking again stays under 2%.
    for costs in ((1.0, 1.1, 1.2), (1.0, 1.5, 2.5), (1.0, 1.9, 3.9)):
        chosen = play(chooser(costs), 2000, 0.0, np.random.default_rng(1))
        price = dict(zip((0, 1, 3), costs, strict=True))
        assert sum(price[width] for width in chosen) < 1.02 * len(chosen)


@pytest.mark.parametrize("costs", [(1.0, 1.1, 1.2), (1.0, 1.35, 1.5), (1.0, 1.9, 3.9)])
def test_a_useless_draft_is_seen_through_at_once(costs):
    # One row, whose job is over after 300 steps: no more than 2% of it are lost.
    made = Chooser([0, 1, 3], 1)
    made.seconds = dict(zip(made.widths, costs, strict=True))
    spent, steps = 0.0, 0
    while steps < 300:
        width = made.choose(np.ones(1, bool))
        count = 32 if made.is_sure else 8
        made.see(width, np.zeros((1, 3), int), np.array([count]))
        spent, steps = spent + count * made.seconds[width], steps + count
    assert spent < 1.02 * steps


def test_a_draft_that_becomes_good_is_found():
    made, rng = chooser((1.0, 1.1, 1.2)), np.random.default_rng(2)
    play(made, 300, 0.0, rng)
    chosen = play(made, 2000, 0.95, rng)
    assert chosen[-1] == 3


def test_the_chances_are_drawn_from_the_rows_own_steps():
    made = chooser((1.0, 1.1, 1.2))
    kept = np.array([[100, 100, 100], [0, 0, 0], [100, 50, 0], [0, 0, 0]])
    made.see(3, kept, np.array([100, 100, 100, 0]))
    chances = made.chances(LIVE)
    assert (chances[0] > 0.9).all()
    assert (chances[1] < 0.1).all()
    np.testing.assert_allclose(chances[2], [0.95, 0.5, 0.05], atol=0.06)
    np.testing.assert_allclose(chances[3], [0.65, 0.49, 0.33], atol=0.03)  # nothing of its own: the job's
    assert (np.diff(chances, axis=1) <= 1e-9).all()
    made.forget_row(0)
    assert (made.chances(LIVE)[0] < 0.7).all()


def test_measured_times_are_smoothed_and_followed():
    made = chooser((1.0, 1.1, 1.2))
    play(made, 50, 0.9, np.random.default_rng(3))
    for _ in range(30):
        made.time(1, 1.1)
        made.time(3, 9.0)
    assert 8.5 < made.seconds[3] < 9.0
    assert play(made, 1, 0.9, np.random.default_rng(4)) == [1]


@pytest.mark.parametrize(("chance", "best"), [(0.0, 0), (0.9, 3)])
def test_a_machine_that_becomes_slower_as_a_whole_changes_no_choice(chance, best):
    made = chooser((1.0, 1.1, 1.2))
    play(made, 50, chance, np.random.default_rng(3))
    for _ in range(40):
        made.time(best, 3.0)
    assert 2.9 < made.seconds[best] < 3.0
    rates = made.rates(LIVE)
    assert max(rates, key=rates.__getitem__) == best


def test_one_time_far_out_ends_no_choice():
    made = chooser((1.0, 1.1, 1.2))
    play(made, 50, 0.9, np.random.default_rng(5))
    made.time(3, 3600.0)  # the machine was asleep
    assert play(made, 1, 0.9, np.random.default_rng(6)) == [3]


def test_a_clock_that_calls_a_wider_step_cheaper_is_not_believed():
    # The narrow one's time was taken while something else ran.
    chosen = play(chooser((1.5, 1.1, 1.2)), 400, 0.0, np.random.default_rng(7))
    assert chosen.count(0) > 0.85 * len(chosen)


@pytest.mark.parametrize("widths", [[1, 3], [0, 3, 1], [0, 1, 1]])
def test_widths_that_do_not_rise_from_nothing_are_refused(widths):
    with pytest.raises(ValueError, match="widths must rise from 0"):
        Chooser(widths, 1)


def test_a_disturbed_step_before_the_job_is_not_believed():
    made = Chooser((0, 3), 2)
    for seconds in (90.0, 2.0, 1.0, 5.0):
        made.warm(0, seconds)
    assert made.seconds[0] == 1.0
