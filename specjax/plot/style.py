"""Colours that differ for colour-blind readers too, on a light and on a dark page."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

__all__ = ["Palette", "palette", "save", "style", "svg"]

Theme = Literal["light", "dark"]


@dataclasses.dataclass(frozen=True)
class Palette:
    """What each thing is drawn in, everywhere; what meets in a figure differs in hatching or dashes too."""

    target: str
    draft: str
    accepted: str
    resampled: str  # drawn in place of a rejected token
    rejected: str
    ink: str  # text and axes
    paper: str
    series: tuple[str, ...]  # lines, in order


# After Okabe and Ito (2008), "Color universal design"; the dark page's are lighter.
_LIGHT = Palette(
    target="#0072b2",
    draft="#e69f00",
    accepted="#009e73",
    resampled="#b5488a",
    rejected="#c9c9c9",
    ink="#1f2328",
    paper="#ffffff",
    series=("#0072b2", "#d55e00", "#009e73", "#b5488a", "#1f2328"),
)
_DARK = Palette(
    target="#56b4e9",
    draft="#e69f00",
    accepted="#1fb88d",
    resampled="#e08dbd",
    rejected="#4a5058",
    ink="#e6edf3",
    paper="#0d1117",
    series=("#56b4e9", "#f0803c", "#1fb88d", "#e08dbd", "#e6edf3"),
)


def palette(axis: Axes) -> Palette:
    """The colours for an axis, by its background."""
    red, green, blue = to_rgb(axis.get_facecolor())
    return _DARK if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else _LIGHT


def style(theme: Theme = "light") -> dict[Any, Any]:
    """Settings for ``matplotlib.rcParams`` or ``matplotlib.rc_context``.

    Args:
      theme: the page that figures are drawn for.

    Returns:
      Names to values.

    Raises:
      ValueError: an unknown theme.
    """
    if theme not in ("light", "dark"):
        raise ValueError(f"theme must be 'light' or 'dark', not {theme!r}")
    colours = _LIGHT if theme == "light" else _DARK
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color")
    papered = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
    return {
        **dict.fromkeys((*inked, "ytick.color", "hatch.color"), colours.ink),
        **dict.fromkeys(papered, colours.paper),
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "figure.constrained_layout.use": True,
        "figure.dpi": 110,
        "font.size": 10,
        "grid.alpha": 0.2,
        "grid.color": colours.ink,
        "hatch.linewidth": 0.7,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "savefig.dpi": 110,
    }


def save(
    path: Path | IO[str],
    draw: Callable[[Axes], None],
    *,
    width: float = 9,
    height: float = 3,
    theme: Theme = "light",
    kind: str | None = None,
) -> None:
    """Writes one figure to a file.

    Args:
      path: its ending says what kind of picture it is.
      draw: draws on the axis that it is given.
      width: in inches, like the height.
      height: likewise.
      theme: the page that it is for.
      kind: of picture, where ``path`` has no ending.

    Raises:
      ValueError: a kind that matplotlib doesn't know.
    """
    with matplotlib.rc_context(style(theme)):
        figure = Figure(figsize=(width, height))
        draw(figure.subplots())
        is_svg = str(kind or path).endswith("svg")
        figure.savefig(path, format=kind, metadata={"Date": None} if is_svg else None)


def svg(draw: Callable[[Axes], None], *, width: float = 9, height: float = 3, theme: Theme = "light") -> str:
    """A figure as ``<svg ...>...</svg>``, to stand in an HTML page; arguments are those of :func:`save`."""
    text = io.StringIO()
    save(text, draw, width=width, height=height, theme=theme, kind="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]
