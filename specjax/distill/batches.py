"""Batches of scored sequences, shuffled, for ever; the iterator's place goes into checkpoints.

Grain reads them: its place is one number, and the order a function of the seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import grain
import jax
import numpy as np

from specjax.distill.train import Batch

__all__ = ["Batches", "Source", "stack"]


class Source(Protocol):
    """Sequences by index: the fields of :class:`~specjax.distill.train.Batch` without their first axis."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...


class Batches:
    """An endless iterator over [A, B, ...] batches.

    Args:
      source: what to read.
      batch: B, sequences of a part.
      parts: A, parts whose gradients are added up.
      seed: of the order; each pass over the source has another.

    Raises:
      ValueError: there are fewer sequences than a batch has.
    """

    def __init__(self, source: Source, *, batch: int, parts: int = 1, seed: int = 0) -> None:
        if len(source) < batch * parts:
            raise ValueError(f"{len(source)} sequences don't fill a batch of {batch * parts}")
        dataset = grain.MapDataset.source(source).shuffle(seed=seed).repeat()
        dataset = dataset.batch(batch * parts, drop_remainder=True)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        self._iterator: Any = iter(dataset.to_iter_dataset(options))
        self._parts = parts

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        fields = next(self._iterator)
        return Batch(**{name: x.reshape(self._parts, -1, *x.shape[1:]) for name, x in fields.items()})

    def place(self) -> dict[str, Any]:
        """Where it stands, as JSON."""
        return self._iterator.get_state()

    def go_to(self, place: dict[str, Any]) -> None:
        """Goes on from a place."""
        self._iterator.set_state(place)


def stack(source: Source, indices: Sequence[int]) -> Batch:
    """One batch [B, ...] of given sequences."""
    rows = [source[i] for i in indices]
    return Batch(**jax.tree.map(lambda *x: np.stack(x), *rows))
