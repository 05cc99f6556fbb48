"""What a job did: speed over time, and what became of the drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import ArrayLike

from specjax.plot.curves import lines
from specjax.plot.style import palette

__all__ = [
    "acceptance_by_position",
    "acceptance_histogram",
    "drafted_tokens",
    "planned_throughput",
    "throughput",
]


def throughput(axis: Axes, seconds: ArrayLike, tokens: ArrayLike) -> None:
    """Draws tokens a second between readings of a clock and a counter, and the mean over all.

    Args:
      axis: to draw on.
      seconds: [N] since the start, rising; N at least 2.
      tokens: [N] decoded by then, never falling.

    Raises:
      ValueError: fewer than two readings, or a clock that stands still or runs backwards.
    """
    clock, count = np.asarray(seconds, np.float64), np.asarray(tokens, np.float64)
    if clock.shape != count.shape or clock.ndim != 1 or len(clock) < 2 or not np.all(np.diff(clock) > 0):
        raise ValueError("throughput needs two readings or more, with rising seconds")
    colours = palette(axis)
    rates = np.diff(count) / np.diff(clock)
    mean = (count[-1] - count[0]) / (clock[-1] - clock[0])
    axis.stairs(rates, clock, color=colours.target, fill=True, alpha=0.25)
    axis.stairs(rates, clock, color=colours.target, linewidth=1.6, baseline=None, label="tokens/s")
    axis.axhline(mean, color=colours.ink, linewidth=1.2, linestyle="--", label=f"mean, {mean:.4g}")
    axis.set(xlabel="seconds", ylabel="tokens/s", xlim=(clock[0], clock[-1]))
    axis.set_ylim(0, 1.25 * max(rates.max(), mean, 1e-9))  # room for the legend
    axis.legend(loc="upper right", ncols=2)


def acceptance_by_position(axis: Axes, shares: ArrayLike) -> None:
    """Draws how many of the tokens drafted at each place of a block were kept.

    Args:
      axis: to draw on.
      shares: [K] in [0, 1]; a NaN, where nothing was drafted, is left out.
    """
    heights = np.asarray(shares, np.float64)
    places = np.arange(1, len(heights) + 1)
    axis.bar(places, np.nan_to_num(heights), 0.7, color=palette(axis).accepted)
    if len(heights) <= 12:
        for place, height in zip(places, heights, strict=True):
            if not np.isnan(height):
                axis.annotate(
                    f"{height:.0%}", (place, height), (0, 3), textcoords="offset points", ha="center"
                )
    axis.set(xlabel="place in the draft", ylabel="kept", ylim=(0, 1.08))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.yaxis.set_major_formatter(PercentFormatter(1))


def acceptance_histogram(axis: Axes, steps: Sequence[int]) -> None:
    """Draws how many steps kept 0, 1, .. K drafted tokens.

    Args:
      axis: to draw on.
      steps: K + 1 counts, as :attr:`specjax.record.Generation.accepted`.
    """
    colours, counts = palette(axis), np.asarray(steps, np.int64)
    places = np.arange(len(counts))
    mean = float(counts @ places) / max(int(counts.sum()), 1)
    axis.bar(places, counts, 0.7, color=colours.accepted)
    axis.axvline(mean, color=colours.ink, linewidth=1.2, linestyle="--", label=f"mean, {mean:.2f}")
    axis.set(xlabel="drafted tokens kept in a step", ylabel="steps")
    axis.set_ylim(0, 1.2 * max(int(counts.max(initial=0)), 1))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(loc="upper right")


def drafted_tokens(axis: Axes, seconds: ArrayLike, num_draft_tokens: ArrayLike) -> None:
    """Draws the K that was chosen over time; each choice holds until the next.

    Args:
      axis: to draw on.
      seconds: [N] at which a choice was made, rising.
      num_draft_tokens: [N], the K chosen then; 0 is plain decoding.
    """
    colours = palette(axis)
    axis.step(seconds, num_draft_tokens, where="post", color=colours.target, linewidth=1.8)
    axis.set(xlabel="seconds", ylabel="K, drafted tokens a step")
    axis.set_ylim(-0.3, float(np.max(np.asarray(num_draft_tokens), initial=0)) + 0.7)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))


def planned_throughput(
    axis: Axes, acceptance: ArrayLike, rates: Mapping[str, ArrayLike], plain: Mapping[str, float]
) -> None:
    """Draws the tokens a second that are expected for each acceptance, over those of plain decoding.

    Args:
      axis: to draw on.
      acceptance: [N] in [0, 1].
      rates: names to tokens a second [N], five at most.
      plain: the same names to tokens a second of plain decoding, drawn dotted.
    """
    lines(axis, acceptance, rates)
    for name, colour in zip(rates, palette(axis).series, strict=False):
        axis.axhline(plain[name], color=colour, linewidth=1.2, linestyle=":")
    axis.set(xlabel="acceptance", ylabel="tokens/s (dotted: plain)")
    axis.set_ylim(bottom=0)
