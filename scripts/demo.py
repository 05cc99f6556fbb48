"""Decode a few prompts plainly and speculatively, compare, and show where each token came from."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence

from specjax.scripts import _cli, _jobs


@dataclasses.dataclass(frozen=True)
class Config(_jobs.DecoderOptions):
    """What to show."""

    max_tokens: int = 96
    """Tokens decoded for each prompt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens < 1:
            raise ValueError("--max-tokens must be at least 1")


CODE = """def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius ** 2
    if shape.kind == "square":
        return shape.side ** 2
    raise ValueError(shape.kind)
"""
PROMPTS = {
    "copying": f"Repeat this Python code exactly, then explain it in one sentence:\n\n{CODE}",
    "summarizing": "Summarize in two sentences: The Amazon is a river in South America. The Amazon carries "
    "more water than any other river. The basin of the Amazon holds the largest rainforest in the world, and "
    "the rainforest holds one in ten known species. Rain that falls in the basin of the Amazon reaches the "
    "Atlantic within weeks.",
    "inventing": "Write a short poem about a lighthouse.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the texts, coloured, and a table; exit code 1 if any output differs."""
    config = _cli.parse(Config, argv, __doc__)
    from rich.console import Console
    from rich.table import Column, Table

    from specjax.generate import Generation, generate
    from specjax.scripts import _colours
    from specjax.trace import pieces

    console = Console(highlight=False)
    console.print(
        f"Loading {config.model} and compiling; this takes a minute or two the first time.", style="dim"
    )
    decoder = _jobs.load_decoder(config)
    prompts = {
        name: decoder.loaded.encode_chat([{"role": "user", "content": text}])
        for name, text in PROMPTS.items()
    }

    def decode(ids: list[int], *, speculative: bool) -> tuple[Generation, float]:
        begin = time.perf_counter()
        (result,) = generate(
            prompts=[ids], max_tokens=config.max_tokens, **decoder.arguments(speculative=speculative)
        )
        return result, time.perf_counter() - begin

    for speculative in (False, True):
        decode(max(prompts.values(), key=len), speculative=speculative)  # compiles

    console.print(_colours.legend())
    table = Table(
        Column("prompt", no_wrap=True),
        "plain, tokens/s",
        "with drafts, tokens/s",
        "tokens a step",
        "drafts accepted",
        "identical",
    )
    all_same = True
    for name, ids in prompts.items():
        plain, plain_time = decode(ids, speculative=False)
        fast, fast_time = decode(ids, speculative=True)
        same = plain.tokens == fast.tokens
        all_same &= same
        texts = list(pieces(fast.tokens, decoder.tokenizer.token_bytes))
        console.rule(name)
        console.print(_colours.coloured(texts, fast.sources))
        table.add_row(
            name,
            f"{len(plain.tokens) / plain_time:.1f}",
            f"{len(fast.tokens) / fast_time:.1f}",
            f"{fast.mean_acceptance_length:.2f}",
            f"{fast.draft_acceptance_rate:.0%}",
            "yes" if same else "no",
        )
    console.print(table)
    console.print(f"outputs identical: {'yes' if all_same else 'no'}", style="bold")
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(_cli.run(main))
