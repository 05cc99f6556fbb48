"""What follows from acceptance over several drafted tokens: lines of theory, points of measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from specjax.plot.style import palette

__all__ = ["expected_and_measured", "lines", "speedups"]

_MARKERS = "osD^v"
_DASHES = ("-", "--", "-.", ":", (0, (1, 3)))


def lines(axis: Axes, x: ArrayLike, curves: Mapping[str, ArrayLike], *, markers: bool = False) -> None:
    """Draws named curves over one x, each with its name at its right end.

    Args:
      axis: to draw on.
      x: [N].
      curves: names to values [N], five at most.
      markers: whether to mark the values.

    Raises:
      ValueError: there are more than five curves: nobody tells them apart.
    """
    colours = palette(axis)
    if len(curves) > len(colours.series):
        raise ValueError(f"{len(curves)} curves are too many to tell apart; {len(colours.series)} at most")
    for (name, values), colour, dashes, marker in zip(
        curves.items(), colours.series, _DASHES, _MARKERS, strict=False
    ):
        axis.plot(
            x,
            values,
            color=colour,
            linestyle=dashes,
            linewidth=1.8,
            marker=marker if markers else None,
            markersize=5,
            label=name,
        )
    axis.legend(loc="best")


def expected_and_measured(
    axis: Axes,
    x: ArrayLike,
    expected: Mapping[str, ArrayLike],
    measured_x: Sequence[float],
    measured: Mapping[str, ArrayLike],
    errors: Mapping[str, ArrayLike],
) -> None:
    """Draws the curves that theory expects, and on them what was measured.

    Args:
      axis: to draw on.
      x: [N] of the curves.
      expected: names to values [N], five at most.
      measured_x: M places.
      measured: the same names to values [M].
      errors: the same names to standard errors [M]; bars of three are drawn.
    """
    lines(axis, x, expected)
    colours = palette(axis)
    for name, colour, marker in zip(expected, colours.series, _MARKERS, strict=False):
        axis.errorbar(
            measured_x,
            measured[name],
            3 * np.asarray(errors[name], np.float64),
            fmt=marker,
            color=colour,
            markeredgecolor=colours.ink,
            markersize=6,
            capsize=3,
        )
    axis.errorbar([], [], [], fmt="o", color="none", markeredgecolor=colours.ink, label="measured")
    axis.legend(loc="upper left")


def speedups(axis: Axes, num_draft_tokens: Sequence[int], curves: Mapping[str, ArrayLike]) -> None:
    """Draws speed-ups over K, the best of each marked, and the line of plain decoding.

    Args:
      axis: to draw on.
      num_draft_tokens: N values of K.
      curves: names to speed-ups [N], five at most.
    """
    lines(axis, num_draft_tokens, curves)
    colours = palette(axis)
    axis.axhline(1, color=colours.ink, linewidth=1, linestyle=":", label="plain decoding")
    for values, colour, marker in zip(curves.values(), colours.series, _MARKERS, strict=False):
        best = int(np.argmax(values))
        axis.plot(
            num_draft_tokens[best],
            np.asarray(values)[best],
            marker,
            color=colour,
            markeredgecolor=colours.ink,
            markersize=9,
        )
    axis.set(xlabel="K, drafted tokens a step", ylabel="times as fast as plain decoding")
    axis.legend(loc="best")
