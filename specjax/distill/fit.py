"""The loop around the step: reading, logging, evaluating, saving, and stopping when told to."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
import optax

from specjax.distill.batches import Batches
from specjax.distill.checkpoints import Checkpoints
from specjax.distill.train import Metrics, Objective, Student, TrainState, train_step
from specjax.types import Params

__all__ = ["Plan", "fit", "make_step"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """When what is done."""

    steps: int
    log_every: int = 10
    evaluate_every: int = 200
    save_every: int = 200


def make_step(
    student: Student, objective: Objective, optimizer: optax.GradientTransformation, **shardings: Any
) -> Callable[[TrainState, Any, Params], tuple[TrainState, Metrics]]:
    """The jitted step, its state donated; ``shardings`` go to ``jax.jit`` (in_shardings, out_shardings)."""
    step = partial(train_step, student=student, objective=objective, optimizer=optimizer)
    return jax.jit(step, donate_argnums=0, **shardings)


def fit(
    state: TrainState,
    frozen: Params,
    batches: Batches,
    checkpoints: Checkpoints,
    step: Callable[[TrainState, Any, Params], tuple[TrainState, Metrics]],
    plan: Plan,
    *,
    evaluate: Callable[[TrainState], dict[str, float]],
    log: Path,
    say: Callable[[str], None] = print,
    also: Callable[[dict[str, Any]], None] = lambda figures: None,
    place_batch: Callable[[Any], Any] = lambda batch: batch,
) -> tuple[TrainState, bool]:
    """Trains to the plan's end, from the newest checkpoint if there is one.

    Args:
      state: a fresh one, of the right shapes and shardings; consumed.
      frozen: see :func:`specjax.distill.train.train_step`.
      batches: where the data comes from; it is moved to the checkpoint's place.
      checkpoints: where the state goes.
      step: from :func:`make_step`.
      plan: when what is done.
      evaluate: figures of a state, among them ``score``: higher is better, and the best is kept.
      log: a JSONL file that lines of metrics are appended to.
      say: told about progress, one line at a time.
      also: given each line of metrics as it is written.
      place_batch: puts a batch where the step wants it.

    Returns:
      The last state, and whether the plan's end was reached: SIGTERM or Ctrl-C saves and ends early.
    """
    newest = checkpoints.latest()
    if newest is not None:
        state, place = checkpoints.load(newest, state)
        batches.go_to(place)
        say(f"resumed at step {newest}")
    done = int(state.step)
    _cut_log(log, done)
    begin, first, seen = time.perf_counter(), done, 0.0
    with _told_to_stop() as stopping, log.open("a", encoding="utf-8") as lines:

        def write(figures: dict[str, Any]) -> None:
            lines.write(json.dumps(figures) + "\n")
            lines.flush()
            also(figures)

        score = None
        while done < plan.steps and not stopping():
            state, metrics = step(state, place_batch(next(batches)), frozen)
            done += 1
            score = None
            seen += float(metrics.positions)  # waits for the step: one at a time is in flight
            if done % plan.log_every == 0 or done == plan.steps:
                pace = (time.perf_counter() - begin) / (done - first)
                write(_figures(done, metrics) | {"seconds_a_step": pace, "positions_since_start": seen})
                left = (plan.steps - done) * pace / 60
                say(
                    f"step {done} of {plan.steps}: loss {float(metrics.loss):.3f}, acceptance "
                    f"{' '.join(f'{x:.3f}' for x in np.asarray(metrics.acceptance))}, "
                    f"{seen / (time.perf_counter() - begin):.0f} positions/s, {left:.0f} min left"
                )
            if done % plan.evaluate_every == 0 or done == plan.steps:
                figures = evaluate(state)
                score = figures.get("score")
                write({"step": done, "held_out": figures})
                say(f"step {done}, held out: {', '.join(f'{k} {v:.3f}' for k, v in figures.items())}")
            if done % plan.save_every == 0 or score is not None:
                checkpoints.save(done, state, batches.place(), score)
        if done > first:
            checkpoints.save(done, state, batches.place(), score)
    checkpoints.wait()
    return state, done >= plan.steps


def _figures(step: int, metrics: Metrics) -> dict[str, Any]:
    values = {name: np.asarray(x).tolist() for name, x in vars(metrics).items()}
    return {"step": step, **values}


def _cut_log(log: Path, step: int) -> None:
    """Leaves out what a run wrote that was killed after its last checkpoint, and a torn last line."""
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    beside = log.with_name(log.name + ".unfinished")
    beside.write_text("".join(kept), encoding="utf-8")
    beside.replace(log)


@contextmanager
def _told_to_stop() -> Iterator[Callable[[], bool]]:
    """Says whether SIGTERM or Ctrl-C came; the step that runs is finished first. A second Ctrl-C ends it."""
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if told and number == signal.SIGINT:
            raise KeyboardInterrupt
        told.append(number)

    before = {kind: signal.signal(kind, note) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(told)
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
