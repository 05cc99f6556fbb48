"""Measure on this machine: plain decoding against the memory's floor, speculation against plain decoding.

Figures are medians over runs; comparisons are ratios of paired runs. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specjax.scripts import _cli, _jobs


@dataclasses.dataclass(frozen=True)
class Config(_jobs.MeshOptions):
    """What to measure."""

    tasks: tuple[str, ...] = ("summarization", "rag")
    """Spec-Bench tasks to compare on."""
    per_task: int = 5
    """Prompts of each."""
    max_tokens: int = 128
    """Tokens decoded for each prompt."""
    runs: int = 5
    """Runs of each figure; the median counts."""
    json: Path | None = None
    """Also write the figures here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.per_task, self.max_tokens, self.runs) < 1:
            raise ValueError("--per-task, --max-tokens and --runs must be at least 1")
        if self.max_tokens < 4 * (self.num_speculative_tokens + 1):
            raise ValueError("--max-tokens must be at least 4 (1 + --num-speculative-tokens)")
        if self.draft == "none":
            raise ValueError("--draft none leaves nothing to compare with plain decoding")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the figures."""
    config = _cli.parse(Config, argv, __doc__)
    from rich.console import Console
    from rich.table import Table

    with _cli.blame_input():
        prompts = _jobs.spec_bench(config.tasks, config.per_task)
    decoder = _jobs.load_decoder(config)
    figures: dict[str, Any] = {}
    figures |= measure_floor(decoder, config)
    figures |= measure_own_work(decoder, config)
    full = _step_seconds(decoder, config, speculative=True) * 1e3
    figures["step_with_a_draft_ms"] = full
    for name in ("greedy", "sampled"):
        figures[f"own_work_{name}_share"] = figures[f"own_work_{name}_ms"] / full
    figures["tasks"] = compare(decoder, config, prompts)
    figures |= measure_memory(config, prompts)

    table = Table(
        "figure", "value", title=f"{decoder.loaded.name}, {config.dtype}, batch 1, draft {config.draft}"
    )
    for name, value in figures.items():
        if name != "tasks":
            table.add_row(name.replace("_", " "), f"{value:.3g}")
    console = Console()
    console.print(table)
    table = Table("task", "tokens a step", "drafts accepted", "speed-up, decoding", "speed-up, whole call")
    for task, row in figures["tasks"].items():
        table.add_row(
            task,
            f"{row['tokens_a_step']:.2f}",
            f"{row['acceptance']:.0%}",
            f"{row['decoding_speedup']:.2f}",
            f"{row['whole_speedup']:.2f}",
        )
    console.print(table)
    if config.json:
        config.json.write_text(
            json.dumps({"config": dataclasses.asdict(config) | {"json": None}, **figures}, indent=1)
        )


def median_seconds(run: Callable[[], Any], runs: int) -> float:
    """The median time of a call, after one that isn't counted."""
    times = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def measure_floor(decoder: _jobs.Decoder, config: Config) -> dict[str, float]:
    """A plain decode step, against reading the weights once at the rate that this machine streams."""
    import jax
    import numpy as np

    weight_bytes = sum(x.nbytes for x in jax.tree.leaves(decoder.loaded.params))
    halves = np.array_split(np.ones(weight_bytes // 4, np.float32), os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(len(halves)) as pool:
        # NumPy's sum reads at memory speed and lets go of the interpreter.
        seconds = median_seconds(lambda: list(pool.map(np.sum, halves)), 3 * config.runs)
    bandwidth = weight_bytes / seconds
    step = _step_seconds(decoder, config, speculative=False)
    return {
        "weights_MB": weight_bytes / 1e6,
        "streaming_read_GB/s": bandwidth / 1e9,
        "plain_step_ms": step * 1e3,
        "floor_over_plain_step": weight_bytes / bandwidth / step,
    }


def _step_seconds(decoder: _jobs.Decoder, config: Config, *, speculative: bool) -> float:
    """Seconds of one decode step at batch 1, prefill left out; a speculative one at full width."""
    from specjax.drafters import LookupDrafter
    from specjax.generate import Decoding

    ids = decoder.loaded.encode("The lighthouse stood at the edge of the sea.")
    arguments = decoder.arguments(speculative=speculative) | dict(
        stop_tokens=(), max_tokens=config.max_tokens
    )
    if isinstance(arguments["drafter"], LookupDrafter):
        arguments["drafter"] = dataclasses.replace(arguments["drafter"], always_full=True)
    times = []
    for _ in range(config.runs + 1):
        decoding = Decoding(prompts=[ids], **arguments)
        decoding.advance(1)
        begin = time.perf_counter()
        decoding.advance()
        seconds = time.perf_counter() - begin
        times.append(seconds / (decoding.rows()[0].num_steps - 1))
    return statistics.median(times[1:])


def measure_own_work(decoder: _jobs.Decoder, config: Config) -> dict[str, float]:
    """All of a step but the models' forwards: the same step with models that cost nothing."""
    import jax

    from specjax.generate import generate
    from specjax.sampling import make_sampling
    from specjax.types import ModelOutput

    @dataclasses.dataclass(frozen=True)
    class Free:
        """A model whose forward hands out its params: logits [K+1, V]."""

        vocab_size: int
        context_length: int = 1 << 20

        def init_cache(self, batch: int, capacity: int) -> None:
            """No cache."""

        def apply(self, params: Any, tokens: Any, cache: None, positions: Any) -> ModelOutput:
            """Scores a position by a row that depends on it, so that nothing is computed once for all."""
            shift = (positions % 2).astype(params.dtype)[..., None]
            return ModelOutput(params[None, : tokens.shape[1]] + shift, None, None)

    vocab_size = decoder.loaded.model.vocab_size
    logits = jax.random.normal(jax.random.key(0), (64, vocab_size))
    # A prompt that repeats keeps lookup drafting, and an impossible repetition keeps it rejected.
    prompt = [1, 2, 3, 4] * 16
    drafter = decoder.drafter
    if decoder.draft_params is not None:
        drafter = dataclasses.replace(drafter, model=Free(vocab_size))
    figures = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        sampling = make_sampling(1, temperature=temperature)

        def run(count: int, sampling: Any = sampling) -> int:
            (result,) = generate(
                Free(vocab_size),
                logits,
                [prompt],
                max_tokens=count,
                drafter=drafter,
                draft_params=logits,
                rule=config.rule,
                sampling=sampling,
            )
            return result.num_steps

        lengths = (64, 448)
        steps = [run(count) for count in lengths]
        seconds = [median_seconds(partial(run, count), config.runs) for count in lengths]
        own = (seconds[1] - seconds[0]) / (steps[1] - steps[0])
        figures[f"own_work_{name}_ms"] = own * 1e3
    return figures


def compare(
    decoder: _jobs.Decoder, config: Config, prompts: list[dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """Paired runs, plain and speculative, on each prompt: ratios of their times, medians over prompts."""
    rows: dict[str, list[tuple[float, float, float, float]]] = {}
    for prompt in prompts:
        ids = decoder.loaded.encode_chat(prompt["messages"])
        timed: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        results = {}
        for _ in range(config.runs + 1):
            for speculative in (False, True):
                results[speculative], decoding, whole = _timed(decoder, config, ids, speculative=speculative)
                timed[speculative].append((decoding, whole))
        if results[False].tokens != results[True].tokens:
            raise RuntimeError(f"{prompt['id']}: speculative and plain output differ")
        pairs = list(zip(timed[False], timed[True], strict=True))[1:]  # the first may compile
        decoding = statistics.median(plain[0] / fast[0] for plain, fast in pairs)
        whole = statistics.median(plain[1] / fast[1] for plain, fast in pairs)
        result = results[True]
        row = (result.mean_acceptance_length, result.draft_acceptance_rate, decoding, whole)
        rows.setdefault(prompt["task"], []).append(row)
    names = ("tokens_a_step", "acceptance", "decoding_speedup", "whole_speedup")
    return {
        task: dict(zip(names, map(statistics.median, zip(*values, strict=True)), strict=True))
        for task, values in rows.items()
    }


def _timed(
    decoder: _jobs.Decoder, config: Config, ids: list[int], *, speculative: bool
) -> tuple[Any, float, float]:
    """A generation, the seconds of its decoding, and the seconds of the whole call."""
    from specjax.generate import Decoding

    begin = time.perf_counter()
    decoding = Decoding(
        prompts=[ids], max_tokens=config.max_tokens, **decoder.arguments(speculative=speculative)
    )
    decoding.advance(0)  # waits for the prefill
    middle = time.perf_counter()
    decoding.advance()
    end = time.perf_counter()
    return decoding.rows()[0], end - middle, end - begin


# A child's peak starts with its parent's size, so the command is started by a parent that is small.
WATCH = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def measure_memory(config: Config, prompts: list[dict[str, Any]]) -> dict[str, float]:
    """The most memory that ``specjax generate`` takes, in a process of its own, compiling and not."""
    longest = max(prompts, key=lambda prompt: len(prompt["messages"][0]["content"]))
    command = [
        sys.executable,
        "-m",
        "specjax.scripts",
        "generate",
        longest["messages"][0]["content"],
        "--chat",
    ]
    command += ["--model", config.model, "--draft", config.draft, "--dtype", config.dtype]
    command += ["--max-tokens", str(config.max_tokens)]
    command += ["--num-speculative-tokens", str(config.num_speculative_tokens)]
    figures = {}
    with tempfile.TemporaryDirectory() as folder:  # an empty cache of compiled programs
        for name in ("generate_peak_MB_first_run", "generate_peak_MB"):
            watched = [sys.executable, "-c", WATCH, *command]
            environment = os.environ | {"XDG_CACHE_HOME": folder}
            peak = subprocess.run(watched, env=environment, capture_output=True, text=True, check=True).stdout
            figures[name] = int(peak) * 1024 / 1e6
    return figures


if __name__ == "__main__":
    sys.exit(_cli.run(main))
