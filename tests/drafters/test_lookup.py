"""Prompt lookup against a search in a loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import LookupDrafter
from specjax.types import Context

CAPACITY = 24


def look_up(text: list[int], drafter: LookupDrafter) -> list[int]:
    """What follows the newest earlier occurrence of the longest n-gram that ends the text."""
    for size in range(drafter.prompt_lookup_max, drafter.prompt_lookup_min - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if len(text) > size and text[end - size : end] == text[-size:]:
                copied = list(text)
                for i in range(drafter.num_draft_tokens):
                    copied.append(copied[end + i])
                return copied[len(text) :]
    return []


def propose(drafter: LookupDrafter, texts: list[list[int]], filler: int = 0):
    tokens = np.full((len(texts), CAPACITY), filler, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    length = jnp.array([len(text) for text in texts], jnp.int32)
    context = Context(jnp.asarray(tokens), length, length, jnp.full((len(texts), 1), -1, jnp.int32))
    return jax.jit(lambda context: drafter.propose(None, None, None, context, None)[0])(context)


def proposals(drafter: LookupDrafter, texts: list[list[int]], filler: int = 0) -> list[list[int]]:
    draft = propose(drafter, texts, filler)
    return [
        row[:length].tolist() for row, length in zip(np.asarray(draft.tokens), draft.lengths, strict=True)
    ]


@pytest.mark.parametrize(("num_draft_tokens", "low", "high"), [(1, 1, 1), (3, 1, 3), (4, 2, 4), (7, 3, 3)])
def test_lookup_equals_a_search_in_a_loop(num_draft_tokens, low, high):
    rng = np.random.default_rng(0)
    drafter = LookupDrafter(num_draft_tokens, low, high)
    # Few ids, so that there are many matches; every length from a lone token to a full buffer.
    texts = [rng.integers(0, 3, length).tolist() for length in range(1, CAPACITY + 1) for _ in range(12)]
    expected = [look_up(text, drafter) for text in texts]
    # Filler that looks like text must not be found.
    assert proposals(drafter, texts, filler=1) == expected
    assert proposals(drafter, texts, filler=2) == expected
    assert 0.05 < np.mean([bool(draft) for draft in expected]) < 1


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([5, 6, 7, 5, 6], [7, 5, 6]),
        ([5, 6, 7, 5, 6, 8, 5, 6], [8, 5, 6]),  # the newest of two
        ([1, 5, 6, 7, 2, 5, 6, 8, 1, 5, 6], [7, 2, 5]),  # a longer match before a newer one
        ([5, 6, 5, 6], [5, 6, 5]),  # a copy that reaches the end goes on with itself
        ([4, 4, 4], [4, 4, 4]),
        ([4, 4], []),  # two tokens are no earlier match of two
        ([5, 6, 7, 8], []),
        ([6], []),
    ],
)
def test_what_is_drafted(text, draft):
    assert proposals(LookupDrafter(3, 2, 3), [text]) == [draft]


def test_the_draft_is_deterministic_and_rows_are_apart():
    draft = propose(LookupDrafter(2, 1, 2), [[5, 6, 7, 5], [1, 2, 3], [9, 9]])
    assert draft.logits is None
    assert draft.lengths.tolist() == [2, 0, 2]
    assert draft.tokens.dtype == draft.lengths.dtype == jnp.int32
    assert draft.tokens[0].tolist() == [6, 7]
    assert draft.tokens[2].tolist() == [9, 9]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0,), "num_draft_tokens must be at least 1, not 0"),
        ((2, 0, 2), "prompt_lookup_min must be at least 1"),
        ((2, 3, 2), "at most prompt_lookup_max, not 3 and 2"),
    ],
)
def test_values_that_make_no_sense_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        LookupDrafter(*values)
