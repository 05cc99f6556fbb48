"""The real model end to end: the README's example, and drafts that change nothing."""

import re
from pathlib import Path

import numpy as np
import pytest

from specjax.drafters import LookupDrafter, ModelDrafter
from specjax.generate import generate
from specjax.sampling import make_sampling

pytestmark = pytest.mark.slow

QUESTIONS = [
    "Repeat after me, twice: a rose is a rose is a rose.",
    "Count from one to ten.",
]


def test_the_readme_example_runs(smollm2, capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    exec(compile(example, "README.md", "exec"), {})
    text = capsys.readouterr().out
    assert "Monday, Tuesday, Wednesday" in text
    assert float(re.search(r"(\d\.\d\d) tokens a step, \d+% of the drafts accepted", text)[1]) > 2


def test_drafts_change_no_token(smollm2):
    prompts = [smollm2.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    greedy = make_sampling(2, repetition_penalty=[1.0, 1.1])
    rest = dict(max_tokens=24, stop_tokens=smollm2.tokenizer.eos_ids, sampling=greedy)
    plain = generate(smollm2.model, smollm2.params, prompts, **rest)
    lookup = generate(smollm2.model, smollm2.params, prompts, drafter=LookupDrafter(4), **rest)
    itself = generate(
        smollm2.model,
        smollm2.params,
        prompts,
        drafter=ModelDrafter(smollm2.model, 3),
        draft_params=smollm2.params,
        **rest,
    )
    expected = [row.tokens for row in plain]
    assert [row.tokens for row in lookup] == expected
    assert [row.tokens for row in itself] == expected
    assert sum(row.num_accepted_tokens for row in lookup) > 0
    # The target as its own draft is always right: only a stop or the limit cuts a step short.
    for row in itself:
        assert row.num_steps == int(np.ceil(len(row.tokens) / 4))
