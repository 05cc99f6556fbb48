"""A batch job seen from outside: its counts, as a time series and for Prometheus, under vLLM's names.

Names and labels are those of https://docs.vllm.ai/en/stable/usage/metrics/; what vLLM doesn't count is named
``specjax:``. A job that goes on counts from zero, as a restarted server does.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax.engine.sink import Sink, repair, replace_file

__all__ = ["Gauges", "MetricsWriter", "Totals", "prometheus_text", "series_line"]

_BEGIN = b'{"time": '
"""How each point of the time series begins."""
INTERVAL = 5.0
"""Seconds between two points of the time series; Prometheus asks every 15 by default."""


@dataclasses.dataclass(frozen=True)
class Totals:
    """What a job has done; the sum of two is what both have done."""

    answered: int = 0  # requests
    refused: int = 0  # lines that got an error
    prompt_tokens: int = 0
    tokens: int = 0  # decoded
    row_steps: int = 0  # steps, counted for each row that was live in it
    drafts: int = 0  # those of them in which something was drafted
    drafted: int = 0  # tokens verified
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()  # drafts whose 1st, 2nd, .. token was accepted
    finish_reasons: Mapping[str, int] = dataclasses.field(default_factory=dict)  # choices that ended so
    steps_by_k: Mapping[int, int] = dataclasses.field(default_factory=dict)  # steps of the batch at each K
    seconds: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        """Adds every count."""
        return Totals(*(_add(getattr(self, field), getattr(other, field)) for field in _FIELDS))

    @property
    def tokens_per_second(self) -> float:
        """Tokens decoded a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens decoded a step and row, those of rows that go on included; 1 without speculation."""
        return (self.row_steps + self.accepted) / max(self.row_steps, 1)

    @property
    def acceptance_rate(self) -> float:
        """The share of the drafted tokens that was accepted; vLLM's ``draft_acceptance_rate``."""
        return self.accepted / max(self.drafted, 1)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens of a step that had a draft, the corrected or bonus one included, as vLLM has it."""
        return 1 + self.accepted / max(self.drafts, 1)


_FIELDS = tuple(field.name for field in dataclasses.fields(Totals))


@dataclasses.dataclass(frozen=True)
class Gauges:
    """How a job stands at one moment."""

    running: int = 0  # rows being decoded
    waiting: int = 0  # requests read and not begun
    slots: int = 0  # rows there is room for
    cache_usage: float = 0.0  # the share of the cache's positions that are taken, 0 to 1
    k: int = 0  # tokens drafted a step


def series_line(totals: Totals, gauges: Gauges, recent: Totals, now: float) -> str:
    """A point of the time series.

    Args:
      totals: what was done since the job began.
      gauges: how it stands.
      recent: what was done since the last point.
      now: seconds since 1970.

    Returns:
      JSON without a line end: every count, the rates, and the recent rates as ``recent_...``.
    """
    row: dict[str, Any] = {"time": round(now, 3), **dataclasses.asdict(totals), **dataclasses.asdict(gauges)}
    for prefix, part in (("", totals), ("recent_", recent)):
        row[f"{prefix}tokens_per_second"] = round(part.tokens_per_second, 3)
        row[f"{prefix}tokens_per_step"] = round(part.tokens_per_step, 4)
        row[f"{prefix}acceptance_rate"] = round(part.acceptance_rate, 4)
    row["mean_acceptance_length"] = round(totals.mean_acceptance_length, 4)
    row["seconds"] = round(totals.seconds, 3)
    return json.dumps(row)


def prometheus_text(totals: Totals, gauges: Gauges, model: str) -> str:
    """The counts in Prometheus' text format.

    Args:
      totals: what was done since the job began.
      gauges: how it stands.
      model: the label ``model_name``.
    """
    base = {"model_name": model, "engine": "0"}
    lines = []
    for name, kind, words, samples in _metrics(totals, gauges):
        lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
        for label, value in samples:
            labels = ",".join(f'{key}="{_escape(text)}"' for key, text in (base | label).items())
            lines.append(f"{name}{{{labels}}} {value}")
    return "\n".join(lines) + "\n"


class MetricsWriter:
    """Writes the time series to a file, and the latest counts for Prometheus to another beside it.

    ``run.jsonl`` is added to; ``run.prom`` is replaced whole, as node_exporter's textfile collector needs it.
    """

    def __init__(self, path: Path, model: str) -> None:
        """Opens the file.

        Args:
          path: the time series; the other file has the suffix ``.prom`` in place of its own.
          model: the name of the model.

        Raises:
          OSError: a file can't be written.
          ValueError: there is a file that is no time series.
        """
        if path.is_file():
            with path.open("rb") as file:
                begin = file.read(len(_BEGIN))
            if path.suffix != ".gz" and not _BEGIN.startswith(begin):
                raise ValueError(f"{path} is there already, and no time series: name another file")
            repair(path)
        self._sink, self._model = Sink(path), model
        self._prometheus = path.with_suffix(".prom")
        self._last = Totals()
        self._due = 0.0

    def write(self, totals: Totals, gauges: Gauges, *, last: bool = False) -> None:
        """Adds a point, if it is time for one or it is the last.

        Raises:
          OSError: a file can't be written.
        """
        if time.monotonic() < self._due and not last:
            return
        self._due = time.monotonic() + INTERVAL
        recent = _difference(totals, self._last)
        self._last = totals
        self._sink.write(series_line(totals, gauges, recent, time.time()))
        replace_file(self._prometheus, prometheus_text(totals, gauges, self._model))

    def close(self) -> None:
        """Ends the writing."""
        self._sink.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Samples = list[tuple[dict[str, str], float]]


def _metrics(totals: Totals, gauges: Gauges) -> Iterator[tuple[str, str, str, Samples]]:
    """Name, kind, meaning, and the values with their labels."""

    def one(value: float) -> Samples:
        return [({}, value)]

    yield "vllm:num_requests_running", "gauge", "Rows being decoded.", one(gauges.running)
    yield "vllm:num_requests_waiting", "gauge", "Requests read and not begun.", one(gauges.waiting)
    yield "vllm:kv_cache_usage_perc", "gauge", "Share of the cache in use; 1 is all.", one(gauges.cache_usage)
    yield "vllm:prompt_tokens_total", "counter", "Tokens of prompts.", one(totals.prompt_tokens)
    yield "vllm:generation_tokens_total", "counter", "Tokens decoded.", one(totals.tokens)
    reasons: Samples = [
        ({"finished_reason": reason}, totals.finish_reasons.get(reason, 0))
        for reason in sorted({"stop", "length", *totals.finish_reasons})
    ]
    yield "vllm:request_success_total", "counter", "Answers, by how they ended.", reasons
    yield "vllm:spec_decode_num_drafts_total", "counter", "Drafts verified.", one(totals.drafts)
    yield "vllm:spec_decode_num_draft_tokens_total", "counter", "Tokens drafted.", one(totals.drafted)
    yield "vllm:spec_decode_num_accepted_tokens_total", "counter", "Tokens accepted.", one(totals.accepted)
    positions: Samples = [({"position": str(i)}, n) for i, n in enumerate(totals.accepted_per_position)]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    yield name, "counter", "Tokens accepted, by their place in the draft.", positions
    yield "specjax:requests_refused_total", "counter", "Lines that got an error.", one(totals.refused)
    yield "specjax:row_steps_total", "counter", "Steps, counted for each live row.", one(totals.row_steps)
    by_k: Samples = [({"k": str(k)}, steps) for k, steps in sorted(totals.steps_by_k.items())]
    yield "specjax:steps_total", "counter", "Steps of the batch, by tokens drafted.", by_k
    yield "specjax:slots", "gauge", "Rows there is room for.", one(gauges.slots)
    yield "specjax:num_speculative_tokens", "gauge", "Tokens drafted a step.", one(gauges.k)


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, tuple):
        return tuple(map(sum, itertools.zip_longest(a, b, fillvalue=0)))
    if isinstance(a, Mapping):
        return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}
    return a + b


def _difference(new: Totals, old: Totals) -> Totals:
    """The counts of numbers alone: what the rates are made from."""
    numbers = [field for field in _FIELDS if isinstance(getattr(new, field), int | float)]
    return Totals(**{field: getattr(new, field) - getattr(old, field) for field in numbers})


def _escape(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()  # a path need not be text
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
