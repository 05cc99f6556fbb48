"""Measure what a rule and its warp cost, against reading the target's logits once.

A large vocabulary, many rows: the part of a step that grows with them. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from specjax.scripts import _cli
from specjax.scripts.bench import median_seconds


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape to measure."""

    vocab_size: int = 128_256
    """V."""
    num_speculative_tokens: int = 5
    """K."""
    batch_size: int = 32
    """B."""
    runs: int = 5
    """Runs of each figure; the median counts."""

    def __post_init__(self) -> None:
        if min(self.vocab_size - 1, self.num_speculative_tokens, self.batch_size, self.runs) < 1:
            raise ValueError("the sizes must be at least 1, --vocab-size at least 2")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints two tables: rules with their warp, and two ways to filter."""
    config = _cli.parse(Config, argv, __doc__)
    _cli.start()
    import jax
    import jax.numpy as jnp
    from rich.console import Console
    from rich.table import Table

    from specjax.sampling import make_sampling, warp
    from specjax.types import Address, Context, Draft
    from specjax.verify import RULES

    batch, count, vocab_size = config.batch_size, config.num_speculative_tokens, config.vocab_size
    context = Context(
        tokens=jnp.zeros((batch, 64), jnp.int32),
        length=jnp.full(batch, 8, jnp.int32),
        prompt_length=jnp.full(batch, 8, jnp.int32),
        stop_tokens=jnp.full((batch, 1), -1, jnp.int32),
    )
    logits = 2 * jax.random.normal(jax.random.key(0), (batch, count + 1, vocab_size))
    draft_logits = logits[:, :-1] + jax.random.normal(jax.random.key(1), (batch, count, vocab_size))
    draft = Draft(jnp.argmax(draft_logits, axis=-1), draft_logits, jnp.full(batch, count, jnp.int32))
    one_hot = dataclasses.replace(draft, logits=None)

    def timed(f: Callable[..., Any], *args: Any) -> tuple[float, float]:
        """Milliseconds, and the temporary memory in units of the logits."""
        compiled = jax.jit(f).lower(*args).compile()
        memory = compiled.memory_analysis()
        seconds = median_seconds(lambda: jax.block_until_ready(compiled(*args)), config.runs)
        return seconds * 1e3, memory.temp_size_in_bytes / logits.nbytes if memory else float("nan")

    once, _ = timed(lambda x: jnp.max(x, axis=-1), logits)
    console = Console()
    title = f"V = {vocab_size}, K = {count}, batch {batch}: the logits are {logits.nbytes / 1e6:.0f} MB"
    table = Table(
        "rule", "warp", "draft", "ms", "readings of the logits", "temporary, in logits", title=title
    )
    table.add_row("(reading once)", "", "", f"{once:.1f}", "1.0", "")
    cases: tuple[tuple[str, dict[str, Any], Draft], ...] = (
        ("greedy", {"temperature": 0.0}, draft),
        ("token", {"temperature": 0.8}, draft),
        ("token", {"temperature": 0.8}, one_hot),
        ("block", {"temperature": 0.8}, draft),
        ("coupled", {"temperature": 0.8}, draft),
        ("token", {"temperature": 0.8, "top_p": 0.95}, draft),
        ("token", {"temperature": 0.8, "top_k": 50}, draft),
    )
    for name, options, given in cases:
        sampling = make_sampling(batch, **options)

        def judge(logits: Any, draft: Any, sampling: Any, rule: str = name) -> Any:
            verdict = RULES[rule].verify(
                Address(sampling.seed, context.length), draft, warp(logits, sampling, context)
            )
            return verdict.num_accepted, verdict.next_token

        ms, memory = timed(judge, logits, given, sampling)
        kind = "one-hot" if given.logits is None else "soft"
        warped = ", ".join(f"{key} {value}" for key, value in options.items())
        table.add_row(name, warped, kind, f"{ms:.1f}", f"{ms / once:.1f}", f"{memory:.2f}")
    console.print(table)

    table = Table(
        "V", "top_p by threshold search, ms", "top_p by sorting, ms", title=f"filtering {count + 1} rows"
    )
    for size in (32_000, 128_000, 256_000):
        rows = 2 * jax.random.normal(jax.random.key(2), (1, count + 1, size))
        one = dataclasses.replace(
            context,
            tokens=context.tokens[:1],
            length=context.length[:1],
            prompt_length=context.length[:1],
            stop_tokens=context.stop_tokens[:1],
        )
        sampling = make_sampling(1, temperature=1.0, top_p=0.95)
        search, _ = timed(lambda x, s, c: warp(x, s, c), rows, sampling, one)
        sort, _ = timed(_sorted_top_p, rows)
        table.add_row(f"{size}", f"{search:.1f}", f"{sort:.1f}")
    console.print(table)


def _sorted_top_p(logits: Any) -> Any:
    """Top-p by a full sort, to compare with."""
    import jax
    import jax.numpy as jnp

    ordered = jnp.sort(logits, axis=-1, descending=True)
    mass = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
    last = jnp.sum(mass < 0.95, axis=-1, keepdims=True)
    return jnp.where(logits >= jnp.take_along_axis(ordered, last, axis=-1), logits, -jnp.inf)


if __name__ == "__main__":
    sys.exit(_cli.run(main))
