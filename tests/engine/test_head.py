"""A head on the target's states as the engine's draft, on one device."""

from __future__ import annotations

import itertools

import numpy as np
import tiny_target

from specjax.distill.train import join_params
from specjax.drafters import FeatureDrafter
from specjax.engine.engine import Engine
from specjax.engine.work import Work


def test_a_head_drafts_too():
    target, params = tiny_target.target()
    vocabulary = np.arange(0, 48, 2, dtype=np.int32)
    _, trained, frozen, head = tiny_target.draft("head", vocabulary)
    drafters = [FeatureDrafter(head, count, 48) for count in (1, 2)]
    work = [Work((*range(n),), 12, {"temperature": n % 2, "seed": n}, tag=n) for n in (1, 5, 30, 70)]
    params_of = join_params(trained, {name: x for name, x in frozen.items() if name != "target_head"})
    plain, fast = (
        Engine(target, params, drafters=some, draft_params=params_of, slots=2, capacity=128)
        for some in ([], drafters)
    )
    expected = {result.work.tag: result.tokens for result in plain.run(work)}
    widths = itertools.cycle([2, 0, 1])
    fast._chooser.choose = lambda live: next(widths)
    results = list(fast.run(work))
    assert {result.work.tag: result.tokens for result in results} == expected
    assert sum(result.num_draft_tokens for result in results) > 0
