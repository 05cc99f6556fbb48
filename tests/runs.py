"""Many rows at once through the library's own compiled programs, and the gates that judge them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from specjax.generate import Decoding, Record
from specjax.sampling import make_sampling


@pytest.fixture(scope="module", autouse=True)
def full_compile():
    """Where a module imports this, its programs run for so long that compiling them well pays."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def decode_rows(
    target,
    target_params,
    prompt,
    seeds,
    num_tokens,
    *,
    steps=None,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    **how,
) -> tuple[np.ndarray, Record]:
    """Decodes the same prompt under many seeds, without the lists that ``generate`` makes of a result.

    Args:
      steps: how many steps to take; None takes all.

    Returns:
      The new tokens [B, num_tokens], and the record.
    """
    batch, begin = len(seeds), len(prompt)
    sampling = make_sampling(batch, temperature=temperature, top_k=top_k, top_p=top_p, seed=seeds)
    decoding = Decoding(
        target, target_params, [prompt] * batch, max_tokens=num_tokens, sampling=sampling, **how
    )
    assert decoding.advance(steps) or steps
    tokens, record = jax.device_get((decoding._state.context.tokens, decoding._record))
    return tokens[:, begin : begin + num_tokens], record


def count_sequences(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each sequence occurs: [B, N] tokens to [V] * N counts."""
    shape = (vocab_size,) * tokens.shape[1]
    codes = np.ravel_multi_index(tuple(tokens.T), shape)
    return np.bincount(codes, minlength=vocab_size ** tokens.shape[1]).reshape(shape)


def assert_counts_follow(counts: np.ndarray, law: np.ndarray) -> None:
    """Gates counts by standard errors: no impossible outcome, no cell and no sum of squares too far out.

    With a seed that is fixed the outcome is too; 4.5 standard errors leave room for another library
    version's random bits, and none for a fault that many trials can show.
    """
    total = counts.sum()
    assert counts[law == 0].sum() == 0, "an impossible outcome occurred"
    expected = total * law[law > 0]
    surprise = (counts[law > 0] - expected) / np.sqrt(expected)
    cells = surprise[expected > 20] / np.sqrt(np.maximum(1 - law[law > 0][expected > 20], 1e-6))
    assert np.abs(cells).max(initial=0) < 4.5, f"a cell is off by {np.abs(cells).max():.1f} standard errors"
    # Rare outcomes count together, so that the sum is chi-squared and its square root about normal.
    common = expected > 5
    terms = [*surprise[common], (counts[law > 0][~common] - expected[~common]).sum()]
    terms[-1] /= np.sqrt(max(expected[~common].sum(), 1))
    degrees = max(len(terms) - 1, 1)
    score = np.sqrt(2 * np.sum(np.square(terms))) - np.sqrt(2 * degrees - 1)
    assert score < 4.5, f"chi-square is {score:.1f} standard errors high"
