"""What a compiled program says of itself: memory, collectives, arithmetic, cycles."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

__all__ = [
    "Collective",
    "Memory",
    "collectives",
    "cycles",
    "flops",
    "host_transfers",
    "memory",
    "sizes",
    "traffic",
]

_KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
_COLLECTIVE = re.compile(rf"= (.*?) ({_KINDS})(?:-start)?\(")
_ARRAY = re.compile(r"\b(pred|bf16|f16|f32|f64|[su](?:4|8|16|32|64))\[([\d,]*)\]")
_ON_CHIP = re.compile(r"\w+\[[\d,]*\]\{[^}]*S\(\d\)[^}]*\}")
"""An array in a space of its own, S(1) say, is in the chip's own memory."""
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = (.*?) ([\w-]+)\((.*?)\)(.*)$")
_MOVES_NOTHING = {"parameter", "tuple", "get-tuple-element", "constant", "bitcast", "iota", "after-all"}


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


def traffic(text: str, trips: int) -> int:
    """Bytes that a TPU program moves between a device's memory and the chip, at most.

    What the compiler keeps in the chip's own memory costs nothing. Every other input and result of an
    instruction is counted whole, once for each instruction; of branches the dearest.

    Args:
      text: of the program.
      trips: how often a loop runs at most.
    """
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            name = found[2]
            entry = name if found[1] else entry
            bodies[name] = []
        elif name and line.startswith("  "):
            bodies[name].append(line)

    def run(name: str) -> int:
        kept: dict[str, str] = {}  # what lies in memory, by the instruction that made it
        total = 0
        for found in filter(None, map(_INSTRUCTION.match, bodies[name])):
            result, kind, inputs, rest = found.group(2, 3, 4, 5)
            kept[found[1]] = _ON_CHIP.sub("", result)
            called = [name for name in re.findall(r"%([\w.-]+)", rest) if name in bodies]
            if kind in _MOVES_NOTHING or kind.endswith("-done"):
                continue
            if kind == "while":
                total += trips * sum(map(run, called))
            elif kind == "conditional":
                total += max(map(run, called))
            elif kind == "call":
                total += sum(map(run, called))
            elif kind in ("copy-start", "slice-start"):
                # Its result names source and target: the smaller of them is what moves, out or in.
                sizes = sorted(map(_num_bytes, re.findall(r"\w+\[\d[\d,]*\]", result)))
                both = kind == "copy-start" and "S(1)" not in result
                total += sizes[0] * (2 if both else 1)
            else:
                read = (kept.get(name, "") for name in re.findall(r"%([\w.-]+)", inputs))
                total += _num_bytes(kept[found[1]]) + sum(map(_num_bytes, read))
        return total

    return run(entry)


def _num_bytes(result: str) -> int:
    total = 0
    for kind, dims in _ARRAY.findall(result):
        bits = 8 if kind == "pred" else int(re.sub(r"\D", "", kind))
        total += math.prod(int(size) for size in dims.split(",") if size) * bits // 8
    return total
