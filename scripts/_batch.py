"""The work of ``specjax batch``: lines to the engine, answers to the output, and what is seen of it."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import specjax
from specjax.engine.answers import Answers, Asked
from specjax.engine.engine import Engine
from specjax.engine.ledger import Ledger, admit, resume
from specjax.engine.memory import available_bytes, plan_memory
from specjax.engine.requests import Request, RequestError
from specjax.engine.responses import error_line
from specjax.engine.sink import Output
from specjax.engine.source import Line, Source
from specjax.engine.work import Work
from specjax.models.tokenizer import Detokenizer
from specjax.scripts import _jobs

if TYPE_CHECKING:
    from specjax.scripts.batch import Config

__all__ = ["Job", "open_job"]

MAX_LOGPROBS = 20
MOST_CAPACITY = 4096
SHOW_SECONDS = 0.5


def open_job(
    stack: contextlib.ExitStack, config: Config, source: Source, output: Output, decoder: _jobs.Decoder
) -> Job:
    """Plans the memory, opens the output and makes the engine.

    Raises:
      OSError: the output can't be opened.
      ValueError: it belongs to another job, or there is too little memory.
    """
    loaded = decoder.loaded
    capacity = config.capacity or min(loaded.model.context_length, MOST_CAPACITY)
    drafters = decoder.ladder(adaptive=config.adaptive)
    widest = drafters[-1] if drafters else decoder.plain_drafter
    params = [loaded.params, [] if decoder.draft_params is loaded.params else decoder.draft_params]
    plan = plan_memory(
        loaded.model,
        params,
        widest,
        slots=config.slots,
        capacity=capacity,
        available=available_bytes(params),
    )
    if not plan.fits:
        raise ValueError(f"too little memory: {plan}; give fewer --slots or a smaller --capacity")
    ledger = stack.enter_context(resume(output, _fingerprint(config, capacity), overwrite=config.overwrite))
    stack.enter_context(output)
    engine = stack.enter_context(
        Engine(
            loaded.model,
            loaded.params,
            drafters=drafters,
            draft_params=decoder.draft_params,
            plain_drafter=decoder.plain_drafter,
            rule=config.rule,
            slots=plan.slots,
            capacity=capacity,
            stop_tokens=decoder.tokenizer.eos_ids,
            adaptive=config.adaptive,
            detokenizer=lambda: Detokenizer(decoder.tokenizer),
            max_logprobs=MAX_LOGPROBS,
        )
    )
    return Job(config, source, output, ledger, engine, decoder, str(plan))


def _fingerprint(config: Config, capacity: int) -> dict[str, Any]:
    """All that an answer depends on."""
    return {
        "specjax": specjax.__version__,
        "model": config.model,
        "model_digest": _digest(config.model),
        "dtype": config.dtype,
        "rule": config.rule,
        "verify_shape": config.verify_shape,
        "max_tokens": config.max_tokens,
        "capacity": capacity,
        # Under the coupled rule the draft can't be seen in the output.
        "draft": None if config.rule == "coupled" else [config.draft, config.num_speculative_tokens],
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
        config: Config,
        source: Source,
        output: Output,
        ledger: Ledger,
        engine: Engine,
        decoder: _jobs.Decoder,
        plan: str,
    ) -> None:
        self._source, self._output, self._ledger, self._engine = source, output, ledger, engine
        self._console = Console(stderr=True)
        self._model, self._plan = config.model, plan
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
            task = progress.add_task("compiling", figures="")

            def warmed(name: str, done: int, total: int) -> None:
                progress.update(task, description=f"compiling: {name}", completed=done, total=total)
                check()

            self._engine.warm_up(warmed)
            progress.reset(task, total=self._source.total_bytes, description="answering")
            self._began = self._shown = time.perf_counter()

            def visited() -> None:
                check()
                now = time.perf_counter()
                if now - self._shown > SHOW_SECONDS:
                    self._shown = now
                    progress.update(task, completed=self._source.read_bytes, figures=self._figures())

            for result in self._engine.run(self._works(), on_visit=visited):
                asked: Asked = result.work.tag
                try:
                    line = self._answers.take(result)
                except RequestError as error:
                    self._refuse(asked.key, asked.shard, asked.place, error)
                    continue
                if line is not None:
                    self._output.write(asked.shard, line)
                    self.num_answered += 1
            progress.update(
                task, completed=self._source.total_bytes or 1, total=self._source.total_bytes or 1
            )
        self._summarize()

    def _works(self) -> Iterator[Work]:
        line: Line
        for line in self._source:
            entry, request = admit(line, self._ledger, self._model)
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
        stats = self._engine.stats
        seconds = max(time.perf_counter() - self._began, 1e-9)
        return (
            f"{self.num_answered} answered, {stats.tokens / seconds:.0f} tokens/s, "
            f"{stats.tokens / max(stats.row_steps, 1):.2f} tokens a step, "
            f"{stats.accepted.sum() / max(stats.drafted, 1):.0%} accepted, K = {stats.width}, "
            f"{stats.live} slots in use"
        )

    def _summarize(self) -> None:
        stats = self._engine.stats
        seconds = time.perf_counter() - self._began
        table = Table(show_header=False)
        steps = sum(stats.steps.values())
        for name, value in (
            ("answered", f"{self.num_answered}"),
            ("with an error", f"{self.num_refused}"),
            ("done before", f"{self.num_skipped}"),
            ("prompt tokens", f"{stats.prompt_tokens}, of which {stats.tokens_read} had to be read"),
            (
                "tokens",
                f"{stats.tokens} in {seconds:.1f} s: {stats.tokens / max(seconds, 1e-9):.1f} tokens/s",
            ),
            ("tokens a step", f"{stats.tokens / max(stats.row_steps, 1):.2f}"),
            ("drafted tokens accepted", f"{stats.accepted.sum()} of {stats.drafted}"),
            (
                "steps by K",
                ", ".join(f"{count} with {width}" for width, count in sorted(stats.steps.items())),
            ),
            ("steps between two visits", f"{steps / max(stats.visits, 1):.1f}"),
            ("device idle", f"{stats.idle_seconds / max(seconds, 1e-9):.1%} of the time"),
        ):
            table.add_row(name, value)
        self._console.print(table)
        if unmet := self._ledger.num_unmet:
            print(f"{unmet} lines of the output belong to no line of this input", file=sys.stderr)
