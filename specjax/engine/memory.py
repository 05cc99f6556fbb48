"""How much memory a job will take, before it takes it."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax

from specjax.engine.lane import default_rows
from specjax.engine.programs import caches_shardings
from specjax.engine.slots import empty_caches
from specjax.parallel.sharding import Placement, place, state_shardings
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
    ways: int  # devices that the rows are spread over
    weights: int
    row: int  # the caches of one row, of target and drafter
    step: int  # one row's logits and what is made of them
    score: int  # the cache of a text that is read for its log-probabilities
    available: int | None  # with the weights that are there already; None where nobody knows

    @property
    def total(self) -> int:
        """All that a device will hold."""
        slots, lane_rows = self.rows_of_a_device
        return self.weights + (slots + lane_rows) * self.row + self.score + slots * self.step

    @property
    def rows_of_a_device(self) -> tuple[int, int]:
        """Of the slots, and of the lane; all of them where the devices don't divide them."""
        of_slots, of_lane = (
            rows if rows % self.ways else rows // self.ways for rows in (self.slots, self.lane_rows)
        )
        return of_slots, of_lane

    @property
    def fits(self) -> bool:
        """Whether there is so much."""
        return self.available is None or self.total <= SPARE * self.available

    def __str__(self) -> str:
        """The arithmetic in one line."""
        slots, lane_rows = self.rows_of_a_device
        text = (
            f"weights {_size(self.weights)} + ({slots} slots + {lane_rows} being read) x "
            f"{_size(self.row)} of cache + {_size(self.score)} to score + {slots} x {_size(self.step)} of "
            f"logits = {_size(self.total)}"
        )
        if self.ways > 1:
            text = f"on each device, with {slots} of {self.slots} slots: {text}"
        return text if self.available is None else f"{text}; {SPARE:.0%} of {_size(self.available)} are there"


def plan_memory(
    target: Model,
    params: Any,
    drafter: Drafter | None,
    *,
    slots: int | None,
    capacity: int,
    available: int | None,
    placement: Placement | None = None,
) -> MemoryPlan:
    """Works out what a job needs of each device.

    Args:
      target: the target.
      params: all weights, of the drafter too, where they lie.
      drafter: the widest.
      slots: B; None takes as many as fit, a power of two for each of the devices that rows are spread over.
      capacity: S.
      available: bytes there are, from :func:`available_bytes`.
      placement: how rows and models lie on a mesh; None for one device.

    Returns:
      The plan; look at ``fits``.
    """
    weights = _bytes(params)
    ways = 1 if placement is None else placement.target.mesh.shape["data"]
    caches = jax.eval_shape(partial(empty_caches, target, drafter, ways, capacity))
    if placement is not None:
        caches = place(caches, caches_shardings(placement, caches))
    row = _bytes(caches)
    score = jax.eval_shape(partial(target.init_cache, 1, capacity))
    if placement is not None:
        score = place(score, state_shardings(placement.target, score))
    width = 1 + (0 if drafter is None else drafter.num_draft_tokens)
    # Logits, the warped ones and what a draw makes of a row, all float32; the draft's likewise.
    step = 4 * target.vocab_size * (3 * width + 6)

    def plan(count: int) -> MemoryPlan:
        return MemoryPlan(
            count, default_rows(count, ways), ways, weights, row, step, _bytes(score), available
        )

    if slots is not None:
        return plan(slots)
    most = MOST_SLOTS.get(jax.default_backend(), MOST_SLOTS_ELSEWHERE)
    for exponent in range(int(math.log2(most)), 0, -1):
        if plan(ways << exponent).fits:
            return plan(ways << exponent)
    return plan(ways)


def available_bytes(params: Any, num_devices: int = 1) -> int | None:
    """The memory of one device that is free or taken by the weights; None if it can't be known.

    Args:
      params: all weights, where they lie.
      num_devices: how many are used; where they are one machine's processor they share its memory.
    """
    device = jax.devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    try:
        entries = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(entries["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
    return free // num_devices + _bytes(params) if device.platform == "cpu" else None


def _bytes(tree: Any) -> int:
    """Of one device."""

    def size(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
