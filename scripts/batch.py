"""Answer a JSONL file of requests, in the OpenAI batch form.

    specjax spec-bench > prompts.jsonl
    specjax batch -i prompts.jsonl -o answers.jsonl

A line asks for a chat or a completion with all their options, or is a bare {"prompt": "..."}. Started again,
the job goes on where it was: what the output has is skipped. Exit codes: 0 all lines answered; 1 the output
could not be written; 2 nothing could be started, or the input changed; 3 finished, with an error in some
lines; 130 or 143 interrupted by Ctrl-C or SIGTERM, and ready to go on; 141 nobody reads the output any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from specjax.scripts import _cli, _jobs

if TYPE_CHECKING:
    from specjax.engine.sink import Output
    from specjax.engine.source import Source


@dataclasses.dataclass(frozen=True)
class Config(_jobs.MeshOptions):
    """A file of requests and how to answer it."""

    input: Annotated[Path, tyro.conf.arg(aliases=["-i"])] = Path("-")
    """The requests: a file, a folder of *.jsonl, either gzipped (.gz), or '-', standard input."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("-")
    """The answers, in the order in which they are done: a file, a folder where the input is one, or '-'."""
    overwrite: bool = False
    """Begin anew where the output is there already."""
    rule: Literal["coupled", "token", "block"] = "coupled"
    """How drafts are judged where temperature is above 0. Under 'coupled' a request's answer depends on its
    seed alone; under the others its law is the same, but K, chosen by measured times, changes the draws."""
    adaptive: bool = True
    """Choose K while running, 0 up to --num-speculative-tokens; otherwise it is always that."""
    slots: int | None = None
    """Rows decoded at a time; by default as many as memory allows, 16 at most on a CPU."""
    capacity: int | None = None
    """Room of a row: prompt, output and draft, in tokens. By default the model's context, at most 4096."""
    max_tokens: int = 128
    """For requests that don't say."""
    metrics: Path | None = None
    """Write a time series here (JSONL), and the newest figures for Prometheus beside it (.prom)."""
    report: Path | None = None
    """Write a page with plots here (.html) when the job ends; needs matplotlib."""
    processes: str = ""
    """Run as one of several processes: '0/4@host:1234' (this is process 0 of 4, and process 0 listens there),
    or 'auto' on TPU pods, Slurm and Open MPI. All get the same options; the first one reads and writes."""
    ray: int = 0
    """Share the files of an input folder out among so many engines on a Ray cluster (found by RAY_ADDRESS, or
    started here); needs ray."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ray < 0:
            raise ValueError(f"--ray must be the number of engines, not {self.ray}")
        for name in ("slots", "capacity", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        if self.ray:
            for name in ("metrics", "report", "processes"):
                if getattr(self, name):
                    raise ValueError(f"--{name} and --ray exclude each other")
        if self.processes and not self.mesh:
            raise ValueError("--processes needs a --mesh over all their devices")


class Interrupted(Exception):
    """A signal asked the job to end; its argument is the signal's number."""

    @property
    def exit_code(self) -> int:
        """As of a process that a signal ended."""
        return 128 + int(self.args[0])

    def __str__(self) -> str:
        """What is said of it."""
        return f"{signal.Signals(self.args[0]).name}: run it again to go on"


def main(argv: Sequence[str] | None = None) -> int:
    """Answers every line that can be answered, and says on the others what is wrong with them."""
    config = _cli.parse(Config, argv, __doc__)
    try:
        with _jobs.together(config.processes) as is_first:
            return _answer(config) if is_first else _help(config)
    except Interrupted as interrupted:
        print(f"specjax batch: {interrupted}", file=sys.stderr)
        return interrupted.exit_code


def _help(config: Config) -> int:
    """Does its part of the work that the first process reads and writes."""
    decoder = _jobs.load_decoder(config)
    from specjax.scripts import _batch

    _batch.help_out(config, decoder)
    return 0


def _answer(config: Config) -> int:
    from specjax.engine.sink import Output
    from specjax.engine.source import Source

    with _cli.blame_input():
        source = Source(config.input)
        output = Output(config.output, source)
        _check_paths(config, source, output)
    if config.report is not None and importlib.util.find_spec("matplotlib") is None:
        _cli.fail('--report needs matplotlib: pip install -e ".[notebooks]"')
    if config.ray:
        return _share_out(config, source, output)
    decoder = _jobs.load_decoder(config)
    from specjax.scripts import _batch

    signals: list[int] = []
    with _noticing(signals, source), contextlib.ExitStack() as stack:
        with _cli.blame_input():
            job = _batch.open_job(stack, config, source, output, decoder)
        job.run(lambda: _raise_if(signals))
        if config.report is not None:
            job.report(config.report)
        return 3 if job.num_refused else 0


def _share_out(config: Config, source: Source, output: Output) -> int:
    if not output.is_folder:
        _cli.fail("--ray shares out the files of a folder: give -i and -o a folder")
    if importlib.util.find_spec("ray") is None:
        _cli.fail('--ray needs ray: pip install -e ".[ray]"')
    from specjax.scripts import _ray

    with _cli.blame_input():
        return 3 if _ray.answer(config, source, output) else 0


def _check_paths(config: Config, source: Source, output: Output) -> None:
    """Refuses pages and figures that can't be written, or would be written over something else."""
    taken = {file.resolve(): "the input" for file in source.files}
    taken |= dict.fromkeys((file.resolve() for file in (output.path, *output.files)), "the output")
    if not output.is_folder and not output.path.resolve().parent.is_dir():
        raise ValueError(f"{output.path} can't be made: there is no folder {output.path.parent}")
    figures = {"--metrics": config.metrics, "--report": config.report}
    if config.metrics is not None:
        figures["the Prometheus file of --metrics"] = config.metrics.with_suffix(".prom")
    for name, path in figures.items():
        if path is None:
            continue
        if path.is_dir() or not path.resolve().parent.is_dir():
            raise ValueError(f"{name}: {path} can't be a file; name one in a folder that is there")
        if path.resolve() in taken:
            raise ValueError(f"{name}: {path} is {taken[path.resolve()]} too: name another file")
        taken[path.resolve()] = name


def _raise_if(signals: list[int]) -> None:
    if signals:
        raise Interrupted(signals[0])


@contextlib.contextmanager
def _noticing(signals: list[int], source: Source) -> Iterator[None]:
    """Notes SIGINT and SIGTERM down, and reads no more; a second Ctrl-C ends the process as usual."""

    def note(number: int, frame: FrameType | None) -> None:
        if signals and number == signal.SIGINT:
            raise KeyboardInterrupt
        signals.append(number)
        source.interrupt()

    before = {kind: signal.signal(kind, note) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


if __name__ == "__main__":
    sys.exit(_cli.run(main))
