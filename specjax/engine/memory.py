"""How much memory a job will take, before it takes it."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax

from specjax.engine.lane import default_rows
from specjax.engine.slots import empty_caches
from specjax.types import Drafter, Model

__all__ = ["MemoryPlan", "available_bytes", "plan_memory"]

SPARE = 0.9
"""The share of the memory that is free which a job may plan to take."""
MOST_SLOTS = {"cpu": 16}
"""Slots that are taken where nobody says, if memory allows: more make a CPU hardly faster."""
MOST_SLOTS_ELSEWHERE = 128


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The arithmetic of a job's memory, in bytes."""

    slots: int
    lane_rows: int
    weights: int
    row: int  # the caches of one row, of target and drafter
    step: int  # one row's logits and what is made of them
    available: int | None  # with the weights that are there already; None where nobody knows

    @property
    def total(self) -> int:
        """All that the job will hold."""
        return self.weights + (self.slots + self.lane_rows) * self.row + self.slots * self.step

    @property
    def fits(self) -> bool:
        """Whether there is so much."""
        return self.available is None or self.total <= SPARE * self.available

    def __str__(self) -> str:
        """The arithmetic in one line."""
        text = (
            f"weights {_size(self.weights)} + ({self.slots} slots + {self.lane_rows} being read) x "
            f"{_size(self.row)} of cache + {self.slots} x {_size(self.step)} of logits = {_size(self.total)}"
        )
        return text if self.available is None else f"{text}; {SPARE:.0%} of {_size(self.available)} are there"


def plan_memory(
    target: Model,
    params: Any,
    drafter: Drafter | None,
    *,
    slots: int | None,
    capacity: int,
    available: int | None,
) -> MemoryPlan:
    """Works out what a job needs.

    Args:
      target: the target.
      params: all weights, of the drafter too.
      drafter: the widest.
      slots: B; None takes as many as fit, a power of two.
      capacity: S.
      available: bytes there are, from :func:`available_bytes`.

    Returns:
      The plan; look at ``fits``.
    """
    weights = _bytes(params)
    row = _bytes(jax.eval_shape(partial(empty_caches, target, drafter, 1, capacity)))
    width = 1 + (0 if drafter is None else drafter.num_draft_tokens)
    # Logits, the warped ones and what a draw makes of a row, all float32; the draft's likewise.
    step = 4 * target.vocab_size * (3 * width + 6)

    def plan(count: int) -> MemoryPlan:
        return MemoryPlan(count, default_rows(count), weights, row, step, available)

    if slots is not None:
        return plan(slots)
    most = MOST_SLOTS.get(jax.default_backend(), MOST_SLOTS_ELSEWHERE)
    for exponent in range(int(math.log2(most)), 0, -1):
        if plan(1 << exponent).fits:
            return plan(1 << exponent)
    return plan(1)


def available_bytes(params: Any) -> int | None:
    """The memory of one device that is free or taken by the weights; None if it can't be known."""
    device = jax.devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    try:
        entries = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(entries["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
    return free + _bytes(params) if device.platform == "cpu" else None


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
