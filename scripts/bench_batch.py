"""Measure the batch engine: speculation against plain decoding in the same engine, by the number of slots.

    specjax bench-batch --slots 1 4 16 --draft useless
    specjax bench-batch --slots 16 --tasks summarization rag --transformers

Throughput is decoded tokens over the seconds of a whole job, prompts included and compiling not. Plain and
speculative runs take turns; figures are medians, comparisons medians of paired ratios. Run it on an otherwise
idle machine.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax.scripts import _cli, _jobs


@dataclasses.dataclass(frozen=True)
class Config(_jobs.DecoderOptions):
    """What to measure. --draft 'useless' is a draft of which no token is ever right."""

    slots: tuple[int, ...] = (1, 4, 16)
    """Rows decoded at a time."""
    tasks: tuple[str, ...] = ("qa",)
    """Spec-Bench tasks to take prompts from, mixed as in a job; 'all' for every one."""
    requests_per_slot: int = 3
    """Requests of a run, for each slot."""
    max_tokens: int = 64
    """Tokens decoded for each."""
    capacity: int = 2048
    """Room of a row."""
    runs: int = 3
    """Paired runs of each figure; the median counts."""
    transformers: bool = False
    """Also decode these prompts with the transformers library, in batches; it needs torch."""
    json: Path | None = None
    """Also write the figures here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(*self.slots, self.requests_per_slot, self.max_tokens, self.runs) < 1:
            raise ValueError("--slots, --requests-per-slot, --max-tokens and --runs must be at least 1")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table, a line for each number of slots."""
    config = _cli.parse(Config, argv, __doc__)
    from rich.console import Console
    from rich.table import Table

    from specjax.engine.work import Work

    useless = config.draft == "useless"
    with _cli.blame_input():
        prompts = _jobs.spec_bench(() if config.tasks == ("all",) else config.tasks)
        random.Random(0).shuffle(prompts)  # the file goes task by task
    decoder = _jobs.load_decoder(dataclasses.replace(config, draft="lookup") if useless else config)
    drafters = decoder.ladder(adaptive=True)
    if useless:
        drafters = [useless_drafter(drafter.num_draft_tokens) for drafter in drafters]
    ids = [tuple(decoder.loaded.encode_chat(prompt["messages"])) for prompt in prompts]
    console, figures = Console(), []
    table = Table(
        "slots", "plain, tokens/s", "with a draft", "ratio", "tokens a step", "steps by K", "device idle"
    )
    for slots in config.slots:
        count = slots * config.requests_per_slot
        works = [
            Work(ids[i % len(ids)], config.max_tokens, stop_tokens=tuple(decoder.tokenizer.eos_ids))
            for i in range(count)
        ]
        row = measure(decoder, drafters, works, slots, config)
        if config.transformers:
            row["transformers"] = run_transformers(config, works, slots)
        figures.append(row)
        table.add_row(
            str(slots),
            f"{row['plain']:.1f}",
            f"{row['speculative']:.1f}",
            f"{row['ratio']:.3f}",
            f"{row['tokens_a_step']:.2f}",
            str(row["steps"]),
            f"{row['idle']:.1%}",
        )
    console.print(table)
    for row in figures:
        if "transformers" in row:
            best = max(row["plain"], row["speculative"])
            console.print(
                f"transformers at {row['slots']} rows: {row['transformers']:.1f} tokens/s; "
                f"specjax is {best / row['transformers']:.2f} times as fast"
            )
    if config.json:
        config.json.write_text(json.dumps(figures, indent=1))


def useless_drafter(count: int) -> Any:
    """A drafter whose K tokens are never right."""
    import jax.numpy as jnp

    from specjax.drafters import SilentDrafter
    from specjax.types import Draft

    @dataclasses.dataclass(frozen=True)
    class Useless(SilentDrafter):
        def propose(self, params: Any, draft_keys: Any, state: Any, context: Any, sampling: Any) -> Any:
            tokens = jnp.zeros((context.length.shape[0], self.num_draft_tokens), jnp.int32)
            return Draft(tokens, None, jnp.full_like(context.length, self.num_draft_tokens)), None

    return Useless(count)


def measure(
    decoder: _jobs.Decoder, drafters: list[Any], works: list[Any], slots: int, config: Config
) -> dict[str, Any]:
    """Plain and speculative runs of one job, in turns."""
    from specjax.engine.engine import Engine

    engines = [
        Engine(
            decoder.loaded.model,
            decoder.loaded.params,
            drafters=some,
            draft_params=decoder.draft_params if some else None,
            slots=slots,
            capacity=config.capacity,
        )
        for some in ([], drafters)
    ]
    rates: list[list[float]] = [[], []]
    for engine in engines:
        engine.warm_up()
    idle = 0.0
    for _ in range(config.runs):
        for engine, own in zip(engines, rates, strict=True):
            before = engine.stats.idle_seconds
            begin = time.perf_counter()
            tokens = sum(len(result.tokens) for result in engine.run(works))
            seconds = time.perf_counter() - begin
            own.append(tokens / seconds)
            idle = max(idle, (engine.stats.idle_seconds - before) / seconds)
    stats = engines[1].stats
    return {
        "slots": slots,
        "plain": statistics.median(rates[0]),
        "speculative": statistics.median(rates[1]),
        "ratio": statistics.median(fast / plain for plain, fast in zip(*rates, strict=True)),
        "tokens_a_step": stats.tokens / max(stats.row_steps, 1),
        "steps": dict(sorted(stats.steps.items())),
        "idle": idle,
    }


def run_transformers(config: Config, works: list[Any], slots: int) -> float:
    """Tokens a second of transformers' own batched greedy ``generate`` on the same prompts and weights."""
    import importlib.util

    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        _cli.fail("--transformers needs torch and transformers: pip install torch transformers")
    import torch
    import transformers

    from specjax.models.load import smollm2_path

    path = smollm2_path() if config.model == "smollm2" else Path(config.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=getattr(torch, config.dtype)
    )
    stop = list(works[0].stop_tokens)

    def batch(some: list[Any], max_tokens: int = config.max_tokens) -> int:
        longest = max(len(work.prompt) for work in some)
        prompts = torch.tensor([[0] * (longest - len(work.prompt)) + list(work.prompt) for work in some])
        mask = torch.tensor([[0] * (longest - len(work.prompt)) + [1] * len(work.prompt) for work in some])
        with torch.inference_mode():
            output = model.generate(
                prompts,
                attention_mask=mask,
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=stop,
                pad_token_id=stop[0],
            )[:, longest:]
        counts = (output == stop[0]).int().argmax(dim=1) + 1
        ended = (output == stop[0]).any(dim=1)
        return int(torch.where(ended, counts, output.shape[1]).sum())

    batch(works[:slots], 2)  # not counted, as compiling is not
    rates = []
    for _ in range(config.runs):
        begin = time.perf_counter()
        tokens = sum(batch(works[first : first + slots]) for first in range(0, len(works), slots))
        rates.append(tokens / (time.perf_counter() - begin))
    return statistics.median(rates)


if __name__ == "__main__":
    sys.exit(_cli.run(main))
