"""The page that a batch job leaves behind: its figures, and plots of how it went."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax import plot
from specjax.engine.metrics import Totals
from specjax.engine.sink import naming

__all__ = ["write_report"]

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td { padding: .2rem 1rem .2rem 0; vertical-align: top; }
figure { margin: 2rem 0; } svg { width: 100%; height: auto; }
"""


def write_report(
    path: Path,
    title: str,
    summary: Mapping[str, str],
    totals: Totals,
    seconds: Sequence[float],
    tokens: Sequence[int],
    widths: Sequence[int],
) -> None:
    """Writes the page: one file, which needs nothing from elsewhere.

    Args:
      path: where.
      title: what was done; may hold anything, it is escaped.
      summary: figures by name.
      totals: the counts.
      seconds: [N] times of readings.
      tokens: [N] tokens decoded by then.
      widths: [N] K at that time.

    Raises:
      OSError: it can't be written.
    """
    kept = totals.accepted_per_position
    at_least = [totals.row_steps, *kept]
    histogram = [a - b for a, b in zip(at_least, [*kept, 0], strict=True)]
    figures: dict[str, Callable[[Any], None]] = {}
    if len(seconds) >= 2:
        figures["Tokens a second"] = lambda axis: plot.throughput(axis, seconds, tokens)
        figures["K, chosen while running"] = lambda axis: plot.drafted_tokens(axis, seconds, widths)
    if totals.drafts:
        shares = [count / totals.drafts for count in kept]
        figures["Drafted tokens kept, by their place"] = lambda axis: plot.acceptance_by_position(
            axis, shares
        )
        figures["Steps by drafted tokens kept"] = lambda axis: plot.acceptance_histogram(axis, histogram)
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
        for name, value in summary.items()
    )
    pictures = "".join(
        f"<figure><figcaption>{html.escape(name)}</figcaption>{plot.svg(draw)}</figure>"
        for name, draw in figures.items()
    )
    with naming(path):
        path.write_text(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f"<style>{STYLE}</style><h1>{html.escape(title)}</h1><table>{rows}</table>{pictures}</html>\n",
            encoding="utf-8",
            errors="backslashreplace",  # a path need not be text
        )
