"""The coupled rule: speculation changes not one token of a sampled text."""

from __future__ import annotations

import numpy as np
import pytest
import tables
from runs import decode_rows

from specjax.drafters import LookupDrafter, ModelDrafter

V, NUM_TOKENS = 6, 51
MODEL = tables.TableModel(V)
DRAFTS = {
    "one": (256, ModelDrafter(MODEL, 1)),
    "four": (256, ModelDrafter(MODEL, 4)),
    "lookup": (256, LookupDrafter(3, 1, 3)),
    "three rows": (3, ModelDrafter(MODEL, 4)),
}


def same_tokens(draft: str, num_tables: int) -> int:
    """Compares rows under random models, options and seeds; returns how many tokens that were."""
    batch, drafter = DRAFTS[draft]
    rng, total, kept = np.random.default_rng(sum(map(ord, draft))), 0, 0
    for _ in range(num_tables):
        target = tables.random_table(rng.integers(1 << 30), V, rng.uniform(0.5, 3))
        # From the target itself to a stranger.
        other = target + rng.uniform(0, 2) * tables.random_table(rng.integers(1 << 30), V, 1.0)
        options = {
            "temperature": rng.uniform(0.4, 1.5),
            "top_p": rng.choice([0.8, 1.0]),
            "top_k": rng.choice([0, 4]),
        }
        prompt = rng.integers(0, V, rng.integers(1, 9)).tolist()
        seeds = rng.integers(0, 1 << 32, 256)
        how = dict(rule="coupled", **options)
        plain, _ = decode_rows(MODEL, target, prompt, seeds, NUM_TOKENS, **how)
        params = None if isinstance(drafter, LookupDrafter) else other
        tokens, record = decode_rows(
            MODEL, target, prompt, seeds[:batch], NUM_TOKENS, drafter=drafter, draft_params=params, **how
        )
        np.testing.assert_array_equal(tokens, plain[:batch])
        total += tokens.size
        kept += record.accepted[:, 1:].sum()
    assert kept > 0.05 * total, "hardly a draft was kept"
    return total


@pytest.mark.parametrize("draft", DRAFTS)
def test_coupled_output_is_that_of_plain_sampling(draft):
    assert same_tokens(draft, 4) == 4 * NUM_TOKENS * DRAFTS[draft][0]


@pytest.mark.slow
def test_a_million_coupled_tokens_are_those_of_plain_sampling():
    assert sum(same_tokens(draft, 26) for draft in ("one", "four", "lookup")) > 10**6
