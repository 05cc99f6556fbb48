"""What a drafter is told of the prompts in the lane."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import tables

from specjax.drafters import SilentDrafter
from specjax.engine.lane import Lane
from specjax.engine.work import Work

PARAMS = jnp.asarray(tables.random_history(0, 11))


@dataclasses.dataclass(frozen=True)
class Told(SilentDrafter):
    """Knows how far each row goes by what it is given to read, and by nothing else."""

    def init(self, batch, capacity):
        return jnp.zeros(batch, jnp.int32)

    def read(self, params, state, tokens, positions, length, features):
        return jnp.minimum(positions[:, -1] + 1, length)


def read_in(lane: Lane, prompt: tuple[int, ...]) -> int:
    """Reads a prompt and takes it out; what the drafter knows of its row then."""
    assert lane.load(Work(prompt))
    while lane.chunks_to_ready():
        lane.read()
    row, _ = lane.take()
    return int(lane.caches[1][row])


def test_the_drafter_knows_where_a_prompt_ends_that_needs_no_reading():
    # Each begins the one before it, so the target has nothing to read; one of one token never has.
    lane = Lane(tables.HistoryModel(11), PARAMS, Told(2), None, rows=1, chunk=4, capacity=64)
    prompt = tuple(i % 11 for i in range(30))
    for length in (30, 20, 19, 2, 1):
        known = read_in(lane, prompt[:length])
        assert length - 1 <= known <= length
