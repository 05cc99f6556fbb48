"""Rows that come and go: each is what its request alone would give, whatever is around it."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
import tables

from specjax.drafters import EitherDrafter, LookupDrafter, ModelDrafter, SilentDrafter
from specjax.engine.engine import Engine
from specjax.engine.work import Work
from specjax.generate import generate
from specjax.record import Source
from specjax.sampling import make_sampling

MODEL = tables.HistoryModel(11)
PARAMS, OTHER = tables.random_history(0, 11), tables.random_history(1, 11)
CAPACITY, EOS = 128, 7


def mixed_work(count: int, seed: int = 0) -> list[Work]:
    """Requests of all lengths and options."""
    rng = np.random.default_rng(seed)
    work = []
    for i in range(count):
        prompt = tuple(rng.integers(0, 11, rng.integers(1, 60)).tolist())
        options = {"temperature": float(rng.choice([0, 0.8])), "seed": i}
        options |= [{}, {"top_k": 3}, {"presence_penalty": 0.5}, {"logit_bias": {2: 3.0}}, {"min_tokens": 5}][
            i % 5
        ]
        count = max(int(rng.integers(1, 60)), options.get("min_tokens", 0))
        work.append(Work(prompt, count, options, (3,) if i % 3 == 0 else (), tag=i))
    return work


def alone(work: Work, rule: str = "coupled"):
    """What the request gives by plain decoding, in a batch of one."""
    (row,) = generate(
        MODEL,
        PARAMS,
        [work.prompt],
        max_tokens=work.max_tokens,
        sampling=make_sampling(1, **work.sampling, num_biases=16),
        rule=rule,
        stop_tokens=[EOS, *work.stop_tokens, *[-1] * (1 - len(work.stop_tokens))],
    )
    return row


@pytest.fixture(scope="module")
def expected():
    return {work.tag: alone(work) for work in mixed_work(60)}


def engine(kind: str, slots: int = 4, **options) -> Engine:
    drafters, draft_params = {
        "none": ([], None),
        "lookup": ([LookupDrafter(1), LookupDrafter(3)], None),
        "model": ([ModelDrafter(MODEL, 1), ModelDrafter(MODEL, 3)], OTHER),
        "itself": ([ModelDrafter(MODEL, 1), ModelDrafter(MODEL, 3)], PARAMS),
        "either": ([EitherDrafter(LookupDrafter(k), ModelDrafter(MODEL, k)) for k in (1, 3)], PARAMS),
    }[kind]
    options = dict(capacity=CAPACITY, stop_tokens=[EOS]) | options
    return Engine(MODEL, PARAMS, drafters=drafters, draft_params=draft_params, slots=slots, **options)


@pytest.mark.parametrize(
    ("kind", "slots"),
    [("lookup", 1), ("lookup", 4), ("lookup", 16), ("model", 4), ("either", 4), ("none", 4)],
)
def test_every_row_is_what_it_is_alone(expected, kind, slots):
    results = {result.work.tag: result for result in engine(kind, slots).run(mixed_work(60))}
    assert {tag: result.tokens for tag, result in results.items()} == {
        tag: row.tokens for tag, row in expected.items()
    }
    for tag, result in results.items():
        assert result.finish == ("stop" if expected[tag].stopped else "length")
        assert len(result.sources) == len(result.tokens)
        kept = sum(source == Source.ACCEPTED for source in result.sources)
        assert kept == result.num_accepted_tokens
        assert len(result.tokens) - kept <= result.num_steps  # each step has one token of its own


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 2, 0)])
def test_rows_decode_while_a_long_prompt_is_read(order):
    decoder = engine("lookup", slots=2, chunk=1)
    prompt = tuple(np.random.default_rng(2).integers(0, 11, 100).tolist())
    # The last one waits for the one before it, which begins alike.
    work = [Work((1, 2), 60, ignore_eos=True, tag=0), Work(prompt, 4, tag=1), Work((*prompt, 1), 4, tag=2)]
    results = decoder.run([work[i] for i in order], partial=True)
    assert next(results).work.tag == 0
    assert decoder._lane.tokens_read < 60
    assert {result.work.tag for result in results} == set(order)


def test_a_free_slot_is_as_short_as_can_be():
    decoder = engine("none", slots=2)
    list(decoder.run([Work((1,) * 50, 4, ignore_eos=True), Work((1, 2), 60, ignore_eos=True)]))
    assert sorted(decoder._slots.state.context.length.tolist()) == [1, 62]


def test_the_order_changes_nothing(expected):
    work = mixed_work(60)
    for order in (work[::-1], work[1::2] + work[::2]):
        results = {result.work.tag: result.tokens for result in engine("lookup").run(order)}
        assert results == {tag: row.tokens for tag, row in expected.items()}


def test_its_own_draft_stays_whole_while_rows_come_and_go():
    # A row moved, or a prompt read, with a gap in the draft's cache would have drafts rejected. (A stop or a
    # limit within a draft cuts it, so no row ends early here.)
    work = [Work(w.prompt, 40, w.sampling, ignore_eos=True) for w in mixed_work(30)]
    for result in engine("itself", adaptive=False).run(work):
        assert result.num_steps == 10
        assert result.num_accepted_tokens == result.num_draft_tokens == 30


def test_a_draft_that_rested_catches_up():
    options = {"temperature": 0.9}
    work = [Work((*range(9),), 100, options | {"seed": seed}, ignore_eos=True) for seed in range(4)]
    decoder = engine("itself")
    widths = iter([0, 3, 3])
    decoder._chooser.choose = lambda live: next(widths)
    for result in decoder.run(work):
        assert result.drafted[0] == 32, "a run without a draft"
        assert result.num_accepted_tokens == result.num_draft_tokens == 51


def test_a_draft_knows_where_a_prompt_stands_that_needs_no_reading():
    # In the lane's row a longer prompt was read before: what the draft has of that is not this one's.
    decoder = engine("itself", slots=1, prefill_rows=1)
    long = tuple(np.random.default_rng(0).integers(0, 11, 60).tolist())
    for prompt in (long, long[:20], (5,)):
        widths = iter([0, 3, 3, 3])
        decoder._chooser.choose = lambda live, widths=widths: next(widths)
        work = Work(prompt, 60, {"temperature": 0.9}, ignore_eos=True)
        (result,) = decoder.run([work])
        assert result.num_accepted_tokens == result.num_draft_tokens > 0


def test_prompts_that_begin_alike_are_read_once():
    system = tuple(np.random.default_rng(5).integers(0, 11, 60).tolist())
    work = [Work((*system, i % 11, i // 11, 3), 4, tag=i) for i in range(40)]
    decoder = engine("lookup", prefill_rows=2)
    results = {result.work.tag: result.tokens for result in decoder.run(work)}
    assert results == {w.tag: alone(w).tokens for w in work}
    assert decoder.stats.prompt_tokens == 40 * 63
    assert decoder.stats.tokens_read <= 2 * 60 + 40 * 3


def test_choices_of_one_prompt_share_its_reading():
    work = [Work(tuple(range(10)) * 5, 8, {"temperature": 1.0, "seed": seed}, tag=seed) for seed in range(12)]
    decoder = engine("lookup")
    results = {result.work.tag: result.tokens for result in decoder.run(work)}
    assert results == {w.tag: alone(w).tokens for w in work}
    assert decoder.stats.tokens_read == 50


def test_the_source_is_read_no_further_than_needed():
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield Work((taken % 11, 3), 4, ignore_eos=True)

    results = engine("lookup").run(endless())
    for _ in range(50):
        next(results)
    assert taken < 50 + 150
    results.close()  # gives the rows up, and the engine can be used again


def test_of_one_prompt_no_more_is_read_ahead_than_of_many():
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield Work((1, 2, 3), 4, {"temperature": 1.0, "seed": taken}, ignore_eos=True)

    results = engine("lookup").run(endless())
    for _ in range(50):
        next(results)
    assert taken < 50 + 150


@pytest.mark.parametrize("late", [(3, 4, 5), (1, 2, 3)])
def test_nobody_waits_for_those_who_came_later(late):
    # All but one share a prompt, and so a row of the lane that is never empty; it may be that one's, too.
    work = [Work((1, 2), 4, {"seed": i}, ignore_eos=True, tag=i) for i in range(200)]
    work[20] = Work(late, 4, ignore_eos=True, tag=20)
    tags = [result.work.tag for result in engine("lookup", chunk=1).run(work)]
    assert sorted(tags) == list(range(200))
    assert tags.index(20) < 60


def test_an_engine_is_used_again_after_it_was_left_in_the_middle(expected):
    decoder = engine("lookup")
    results = decoder.run(mixed_work(60))
    next(results)
    results.close()
    again = {result.work.tag: result.tokens for result in decoder.run(mixed_work(60))}
    assert again == {tag: row.tokens for tag, row in expected.items()}


def test_submitted_work_comes_back_and_more_may_be_submitted_on_the_way():
    with engine("lookup") as decoder:
        decoder.submit(Work((1, 2), 5, tag="first"))
        tags = []
        for result in decoder:
            tags.append(result.work.tag)
            if len(tags) < 4:
                decoder.submit(Work((len(tags),), 5, tag=len(tags)))
    assert tags == ["first", 1, 2, 3]


def test_results_may_outlive_the_engine():
    with engine("lookup") as decoder:
        results = decoder.run(mixed_work(20))
        next(results)
    results.close()


def test_each_k_is_timed_over_steps_that_were_taken(monkeypatch):
    # Together they would take more tokens than a slot has room for.
    monkeypatch.setattr("specjax.engine.engine.MIN_STEPS", 40)
    decoder = engine("itself")
    run, steps = decoder._run, []

    def counted(*arguments):
        report = run(*arguments)
        steps.append(int(report.num_steps))
        return report

    decoder._run = counted
    decoder.warm_up()
    assert len(steps) == 9  # K = 0, 1, 3, three times each
    assert min(steps) >= 30


def test_a_run_that_ended_unseen_is_not_timed():
    decoder = engine("lookup", slots=1)
    decoder.warm_up()
    timed = []
    decoder._chooser.time = lambda width, seconds: timed.append(seconds)
    for _ in decoder.run([Work((1, 2, 3), 120, ignore_eos=True)], partial=True):
        jax.block_until_ready(decoder._slots)  # a consumer that takes longer than the next run
    assert len(timed) <= 1  # the first, which was waited for


@pytest.mark.parametrize("kind", ["model", "either"])
def test_a_draft_rests_in_the_fixed_shape(expected, kind):
    decoder = engine(kind, plain_drafter=SilentDrafter(3))
    decoder.warm_up()
    widths = itertools.cycle([0, 3, 1])
    decoder._chooser.choose = lambda live: next(widths)
    results = {result.work.tag: result.tokens for result in decoder.run(mixed_work(12))}
    assert results == {tag: expected[tag].tokens for tag in range(12)}


def test_partial_results_grow_into_the_whole():
    work, seen = Work((1, 2, 3), 100, ignore_eos=True), []
    for result in engine("lookup").run([work], partial=True):
        assert result.tokens[: len(seen)] == seen
        seen = result.tokens
    assert result.finish == "length"
    assert len(seen) == 100


def test_logprobs_are_those_of_the_steps():
    work = [Work(w.prompt, w.max_tokens, w.sampling, num_logprobs=2, tag=w.tag) for w in mixed_work(20)]
    for result in engine("lookup", max_logprobs=4).run(work):
        (row,) = generate(
            MODEL,
            PARAMS,
            [result.work.prompt],
            max_tokens=result.work.max_tokens,
            sampling=make_sampling(1, **result.work.sampling, num_biases=16),
            rule="coupled",
            stop_tokens=[EOS],
            num_logprobs=2,
        )
        for a, b in zip(jax.tree.leaves(result.logprobs), jax.tree.leaves(row.logprobs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_fixed_k_repeats_under_every_rule(rule):
    runs = [
        {
            result.work.tag: result.tokens
            for result in engine("model", slots, rule=rule, adaptive=False).run(mixed_work(20))
        }
        for slots in (1, 3)
    ]
    assert runs[0] == runs[1]


class Broken(tables.HistoryModel):
    """Gives no numbers after token 9."""

    def apply(self, params, tokens, cache, positions):
        output = super().apply(params, tokens, cache, positions)
        logits = jax.numpy.where((tokens == 9)[..., None], jax.numpy.nan, output.logits)
        return type(output)(logits, None, output.cache)


def test_a_row_whose_logits_are_no_numbers_fails_alone():
    decoder = Engine(Broken(11), PARAMS, drafters=[LookupDrafter(2)], slots=3, capacity=CAPACITY)
    work = [Work((1, i), 30, {"logit_bias": {9: -1e9}}, tag=i) for i in range(11)]
    finishes = {result.work.tag: result.finish for result in decoder.run(work)}
    assert finishes == {i: "failed" if i == 9 else "length" for i in range(11)}


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Work(()), "the prompt is empty"),
        (Work((11,)), "outside the vocabulary of 11"),
        (Work((-1,)), "outside the vocabulary"),
        (Work((1,) * 124), r"no room in slots of 124 tokens \(a capacity of 128, less 4 for a step\)"),
        (Work((1, 2), 123), r"max_tokens must be in 1..122"),
        (Work((1, 2), 0), "max_tokens must be in"),
        (Work((1, 2), 8, {"min_tokens": 9}), "min_tokens is 9, more than the 8 there may be"),
        (Work((1, 2), 5, stop_tokens=tuple(range(20))), "more than 16 stop tokens"),
        (Work((1, 2), 5, {"logit_bias": {11: 1.0}}), "logit_bias has a token outside"),
        (Work((1, 2), 5, {"logit_bias": dict.fromkeys(range(600), 1.0)}), "logit_bias has"),
        (Work((1, 2), 5, {"temperature": -1.0}), "temperature must be at least 0"),
        (Work((1, 2), 5, stop=("x",)), "stop strings need an engine with a detokenizer"),
        (Work((1, 2), 5, num_logprobs=1), "log-probabilities"),
    ],
)
def test_what_cannot_be_done_is_refused_before(work, message):
    with pytest.raises(ValueError, match=message):
        engine("lookup").submit(work)


def test_an_empty_stop_string_is_refused_before():
    limits = dataclasses.replace(engine("lookup").limits, has_text=True)
    with pytest.raises(ValueError, match="a stop string must not be empty"):
        limits.check(Work((1, 2), 5, stop=("x", "")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "best"}, "no rule is named 'best'"),
        ({"slots": 0}, "slots must be at least 1"),
        ({"capacity": 2}, "a capacity of 2 positions"),
        ({"drafters": [LookupDrafter(3), LookupDrafter(1)]}, "rising numbers of draft tokens"),
    ],
)
def test_an_engine_that_cannot_work_is_refused(options, message):
    options = {"slots": 2, "capacity": 64} | options
    with pytest.raises(ValueError, match=message):
        Engine(MODEL, PARAMS, **options)


@pytest.fixture
def compiled():
    """What is traced or compiled, as it happens."""
    events = []

    def listen(event: str, duration: float, **_) -> None:
        if "compile" in event or "trace" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def test_nothing_is_compiled_after_the_warm_up(compiled):
    decoder = engine("either", max_logprobs=3)
    decoder.warm_up()
    assert compiled
    compiled.clear()
    work = [
        dataclasses.replace(work, num_logprobs=i % 4 if i % 7 == 0 else None)
        for i, work in enumerate(mixed_work(500, seed=1))
    ]
    assert sum(1 for _ in decoder.run(work)) == 500
    assert compiled == []


def test_the_host_comes_by_once_in_eight_steps_at_most():
    decoder = engine("lookup", 4)
    list(decoder.run(mixed_work(60)))
    assert sum(decoder.stats.steps.values()) >= 8 * (decoder.stats.visits - 2)  # the last runs end early


def test_no_output_at_all_for_no_work():
    assert list(engine("lookup").run([])) == []
