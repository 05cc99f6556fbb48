"""How many tokens to draft: chosen while the job runs, by what was accepted and what a step costs.

Looks only at the past, so the law of the output is untouched: a draft's length never depends on the
tokens that will be drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["Chooser"]

PRIOR = 0.4
"""What the acceptance of a token is taken for before any was seen, as if from so many steps:"""
PRIOR_STEPS = 8
FORGET = 2000
"""Steps of rows after which what was seen of the job counts half."""
SMOOTH = 0.2
"""Weight of the newest measurement of a step's time."""
FIRST_PROBE, LAST_PROBE = 16, 256
"""Runs between two looks at the second-best choice; twice as many after each that changed nothing."""


class Chooser:
    """Picks K for the next run: the most tokens in the least time, over the rows as they are.

    A row's chance to get at least i drafted tokens accepted in a step is estimated from its own steps,
    drawn toward the whole job's where it has few. The steps that found nothing to draft count as well,
    so a lookup that seldom matches is worth little. With s(K) the measured seconds of a step,

        K = argmax_k  sum_rows (1 + sum_{i <= k} P(accepted >= i)) / s(k).

    Args:
      widths: the K that there is a program for, 0 among them, in rising order.
      slots: B.
    """

    def __init__(self, widths: Sequence[int], slots: int) -> None:
        if list(widths) != sorted(set(widths)) or widths[0] != 0:
            raise ValueError(f"widths must rise from 0, not {list(widths)}")
        self.widths = tuple(widths)
        self.seconds: dict[int, float] = {}
        # Steps taken with a width of at least i, and those that kept at least i; of rows, and of the job.
        self._tried = np.zeros((slots, self.widths[-1]))
        self._kept = np.zeros((slots, self.widths[-1]))
        self._job_tried = np.zeros(self.widths[-1])
        self._job_kept = np.zeros(self.widths[-1])
        self._best = 0
        self._until_probe = self._interval = FIRST_PROBE

    def forget_row(self, slot: int) -> None:
        """Another request came into the slot."""
        self._tried[slot] = self._kept[slot] = 0

    def see(self, width: int, kept_at_least: np.ndarray, steps: np.ndarray) -> None:
        """Counts what a run did.

        Args:
          width: its K.
          kept_at_least: [B, K_max], steps of each row that kept at least 1, 2, .. drafted tokens.
          steps: [B], the steps in which each row was live.
        """
        if not width:
            return
        tried = np.where(np.arange(self.widths[-1]) < width, steps[:, None], 0)
        self._tried += tried
        self._kept += kept_at_least
        fade = 0.5 ** (steps.sum() / FORGET)
        self._job_tried = self._job_tried * fade + tried.sum(axis=0)
        self._job_kept = self._job_kept * fade + kept_at_least.sum(axis=0)

    def time(self, width: int, seconds: float) -> None:
        """Takes note of the seconds that a step of this width took."""
        before = self.seconds.get(width, seconds)
        # A machine that was asleep makes no K slow: that would be believed for as long as K isn't chosen.
        self.seconds[width] = before + SMOOTH * (min(seconds, 2 * before) - before)

    def chances(self, live: np.ndarray) -> np.ndarray:
        """The estimated P(accepted >= i) of the live rows ([B] bool), [rows, K_max]."""
        job = np.zeros(self.widths[-1])
        reached, step = 1.0, PRIOR
        for i in range(len(job)):
            # Of what has never been tried, the ratio to the position before is taken to go on.
            prior = reached * step
            job[i] = (self._job_kept[i] + PRIOR_STEPS * prior) / (self._job_tried[i] + PRIOR_STEPS)
            step, reached = min(job[i] / max(reached, 1e-9), 1.0), job[i]
        return (self._kept[live] + PRIOR_STEPS * job) / (self._tried[live] + PRIOR_STEPS)

    def rates(self, live: np.ndarray) -> dict[int, float]:
        """Expected tokens a second of each width."""
        gains = np.cumsum(self.chances(live), axis=1).sum(axis=0)
        count = int(live.sum())
        return {
            width: (count + (gains[width - 1] if width else 0.0)) / self.seconds[width]
            for width in self.widths
        }

    def choose(self, live: np.ndarray) -> int:
        """K for the next run over the live rows, [B] bool; now and then the second-best, to look again."""
        rates = self.rates(live)
        ranked = sorted(self.widths, key=rates.__getitem__, reverse=True)
        if ranked[0] != self._best:
            self._best, self._interval = ranked[0], FIRST_PROBE
            self._until_probe = self._interval
        self._until_probe -= 1
        if self._until_probe > 0 or len(ranked) == 1:
            return ranked[0]
        self._interval = min(2 * self._interval, LAST_PROBE)
        self._until_probe = self._interval
        return ranked[1]
