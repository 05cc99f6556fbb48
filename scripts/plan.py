"""What a decode step would need on TPUs, from their own compiler; no TPU is needed.

    specjax plan --target llama-3.1-8b --draft llama-3.2-1b --topology v5e:2x4
    specjax plan --target llama-3.1-70b --draft llama-3.1-8b --topology v5p:2x2x1 --json plan.json

All figures are the compiler's and ours from its program: estimates, no measurements.
Needs the extra `tpu`: pip install -e ".[tpu]".
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from specjax.scripts import _cli


@dataclasses.dataclass(frozen=True)
class Config:
    """What to plan."""

    target: str = "llama-3.1-8b"
    """A shape by name (as qwen3-4b; a wrong name lists all), or a GGUF file, for its sizes alone."""
    draft: str = "llama-3.2-1b"
    """The same for the draft."""
    topology: str = "v5e:2x4"
    """As v5e:2x4, v5p:2x2x1, v6e:2x4."""
    mesh: str = ""
    """As data=2,model=4. Empty: models over as many devices as key-value heads allow, rows over the rest."""
    draft_shards: int = 0
    """Over how many devices the draft is spread, a divisor of the mesh's model; 0 takes all."""
    rows: tuple[int, ...] = (32,)
    """Rows decoded at once; the first is the one whose step is compiled whole."""
    capacity: int = 2048
    """Slots of the cache a row, a multiple of 512."""
    live: int = 1024
    """Slots that hold text, for the costs."""
    num_speculative_tokens: int = 5
    """Drafted tokens a step."""
    rule: Literal["token", "block", "coupled", "greedy"] = "token"
    """How drafts are judged."""
    acceptance: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    """Acceptances to give tokens a second for."""
    json: Path | None = None
    """Also write the figures here."""
    plot: Path | None = None
    """Also draw the speed-up against acceptance, as SVG (needs the extra notebooks); 5 --rows at most."""
    export: Path | None = None
    """Also write the step as a portable jax.export artifact, for one device of any kind."""

    def __post_init__(self) -> None:
        if not self.rows or min(self.rows) < 1 or self.num_speculative_tokens < 1 or self.draft_shards < 0:
            raise ValueError(
                "--rows and --num-speculative-tokens must be at least 1, --draft-shards 0 or more"
            )
        if (
            self.capacity < 512
            or self.capacity % 512
            or not 512 <= self.live <= self.capacity
            or self.live % 512
        ):
            raise ValueError(
                "--capacity and --live must be multiples of 512, --live no larger than --capacity"
            )
        if not self.acceptance or not all(0 <= value <= 1 for value in self.acceptance):
            raise ValueError("--acceptance needs values in 0 .. 1")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; exit code 1 if the step does not fit."""
    config = _cli.parse(Config, argv, __doc__)
    os.environ["JAX_PLATFORMS"] = "cpu"  # the TPU's compiler is wanted, not a TPU
    from specjax.parallel import plan
    from specjax.parallel.sharding import make_placement
    from specjax.verify import RULES

    begin = time.perf_counter()
    with _cli.blame_input():
        target, draft = _shape(config.target), _shape(config.draft)
        if target[1].vocab_size != draft[1].vocab_size:
            raise ValueError(f"the vocabularies differ: {target[1].vocab_size} and {draft[1].vocab_size}")
        devices = plan.devices_of(config.topology)
        ways = next(
            n
            for n in range(min(len(devices), target[1].num_kv_heads), 0, -1)
            if target[1].num_kv_heads % n == 0 and len(devices) % n == 0
        )
        mesh = config.mesh or f"data={len(devices) // ways},model={ways}"
        placement = make_placement(mesh, config.draft_shards or None, devices)
    chip = plan.CHIPS[devices[0].device_kind]
    figures: dict[str, Any] = {"chip": chip.name, "devices": len(devices), "mesh": mesh}
    figures |= _programs(config, target[0], draft[0], placement, chip, RULES[config.rule])
    figures["rows"] = {
        rows: _costs(config, plan.costs(target[0], draft[0], placement, chip, _batch(config, rows)), rows)
        for rows in config.rows
    }
    figures["seconds_to_plan"] = time.perf_counter() - begin
    _print(config, figures)
    with _cli.blame_input(OSError):
        if config.json:
            settings = json.loads(json.dumps(dataclasses.asdict(config), default=str))
            config.json.write_text(json.dumps({"config": settings, **figures}, indent=1))
        if config.export:
            artifact = plan.export_step(
                target[0], draft[0], _batch(config, config.rows[0]), RULES[config.rule]
            )
            config.export.write_bytes(artifact)
            print(f"{config.export}: the step for cpu, cuda and tpu, {len(artifact) / 1e6:.1f} MB")
        if config.plot:
            config.plot.write_text(_draw(config, figures), encoding="utf-8")
    return 0 if figures["fits"] else 1


def _batch(config: Config, rows: int) -> Any:
    from specjax.parallel.plan import Batch

    return Batch(rows, config.capacity, config.num_speculative_tokens, config.live)


def _shape(name: str) -> tuple[Any, Any]:
    """The shape to plan with, and its configuration in bfloat16."""
    from specjax.models.functional import abstract_model
    from specjax.models.shapes import SHAPES
    from specjax.parallel.plan import Shape

    if name in SHAPES:
        cfg = SHAPES[name]
    elif name.endswith(".gguf"):
        from specjax.models.gguf import config_of
        from specjax.models.gguf_file import open_gguf

        cfg = config_of(open_gguf(Path(name)), "bfloat16")
    else:
        raise ValueError(f"no shape is named {name!r}; there are {', '.join(SHAPES)}, and GGUF files")

    def build(num_layers: int, scanned: bool) -> tuple[Any, Any]:
        return abstract_model(dataclasses.replace(cfg, num_layers=num_layers, scan_layers=scanned))

    return Shape(name, cfg.num_layers, build), cfg


def _programs(
    config: Config, target: Any, draft: Any, placement: Any, chip: Any, rule: Any
) -> dict[str, Any]:
    """Compiles the real step and prefill, and says what they hold."""
    from specjax.parallel import plan, program

    step = plan.Step.make(target, draft, placement, _batch(config, config.rows[0]))
    parts = step.bytes_a_device()
    figures: dict[str, Any] = {"bytes_a_device": parts, "fits": True}
    # Side by side: the compiler takes one processor for a program.
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        judged = pool.submit(plan.compile_rule, step, rule)
        programs = {
            "step": pool.submit(plan.compile_step, step, rule),
            "prefill": pool.submit(plan.compile_start, step),
        }
    for name, compiling in programs.items():
        try:
            compiled = compiling.result()
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and "Ran out of memory" not in str(error):
                raise
            figures[name] = {"does_not_fit": next(line for line in str(error).splitlines() if line.strip())}
            figures["fits"] = False
            continue
        text, memory = compiled.as_text(), program.memory(compiled)
        exchanged: dict[str, list[int]] = {}
        for collective in program.collectives(text):
            exchanged.setdefault(collective.kind, []).append(collective.num_bytes)
        caches = parts["target_cache"] + parts["draft_cache"]
        figures[name] = dataclasses.asdict(memory) | {
            "total": memory.total,
            "temporary_over_caches": memory.temporary / caches,
            "collectives_written": exchanged,
            "host_transfers": program.host_transfers(text),
        }
        figures["fits"] &= memory.total <= chip.memory
    # No loop of theirs runs more often than a float has bits, or than there are drafted tokens.
    figures["rule_bytes"] = program.traffic(judged.result().as_text(), max(32, config.num_speculative_tokens))
    return figures


def _costs(config: Config, costs: Any, rows: int) -> dict[str, Any]:
    """The figures of one number of rows."""
    best = {a: costs.best(a) for a in config.acceptance}
    planned = config.num_speculative_tokens
    return {
        "decode": dataclasses.asdict(costs.decode),
        "verify": dataclasses.asdict(costs.verify),
        "draft": dataclasses.asdict(costs.draft),
        "draft_cost": costs.draft_cost,
        "verify_cost": costs.verify_cost(planned),
        "break_even_acceptance": costs.break_even(),
        "plain_tokens_a_second": rows / costs.decode.seconds,
        "tokens_a_second": {a: costs.tokens_a_second(rows, a, planned) for a in config.acceptance},
        "best_num_speculative_tokens": best,
        "tokens_a_second_at_best": {a: costs.tokens_a_second(rows, a, best[a]) for a in config.acceptance},
    }


def _print(config: Config, figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"{config.target} with {config.draft} on {config.topology} ({figures['devices']} {figures['chip']}, "
        f"{figures['mesh']}), bfloat16, K = {config.num_speculative_tokens}, {config.capacity} slots.\n"
        "The TPU compiler's estimates, and ours from its program. Nothing was run or measured."
    )
    parts = figures["bytes_a_device"]
    table = Table("MB a device", *map(_words, parts), "temporary", "of the caches", "all", "fits")
    for name in ("step", "prefill"):
        found = figures[name]
        held = [f"{value / 1e6:.0f}" for value in parts.values()]
        if "does_not_fit" in found:
            table.add_row(name, *held, "", "", "", "no")
            console.print(f"{name}: {found['does_not_fit']}")
            continue
        temporary = [f"{found['temporary'] / 1e6:.1f}", f"{found['temporary_over_caches']:.1%}"]
        table.add_row(name, *held, *temporary, f"{found['total'] / 1e6:.0f}", _yes(figures["fits"]))
        for kind, sizes in found["collectives_written"].items():
            console.print(f"{name}: {len(sizes)} {kind} in its text, the largest {max(sizes) / 1e3:.0f} kB")
    console.print(table)
    table = Table(
        "a device", "rows", "GFLOP", "MB read", "exchanges", "kB exchanged", "floor ms", "estimate ms"
    )
    for rows, row in figures["rows"].items():
        for name in ("decode", "verify", "draft"):
            one = row[name]
            work = f"{one['flops'] / 1e9:.1f}", f"{one['bytes_read'] / 1e6:.0f}"
            exchanged = str(one["collectives"]), f"{one['collective_bytes'] / 1e3:.0f}"
            times = f"{one['floor'] * 1e3:.2f}", f"{one['seconds'] * 1e3:.2f}"
            table.add_row(name, str(rows), *work, *exchanged, *times)
    console.print(table)
    moved, read = figures["rule_bytes"], figures["rows"][config.rows[0]]["verify"]["bytes_read"]
    console.print(
        f"warp and rule ({config.rule}) move {moved / 1e6:.1f} MB at most, "
        f"{moved / read:.1%} of what a verify forward of {config.rows[0]} rows reads"
    )
    columns = [f"at {value:g} (best K)" for value in config.acceptance]
    table = Table("rows", "c", "v", "break-even", "plain", *columns, title="tokens a second, by acceptance")
    for rows, row in figures["rows"].items():
        even = row["break_even_acceptance"]
        costs = (
            f"{row['draft_cost']:.2f}",
            f"{row['verify_cost']:.2f}",
            "none" if even is None else f"{even:.2f}",
        )
        speeds = [
            f"{row['tokens_a_second'][value]:.0f} ({row['best_num_speculative_tokens'][value]})"
            for value in config.acceptance
        ]
        table.add_row(str(rows), *costs, f"{row['plain_tokens_a_second']:.0f}", *speeds)
    console.print(table)
    console.print(f"planned in {figures['seconds_to_plan']:.0f} s")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _draw(config: Config, figures: dict[str, Any]) -> str:
    """Tokens a second over plain decoding's, by acceptance, a curve for each number of rows."""
    from specjax.plot import lines
    from specjax.plot.style import svg

    def draw(axis: Any) -> None:
        curves = {
            f"{rows} rows": [
                value / row["plain_tokens_a_second"] for value in row["tokens_a_second"].values()
            ]
            for rows, row in figures["rows"].items()
        }
        lines(axis, config.acceptance, curves, markers=True)
        axis.axhline(1, linewidth=1, linestyle=":")
        axis.set(xlabel="acceptance", ylabel="times as fast as plain decoding, estimated", ylim=(0, None))

    return svg(draw, width=7, height=4)


if __name__ == "__main__":
    sys.exit(_cli.run(main))
