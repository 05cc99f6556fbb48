"""What a compiled program says of itself: memory, collectives, arithmetic, cycles."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

__all__ = ["Collective", "Memory", "collectives", "cycles", "flops", "host_transfers", "memory", "sizes"]

_KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
_COLLECTIVE = re.compile(rf"= (.*?) ({_KINDS})(?:-start)?\(")
_ARRAY = re.compile(r"\b(pred|bf16|f16|f32|f64|[su](?:4|8|16|32|64))\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange between devices."""

    kind: str
    num_bytes: int  # of its result, on one device


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device while the program runs."""

    arguments: int
    results: int  # not counting what takes an argument's place
    in_place: int  # of the arguments: given away, and their place taken by results
    temporary: int
    code: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.arguments + self.results + self.temporary + self.code


def memory(compiled: Any) -> Memory:
    """The memory of a ``jax.stages.Compiled``."""
    stats = compiled.memory_analysis()
    return Memory(
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        in_place=stats.alias_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )


def collectives(text: str) -> list[Collective]:
    """The exchanges in a program's text, each written once, loops or not."""
    return [Collective(kind, _num_bytes(result)) for result, kind in _COLLECTIVE.findall(text)]


def host_transfers(text: str) -> list[str]:
    """What in a program's text speaks with the host."""
    return re.findall(r"(?:infeed|outfeed|send|recv|xla_python\w*callback)(?=\()", text)


def sizes(text: str) -> set[int]:
    """The lengths of the dimensions of all arrays in a program's text."""
    return {int(size) for _, dims in _ARRAY.findall(text) for size in dims.split(",") if size}


def flops(compiled: Any) -> float:
    """The program's arithmetic; what a loop runs is counted once."""
    return compiled.cost_analysis().get("flops", 0.0)


def cycles(text: str) -> int:
    """The cycles that the TPU's compiler gives its instructions, loops counted once, exchanges not at all."""
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))


def _num_bytes(result: str) -> int:
    total = 0
    for kind, dims in _ARRAY.findall(result):
        bits = 8 if kind == "pred" else int(re.sub(r"\D", "", kind))
        total += math.prod(int(size) for size in dims.split(",") if size) * bits // 8
    return total
