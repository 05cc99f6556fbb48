"""Ten steps equal five, killed, resumed, five: bit for bit, data order included."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from specjax.distill.batches import Batches
from specjax.distill.checkpoints import CheckpointMismatch, Checkpoints
from specjax.distill.fit import Plan, fit
from specjax.distill.train import Metrics, Schedule, TrainState, init_state, make_optimizer


class Rows:
    """Sequences that only bear their number."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        row = np.full(4, index, np.int32)
        return {
            "tokens": row,
            "features": np.full((4, 2), index, np.float32),
            "log_normalizer": row.astype(np.float32),
            "labels": row,
            "best": row,
            "mask": np.ones(4, bool),
            "lengths": np.array(4, np.int32),
        }


OPTIMIZER = make_optimizer(Schedule(10, 0.1, 2))


def fresh(width=3):
    return init_state({"kernel": jnp.ones((2, width)) / 3}, OPTIMIZER)


@jax.jit
def step(state, batch, frozen):
    """A model so small that its whole training is quick, with Adam's state and a rate that falls."""

    def loss(params):
        return jnp.sum(jnp.square(batch.features[0].mean(axis=1) @ params["kernel"] - frozen))

    value, grads = jax.value_and_grad(loss)(state.params)
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.params)
    metrics = Metrics(value, value[None], jnp.float32(4), optax.tree.norm(grads))
    return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), metrics


def run(folder, steps, stop_at=None, number=signal.SIGTERM):
    """Trains; ``stop_at`` sends a signal in the middle of that step."""

    def counted(state, batch, frozen):
        if int(state.step) + 1 == stop_at:
            os.kill(os.getpid(), number)
        return step(state, batch, frozen)

    checkpoints = Checkpoints(str(folder / "checkpoints"))
    result = fit(
        fresh(),
        jnp.ones((4, 3)),
        Batches(Rows(), batch=4, seed=5),
        checkpoints,
        counted,
        Plan(steps, log_every=1, evaluate_every=100, save_every=4),
        evaluate=lambda state: {"score": float(state.step)},
        log=folder / "metrics.jsonl",
        say=lambda line: None,
    )
    checkpoints.close()
    return result


def lines(folder):
    """The metrics of every step, without what time it took."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ten_steps_are_five_stopped_resumed_five(tmp_path, number):
    whole, finished = run(tmp_path / "whole", 10)
    assert finished
    _, finished = run(tmp_path / "parts", 10, stop_at=5, number=number)
    assert not finished
    parts, finished = run(tmp_path / "parts", 10)
    assert finished
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    # Loss and gradient of each step tell the order of the data too: every batch has other rows.
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert len({loss for _, loss, _ in lines(tmp_path / "whole")}) == 10


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {here!r}]
import test_resume

def killed(*arguments, **options):
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)

import specjax.distill.checkpoints as checkpoints
save = checkpoints.Checkpoints.save
def save_and_die(self, step, state, place, score=None):
    save(self, step, state, place, score)
    if step == 8:  # on its way to the disk
        killed()
    self.wait()
checkpoints.Checkpoints.save = save_and_die
test_resume.run(Path({folder!r}), 10)
"""


def test_killed_during_a_save_the_last_whole_one_is_taken(tmp_path):
    here = Path(__file__)
    program = KILLED.format(
        tests=str(here.parent.parent), here=str(here.parent), folder=str(tmp_path / "killed")
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    # What a kill leaves behind, whenever it came: a folder that isn't whole must not be taken for one.
    (tmp_path / "killed" / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()
    whole = {folder.name for folder in (tmp_path / "killed" / "checkpoints").glob("*[0-9]")}
    assert "4" in whole
    assert max(map(int, whole)) in (4, 8)  # 8 if it was faster than the kill
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 9, "lo')
    resumed, _ = run(tmp_path / "killed", 10)
    undisturbed, _ = run(tmp_path / "whole", 10)
    jax.tree.map(np.testing.assert_array_equal, resumed, undisturbed)
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")


def test_saved_on_eight_devices_loaded_on_one_and_two(tmp_path):
    def put(count):
        mesh = jax.make_mesh(
            (count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:count]
        )
        state = fresh(8)
        parted = {"kernel": NamedSharding(mesh, PartitionSpec(None, "data"))}
        everywhere = NamedSharding(mesh, PartitionSpec())
        return TrainState(
            jax.device_put(state.params, parted), *jax.device_put((state.opt_state, state.step), everywhere)
        )

    checkpoints = Checkpoints(str(tmp_path))
    state = put(8)
    checkpoints.save(3, state, {"next_index": 3})
    checkpoints.wait()
    for count in (1, 2):
        loaded, place = checkpoints.load(3, put(count))
        jax.tree.map(np.testing.assert_array_equal, loaded, jax.device_get(state))
        assert len(loaded.params["kernel"].sharding.device_set) == count
        assert place == {"next_index": 3}
    checkpoints.close()


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    for number, score in enumerate([0.1, 0.9, 0.3, 0.2, None], 1):
        checkpoints.save(number, fresh(), {"next_index": number}, score)
    checkpoints.wait()
    assert checkpoints.latest() == 5
    assert checkpoints.best() == 2
    kept = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    assert kept == [2, 4, 5]
    checkpoints.close()


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (lambda: fresh(4), "params/kernel"),
        (lambda: init_state({"weight": jnp.ones((2, 3))}, OPTIMIZER), "weight|kernel"),
        (lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16), fresh()), "float32"),
    ],
)
def test_a_checkpoint_of_another_draft_is_refused_by_name(tmp_path, other, complaint):
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, fresh(), {"next_index": 1})
    checkpoints.wait()
    with pytest.raises(CheckpointMismatch, match=complaint):
        checkpoints.load(1, other())
    checkpoints.close()


FULL = """
import resource, signal, sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {here!r}]
import test_resume
from specjax.distill.checkpoints import CheckpointNotWritten, Checkpoints

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
save = Checkpoints.save
def save_where_nothing_fits(self, step, state, place, score=None):
    if step == 8:
        self.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    save(self, step, state, place, score)
    if step == 8:
        self.wait()
Checkpoints.save = save_where_nothing_fits
try:
    test_resume.run(Path({folder!r}), 10)
except CheckpointNotWritten as error:
    print(error, file=sys.stderr)
    sys.exit(7)
"""


def test_a_full_disk_ends_the_training_and_leaves_the_last_whole_checkpoint(tmp_path):
    here = Path(__file__)
    program = FULL.format(tests=str(here.parent.parent), here=str(here.parent), folder=str(tmp_path / "full"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 7, done.stderr
    reason = "a checkpoint couldn't be written: File too large; the last whole one stays"
    assert sum(line.endswith(reason) for line in done.stderr.splitlines()) == 1
    resumed, _ = run(tmp_path / "full", 10)
    undisturbed, _ = run(tmp_path / "whole", 10)
    jax.tree.map(np.testing.assert_array_equal, resumed, undisturbed)
    assert lines(tmp_path / "full") == lines(tmp_path / "whole")
