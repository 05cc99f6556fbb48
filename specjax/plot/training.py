"""How a training went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from specjax.plot.style import palette

__all__ = ["learning_curves"]


def learning_curves(axis: Axes, rows: Iterable[Mapping[str, Any]]) -> None:
    """Draws acceptance in training by pass, and on the held-out prompts by temperature.

    Args:
      axis: to draw on.
      rows: the lines of a training's ``metrics.jsonl``: ``step`` with ``acceptance``, one number a pass, or
        with ``held_out``, whose ``acceptance_T0_1`` is that of the first drafted token at temperature 0.

    Raises:
      ValueError: no line has an acceptance.
    """
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        found = {f"training, pass {i}": x for i, x in enumerate(row.get("acceptance", ()), 1)}
        for temperature in (0, 1):
            name = f"acceptance_T{temperature}_1"
            if name in row.get("held_out", {}):
                found[f"held out, T = {temperature}"] = row["held_out"][name]
        for name, value in found.items():
            curves.setdefault(name, []).append((row["step"], value))
    if not curves:
        raise ValueError("learning_curves needs a line with an acceptance")
    colours = palette(axis)
    trained = sorted(name for name in curves if name.startswith("training"))
    for place, name in enumerate(trained):
        alpha = 0.25 + 0.45 * (len(trained) - place) / len(trained)
        axis.plot(*zip(*curves[name], strict=True), color=colours.ink, linewidth=1.1, alpha=alpha, label=name)
    for name, colour, marker in (
        ("held out, T = 0", colours.target, "o"),
        ("held out, T = 1", colours.draft, "s"),
    ):
        if name in curves:
            axis.plot(*zip(*curves[name], strict=True), color=colour, marker=marker, markersize=5, label=name)
    axis.set(xlabel="step", ylabel="acceptance", ylim=(0, 1))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(loc="upper left", ncols=2)
