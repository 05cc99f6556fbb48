"""The trace tells the truth: its tokens are those of generate, its numbers those that the rule went by."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import tables

from specjax.drafters import LookupDrafter, ModelDrafter
from specjax.generate import Source, generate
from specjax.sampling import make_sampling
from specjax.trace import trace

V, K = 7, 3
MODEL = tables.TableModel(V)
TARGET, DRAFT = tables.random_table(0, V), tables.random_table(1, V)
HOW = {
    "target": MODEL,
    "target_params": jnp.asarray(TARGET),
    "max_tokens": 40,
    "num_choices": 4,
}
OPTIONS = {"temperature": 0.9, "top_p": 0.95}
PROMPT = [3, 1, 3, 1]


def sampled(seed=5):
    return make_sampling(1, **OPTIONS, seed=seed)


DRAFTS = {
    "model": dict(drafter=ModelDrafter(MODEL, K), draft_params=jnp.asarray(DRAFT)),
    "lookup": dict(drafter=LookupDrafter(K, prompt_lookup_min=1)),
    "none": {},
}


@pytest.mark.parametrize(
    ("rule", "draft"),
    [("token", "model"), ("token", "none"), ("block", "model"), ("coupled", "model"), ("greedy", "lookup")],
)
def test_a_trace_has_the_tokens_sources_and_figures_of_generate(rule, draft):
    sampling = make_sampling(1) if rule == "greedy" else sampled()
    how = HOW | DRAFTS[draft] | {"rule": rule, "sampling": sampling}
    traced = trace(prompt=PROMPT, **how)
    how.pop("num_choices")
    (row,) = generate(prompts=[PROMPT], **how)
    assert traced.generation.tokens == row.tokens == [t for step in traced.steps for t in step.tokens]
    assert traced.generation.sources == row.sources == [s for step in traced.steps for s in step.sources]
    assert len(traced.steps) == row.num_steps == traced.generation.num_steps
    np.testing.assert_array_equal(traced.generation.drafted, row.drafted)
    np.testing.assert_array_equal(
        np.bincount(
            [sum(p.stood for p in step.proposals) for step in traced.steps], minlength=len(row.accepted)
        ),
        row.accepted,
    )
    starts = np.cumsum([len(PROMPT)] + [len(step.tokens) for step in traced.steps])
    assert [step.start for step in traced.steps] == starts[:-1].tolist()


@pytest.mark.parametrize(("rule", "draft"), [("token", "model"), ("token", "lookup"), ("block", "model")])
def test_probabilities_are_those_after_the_warp_and_the_draw_decides(rule, draft):
    traced = trace(prompt=PROMPT, **HOW | DRAFTS[draft] | {"rule": rule, "sampling": sampled()})
    text, judged, rejected = list(PROMPT), 0, 0
    for step in traced.steps:
        passed = []
        for i, proposal in enumerate(step.proposals):
            before = [*text, *(other.token for other in step.proposals[:i])]
            p = tables.next_probs(TARGET, before, len(PROMPT), **OPTIONS)
            q = tables.next_probs(DRAFT, before, len(PROMPT), **OPTIONS)
            if draft == "lookup":
                q = np.eye(V)[proposal.token]
                assert proposal.draft_choices == []
            else:
                likely = dict(proposal.draft_choices)
                assert len(likely) == min(4, np.sum(q > 0))
                assert all(abs(q[token] - chance) < 1e-5 for token, chance in likely.items())
            assert proposal.target_prob == pytest.approx(p[proposal.token], abs=1e-5)
            assert proposal.draft_prob == pytest.approx(q[proposal.token], abs=1e-5)
            if rule == "token":
                ratio = min(1, p[proposal.token] / q[proposal.token])
                assert proposal.accept_prob == pytest.approx(ratio, abs=1e-4)
            own = tables.softmax(np.float64(tables.table_logits(TARGET, before)))
            assert [token for token, _ in proposal.target_choices] == np.argsort(-own)[:4].tolist()
            passed.append(proposal.uniform < proposal.accept_prob)
        kept = sum(proposal.stood for proposal in step.proposals)
        if rule == "token":
            assert kept == next((i for i, ok in enumerate(passed) if not ok), len(passed))
        else:
            assert kept == max((i + 1 for i, ok in enumerate(passed) if ok), default=0)
        assert [p.token for p in step.proposals[:kept]] == step.tokens[:kept]
        for i, (token, chance) in enumerate(zip(step.tokens, step.probs, strict=True)):
            own = tables.softmax(np.float64(tables.table_logits(TARGET, [*text, *step.tokens[:i]])))
            assert chance == pytest.approx(own[token], abs=1e-5)
        if step.sources[-1] == Source.CORRECTED:
            # Drawn from max(p - q, 0): never the rejected token of a one-hot draft.
            allowed = dict(step.next_choices)
            assert sum(allowed.values()) <= 1 + 1e-6
            if draft == "lookup":
                assert step.proposals[kept].token not in allowed
        text += step.tokens
        judged += len(step.proposals)
        rejected += len(step.proposals) - kept
    assert judged > 5
    assert rejected > 2


def test_rules_without_a_uniform_show_none():
    for rule, draft, sampling in (("coupled", "model", sampled()), ("greedy", "lookup", make_sampling(1))):
        traced = trace(prompt=PROMPT, **HOW | DRAFTS[draft] | {"rule": rule, "sampling": sampling})
        assert {p.uniform for step in traced.steps for p in step.proposals} == {None}


def test_a_stop_inside_a_draft_cuts_the_step():
    how = HOW | DRAFTS["model"] | {"sampling": sampled()}
    how["draft_params"] = how["target_params"]  # all is accepted
    tokens = trace(prompt=PROMPT, **how).generation.tokens
    stop = next(t for i, t in enumerate(tokens) if i % (K + 1) == 1 and t not in tokens[:i])
    traced = trace(prompt=PROMPT, **how, stop_tokens=[stop])
    assert traced.generation.tokens == tokens[: tokens.index(stop) + 1]
    last = traced.steps[-1]
    assert last.tokens[-1] == stop
    assert last.sources == [Source.ACCEPTED] * len(last.tokens)
    assert [p.stood for p in last.proposals] == [i < len(last.tokens) for i in range(len(last.proposals))]


def test_no_choice_at_all_is_refused():
    with pytest.raises(ValueError, match="num_choices must be at least 1"):
        trace(prompt=PROMPT, **HOW | {"num_choices": 0})
