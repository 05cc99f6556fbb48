"""Continuous batching: rows come into slots and go out while the others go on.

The host visits the device after a run of some steps. It waits for a few flags only: it then fills the
slots that became free, starts the next run, and reads the tokens of the last one while that goes on.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np

from specjax.decode import Caches
from specjax.engine.choose import MIN_STEPS, Chooser
from specjax.engine.lane import Lane, default_rows
from specjax.engine.programs import Programs
from specjax.engine.running import Running
from specjax.engine.score import Scorer
from specjax.engine.slots import Report
from specjax.engine.stats import Stats
from specjax.engine.stopping import Detokenizer
from specjax.engine.work import Limits, Result, Work, WorkQueue
from specjax.parallel.channel import relay, tell
from specjax.parallel.sharding import Placement
from specjax.types import Drafter, Model, Params
from specjax.verify import RULES

__all__ = ["Engine"]

MAX_STEPS = 32
"""Steps between two visits at most, so that the host is seen; at least MIN_STEPS, so that it is seldom
waited for."""
READS = 16
"""Chunks that the lane reads at most in one visit while rows are being decoded, or wait to be: long prompts
don't stall them for long."""
TIMINGS = 2
"""Runs of each K, besides the one that compiles it, that say what a step of it takes; the least counts."""
LOOKAHEAD = 64
"""Pieces of work taken from the source ahead of need."""


@dataclasses.dataclass
class _Flight:
    """A run that was started."""

    report: Report
    width: int
    rows: list[Running | None]
    started: float
    is_alone: bool  # whether the device had nothing to do before it


class Engine:
    """Decodes any number of prompts through a fixed number of slots.

    :meth:`run` takes an iterable, reads it as slots become free, and yields results as they come. Or
    :meth:`submit` takes a piece of work at a time, and iterating over the engine gives the results::

        with Engine(target, params, slots=8, capacity=1024) as engine:
            engine.submit(Work(prompt, max_tokens=64))
            for result in engine:
                ...

    What a row's tokens are depends on its request alone where they are greedy, or sampled under the rule
    ``coupled``: not on the slots, its neighbours, the order, or K. Under ``token`` and ``block`` the law is
    the same but the tokens depend on K, which is chosen by measured times.

    Args:
      target: the model whose law the output has.
      target_params: its weights.
      drafters: what proposes, one for each K to choose from, rising; their states must have one shape.
        Empty decodes plainly.
      draft_params: the drafters' weights.
      plain_drafter: what runs with K = 0: None, or a :class:`~specjax.drafters.SilentDrafter` for the fixed
        shape.
      rule: a name in :data:`specjax.verify.RULES`.
      slots: B, rows decoded at a time.
      capacity: S, positions a row; a prompt, its output and the widest draft must fit.
      stop_tokens: ids that end every row.
      adaptive: chooses K while running; otherwise it is always the widest.
      detokenizer: makes what turns ids into text, block by block; needed for stop strings.
      max_logprobs: the most alternatives that work may ask for; None has no log-probabilities at all.
      prefill_rows: P, prompts held while they are read; None: 4 for each device along ``data``, no more than
        slots.
      chunk: tokens of a prompt read at once, a quarter where no more are left; None: 64 on a CPU, where more
        make no product faster, else 512.
      placement: how all lies on a mesh; :meth:`specjax.parallel.sharding.Layout.lay` has laid the models.
    """

    def __init__(
        self,
        target: Model,
        target_params: Params,
        *,
        drafters: Sequence[Drafter] = (),
        draft_params: Params = None,
        plain_drafter: Drafter | None = None,
        rule: str = "coupled",
        slots: int = 8,
        capacity: int = 2048,
        stop_tokens: Sequence[int] = (),
        adaptive: bool = True,
        detokenizer: Callable[[], Detokenizer] | None = None,
        max_logprobs: int | None = None,
        prefill_rows: int | None = None,
        chunk: int | None = None,
        placement: Placement | None = None,
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"no rule is named {rule!r}; there are {', '.join(RULES)}")
        widths = [drafter.num_draft_tokens for drafter in drafters]
        if widths != sorted(set(widths)):
            raise ValueError(f"drafters must have rising numbers of draft tokens, not {widths}")
        for name, count in dict(slots=slots, prefill_rows=prefill_rows, chunk=chunk).items():
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, not {count}")
        reserve = max(widths, default=0) + 1
        if capacity < reserve + 2:
            raise ValueError(f"a capacity of {capacity} positions is less than one token and a draft need")
        chunk = (64 if jax.default_backend() == "cpu" else 512) if chunk is None else chunk
        self.limits = Limits(
            vocab_size=target.vocab_size,
            context_length=target.context_length,
            capacity=capacity,
            reserve=reserve,
            stop_tokens=tuple(stop_tokens),
            has_text=detokenizer is not None,
            max_logprobs=max_logprobs,
        )
        self.num_slots = slots
        self._drafters = {0: plain_drafter} | dict(zip(widths, drafters, strict=True))
        self._widest = drafters[-1] if drafters else plain_drafter
        self._rule, self._detokenizer = RULES[rule], detokenizer
        self._num_kept = max([1, *(d.num_draft_tokens for d in self._drafters.values() if d is not None)])
        if not adaptive:
            self._drafters = {max(self._drafters): self._widest}
        self._adaptive = len(self._drafters) > 1
        self._programs = programs = Programs(
            target, target_params, self._widest, draft_params, capacity=capacity, placement=placement
        )
        rows = default_rows(slots, programs.ways) if prefill_rows is None else prefill_rows
        self._lane = Lane(programs, rows=rows, chunks=sorted({-(-chunk // 4), chunk}))
        top = min(max_logprobs or 0, target.vocab_size)
        self._scorer = None if max_logprobs is None else Scorer(programs, capacity, top)
        self._slots = programs.empty_slots(slots, self._num_kept)
        self._chooser = Chooser(sorted({0, *self._drafters}), slots)
        self._running: list[Running | None] = [None] * slots
        bins = (slots, self._num_kept + 1)
        # Each row's steps, and these by the number of tokens drafted and kept, as last read.
        self._seen = [np.zeros(shape, np.int32) for shape in ((slots,), bins, bins)]
        self._submitted = WorkQueue()
        self._source: Iterator[Work] = iter(())
        self._waiting: deque[Work] = deque()
        self._is_warm, self._is_idle, self._partial, self._ended_at = False, False, False, 0.0
        self.stats = Stats()

    # Using it.

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets go of the device's memory."""
        del self._slots, self._lane.caches, self._scorer

    def submit(self, work: Work) -> None:
        """Adds work; iterate over the engine for the results.

        Raises:
          ValueError: it can't be done by this engine: see :meth:`Limits.check`.
        """
        self.limits.check(work)
        self._submitted.append(work)

    def __iter__(self) -> Iterator[Result]:
        """The results of what was submitted, as they come; more may be submitted on the way."""
        return self.run(self._submitted)

    def warm_up(self, progress: Callable[[str, int, int], None] = lambda name, done, total: None) -> None:
        """Compiles all programs and times a step of each K; ``progress(name, done, total)`` says how far."""
        names = ["prefill", "admission", *(f"steps with K = {width}" for width in self._drafters)]
        names += ["log-probabilities"] * (self._scorer is not None) + ["a step's time"]
        for done, name in enumerate(names):
            progress(name, done, len(names))
            if name == "prefill":
                self._lane.warm_up()
            elif name == "admission":
                self._admit(0, *self._trial())
            elif name == "log-probabilities" and self._scorer is not None:
                self._scorer((1,), [1], 0)
            elif name == "a step's time":
                for width in [*self._drafters] * TIMINGS:  # by turns: what disturbs one disturbs all
                    self._time_step(width)
            else:
                self._time_step(list(self._drafters)[done - 2])
        progress("ready", len(names), len(names))
        self._running = [None] * self.num_slots
        for array in self._seen:
            array[:] = 0
        self._is_warm, self.stats = True, Stats()

    def run(
        self,
        source: Iterable[Work],
        *,
        partial: bool = False,
        on_visit: Callable[[], object] = lambda: None,
    ) -> Iterator[Result]:
        """Decodes what the source gives, and yields results as they come.

        Args:
          source: read a little ahead of need; each piece must pass :meth:`Limits.check`. Of several
            processes the first one's counts; the others get its work, without the tags.
          partial: also yields, at each visit, what the rows that go on have by then.
          on_visit: called after each visit, when its results have been taken.
        """
        if not self._is_warm:
            self.warm_up()
        self._source = relay(source, Work.packed, lambda packed: Work(**packed))
        self._partial = partial
        flight: _Flight | None = None
        try:
            while True:
                ended = [] if flight is None else self._wait(flight)
                self._refill()
                following = self._start()
                if flight is not None:
                    yield from self._collect(flight, ended, partial)
                flight = following
                on_visit()
                self._load()  # what was submitted in between
                if flight is None and not self._waiting and self._lane.is_empty:
                    return
        finally:
            if flight is not None:  # the consumer has gone away, or something failed: the rows are dropped
                jax.block_until_ready(flight.report.done)
            self._abandon()

    # One visit, in its order.

    def _wait(self, flight: _Flight) -> list[tuple[int, Running]]:
        """Waits for the run's end and takes note of it; frees the slots of the rows that ended."""
        # When a run ended before the host came, nobody knows when that was.
        report, record = flight.report, flight.report.record
        newest: Any = report.done
        is_timed = flight.is_alone and not newest.is_ready()
        flags = jax.device_get(
            (report.done, report.num_steps, report.length, record.num_steps, record.drafted, record.accepted)
        )
        self._ended_at = time.perf_counter()
        self._is_idle = True
        done, num_steps, length, *seen = flags
        live = np.array([row is not None for row in flight.rows])
        row_steps, drafted, accepted = (
            (now - before) * live.reshape(-1, *[1] * (now.ndim - 1))
            for now, before in zip(seen, self._seen, strict=True)
        )
        self._seen = [array.copy() for array in seen]
        at_least = np.cumsum(accepted[:, ::-1], axis=1)[:, ::-1][:, 1:]
        self._chooser.see(flight.width, at_least[:, : self._chooser.widths[-1]], row_steps)
        if num_steps >= MIN_STEPS:
            seconds = (self._ended_at - flight.started) / int(num_steps) if is_timed else None
            if (seconds := tell(seconds)) is not None:
                self._chooser.time(flight.width, seconds)
        self.stats.taken = int(length[live & ~done].sum())
        self.stats.add_run(flight.width, int(num_steps), row_steps, drafted, at_least)
        ended = []
        for slot, row in enumerate(flight.rows):
            if row is not None and done[slot] and self._running[slot] is row:
                ended.append((slot, row))
                self._running[slot] = None
        return ended

    def _refill(self) -> None:
        """Fills free slots from the lane, and the lane from the source; reads ahead for the next visit."""
        reads = READS if any(self._running) else None  # with nobody to hold up there is no limit
        free = deque(slot for slot, row in enumerate(self._running) if row is None)
        while True:
            self._load()
            if free and (taken := self._lane.take()):
                self._busy()
                self._admit(free.popleft(), *taken)
                reads = READS if reads is None else reads
                continue
            # The next one is ready for when a slot is free, or nothing is to be read.
            if self._lane.is_ready or reads == 0 or not self._lane.read():
                break
            self._busy()
            reads = None if reads is None else reads - 1
        self.stats.live = sum(row is not None for row in self._running)
        self.stats.waiting = self._num_waiting

    def _start(self) -> _Flight | None:
        """Starts the next run, unless no row is live."""
        live = np.array([row is not None for row in self._running])
        if not live.any():
            return None
        width = self._chooser.choose(live) if self._adaptive else max(self._drafters)
        # With nobody waiting there is no reason to come back for one row that ended.
        more = bool(self._waiting) or not self._lane.is_empty
        watched = self._partial or any(row is not None and bool(row.work.stop) for row in self._running)
        is_alone = self._is_idle
        self._busy()
        started = time.perf_counter()
        most = MAX_STEPS if self._chooser.is_sure and not watched else MIN_STEPS
        report = self._run(width, most, 1 if more else self.num_slots)
        return _Flight(report, width, list(self._running), started, is_alone)

    def _collect(self, flight: _Flight, ended: list[tuple[int, Running]], partial: bool) -> Iterator[Result]:
        """Reads a run's tokens: the results of the rows that ended, and of those that a stop string ends."""
        slots = dict(ended)
        watched = {
            slot: row
            for slot, row in enumerate(flight.rows)
            if row is not None and row is self._running[slot] and (partial or row.work.stop)
        }
        if not slots and not watched:
            return
        tokens, length, record = jax.device_get(
            (flight.report.tokens, flight.report.length, flight.report.record)
        )
        for slot, row in {**slots, **watched}.items():
            own = jax.tree.map(lambda x, slot=slot: x[slot], record)
            result = row.read(tokens[slot], int(length[slot]), own, is_over=slot in slots)
            if result.finish is None:
                if partial:
                    yield result
                continue
            if slot in watched:  # a stop string: the device doesn't know yet
                self._running[slot] = None
            self.stats.tokens += len(result.tokens)
            if row.work.num_logprobs is not None and self._scorer is not None:
                self._busy()
                scores = self._scorer(row.work.prompt, result.tokens, row.work.num_logprobs)
                result = dataclasses.replace(result, logprobs=scores)
            yield result

    # Its parts.

    @property
    def _num_waiting(self) -> int:
        return len(self._waiting) + self._lane.num_waiting

    def _load(self) -> None:
        while self._num_waiting < LOOKAHEAD and (work := next(self._source, None)) is not None:
            self._waiting.append(work)
        while self._waiting and self._lane.load(self._waiting[0]):
            self._waiting.popleft()

    def _admit(self, slot: int, caches: Caches, lane_row: int, work: Work) -> None:
        row = self.limits.row(work)
        self._slots = self._programs.admit(self._slots, caches, row, np.int32(lane_row), np.int32(slot))
        text = None if self._detokenizer is None else self._detokenizer()
        self._running[slot] = Running(work, self.limits.stop_ids(work), text)
        for array in self._seen:
            array[slot] = 0
        self._chooser.forget_row(slot)
        self.stats.prompt_tokens += len(work.prompt)
        self.stats.tokens_read = self._lane.tokens_read

    def _run(self, width: int, max_steps: int, enough: int) -> Report:
        free = np.array([row is None for row in self._running])
        control = free, np.int32(MIN_STEPS), np.int32(max_steps), np.int32(enough)
        self._slots, report = self._programs.run(
            self._slots, *control, drafter=self._drafters[width], rule=self._rule
        )
        return report

    def _trial(self) -> tuple[Caches, int, Work]:
        """A row to warm up with."""
        return self._lane.caches[0], 0, Work((1,), ignore_eos=True)

    def _time_step(self, width: int) -> None:
        """Runs some steps of a new row in all slots; compiles what isn't compiled yet."""
        for slot in range(self.num_slots):  # those of the last run may have ended
            self._admit(slot, *self._trial())
        jax.block_until_ready(self._slots)
        started = time.perf_counter()
        steps = int(self._run(width, MIN_STEPS, self.num_slots).num_steps)
        self._chooser.warm(width, tell((time.perf_counter() - started) / max(steps, 1)))

    def _busy(self) -> None:
        """The device is about to be given something."""
        if self._is_idle:
            self.stats.idle_seconds += time.perf_counter() - self._ended_at
        self._is_idle = False

    def _abandon(self) -> None:
        self._is_idle = False  # what passes until the next job is nobody's waiting
        self._waiting.clear()
        self._running = [None] * self.num_slots
        self._lane.clear()
