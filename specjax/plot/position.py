"""The rule at one position, in bars: one place for each token of a small vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from specjax.plot.style import palette

__all__ = [
    "acceptance_rule",
    "counts_by_token",
    "distributions",
    "over_and_under",
    "rescaled",
    "stacked",
    "whole_step",
]

_WIDE, _NARROW = 0.72, 0.36
_HATCH = "///"


def distributions(axis: Axes, target: ArrayLike, draft: ArrayLike, tokens: Sequence[str]) -> None:
    """Draws target and draft side by side.

    Args:
      axis: to draw on.
      target: [V] probabilities.
      draft: [V] probabilities.
      tokens: V names.
    """
    colours, places = palette(axis), np.arange(len(tokens))
    axis.bar(places - _NARROW / 2, target, _NARROW, color=colours.target, label="target $p$")
    axis.bar(places + _NARROW / 2, draft, _NARROW, color=colours.draft, label="draft $q$", hatch=_HATCH)
    _finish(axis, tokens)


def over_and_under(axis: Axes, target: ArrayLike, draft: ArrayLike, tokens: Sequence[str]) -> None:
    """Draws where the draft overshoots the target and where it undershoots.

    Arguments are those of :func:`distributions`.
    """
    colours, places = palette(axis), np.arange(len(tokens))
    p, q = np.asarray(target, np.float64), np.asarray(draft, np.float64)
    both = np.minimum(p, q)
    axis.bar(places, both, _WIDE, color=colours.rejected, label=r"both, $\min(p, q)$")
    axis.bar(places, q - both, _WIDE, both, color=colours.draft, hatch=_HATCH, label="overshoots, $q - p$")
    axis.bar(places, p - both, _WIDE, both, color=colours.target, label="undershoots, $p - q$")
    _finish(axis, tokens)


def acceptance_rule(axis: Axes, draft: ArrayLike, accept_probs: ArrayLike, tokens: Sequence[str]) -> None:
    """Draws each draft bar, chopped where the rule's acceptance chops it.

    Args:
      axis: to draw on.
      draft: [V] probabilities.
      accept_probs: [V], what the uniform of each token is held against.
      tokens: V names.
    """
    colours, places = palette(axis), np.arange(len(tokens))
    q, accept = np.asarray(draft, np.float64), np.asarray(accept_probs, np.float64)
    axis.bar(places, q * accept, _WIDE, color=colours.accepted, label=r"accepted, $q\,\min(1, p/q)$")
    axis.bar(
        places,
        q * (1 - accept),
        _WIDE,
        q * accept,
        color=colours.rejected,
        hatch=_HATCH,
        label="rejected",
    )
    for place, height, chance in zip(places, q, accept, strict=True):
        axis.annotate(
            f"{chance:.0%}", (place, height), (0, 3), textcoords="offset points", ha="center", fontsize=9
        )
    _finish(axis, tokens)


def rescaled(axis: Axes, leftover: ArrayLike, residual: ArrayLike, tokens: Sequence[str]) -> None:
    """Draws what the accepted bars still lack, beside the same scaled to a distribution.

    Args:
      axis: to draw on.
      leftover: [V], max(0, p - q).
      residual: [V], the same over its sum.
      tokens: V names.
    """
    colours, places = palette(axis), np.arange(len(tokens))
    axis.bar(
        places - _NARROW / 2, leftover, _NARROW, color=colours.target, label=r"lacking, $\max(0, p - q)$"
    )
    axis.bar(
        places + _NARROW / 2,
        residual,
        _NARROW,
        color=colours.resampled,
        hatch=_HATCH,
        label="residual, scaled to 1",
    )
    _finish(axis, tokens)


def stacked(
    axis: Axes,
    accepted: ArrayLike,
    resampled: ArrayLike,
    target: ArrayLike,
    tokens: Sequence[str],
    *,
    errors: ArrayLike | None = None,
    draft: ArrayLike | None = None,
) -> None:
    """Draws accepted and resampled bars on top of each other, under marks where the target is.

    Args:
      axis: to draw on.
      accepted: [V], the probability (or share of draws) of each token by acceptance.
      resampled: [V], the same by a draw after a rejection.
      target: [V] probabilities.
      tokens: V names.
      errors: [V], half the height of a bar of uncertainty around the target; None draws none.
      draft: [V] probabilities, drawn as outlines; None draws none.
    """
    colours, places = palette(axis), np.arange(len(tokens))
    low, high = np.asarray(accepted, np.float64), np.asarray(resampled, np.float64)
    axis.bar(places, low, _WIDE, color=colours.accepted, label="accepted")
    axis.bar(places, high, _WIDE, low, color=colours.resampled, hatch=_HATCH, label="resampled")
    if draft is not None:
        axis.bar(
            places,
            draft,
            _WIDE + 0.12,
            fill=False,
            edgecolor=colours.draft,
            linewidth=1.6,
            linestyle=(0, (3, 2)),
            label="draft $q$",
        )
    if errors is None:
        axis.hlines(
            np.asarray(target, np.float64),
            places - _WIDE / 2 - 0.08,
            places + _WIDE / 2 + 0.08,
            colors=colours.ink,
            linewidth=2.2,
            label="target $p$",
        )
    else:
        axis.errorbar(
            places,
            target,
            errors,
            fmt="_",
            color=colours.ink,
            markersize=14,
            markeredgewidth=1.6,
            capsize=4,
            label="target $p$, three standard errors",
        )
    _finish(axis, tokens)


def counts_by_token(
    axis: Axes, accepted: Sequence[int], resampled: Sequence[int], target: ArrayLike, tokens: Sequence[str]
) -> None:
    """Draws the shares of counted draws against the target, three standard errors around it.

    Args:
      axis: to draw on.
      accepted: V counts of tokens that were drafted and accepted.
      resampled: V counts of tokens drawn after a rejection.
      target: [V] probabilities.
      tokens: V names.
    """
    total = np.sum(accepted) + np.sum(resampled)
    p = np.asarray(target, np.float64)
    errors = 3 * np.sqrt(p * (1 - p) / total)
    stacked(axis, np.divide(accepted, total), np.divide(resampled, total), p, tokens, errors=errors)


def whole_step(axis: Axes, accepted: ArrayLike, resampled: ArrayLike, tokens: Sequence[str]) -> None:
    """Draws all that a step may do as one bar of length 1, each token's share in one piece.

    Args:
      axis: to draw on.
      accepted: [V], the probability of each token by acceptance.
      resampled: [V], the same by a draw after a rejection.
      tokens: V names.
    """
    colours, left, lower = palette(axis), 0.0, False
    low, high = np.asarray(accepted, np.float64), np.asarray(resampled, np.float64)
    sums = f"accepted, {low.sum():.0%} in all", f"resampled, {high.sum():.0%} in all"
    for i, token in enumerate(tokens):
        begin = left
        for share, colour, hatch, label in (
            (low[i], colours.accepted, None, sums[0]),
            (high[i], colours.resampled, _HATCH, sums[1]),
        ):
            if share > 0:
                axis.barh(
                    0,
                    share,
                    0.6,
                    left,
                    color=colour,
                    hatch=hatch,
                    label=label if label not in axis.get_legend_handles_labels()[1] else None,
                )
            left += share
        if left > begin:
            # Neighbours of a narrow piece have their names on another line.
            lower = left - begin < 0.08 and not lower
            place = ((begin + left) / 2, -0.75 if lower else -0.34)
            name = f"{token}\n{left - begin:.0%}"
            axis.annotate(name, place, ha="center", va="top", fontsize=9, parse_math=False)
            axis.vlines(left, -0.36, 0.36, colors=colours.ink, linewidth=1)
    axis.set(xlim=(0, max(1.0, left)), ylim=(-1.2, 0.4), yticks=[], xlabel="probability")
    axis.grid(visible=False)
    axis.spines["left"].set_visible(False)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def _finish(axis: Axes, tokens: Sequence[str]) -> None:
    axis.set_xticks(np.arange(len(tokens)), tokens, parse_math=False)  # a token may be "$x$"
    axis.tick_params(axis="x", length=0)
    axis.set(ylabel="probability")
    axis.use_sticky_edges = False  # a bar of no height would stop the axis right there
    axis.margins(y=0.08)
    axis.set_ylim(bottom=0)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)  # clear of the bars
