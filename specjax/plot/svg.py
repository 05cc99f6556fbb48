"""A figure as text, for pages."""

from __future__ import annotations

import io
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["svg"]


def svg(draw: Callable[[Axes], object], width: float = 9.0, height: float = 3.0) -> str:
    """Draws one axis and gives it as an ``<svg>`` element; equal drawings give equal text.

    Args:
      draw: what to draw, such as a function of this package with its data bound.
      width: in inches.
      height: likewise.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.subplots())
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    page = text.getvalue()
    return page[page.index("<svg") :]
