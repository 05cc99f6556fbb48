"""What an engine counts."""

from __future__ import annotations

import dataclasses

import numpy as np

__all__ = ["Stats"]


@dataclasses.dataclass
class Stats:
    """What an engine has done since it was warmed up."""

    prompt_tokens: int = 0  # of the work that was admitted
    tokens_read: int = 0  # of these, the ones that were read: what they share with others isn't read again
    tokens: int = 0
    row_steps: int = 0
    drafts: int = 0  # row steps in which something was drafted
    drafted: int = 0
    # Steps of rows that kept at least 1, 2, .. drafted tokens, [K].
    accepted: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, int))
    steps: dict[int, int] = dataclasses.field(default_factory=dict)  # by width
    width: int = 0  # of the newest run
    visits: int = 0
    idle_seconds: float = 0.0  # from the end of a run to the next thing that the device was given
    live: int = 0  # rows being decoded
    taken: int = 0  # positions of the cache that they hold
    waiting: int = 0  # pieces of work known but not in a slot

    def add_run(
        self, width: int, num_steps: int, row_steps: np.ndarray, drafted: np.ndarray, at_least: np.ndarray
    ) -> None:
        """Counts a run.

        Args:
          width: its K.
          num_steps: the steps it took.
          row_steps: [B], the steps in which each row was live.
          drafted: [B, K+1], these steps by the number of tokens drafted.
          at_least: [B, K], those that kept at least 1, 2, .. of them.
        """
        self.visits += 1
        self.width = width
        self.steps[width] = self.steps.get(width, 0) + num_steps
        self.row_steps += int(row_steps.sum())
        self.drafts += int(drafted[:, 1:].sum())
        self.drafted += int((drafted @ np.arange(drafted.shape[1])).sum())
        self.accepted = self.accepted + at_least.sum(axis=0)
