"""What a drafter is told of the prompts in the lane."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import tables

from specjax.drafters import SilentDrafter
from specjax.engine.lane import Lane
from specjax.engine.programs import Programs
from specjax.engine.work import Work

PARAMS = jnp.asarray(tables.random_history(0, 11))


@dataclasses.dataclass(frozen=True)
class Told(SilentDrafter):
    """Knows how far each row goes by what it is given to read, and by nothing else."""

    def init(self, batch, capacity):
        return jnp.zeros(batch, jnp.int32)

    def read(self, params, state, tokens, positions, length, features):
        return jnp.minimum(positions[:, -1] + 1, length - 1)  # all but the newest token, as a head does


def read_in(lane: Lane, prompt: tuple[int, ...]) -> int:
    """Reads a prompt and takes it out; what the drafter knows of its row then."""
    assert lane.load(Work(prompt))
    while lane.read():
        pass
    (_, known), row, _ = lane.take()
    return int(known[row])


def test_the_drafter_knows_where_a_prompt_ends_that_needs_no_reading():
    # Each begins the one before it, so the target has nothing to read; one of one token never has. The last
    # goes on by the one token that a step feeds.
    programs = Programs(tables.HistoryModel(11), PARAMS, Told(2), None, capacity=64, placement=None)
    lane = Lane(programs, rows=1, chunks=(1, 4))
    prompt = tuple(i % 11 for i in range(30))
    for length in (30, 20, 19, 2, 1, 5, 6):
        assert read_in(lane, prompt[:length]) == length - 1


@dataclasses.dataclass
class Noted:
    """Reads nothing, and keeps the shapes that it was given."""

    ways: int = 1
    shapes: list = dataclasses.field(default_factory=list)

    def empty_caches(self, rows):
        return jnp.zeros(rows), None

    def read(self, caches, tokens, positions, length):
        self.shapes.append(tokens.shape)
        return caches


def test_a_lone_prompt_costs_no_more_than_its_tokens():
    programs = Noted()
    lane = Lane(programs, rows=4, chunks=(16, 64))
    assert not lane.read()
    for length in (141, 10):
        assert lane.load(Work(tuple(range(length)), tag=length))
    assert [lane.read() for _ in range(5)] == [True] * 4 + [False]
    # By turns, and with as few tokens as an end needs.
    assert programs.shapes == [(1, 64), (1, 16), (1, 64), (1, 16)]
    assert [lane.take()[2].tag for _ in range(2)] == [141, 10]


def read_all(lane: Lane) -> list:
    """Reads and takes whatever waits; the tags as they come."""
    taken = []
    while not lane.is_empty:
        while lane.read():
            pass
        taken.append(lane.take()[2].tag)
    return taken


def test_prompts_that_begin_alike_read_that_once():
    lane = Lane(Noted(), rows=2, chunks=(16, 64))
    document = tuple(range(200))
    questions = [Work((*document, 1000 + i, 0), tag=i) for i in range(3)]
    other = Work((*document[:60], 2000, 0), tag="other")  # what it would save is less than a chunk
    # Whoever comes later doesn't wait for the document, which the others do.
    assert all(lane.load(work) for work in (*questions, other))
    assert lane.take() is None
    assert lane.read()
    assert lane.read()
    assert lane.take()[2].tag == "other"
    assert read_all(lane) == [0, 1, 2]
    assert lane.tokens_read == 202 + 62 + 2 * 2


def test_whoever_comes_after_another_in_a_row_is_not_overtaken():
    lane = Lane(Noted(), rows=2, chunks=(4,))
    first, second = (*range(20),), (*range(20), 7, 8)
    for tag, prompt in enumerate((first, second, first, first)):
        assert lane.load(Work(prompt, tag=tag))
    assert read_all(lane) == [0, 1, 2, 3]
    assert lane.tokens_read == 20 + 2


def test_what_was_read_last_stays_where_there_are_other_rows():
    lane = Lane(Noted(), rows=2, chunks=(16, 64))
    for i in range(3):
        for prompt in ((*range(200), 1000 + i), (2000 + i, 0)):
            assert lane.load(Work(prompt))
            read_all(lane)
    assert lane.tokens_read == 201 + 3 * 2


def test_rows_that_are_read_together_do_not_wait_for_each_other():
    programs = Noted(ways=2)
    lane = Lane(programs, rows=2, chunks=(16, 64))
    assert all(lane.load(Work((*range(200), 1000 + i, 0))) for i in range(2))
    read_all(lane)
    assert programs.shapes == [(2, 64)] * 3 + [(2, 16)]


def test_rows_of_several_devices_are_read_together():
    programs = Noted(ways=2)
    lane = Lane(programs, rows=4, chunks=(16, 64))
    for length in (10, 20, 30):
        assert lane.load(Work(tuple(range(length)), tag=length))
    while lane.read():
        pass
    assert programs.shapes == [(2, 64), (2, 64)]
    where = [(caches.shape, row) for (caches, _), row, _ in (lane.take() for _ in range(3))]
    assert where == [((2,), 0), ((2,), 1), ((2,), 0)]


def test_what_was_read_before_a_warm_up_is_forgotten():
    lane = Lane(Noted(), rows=1, chunks=(4,))
    prompt = tuple(range(9))
    for again in (False, True):
        assert lane.load(Work((*prompt, again)))
        assert lane.read() is True
        while lane.read():
            pass
        lane.take()
        lane.warm_up()
