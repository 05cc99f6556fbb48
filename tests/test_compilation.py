"""What is traced, compiled and run, and how often."""

from __future__ import annotations

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
import tables

from specjax import generate as module
from specjax.drafters import LookupDrafter, ModelDrafter
from specjax.generate import Decoding, generate
from specjax.sampling import make_sampling

V, K = 7, 3
TABLE = tables.random_table(0, V)
CALLS = collections.Counter()


@dataclasses.dataclass(frozen=True)
class Counted(tables.TableModel):
    """Counts how often it is traced, and how often it runs, by the number of tokens fed a row."""

    name: str = "target"

    def apply(self, params, tokens, cache, positions):
        width = tokens.shape[1]
        CALLS[self.name, "traced"] += 1
        jax.debug.callback(lambda: CALLS.update([(self.name, width)]))
        return super().apply(params, tokens, cache, positions)


@pytest.fixture(autouse=True)
def no_calls_yet():
    CALLS.clear()
    yield
    jax.effects_barrier()


@pytest.fixture
def compiled():
    """The names of the events that tracing and compiling send, as they come."""
    events = []

    def listen(event: str, duration: float, **_) -> None:
        if re.search("compile|trace|mlir", event):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def run(target, prompts, max_tokens=12, seed=0, **how):
    sampling = make_sampling(len(prompts), temperature=1.0, top_p=0.9, seed=seed)
    return generate(target, TABLE, prompts, max_tokens=max_tokens, sampling=sampling, **how)


@pytest.mark.parametrize(
    ("drafter", "params", "target_traces", "draft_traces"),
    [
        (None, None, 1, 0),
        # Catching up, the first token, and the scan's body.
        (ModelDrafter(Counted(V, name="draft"), K), TABLE, 1, 3),
        (LookupDrafter(K, 1, 2), None, 2, 0),  # each of two widths
    ],
    ids=["plain", "model", "lookup"],
)
def test_the_step_is_traced_once(drafter, params, target_traces, draft_traces):
    target = Counted(V)
    run(target, [[1, 2], [3, 4, 5]], drafter=drafter, draft_params=params)
    # Prefill is one more trace of each model.
    assert CALLS["target", "traced"] == target_traces + 1
    assert CALLS["draft", "traced"] == draft_traces + (1 if draft_traces else 0)
    # Other texts, lengths, limits, seeds and weights of the same bucket: not one more.
    before = CALLS["target", "traced"], CALLS["draft", "traced"]
    run(target, [[6], [1] * 30], max_tokens=[3, 29], seed=7, drafter=drafter, draft_params=params)
    assert (CALLS["target", "traced"], CALLS["draft", "traced"]) == before


def test_nothing_compiles_after_the_first_call(compiled):
    target, drafter = tables.TableModel(V), ModelDrafter(tables.TableModel(V), K)
    how = dict(drafter=drafter, draft_params=TABLE, stop_tokens=[2])
    run(target, [[1, 2], [3, 4, 5]], **how)
    assert compiled, "the events have other names"
    compiled.clear()
    sizes = module._start._cache_size(), module._advance._cache_size()
    for length in range(1, 50):
        run(target, [[1] * length, [3] * (50 - length)], max_tokens=[1 + length % 9, 9], seed=length, **how)
    assert compiled == []
    assert (module._start._cache_size(), module._advance._cache_size()) == sizes


def test_a_step_without_a_draft_feeds_one_token():
    # No token stands twice, so nothing can be looked up: all steps are plain ones.
    (row,) = run(Counted(V), [[0, 1]], max_tokens=1, drafter=LookupDrafter(K, 2, 3))
    jax.effects_barrier()
    assert CALLS["target", 1] == row.num_steps == 1
    assert CALLS["target", K + 1] == 0
    # With a row that repeats itself the batch feeds K + 1.
    CALLS.clear()
    rows = run(Counted(V), [[0, 1], [1, 2, 1, 2]], max_tokens=9, drafter=LookupDrafter(K, 2, 3))
    jax.effects_barrier()
    steps = max(row.num_steps for row in rows)
    assert CALLS["target", 1] + CALLS["target", K + 1] == steps
    assert CALLS["target", K + 1] > 0
    # Not a step more than rows need: the loop ends when the last row does.
    assert sum(row.num_steps for row in rows) >= steps


def test_the_state_is_given_away():
    # Caches and buffers are donated: after a call the old ones are gone, and a warning would be an error.
    drafter = ModelDrafter(tables.TableModel(V), K)
    how = dict(drafter=drafter, draft_params=jnp.asarray(TABLE), sampling=make_sampling(2, temperature=1.0))
    decoding = Decoding(tables.TableModel(V), jnp.asarray(TABLE), [[1, 2], [3]], max_tokens=9, **how)
    before = decoding._state, decoding._record
    decoding.advance(1)
    big = (before[0].target_cache, before[0].draft_state.cache, before[0].context.tokens, before[1].source)
    assert all(array.is_deleted() for array in big)
    assert not how["draft_params"].is_deleted()


@pytest.mark.parametrize("drafter", [None, LookupDrafter(K, 1, 2)], ids=["plain", "lookup"])
def test_nothing_comes_back_to_the_host_inside_the_loop(drafter):
    sampling = make_sampling(2, temperature=1.0)
    decoding = Decoding(
        tables.TableModel(V), TABLE, [[1, 2], [3]], max_tokens=9, drafter=drafter, sampling=sampling
    )
    state = decoding._state, decoding._record
    how = decoding._advance.keywords
    program = module._advance.lower(*decoding._params, *state, 5, **how).as_text()
    assert "stablehlo.while" in program
    assert not re.search("callback|infeed|outfeed|stablehlo.send", program)
