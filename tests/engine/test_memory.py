"""The arithmetic of a job's memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import tables

from specjax.drafters import LookupDrafter, ModelDrafter
from specjax.engine.memory import available_bytes, plan_memory
from specjax.engine.slots import batch_axes, empty_slots
from specjax.models.config import ModelConfig
from specjax.models.functional import abstract_model

TINY = ModelConfig(
    vocab_size=50, num_layers=2, width=16, num_heads=4, num_kv_heads=2, head_dim=4, mlp_width=24
)


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
def test_the_plan_is_what_the_device_will_hold(scan_layers, drafted):
    model, params = abstract_model(TINY.__class__(**{**vars(TINY), "scan_layers": scan_layers}))
    drafter = ModelDrafter(model, 3) if drafted else LookupDrafter(3)
    plan = plan_memory(model, params, drafter, slots=5, capacity=64, available=None)
    held = jax.eval_shape(lambda: empty_slots(model, drafter, 5, 64, 3)).state
    caches = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((held.target_cache, held.draft_state)))
    assert plan.row == caches / 5
    assert plan.weights == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    one = jax.tree.leaves(jax.eval_shape(lambda: model.init_cache(1, 64)))
    assert plan.score == sum(x.size * x.dtype.itemsize for x in one)
    assert plan.total == plan.weights + 9 * plan.row + 5 * plan.step + plan.score
    assert plan.fits  # nobody knows better
    axes = batch_axes(model, drafter, 64)
    assert {x.shape[axis] for x, axis in zip(jax.tree.leaves(held)[-len(axes) :], axes, strict=True)} == {5}


def test_as_many_slots_are_taken_as_fit():
    model, params = tables.TableModel(50), jnp.zeros((50, 50, 50))
    one = plan_memory(model, params, None, slots=1, capacity=64, available=None)
    assert plan_memory(model, params, None, slots=None, capacity=64, available=10**12).slots == 16
    for slots in (1, 2, 4, 8):
        enough = plan_memory(model, params, None, slots=slots, capacity=64, available=None).total
        available = int(enough / 0.9) + 100
        plan = plan_memory(model, params, None, slots=None, capacity=64, available=available)
        assert plan.slots == slots
        assert plan.fits
    too_little = plan_memory(model, params, None, slots=None, capacity=64, available=one.total)
    assert not too_little.fits
    assert "weights 0.5 MB + (1 slots + 1 being read)" in str(too_little)
    assert "90% of" in str(too_little)


def test_this_machine_has_some_memory():
    params = jnp.zeros(1000)
    available = available_bytes(params)
    assert available is None or available > 10**8
