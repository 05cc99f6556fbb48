"""How many tokens to draft: chosen while the job runs, by what was accepted and what a step costs.

Looks only at the past, so the law of the output is untouched: a draft's length never depends on the
tokens that will be drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["MIN_STEPS", "Chooser"]

PRIOR = 0.3
"""What the acceptance of a token is taken for before any was seen; of the job, as if from so many steps:"""
JOB_STEPS = 4
ROW_STEPS = 8
"""A row's own steps count as much as the job's when there are so many."""
SURE = 64
"""Steps of rows after which a width is known well enough to be run for long."""
MIN_STEPS = 8
"""Steps of the shortest run, such as one that looks at a width."""
FORGET = 2000
"""Steps of rows after which what was seen of the job counts half."""
SMOOTH = 0.2
"""Weight of the newest measurement of a step's time."""
LEAST_MORE = 1.02
"""What a step costs at least beside a narrower one."""
PROBE_SHARE = 0.004
"""Of the time, what may be lost by looking at the second-best choice again."""
LEAST_LOSS = 0.25
"""Steps that a look counts as lost at least, so that two choices that are alike don't take turns."""


class Chooser:
    """Picks K for the next run: the most tokens in the least time, over the rows as they are.

    A row's chance to get at least i drafted tokens accepted in a step is estimated from its own steps,
    drawn toward the whole job's where it has few. The steps that found nothing to draft count as well,
    so a lookup that seldom matches is worth little. With s(K) the measured seconds of a step,

        K = argmax_k  sum_rows (1 + sum_{i <= k} P(accepted >= i)) / s(k).

    A wider step is always taken to cost a little more than a narrower one, whatever the clock said.

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
        self._timed: int | None = None  # the width that was timed last
        self._spent, self._lost = 0.0, 0.0  # seconds of decoding, and of these lost by looking
        self.is_sure = True  # whether the last choice is one to run for long

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
        self._spent += float(steps.max(initial=0)) * self.seconds.get(width, 0.0)
        if not width:
            return
        tried = np.where(np.arange(self.widths[-1]) < width, steps[:, None], 0)
        self._tried += tried
        self._kept += kept_at_least
        fade = 0.5 ** (steps.sum() / FORGET)
        self._job_tried = self._job_tried * fade + tried.sum(axis=0)
        self._job_kept = self._job_kept * fade + kept_at_least.sum(axis=0)

    def warm(self, width: int, seconds: float) -> None:
        """Takes the least of what a step took before the job: whatever disturbs one makes it slower."""
        self.seconds[width] = min(seconds, self.seconds.get(width, seconds))

    def time(self, width: int, seconds: float) -> None:
        """Takes note of the seconds that a step of this width took.

        A machine that becomes slower does so for every width, and longer texts cost each of them: a change
        from run to run of one width moves all. What a width costs beside the others shows where it follows
        another.
        """
        before = self.seconds.setdefault(width, seconds)
        # A machine that was asleep makes no K slow: that would be believed for as long as K isn't chosen.
        change = 1 + SMOOTH * (min(seconds / before, 2) - 1)
        for moved in self.seconds if self._timed in (None, width) else (width,):
            self.seconds[moved] *= change
        self._timed = width

    def chances(self, live: np.ndarray) -> np.ndarray:
        """The estimated P(accepted >= i) of the live rows ([B] bool), [rows, K_max]."""
        job = np.zeros(self.widths[-1])
        reached, step = 1.0, PRIOR
        for i in range(len(job)):
            # Of what has never been tried, the ratio to the position before is taken to go on.
            prior = reached * step
            job[i] = (self._job_kept[i] + JOB_STEPS * prior) / (self._job_tried[i] + JOB_STEPS)
            step, reached = min(job[i] / max(reached, 1e-9), 1.0), job[i]
        return (self._kept[live] + ROW_STEPS * job) / (self._tried[live] + ROW_STEPS)

    def rates(self, live: np.ndarray) -> dict[int, float]:
        """Expected tokens a second of each width."""
        gains = np.cumsum(self.chances(live), axis=1).sum(axis=0)
        count = int(live.sum())
        return {
            width: (count + (gains[width - 1] if width else 0.0)) / self._cost(width) for width in self.widths
        }

    def _cost(self, width: int) -> float:
        """The seconds of a step, more than those of a narrower one."""
        narrower = [self.seconds[other] for other in self.widths if other < width]
        return max([self.seconds[width], *(LEAST_MORE * seconds for seconds in narrower)])

    def choose(self, live: np.ndarray) -> int:
        """K for the next run over the live rows, [B] bool; now and then the second-best, to look again."""
        rates = self.rates(live)
        best, *others = sorted(self.widths, key=rates.__getitem__, reverse=True)
        self.is_sure = not best or bool(self._job_tried[best - 1] >= SURE)
        if not others:
            return best
        # The tokens that the best one would have made meanwhile, in its seconds.
        loss = self._cost(others[0]) * (1 - rates[others[0]] / rates[best])
        loss = MIN_STEPS * max(loss, LEAST_LOSS / MIN_STEPS * self._cost(best))
        if self._lost + loss > PROBE_SHARE * self._spent:
            return best
        self._lost += loss
        self.is_sure = False
        return others[0]
