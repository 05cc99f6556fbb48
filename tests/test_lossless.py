"""What a rule says follows the target's law: exactly, through the library's own compiled step."""

from __future__ import annotations

import numpy as np
import pytest
import tables
from exact import Case, Tables, output_laws

PLAIN, NUCLEUS = {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}
CASES = [
    Case(PLAIN),
    Case(PLAIN, ragged=True),
    Case(NUCLEUS),
    Case(NUCLEUS, ragged=True),
    Case({"temperature": 1.4, "top_k": 2}),
    Case({"temperature": 0.0}),
    Case({"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": -0.3}),
    Case({"logit_bias": {0: 1.2, 2: -2.0}, "min_p": 0.2, "frequency_penalty": 0.5}, ragged=True),
]
# V, and how many tokens of text, for K = 1, 2, 3: texts of one step and of several.
SIZES = {1: (5, 3), 2: (4, 3), 3: (3, 4)}


def make_tables(kind: str, vocab_size: int) -> Tables:
    """A target and a draft, both skewed, of a kind."""
    rng = np.random.default_rng(vocab_size)
    target, draft = rng.normal(0, 1.5, (2, *(vocab_size,) * 3))
    half = np.arange(vocab_size) < (vocab_size + 1) // 2
    if kind == "equal":
        draft = target
    if kind == "disjoint":
        target, draft = np.where(half, target, -np.inf), np.where(half, -np.inf, draft)
    if kind == "partial":
        masked = rng.random((2, *target.shape)) < 0.4
        masked[..., 0] &= ~masked.all(axis=-1)
        target, draft = np.where(masked[0], -np.inf, target), np.where(masked[1], -np.inf, draft)
    return Tables(target, draft, one_hot=kind == "one-hot")


@pytest.mark.parametrize("num_draft_tokens", SIZES)
@pytest.mark.parametrize("kind", ["soft", "partial", "equal", "disjoint", "one-hot"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_exact_law(rule, kind, num_draft_tokens):
    vocab_size, num_tokens = SIZES[num_draft_tokens]
    given, prompt = make_tables(kind, vocab_size), [1, 0, 1]
    laws = output_laws(rule, given, CASES, prompt, num_tokens, num_draft_tokens)
    for case, law in zip(CASES, laws, strict=True):
        expected = tables.sequence_law(given.target, prompt, num_tokens, **case.options)
        np.testing.assert_allclose(law, expected, rtol=0, atol=1e-12, err_msg=str(case))
