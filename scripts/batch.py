"""Answer a JSONL file of requests, in the OpenAI batch form.

    specjax spec-bench > prompts.jsonl
    specjax batch -i prompts.jsonl -o answers.jsonl

Exit codes: 0 all lines answered, 2 nothing could be started, 3 finished, with an error in some lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Annotated

import tyro

from specjax.engine.requests import NEUTRAL, Request, RequestError, parse_request
from specjax.engine.responses import Choice, error_line, response_line
from specjax.scripts import _cli, _jobs

# Requests are sorted by length within so many batches: like lengths finish together, and the file is
# still never read whole.
WINDOW = 16


@dataclasses.dataclass(frozen=True)
class Config(_jobs.DecoderOptions):
    """A file of requests and how to answer it."""

    input: Annotated[Path, tyro.conf.arg(aliases=["-i"])] = Path("-")
    """The requests; '-' is standard input."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("-")
    """The answers, in the order in which they are done; '-' is standard output."""
    overwrite: bool = False
    """Replace the output if it is there."""
    batch_size: int = 8
    """Rows decoded at a time."""
    max_tokens: int = 128
    """For requests that don't say."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")


@dataclasses.dataclass
class Totals:
    """What the job has done so far."""

    answered: int = 0
    refused: int = 0
    tokens: int = 0
    row_steps: int = 0
    drafted: int = 0
    accepted: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Answers every line that can be answered, and says on the others what is wrong with them."""
    config = _cli.parse(Config, argv, __doc__)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with contextlib.ExitStack() as stack:
        with _cli.blame_input(OSError):
            source = _open(stack, config.input, "r")
            if config.output.is_file():  # and no pipe or device
                if not config.overwrite:
                    _cli.fail(f"{config.output} is there already: move it away, or give --overwrite")
                if config.input.exists() and config.output.samefile(config.input):
                    _cli.fail(f"{config.output} is the input too: name another --output")
        decoder = _jobs.load_decoder(config)
        with _cli.blame_input(OSError):
            sink = _open(stack, config.output, "w")
        columns = (
            TextColumn("answered"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        task = progress.add_task("", total=None)
        totals, begin, seen = Totals(), time.perf_counter(), set[str]()
        numbered = enumerate(source, start=1)
        while window := list(itertools.islice(numbered, WINDOW * config.batch_size)):
            ready = []
            for number, line in window:
                if not line.strip():
                    continue
                try:
                    ready.append(_prepare(parse_request(line), seen, decoder, config))
                except RequestError as error:
                    totals.refused += 1
                    print(error_line(f"line-{number}", error, f"line {number}"), file=sink, flush=True)
            ready.sort(key=lambda pair: len(pair[1]))
            for first in range(0, len(ready), config.batch_size):
                _answer(ready[first : first + config.batch_size], decoder, config, sink, totals)
                rate = totals.tokens / (time.perf_counter() - begin)
                progress.update(task, completed=totals.answered, description=f"{rate:.1f} tokens/s")
        progress.update(task, total=totals.answered)
    _summarize(totals, time.perf_counter() - begin)
    return 3 if totals.refused else 0


def _open(stack: contextlib.ExitStack, path: Path, mode: str) -> IO[str]:
    if path == Path("-"):
        if mode == "r" and isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
        return sys.stdin if mode == "r" else sys.stdout
    if mode == "w":
        return stack.enter_context(path.open(mode, encoding="utf-8"))
    # A byte that is no UTF-8 becomes half a surrogate pair, and so costs its own line only.
    return stack.enter_context(path.open(mode, encoding="utf-8-sig", errors="surrogateescape"))


def _prepare(
    request: Request, seen: set[str], decoder: _jobs.Decoder, config: Config
) -> tuple[Request, list[int]]:
    """The request's ids; a RequestError if it can't be answered by this job."""
    from specjax.sampling import make_sampling

    try:
        if request.custom_id in seen:
            raise ValueError("custom_id was used by an earlier line")
        seen.add(request.custom_id)
        if request.model not in (config.model, decoder.loaded.name):
            raise ValueError(f"model {request.model!r} is not served here; {config.model!r} is")
        plain = Request(
            request.custom_id, request.model, request.prompt, request.max_tokens, request.sampling
        )
        if request != plain:
            raise ValueError(
                "n, stop, stop_token_ids, logprobs, ignore_eos and sources are not supported yet"
            )
        if isinstance(request.prompt, str):
            ids = decoder.loaded.encode(request.prompt)
        elif isinstance(request.prompt, list):
            ids = decoder.loaded.encode_chat(request.prompt)
        else:
            ids = list(request.prompt)
        context = decoder.loaded.model.context_length
        if len(ids) >= context:
            raise ValueError(f"a prompt of {len(ids)} tokens leaves no room in a context of {context}")
        vocab_size = decoder.loaded.model.vocab_size
        if any(token >= vocab_size for token in request.sampling["logit_bias"]):
            raise ValueError(f"logit_bias has a token outside the vocabulary of {vocab_size}")
        make_sampling(1, **request.sampling)  # refuses what it can't take, before it is part of a batch
        return request, ids
    except ValueError as error:
        raise RequestError(str(error), request.custom_id) from None


def _answer(
    batch: list[tuple[Request, list[int]]],
    decoder: _jobs.Decoder,
    config: Config,
    sink: IO[str],
    totals: Totals,
) -> None:
    from specjax.generate import generate
    from specjax.sampling import make_sampling

    requests = [request for request, _ in batch]
    # The last batch is filled up to the shape that is compiled already, with rows that end at once.
    missing = config.batch_size - len(batch)
    filler = NEUTRAL | {"temperature": 0.0}

    results = generate(
        prompts=[ids for _, ids in batch] + [[0]] * missing,
        max_tokens=[request.max_tokens or config.max_tokens for request in requests] + [1] * missing,
        sampling=make_sampling(
            config.batch_size,
            **{
                name: [request.sampling[name] for request in requests] + [filler[name]] * missing
                for name in NEUTRAL
            },
        ),
        **decoder.arguments(),
    )
    for (request, ids), result in zip(batch, results, strict=False):
        if result.failed:
            totals.refused += 1
            error = RequestError("the model's logits stopped being numbers", request.custom_id)
            print(error_line(request.custom_id, error), file=sink, flush=True)
            continue
        choice = Choice(
            decoder.tokenizer.decode(result.tokens), "stop" if result.stopped else "length", result.tokens
        )
        line = response_line(
            request.custom_id,
            request,
            [choice],
            usage={"prompt_tokens": len(ids), "completion_tokens": len(result.tokens)},
            speculation={
                "num_spec_steps": result.num_steps,
                "num_draft_tokens": result.num_draft_tokens,
                "num_accepted_draft_tokens": result.num_accepted_tokens,
                "acceptance_histogram": result.accepted.tolist(),
            },
            token_bytes=decoder.tokenizer.token_bytes,
        )
        print(line, file=sink, flush=True)
        totals.answered += 1
        totals.tokens += len(result.tokens)
        totals.row_steps += result.num_steps
        totals.drafted += result.num_draft_tokens
        totals.accepted += result.num_accepted_tokens


def _summarize(totals: Totals, seconds: float) -> None:
    print(
        f"{totals.answered} answered, {totals.refused} refused, {totals.tokens} tokens in {seconds:.1f} s "
        f"({totals.tokens / seconds:.1f} tokens/s, compiling included), "
        f"{totals.tokens / max(totals.row_steps, 1):.2f} tokens a step, "
        f"{totals.accepted} of {totals.drafted} drafted tokens accepted",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(_cli.run(main))
