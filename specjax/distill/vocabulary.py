"""Which tokens a draft scores: the most frequent ones of what the target says."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from specjax.distill.sequences import TokenSequence

__all__ = ["frequent_tokens", "share_covered"]


def frequent_tokens(sequences: Iterable[TokenSequence], size: int, target_size: int) -> np.ndarray:
    """The ``size`` most frequent tokens of responses; the lowest ids among equals, which BPE made first.

    Args:
      sequences: training data.
      size: W.
      target_size: V.

    Returns:
      [W] int32, rising.
    """
    if not 1 <= size <= target_size:
        raise ValueError(f"a draft scores 1 .. {target_size} tokens, not {size}")
    counts = np.zeros(target_size, np.int64)
    for sequence in sequences:
        counts += np.bincount(sequence.tokens[sequence.prompt_length :], minlength=target_size)
    order = np.lexsort((np.arange(target_size), -counts))
    return np.sort(order[:size]).astype(np.int32)


def share_covered(sequences: Iterable[TokenSequence], vocabulary: np.ndarray) -> float:
    """The share of the responses' tokens that a vocabulary has."""
    responses = np.concatenate([s.tokens[s.prompt_length :] for s in sequences])
    return float(np.isin(responses, vocabulary).mean())
