"""Decode one prompt, speculatively.

    specjax generate --chat "Name three rivers in France."
    specjax generate "Once upon a time" --temperature 0.8 --top-p 0.95 --stream
    specjax generate --chat "Count to ten, twice." --trace trace.html

The text goes to standard output, one line of figures to standard error.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from specjax.scripts import _cli, _jobs


@dataclasses.dataclass(frozen=True)
class Config(_jobs.SamplingOptions, _jobs.MeshOptions):
    """One prompt and how to decode it."""

    prompt: tyro.conf.Positional[str] = "-"
    """The text to continue; '-' reads it from standard input."""
    chat: bool = False
    """Ask the prompt as a user would, through the model's chat template."""
    max_tokens: int = 128
    """The most tokens to decode."""
    seed: int = 0
    """The only source of randomness."""
    stream: bool = False
    """Print text as it comes."""
    trace: Path | None = None
    """Write a page that shows where each token came from, and why; on a terminal the text is coloured too."""
    overwrite: bool = False
    """Replace the page if it is there."""
    processes: str = ""
    """Run as one of several processes: '0/4@host:1234' (this is process 0 of 4, and process 0 listens there),
    or 'auto' on TPU pods, Slurm and Open MPI. All get the same options; the first one prints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"--min-tokens is {self.min_tokens}, more than --max-tokens, {self.max_tokens}")
        if self.processes and not self.mesh:
            raise ValueError("--processes needs a --mesh over all their devices")
        if self.processes and self.trace:
            raise ValueError("--trace is for one process")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the text on standard output, and one line of figures on standard error."""
    config = _cli.parse(Config, argv, __doc__)
    with _jobs.together(config.processes):
        return _decode(config)


def _decode(config: Config) -> int:
    # Import late: a mistyped option is answered before JAX is loaded.
    from specjax.generate import generate, stream
    from specjax.models.tokenizer import Detokenizer
    from specjax.sampling import make_sampling
    from specjax.scripts import _colours

    with _cli.blame_input(ValueError):
        sampling = make_sampling(1, **config.values(), seed=config.seed)
        prompt = sys.stdin.read() if config.prompt == "-" else config.prompt
        if not prompt.strip():
            raise ValueError("the prompt is empty: give some text")
    if config.trace is not None:
        if config.stream:
            _cli.fail("--trace and --stream exclude each other: give one of them")
        _check_free(config.trace, overwrite=config.overwrite)
    decoder = _jobs.load_decoder(config)
    begin = time.perf_counter()
    with _cli.blame_input(ValueError):
        ids = (
            decoder.loaded.encode_chat([{"role": "user", "content": prompt}])
            if config.chat
            else decoder.loaded.encode(prompt)
        )
        arguments = decoder.arguments() | dict(max_tokens=config.max_tokens, sampling=sampling)
        shown_as = _colours.harmless if sys.stdout.isatty() else str
        if config.trace is not None:
            result = _trace(config.trace, decoder, ids, arguments)
        elif config.stream:
            text, shown = Detokenizer(decoder.tokenizer), 0
            for result in stream(prompt=ids, **arguments):
                print(shown_as(text.feed(result.tokens[shown:])), end="", flush=True)
                shown = len(result.tokens)
            print(shown_as(text.finish()))
        else:
            (result,) = generate(prompts=[ids], **arguments)
            print(shown_as(decoder.tokenizer.decode(result.tokens)))
    print(
        f"{len(result.tokens)} tokens in {time.perf_counter() - begin:.2f} s (with compiling and prefill), "
        f"{result.mean_acceptance_length:.2f} tokens a step, {result.num_accepted_tokens} of "
        f"{result.num_draft_tokens} drafted tokens accepted",
        file=sys.stderr,
    )
    if result.failed:
        print("specjax generate: error: the model's logits stopped being numbers", file=sys.stderr)
    return 1 if result.failed else 0


def _check_free(path: Path, *, overwrite: bool) -> None:
    """Before anything is computed: the page can be written, and replaces nothing unasked."""
    if path.exists() and not overwrite:
        _cli.fail(f"{path} is there already: move it away, or give --overwrite")
    if not path.parent.is_dir():
        _cli.fail(f"{path.parent} is no folder: make it, or name another --trace")


def _trace(path: Path, decoder: _jobs.Decoder, ids: list[int], arguments: dict[str, Any]) -> Any:
    """Decodes step by step, prints the text, coloured on a terminal, and writes the page."""
    from rich.console import Console

    from specjax.scripts import _colours
    from specjax.trace import pieces, render, trace

    tokenizer, console = decoder.tokenizer, Console(highlight=False, soft_wrap=True)
    found = trace(prompt=ids, **arguments)
    tokens, sources = found.generation.tokens, found.generation.sources
    if console.is_terminal:
        if console.color_system and not console.no_color:
            console.print(_colours.legend())
        console.print(_colours.coloured(list(pieces(tokens, tokenizer.token_bytes)), sources))
    else:
        print(tokenizer.decode(tokens))
    spelt = functools.partial(tokenizer.token_bytes, skip_special=False)
    with _cli.blame_input(OSError):
        path.write_text(render(found, spelt, title=decoder.loaded.name), "utf-8")
    return found.generation


if __name__ == "__main__":
    sys.exit(_cli.run(main))
