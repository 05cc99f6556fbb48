"""The lines of ``metrics.jsonl`` as TensorBoard's event files, where tensorboardX is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["event_writer", "scalars"]


def scalars(figures: dict[str, Any]) -> dict[str, float]:
    """Names to numbers: ``acceptance/1`` for the first of a list, ``held_out/score`` for one of a dict."""
    flat: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{inner}": x for inner, x in scalars(value).items()}
        elif isinstance(value, list):
            flat |= {f"{name}/{place}": float(x) for place, x in enumerate(value, 1)}
        elif name != "step":
            flat[name] = float(value)
    return flat


def event_writer(folder: Path) -> Callable[[dict[str, Any]], None]:
    """A function that adds one line of metrics to event files in a folder; without tensorboardX, nothing."""
    if importlib.util.find_spec("tensorboardX") is None:
        return lambda figures: None
    from tensorboardX import SummaryWriter

    writer: Any = None

    def write(figures: dict[str, Any]) -> None:
        nonlocal writer
        step = figures["step"]
        # What a run wrote that was killed after its last checkpoint is not to be shown.
        writer = writer or SummaryWriter(str(folder), purge_step=step)
        for name, value in scalars(figures).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write
