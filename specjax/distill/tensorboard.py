"""The lines of ``metrics.jsonl`` as TensorBoard's event files, where tensorboardX is installed."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def event_writer(folder: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Gives a function that adds a line of metrics to an event file; without tensorboardX it does nothing."""
    if importlib.util.find_spec("tensorboardX") is None:
        yield lambda figures: None
        return
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary

    # Written here and now, not by the library's queue and thread: a full disk must show, not hang.
    writer: Any = None

    def write(figures: dict[str, Any]) -> None:
        nonlocal writer
        step = figures["step"]
        if writer is None:
            folder.mkdir(parents=True, exist_ok=True)
            writer = EventsWriter(str(folder / "events"))
            # What a run wrote that was killed after its last checkpoint is not to be shown.
            writer.write_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        values = [Summary.Value(tag=name, simple_value=x) for name, x in scalars(figures).items()]
        writer.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        writer.flush()

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()
