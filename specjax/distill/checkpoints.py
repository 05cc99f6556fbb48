"""Checkpoints of a training: the last few and the best, each whole or not there.

Orbax writes a checkpoint beside its name and renames it, so one that was killed on the way is never seen.
With the state goes the place of the data iterator: what is resumed goes on to the bit.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from specjax.distill.train import TrainState

__all__ = ["CheckpointMismatch", "CheckpointNotWritten", "Checkpoints"]

_METRIC = "score"


class CheckpointMismatch(ValueError):
    """A checkpoint holds other arrays than the training that wants to resume it; says which."""


class CheckpointNotWritten(OSError):
    """A checkpoint didn't get to the disk; says why. Those before it are whole."""


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """A folder of checkpoints.

    Args:
      folder: made if it isn't there.
      keep: how many of the newest stay, besides the best.
    """

    folder: str
    keep: int = 2

    def __post_init__(self) -> None:
        policies = ocp.training.preservation_policies
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics[_METRIC], n=1, keep_checkpoints_without_metrics=False
        )
        checkpointer = ocp.training.Checkpointer(
            os.path.abspath(self.folder),
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(self.keep), best]),
            cleanup_tmp_directories=True,
        )
        object.__setattr__(self, "_checkpointer", checkpointer)

    def latest(self) -> int | None:
        """The newest whole checkpoint's step; None where there is none."""
        newest = self._orbax.latest
        return None if newest is None else newest.step

    def best(self) -> int | None:
        """The step with the highest score among those kept."""
        scored = [c for c in self._orbax.checkpoints if c.metrics and _METRIC in c.metrics]
        return max(scored, key=lambda c: c.metrics[_METRIC]).step if scored else None

    def save(self, step: int, state: TrainState, place: dict[str, Any], score: float | None = None) -> None:
        """Starts saving, and returns; the arrays may be donated at once.

        Args:
          step: the steps done.
          state: what a step changes.
          place: where the data iterator stands, as JSON.
          score: higher is better; the best one is kept.

        Raises:
          CheckpointNotWritten: the save before this one failed, or this one can't begin.
        """
        if self.latest() == step:
            return
        with self._blamed():
            self._orbax.save_checkpointables_async(
                step,
                {"state": state, "place": place},
                force=True,  # when to save is the loop's to decide
                metrics=None if score is None else {_METRIC: score},
            )

    def wait(self) -> None:
        """Until what is being saved is whole; raises CheckpointNotWritten where it won't be."""
        with self._blamed():
            self._orbax.wait()

    def close(self) -> None:
        """Waits, and lets the folder go."""
        with self._blamed():
            self._orbax.close()

    def load(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Reads a checkpoint into arrays of the shapes, dtypes and shardings of ``like``.

        Raises:
          CheckpointMismatch: it holds other arrays.
        """
        saved = self._orbax.checkpointables_metadata(step).metadata["state"]
        _compare(step, like, saved)
        loaded = self._orbax.load_checkpointables(
            step, {"state": jax.tree.map(_abstract, like), "place": None}
        )
        return loaded["state"], loaded["place"]

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Whatever the libraries raise when a disk is full or may not be written."""
        try:
            yield
        except Exception as error:
            # TensorStore's message is the reason between a path and a page of its own settings.
            reason = str(error).partition(" [")[0].rpartition(": ")[2] or type(error).__name__
            raise CheckpointNotWritten(
                f"{self.folder}: a checkpoint couldn't be written: {reason}; the last whole one stays"
            ) from error

    @property
    def _orbax(self) -> Any:
        return self.__dict__["_checkpointer"]


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _compare(step: int, like: TrainState, saved: Any) -> None:
    """Orbax casts in silence; a checkpoint of another width, depth or dtype is refused by name."""
    found = {_name(path): (tuple(x.shape), str(x.dtype)) for path, x in jax.tree.leaves_with_path(saved)}
    wanted = {_name(path): (tuple(x.shape), str(x.dtype)) for path, x in jax.tree.leaves_with_path(like)}
    for name in sorted(found.keys() ^ wanted.keys()):
        where = "the checkpoint lacks" if name in wanted else "only the checkpoint has"
        raise CheckpointMismatch(f"step {step}: {where} {name}; it is of another draft")
    for name, value in wanted.items():
        if found[name] != value:
            raise CheckpointMismatch(
                f"step {step}: {name} is {found[name]} in the checkpoint, not {value}: it is of another draft"
            )


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
