"""Figures, as functions that take data and an axis (the extra ``notebooks``).

They draw NumPy arrays or plain lists and compute nothing of their own but heights and places; colours follow
the axis's background. :mod:`specjax.plot.position` shows the rule at one position, :mod:`specjax.plot.curves`
what follows over many, :mod:`specjax.plot.reports` what a job did.
"""

from specjax.plot.curves import expected_and_measured, lines, speedups
from specjax.plot.position import (
    acceptance_rule,
    counts_by_token,
    distributions,
    over_and_under,
    rescaled,
    stacked,
    whole_step,
)
from specjax.plot.reports import (
    acceptance_by_position,
    acceptance_histogram,
    drafted_tokens,
    planned_throughput,
    throughput,
)
from specjax.plot.sliders import sliders
from specjax.plot.style import Palette, palette, save, style, svg
from specjax.plot.training import learning_curves

__all__ = [
    "Palette",
    "acceptance_by_position",
    "acceptance_histogram",
    "acceptance_rule",
    "counts_by_token",
    "distributions",
    "drafted_tokens",
    "expected_and_measured",
    "learning_curves",
    "lines",
    "over_and_under",
    "palette",
    "planned_throughput",
    "rescaled",
    "save",
    "sliders",
    "speedups",
    "stacked",
    "style",
    "svg",
    "throughput",
    "whole_step",
]
