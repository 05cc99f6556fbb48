"""The work of ``specjax batch``: lines to the engine, answers to the output, and what is seen of it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import specjax
from specjax.engine.answers import Answers, Asked
from specjax.engine.engine import Engine
from specjax.engine.ledger import Ledger, admit, resume
from specjax.engine.memory import MemoryPlan, available_bytes, plan_memory
from specjax.engine.metrics import Gauges, MetricsWriter, Totals
from specjax.engine.requests import Request, RequestError
from specjax.engine.responses import error_line
from specjax.engine.sink import Output
from specjax.engine.source import Source
from specjax.engine.work import Work
from specjax.models.tokenizer import Detokenizer
from specjax.parallel.channel import tell
from specjax.scripts import _cli, _jobs

__all__ = ["Job", "fingerprint_of", "help_out", "make_engine", "open_job", "plan_job"]

MAX_LOGPROBS = 20
MOST_CAPACITY = 4096
SHOW_SECONDS = 0.5


def open_job(
    stack: contextlib.ExitStack, config: Any, source: Source, output: Output, decoder: _jobs.Decoder
) -> Job:
    """Plans the memory, opens the output and makes the engine.

    Raises:
      OSError: the output can't be opened.
      ValueError: it belongs to another job, or there is too little memory.
    """
    plan = plan_job(config, decoder)
    fingerprint = fingerprint_of(config, decoder)
    ledger = stack.enter_context(resume(output, fingerprint, overwrite=config.overwrite))
    stack.enter_context(output).create()
    engine = stack.enter_context(make_engine(config, decoder, tell(plan.slots)))
    metrics = None
    if config.metrics is not None:
        metrics = stack.enter_context(MetricsWriter(config.metrics, config.model))
    return Job(config, source, output, ledger, engine, decoder, metrics, str(plan))


def help_out(config: Any, decoder: _jobs.Decoder) -> None:
    """Does this process's part of a job that :func:`open_job` opened in the first one."""
    with make_engine(config, decoder, tell()) as engine:
        for _ in engine.run(()):
            pass


def plan_job(config: Any, decoder: _jobs.Decoder, share: int | None = None) -> MemoryPlan:
    """Plans the memory of one engine.

    Args:
      config: the job's.
      decoder: its models.
      share: bytes that it may take of a machine's memory; None if it is alone there.

    Raises:
      ValueError: there is too little.
    """
    drafters, placement = decoder.ladder(adaptive=config.adaptive), decoder.placement
    params = [
        decoder.loaded.params,
        [] if decoder.draft_params is decoder.loaded.params else decoder.draft_params,
    ]
    available = available_bytes(params, 1 if placement is None else placement.num_devices)
    if share is not None and available is not None:
        available = min(available, share)
    plan = plan_memory(
        decoder.loaded.model,
        params,
        drafters[-1] if drafters else decoder.plain_drafter,
        slots=config.slots,
        capacity=_capacity(config, decoder),
        available=available,
        placement=placement,
    )
    if not plan.fits:
        raise ValueError(f"too little memory: {plan}; give fewer --slots or a smaller --capacity")
    return plan


def make_engine(config: Any, decoder: _jobs.Decoder, slots: int) -> Engine:
    """The engine that answers."""
    return Engine(
        decoder.loaded.model,
        decoder.loaded.params,
        drafters=decoder.ladder(adaptive=config.adaptive),
        draft_params=decoder.draft_params,
        plain_drafter=decoder.plain_drafter,
        rule=config.rule,
        slots=slots,
        capacity=_capacity(config, decoder),
        stop_tokens=decoder.tokenizer.eos_ids,
        adaptive=config.adaptive,
        detokenizer=lambda: Detokenizer(decoder.tokenizer),
        max_logprobs=MAX_LOGPROBS,
        placement=decoder.placement,
    )


def _capacity(config: Any, decoder: _jobs.Decoder) -> int:
    return config.capacity or min(decoder.loaded.model.context_length, MOST_CAPACITY)


def fingerprint_of(config: Any, decoder: _jobs.Decoder) -> dict[str, Any]:
    """All that an answer depends on."""
    drafters = decoder.ladder(adaptive=config.adaptive)
    draft: dict[str, Any] = {}
    if config.rule != "coupled":  # under which the draft can't be seen in the output
        names = "draft", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "adaptive"
        draft = {name: getattr(config, name) for name in names}
        draft["draft_digest"] = _digest(config.draft.rpartition("+")[2])
    return {
        "specjax": specjax.__version__,
        "model": config.model,
        "model_digest": _digest(config.model),
        "dtype": config.dtype,
        "rule": config.rule,
        "verify_shape": config.verify_shape,
        "max_tokens": config.max_tokens,
        "capacity": _capacity(config, decoder),
        # What a draft may need at the end of a row is not there for its answer.
        "reserve": drafters[-1].num_draft_tokens if drafters else 0,
        **draft,
    }


def _digest(model: str) -> str:
    from specjax.models.load import smollm2_path

    path = smollm2_path() if model == "smollm2" else Path(model)
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


class Job:
    """A batch job in the making."""

    def __init__(
        self,
        config: Any,
        source: Source,
        output: Output,
        ledger: Ledger,
        engine: Engine,
        decoder: _jobs.Decoder,
        metrics: MetricsWriter | None,
        plan: str,
    ) -> None:
        self._source, self._output, self._ledger, self._engine = source, output, ledger, engine
        self._slots = engine.num_slots
        self._metrics, self._points = metrics, Points()
        self._console = Console(stderr=True)
        self._model, self._plan = config.model, plan
        self._finishes: dict[str, int] = {}
        self._broken_off: Exception | None = None  # what is wrong with the rest of the input
        self._refused_before = ledger.num_refused
        self.num_answered, self.num_skipped, self.num_refused = 0, 0, ledger.num_refused

        def encode(request: Request) -> list[int]:
            if isinstance(request.prompt, tuple):
                return list(request.prompt)
            if isinstance(request.prompt, str):
                return decoder.loaded.encode(request.prompt)
            return decoder.loaded.encode_chat(request.prompt)

        def token_bytes(token: int) -> bytes:
            return decoder.tokenizer.token_bytes(token, skip_special=False)

        models = dict.fromkeys((config.model, decoder.loaded.name))
        self._answers = Answers(engine.limits, encode, list(models), config.max_tokens, token_bytes)

    def run(self, check: Callable[[], object]) -> None:
        """Answers all lines; ``check`` is called often, and may raise to end the job."""
        self._console.print(f"[dim]{self._plan}[/dim]", highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task("looking for what is left", figures="")
            works, is_left = self._works(), True
            # A finished job, begun again, has nothing to compile; several processes must all do the same.
            if self._ledger.num_unmet and jax.process_count() == 1:
                first = list(itertools.islice(works, 1))
                works, is_left = itertools.chain(first, works), bool(first)

            def warmed(name: str, done: int, total: int) -> None:
                progress.update(task, description=f"compiling: {name}", completed=done, total=total)
                check()

            if is_left:
                if not self._console.is_terminal:
                    self._console.print("compiling", style="dim")
                self._engine.warm_up(warmed)
            progress.reset(task, total=self._source.total_bytes, description="answering")
            self._began = self._shown = time.perf_counter()

            def visited() -> None:
                check()
                now = time.perf_counter()
                if now - self._shown > SHOW_SECONDS:
                    self._shown = now
                    progress.update(task, completed=self._source.read_bytes, figures=self._figures())
                    self._note()

            if is_left:
                self._decode(works, visited)
            self._end()
            check()  # an input that was broken off has not been answered
            progress.update(
                task, completed=self._source.total_bytes or 1, total=self._source.total_bytes or 1
            )
        self._note(last=True)
        self._summarize()

    def answer(self) -> None:
        """Answers all lines, and shows nothing.

        Raises:
          UsageError: the input can't be read on, or has changed; the lines before are answered.
        """
        self._decode(self._works(), lambda: None)
        self._end()

    def _decode(self, works: Iterator[Work], on_visit: Callable[[], object]) -> None:
        for result in self._engine.run(works, on_visit=on_visit):
            asked: Asked = result.work.tag
            if result.finish is not None:
                self._finishes[result.finish] = self._finishes.get(result.finish, 0) + 1
            try:
                line = self._answers.take(result)
            except RequestError as error:
                self._refuse(asked.key, asked.shard, asked.place, error)
                continue
            if line is not None:
                self._output.write(asked.shard, line)
                self.num_answered += 1

    def _end(self) -> None:
        with _cli.blame_input():
            if self._broken_off is not None:
                raise self._broken_off

    def totals(self) -> Totals:
        """What was done so far."""
        stats = self._engine.stats
        return Totals(
            answered=self.num_answered,
            refused=self.num_refused - self._refused_before,
            prompt_tokens=stats.prompt_tokens,
            tokens=stats.tokens,
            row_steps=stats.row_steps,
            drafts=stats.drafts,
            drafted=stats.drafted,
            accepted=int(stats.accepted.sum()),
            accepted_per_position=tuple(stats.accepted.tolist()),
            finish_reasons=dict(self._finishes),
            steps_by_k=dict(stats.steps),
            seconds=time.perf_counter() - self._began,
        )

    def report(self, path: Path) -> None:
        """Writes the page with plots."""
        from specjax.scripts._report import write_report  # only this needs matplotlib

        points = self._points
        title = f"specjax batch, {self._model}"
        write_report(path, title, self.summary(), self.totals(), points.seconds, points.tokens, points.widths)

    def _note(self, *, last: bool = False) -> None:
        stats, totals = self._engine.stats, self.totals()
        self._points.add(totals.seconds, stats.tokens, stats.width)
        if self._metrics is not None:
            usage = stats.taken / (self._slots * self._engine.limits.capacity)
            gauges = Gauges(stats.live, stats.waiting, self._slots, usage, stats.width)
            self._metrics.write(totals, gauges, last=last)

    def _works(self) -> Iterator[Work]:
        lines = iter(self._source)
        while True:
            try:
                line = next(lines, None)
                if line is None:
                    return
                entry, request = admit(line, self._ledger, self._model)
            except InterruptedError:  # what is being decoded is still written; then the job looks up
                return
            except (OSError, ValueError) as error:  # it can't be read on, or has changed
                self._broken_off = error
                return
            if entry.done:
                self.num_skipped += 1
                continue
            try:
                if isinstance(request, RequestError):
                    raise request
                works = self._answers.work(entry.key, line.shard, line.place, request)
            except RequestError as error:
                self._refuse(entry.key, line.shard, line.place, error)
                continue
            yield from works

    def _refuse(self, key: str, shard: str, place: str, error: RequestError) -> None:
        self._output.write(shard, error_line(key, error, place))
        self.num_refused += 1

    def _figures(self) -> str:
        stats, totals = self._engine.stats, self.totals()
        return (
            f"{totals.answered} answered, {totals.tokens_per_second:.0f} tokens/s, "
            f"{totals.tokens_per_step:.2f} tokens a step, {self._accepted(totals)}, "
            f"K = {stats.width}, {stats.live} of {self._slots} slots in use"
        )

    @staticmethod
    def _accepted(totals: Totals) -> str:
        return f"{totals.acceptance_rate:.0%} accepted" if totals.drafted else "nothing drafted"

    def _summarize(self) -> None:
        table = Table(show_header=False)
        for name, value in self.summary().items():
            table.add_row(name, value)
        self._console.print(table)
        if unmet := self._ledger.num_unmet:
            print(f"{unmet} lines of the output belong to no line of this input", file=sys.stderr)

    def summary(self) -> dict[str, str]:
        """The figures of the whole job, by name."""
        stats, totals = self._engine.stats, self.totals()
        steps = sum(stats.steps.values())
        return {
            "answered": f"{totals.answered}",
            "with an error": f"{self.num_refused}",
            "done before": f"{self.num_skipped}",
            "prompt tokens": f"{totals.prompt_tokens}, of which {stats.tokens_read} had to be read",
            "tokens": f"{totals.tokens} in {totals.seconds:.1f} s, {totals.tokens_per_second:.1f} a second",
            "tokens a step": f"{totals.tokens_per_step:.2f}",
            "drafted tokens accepted": f"{totals.accepted} of {totals.drafted}",
            "steps by K": ", ".join(f"{count} with {k}" for k, count in sorted(stats.steps.items())),
            "steps between two visits": f"{steps / max(stats.visits, 1):.1f}",
            "device idle": f"{stats.idle_seconds / max(totals.seconds, 1e-9):.1%} of the time",
        }


class Points:
    """Readings over time; at most a thousand, every other one goes when there are more."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.widths: list[int] = []

    def add(self, seconds: float, tokens: int, width: int) -> None:
        """Adds a reading."""
        for column, value in ((self.seconds, seconds), (self.tokens, tokens), (self.widths, width)):
            if len(column) >= 1000:
                del column[1::2]
            column.append(value)  # type: ignore[arg-type]
