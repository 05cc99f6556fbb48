"""The formulas against values by hand, against each other, against a loop, and against the real step."""

from __future__ import annotations

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from tables import TableModel, random_table, softmax

from specjax import theory, theory_law
from specjax.drafters.model import ModelDrafter
from specjax.generate import Decoding
from specjax.sampling import make_sampling

RULES = ("token", "block", "coupled")
TARGET, DRAFT = np.array([0.1, 0.6, 0.3]), np.array([0.6, 0.38, 0.02])
PAPER = ([1 / 3, 2 / 3], [2 / 3, 1 / 3])  # the example of arXiv 2403.10444: 10/9 accepted of 2, or 11/9


def always(probs):
    """A law that does not look at the context."""
    return lambda context: probs


def table_law(table):
    """The law of a TableModel at temperature 1."""
    probs = np.array([[softmax(np.float64(row)) for row in rows] for rows in table])
    return lambda context: probs[(0, *context)[-2], (0, *context)[-1]]


def greedy_law(law):
    """One-hot at the argmax: a deterministic draft."""
    return lambda context: np.eye(len(law(context)))[np.argmax(law(context))]


def partial_law(law):
    """The same without its likeliest token."""

    def without(context):
        probs = law(context) * (1 - greedy_law(law)(context))
        return probs / probs.sum()

    return without


def laws(seed, vocab_size):
    """Pairs of a target's and a draft's law, of every kind."""
    target, other = (table_law(random_table(seed + i, vocab_size)) for i in range(2))
    return {
        "soft": (target, other),
        "one-hot": (target, greedy_law(other)),
        "partial": (target, partial_law(other)),
        "filtered": (partial_law(target), other),
        "equal": (target, target),
        "disjoint": (partial_law(target), greedy_law(target)),
    }


def plain_law(law, context, num_tokens):
    """What plain decoding says, token by token."""
    vocab_size = len(law(context))
    result = np.zeros((vocab_size,) * num_tokens)
    for sequence in np.ndindex(result.shape):
        result[sequence] = math.prod(
            law((*context, *sequence[:i]))[token] for i, token in enumerate(sequence)
        )
    return result


def mean_tokens(outcomes):
    return sum(step.ndim * step.sum() for step in outcomes)


# Distributions.


def test_one_position_by_hand():
    assert theory.acceptance(TARGET, DRAFT) == pytest.approx(0.5)
    np.testing.assert_allclose(theory.residual(TARGET, DRAFT), [0, 0.44, 0.56])
    np.testing.assert_allclose(theory.residual(TARGET, DRAFT, 0.8), [0, 0.1 / 0.32, 0.22 / 0.32])
    matches = [1 / 10, 1 / (1 / 6 + 0.6 / 0.38 + 1 + 0.5 - 1 / 6), 1 / 50]
    np.testing.assert_allclose(theory.coupled_matches(TARGET, DRAFT), matches)
    assert theory.coupled_acceptance(TARGET, DRAFT) == pytest.approx(sum(matches))


def test_equal_disjoint_and_one_hot():
    for accept in (theory.acceptance, theory.coupled_acceptance):
        assert accept(TARGET, TARGET) == pytest.approx(1)
        assert accept([0.4, 0.6, 0, 0], [0, 0, 1, 0]) == 0
        np.testing.assert_allclose(accept(TARGET, np.eye(3)), TARGET)  # broadcast over three drafts
    np.testing.assert_allclose(theory.residual(TARGET, np.eye(3)[1]), [0.25, 0, 0.75])
    np.testing.assert_array_equal(theory.residual(TARGET, TARGET), TARGET)


def test_acceptances_on_random_distributions():
    rng = np.random.default_rng(0)
    target, draft = rng.dirichlet(np.full(7, 0.3), (2, 5, 4))
    target[0, 0, :3], draft[0, 0, 2:5] = 0, 0  # zeros on one side, and on both
    target, draft = (probs / probs.sum(-1, keepdims=True) for probs in (target, draft))
    variation = 0.5 * np.abs(target - draft).sum(-1)
    np.testing.assert_allclose(theory.acceptance(target, draft), 1 - variation)
    matches = np.zeros_like(target)
    for *row, x in np.ndindex(target.shape):
        p, q = target[*row], draft[*row]
        if p[x] > 0 and q[x] > 0:
            matches[*row, x] = 1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(7))
    np.testing.assert_allclose(theory.coupled_matches(target, draft), matches, atol=1e-15)
    coupled = theory.coupled_acceptance(target, draft)
    assert np.all(coupled >= (1 - variation) / (1 + variation) - 1e-12)
    assert np.all(coupled <= 1 - variation + 1e-12)
    np.testing.assert_allclose(theory.residual(target, draft).sum(-1), 1)


def test_coupled_acceptance_is_how_often_two_argmaxes_agree():
    noise = np.random.default_rng(1).gumbel(size=(200_000, 3))
    agreed = np.argmax(np.log(TARGET) + noise, -1) == np.argmax(np.log(DRAFT) + noise, -1)
    expected = theory.coupled_acceptance(TARGET, DRAFT)
    assert abs(agreed.mean() - expected) < 4 * math.sqrt(expected * (1 - expected) / len(noise))


# The i.i.d. formulas.


def test_expected_tokens():
    drafted, accept = np.arange(6)[:, None], np.array([0, 0.3, 0.9, 1 - 1e-12, 1])
    sums = np.sum([np.where(drafted >= i, accept**i, 0) for i in range(6)], axis=0)
    np.testing.assert_allclose(theory.expected_tokens(drafted, accept), sums, rtol=1e-12)
    np.testing.assert_allclose(theory.expected_tokens(10**9, accept[:3]), 1 / (1 - accept[:3]))


def test_speedup():
    assert theory.speedup(3.0, 4, 0.1) == pytest.approx(3 / 1.4)
    costs = {2: 1.1, 4: 1.3}
    expected = [1.0, 2 / 1.3, 3 / 1.7]
    np.testing.assert_allclose(theory.speedup([1, 2, 3], [0, 2, 4], 0.1, costs.__getitem__), expected)
    np.testing.assert_allclose(theory.speedup([1, 2, 3], [0, 2, 4], 0.1, [9, 1.1, 1.3]), expected)


def test_best_num_draft_tokens():
    accept = np.linspace(0, 1, 41)
    cheap = theory.best_num_draft_tokens(accept, 0.02, lambda k: 1 + 0.03 * k)
    dear = theory.best_num_draft_tokens(accept, 0.2, lambda k: 1 + 0.03 * k)
    assert np.all(np.diff(cheap) >= 0)
    assert np.all(dear <= cheap)
    assert np.all(cheap[[0, -1]] == [0, 16])

    # Against a search by hand, and in whatever order the candidates come.
    def gain(k):
        return sum(0.8**i for i in range(k + 1)) / (0.1 * k + 1.2)

    candidates = (8, 1, 5, 3)
    best = theory.best_num_draft_tokens(0.8, 0.1, [1.2] * 4, candidates)
    assert best.shape == ()
    assert best == max(candidates, key=gain)
    assert theory.best_num_draft_tokens(1, 0, 1, candidates) == 8
    assert theory.best_num_draft_tokens(0.99, 1, 1, candidates) == 0  # a draft that costs a target
    assert theory.best_num_draft_tokens(0, 0, 1, candidates) == 0  # no gain, no loss: the smallest
    assert theory.best_num_draft_tokens(1, 0, lambda k: (k + 1) / 2, candidates) == 1  # all equally good
    assert theory.best_num_draft_tokens(0.5, 0, 1, ()) == 0


def test_stop_probs_over_every_pattern_of_uniforms():
    accept = np.random.default_rng(2).uniform(size=(5, 3)) * np.array([1, 1, 0.9])
    accept[0] = [1, 0, 1]
    for rule in RULES:
        expected = np.zeros((5, 4))
        for passed in itertools.product([False, True], repeat=3):
            leading = next((i for i, ok in enumerate(passed) if not ok), 3)
            last = max((i + 1 for i, ok in enumerate(passed) if ok), default=0)
            weight = np.prod(np.where(passed, accept, 1 - accept), axis=-1)
            expected[:, last if rule == "block" else leading] += weight
        np.testing.assert_allclose(theory.stop_probs(accept, rule), expected, atol=1e-15)
    np.testing.assert_array_equal(theory.stop_probs(np.zeros((2, 0)), "block"), [[1], [1]])


# A step, by enumeration.


def test_the_papers_example():
    target, draft = map(always, PAPER)
    assert theory_law.expected_step_tokens("token", target, draft, (), 2) == pytest.approx(1 + 10 / 9)
    assert theory_law.expected_step_tokens("block", target, draft, (), 2) == pytest.approx(1 + 11 / 9)


@pytest.mark.parametrize("num_draft_tokens", range(4))
def test_context_free_laws_are_the_iid_formula(num_draft_tokens):
    for rule, accept in (("token", theory.acceptance), ("coupled", theory.coupled_acceptance)):
        exact = theory_law.expected_step_tokens(rule, always(TARGET), always(DRAFT), (), num_draft_tokens)
        assert exact == pytest.approx(
            theory.expected_tokens(num_draft_tokens, accept(TARGET, DRAFT)), abs=1e-12
        )


@pytest.mark.parametrize("num_draft_tokens", range(4))
@pytest.mark.parametrize("vocab_size", [2, 4])
def test_the_formula_is_the_mean_of_the_outcomes(vocab_size, num_draft_tokens):
    for kind, (target, draft) in laws(vocab_size, vocab_size).items():
        expected = {}
        for rule in RULES:
            outcomes = theory_law.step_outcomes(rule, target, draft, (1,), num_draft_tokens)
            assert all(np.all(step >= 0) for step in outcomes)
            assert sum(step.sum() for step in outcomes) == pytest.approx(1, abs=1e-12)
            expected[rule] = theory_law.expected_step_tokens(rule, target, draft, (1,), num_draft_tokens)
            assert mean_tokens(outcomes) == pytest.approx(expected[rule], abs=1e-12)
        assert expected["block"] >= expected["token"] - 1e-12 >= expected["coupled"] - 2e-12
        if kind == "equal":
            assert expected["coupled"] == pytest.approx(num_draft_tokens + 1)
        if kind == "one-hot" or num_draft_tokens < 2:  # no gain to be had
            assert expected["block"] == pytest.approx(expected["token"], abs=1e-12)
        if kind == "soft" and num_draft_tokens >= 2:
            assert expected["block"] > expected["token"] + 1e-3
        if kind == "disjoint":
            assert expected["block"] == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab_size", "num_draft_tokens"), [(2, 0), (2, 3), (3, 1), (3, 2), (4, 3)])
def test_the_output_has_the_targets_law(rule, vocab_size, num_draft_tokens):
    num_tokens = min(num_draft_tokens + 2, 4)  # more than the longest step, where that is cheap
    for target, draft in laws(10 * vocab_size, vocab_size).values():
        law = theory_law.output_law(rule, target, draft, (1, 0), num_draft_tokens, num_tokens)
        np.testing.assert_allclose(law, plain_law(target, (1, 0), num_tokens), rtol=0, atol=1e-12)


def test_the_output_law_shows_a_fault(monkeypatch):
    monkeypatch.setattr(
        theory_law, "residual", lambda p, q, scale: p
    )  # the fault: p in place of the residual
    law = theory_law.output_law("token", always(TARGET), always(DRAFT), (), 2, 3)
    assert np.abs(law - plain_law(always(TARGET), (), 3)).sum() > 0.1


# Many steps.


@pytest.mark.parametrize("rule", RULES)
def test_long_runs(rule):
    step = theory_law.expected_step_tokens
    args = (rule, *laws(5, 3)["soft"], (2, 1), 2)
    assert theory_law.tokens_per_step(*args, memory=2, num_steps=1) == pytest.approx(step(*args))
    # Two steps by hand.
    second = 0.0
    for outcome in theory_law.step_outcomes(*args):
        for emitted, probability in np.ndenumerate(outcome):
            second += probability * step(*args[:3], (2, 1, *emitted), 2)
    assert theory_law.tokens_per_step(*args, memory=2, num_steps=2) == pytest.approx(
        (step(*args) + second) / 2
    )
    # A long run forgets where it began, and a longer memory than is needed changes nothing.
    forever = theory_law.tokens_per_step(*args, memory=2)
    assert theory_law.tokens_per_step(*args[:3], (0,), 2, memory=3) == pytest.approx(forever)
    first = theory_law.tokens_per_step(*args, memory=2, num_steps=200)
    both = theory_law.tokens_per_step(*args, memory=2, num_steps=400)
    assert 2 * both - first == pytest.approx(forever, abs=1e-9)
    assert abs(forever - step(*args)) > 1e-3  # it is not one context's mean


def test_long_runs_of_laws_that_get_caught():
    stay = np.eye(3)
    # Token 0 leads to 1 or 2 for ever; the draft knows the first way only.
    branching = (lambda context: [0, 0.5, 0.5] if context[-1] == 0 else stay[context[-1]], always(stay[1]))
    with pytest.raises(ValueError, match="depends on chance"):
        theory_law.tokens_per_step("token", *branching, (0,), 2, memory=1)
    assert theory_law.tokens_per_step("token", *branching, (1,), 2, memory=1) == pytest.approx(3)
    # A cycle: 0 1 2 0 1 2 .. with a draft that is right after 0 alone.
    cycle = (lambda context: stay[(context[-1] + 1) % 3], always(stay[1]))
    assert theory_law.tokens_per_step("block", *cycle, (0,), 1, memory=1) == pytest.approx(1.5)


def loop_step(rule, target, draft, context, num_draft_tokens, rng):
    """One step as the papers write it, drawn token by token."""
    drafted = []
    for _ in range(num_draft_tokens):
        drafted.append(int(rng.choice(len(target(context)), p=draft((*context, *drafted)))))
    p = [target((*context, *drafted[:i])) for i in range(num_draft_tokens + 1)]
    q = [draft((*context, *drafted[:i])) for i in range(num_draft_tokens)]
    ratios = [p[i][token] / q[i][token] for i, token in enumerate(drafted)]
    kept, scale = 0, 1.0
    if rule == "token":
        while kept < num_draft_tokens and rng.random() < ratios[kept]:
            kept += 1
    else:
        prefix = 1.0
        for i in range(1, num_draft_tokens + 1):
            prefix = min(1.0, prefix * ratios[i - 1])
            passes = prefix
            if i < num_draft_tokens:
                left = sum(max(prefix * a - b, 0) for a, b in zip(p[i], q[i], strict=True))
                passes = left / (left + 1 - prefix) if left > 0 else 0
            if rng.random() < passes:
                kept, scale = i, prefix
    following = p[kept] if kept == num_draft_tokens else np.maximum(scale * p[kept] - q[kept], 0)
    return (*drafted[:kept], int(rng.choice(len(following), p=following / following.sum())))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_an_independent_loop(rule):
    rng, num_trials = np.random.default_rng(3), 4000
    args = (rule, *laws(8, 3)["soft"], (2, 0), 3)
    drawn = [loop_step(*args, rng) for _ in range(num_trials)]
    counts = np.array([len(emitted) for emitted in drawn])
    expected = theory_law.expected_step_tokens(*args)
    assert abs(counts.mean() - expected) < 4 * counts.std() / math.sqrt(num_trials)
    # And not the number of tokens alone: each outcome as often as it should be.
    for outcome in theory_law.step_outcomes(*args):
        for emitted, probability in np.ndenumerate(outcome):
            error = abs(drawn.count(emitted) / num_trials - probability)
            assert error < 5 * math.sqrt(max(probability * (1 - probability), 1 / num_trials) / num_trials)


@pytest.mark.slow  # it compiles the step
@pytest.mark.parametrize("rule", RULES)
def test_the_real_step(rule):
    batch, num_steps, num_draft_tokens, vocab_size = 2048, 12, 3, 5
    target, draft = (random_table(seed, vocab_size) for seed in (20, 21))
    model = TableModel(vocab_size)
    decoding = Decoding(
        model,
        jnp.asarray(target),
        [[1, 3]] * batch,
        max_tokens=(num_draft_tokens + 1) * (num_steps + 1),  # never reached: it would cut a draft short
        drafter=ModelDrafter(model, num_draft_tokens),
        draft_params=jnp.asarray(draft),
        rule=rule,
        sampling=make_sampling(batch, temperature=1.0),
    )
    for count in (1, num_steps - 1):
        decoding.advance(count)
        means = np.array([len(row.tokens) / row.num_steps for row in decoding.rows()])
        expected = theory_law.tokens_per_step(
            rule,
            table_law(target),
            table_law(draft),
            (1, 3),
            num_draft_tokens,
            memory=2,
            num_steps=1 if count == 1 else num_steps,
        )
        assert abs(means.mean() - expected) < 4 * means.std() / math.sqrt(batch)


# What is refused.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.acceptance([0.5, 0.6], [0.5, 0.5]), "target_probs must be"),
        (lambda: theory.acceptance([0.5, 0.5], [1.5, -0.5]), "draft_probs must be"),
        (lambda: theory.acceptance([0.5, 0.5], [1.0]), "2 and 1 tokens"),
        (lambda: theory.coupled_acceptance([np.nan, 0.5], [0.5, 0.5]), "target_probs must be"),
        (lambda: theory.residual(TARGET, DRAFT, 1.5), "scale must be"),
        (lambda: theory.expected_tokens(-1, 0.5), "num_draft_tokens must be"),
        (lambda: theory.expected_tokens(1, 1.1), "acceptance must be"),
        (lambda: theory.speedup(1, -1, 0.1), "num_draft_tokens must be"),
        (lambda: theory.speedup(1, 1, -0.1), "draft_cost must be"),
        (lambda: theory.speedup(1, 1, 0.1, 0), "verify_cost above 0"),
        (lambda: theory.best_num_draft_tokens(0.5, 0.1, [1, 1], (1, 2, 3)), "verify_cost needs one value"),
        (lambda: theory.stop_probs([0.5, 1.5], "token"), "accept_probs must be"),
        (lambda: theory.stop_probs([0.5], "greedy"), "no formula for the rule 'greedy'"),
        (lambda: theory_law.expected_step_tokens("tree", always(TARGET), always(DRAFT), (), 1), "'tree'"),
        (
            lambda: theory_law.step_outcomes("token", always(TARGET), always(DRAFT), (), -1),
            "num_draft_tokens",
        ),
        (
            lambda: theory_law.step_outcomes("token", always(TARGET), always([1.0]), (), 1),
            "draft_law must give",
        ),
        (lambda: theory_law.step_outcomes("token", always([2, 1]), always([1, 0]), (), 1), "target_law must"),
        (lambda: theory_law.step_outcomes("token", always(TARGET), always(DRAFT), (), 30), "too many"),
        (lambda: theory_law.output_law("token", always(TARGET), always(DRAFT), (), 1, 0), "num_tokens must"),
        (
            lambda: theory_law.tokens_per_step("token", always(TARGET), always(DRAFT), (), 1, memory=0),
            "memory",
        ),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
