"""The batch engine on a mesh: rows that come and go, spread over devices, are what they are on one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.drafters import EitherDrafter, LookupDrafter, ModelDrafter
from specjax.engine.engine import Engine
from specjax.engine.memory import plan_memory
from specjax.engine.work import Work
from specjax.models import ModelConfig, Transformer, to_model
from specjax.parallel.sharding import make_placement

V, CAPACITY = 104, 64


def made(mesh: str | None, slots: int, draft_ways: int | None = None) -> Engine:
    config = ModelConfig(V, 1, 32, 16, 8, 4, 64, qk_norm=True)
    target, target_params = to_model(Transformer(config, nnx.Rngs(0)))
    draft, draft_params = target, jax.tree.map(lambda x: x + 0.1 * jnp.sign(jnp.sin(1e3 * x)), target_params)
    placement = None if mesh is None else make_placement(mesh, draft_ways)
    if placement is not None:
        target, target_params = placement.target.lay(target, target_params)
        draft, draft_params = placement.draft.lay(draft, draft_params)
    return Engine(
        target,
        target_params,
        drafters=[EitherDrafter(LookupDrafter(2), ModelDrafter(draft, 2))],
        draft_params=draft_params,
        slots=slots,
        capacity=CAPACITY,
        adaptive=False,  # this machine's times decide nothing
        max_logprobs=2,
        placement=placement,
    )


def mixed_work(count: int = 14) -> list[Work]:
    rng = np.random.default_rng(0)
    options = [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}, {"presence_penalty": 0.5}]
    return [
        Work(
            tuple(rng.integers(0, V, rng.integers(1, 30)).tolist()),
            int(rng.integers(1, 20)),
            options[i % 4] | {"seed": i},
            num_logprobs=2 if i == 3 else None,
            tag=i,
        )
        for i in range(count)
    ]


@functools.cache
def alone():
    return {result.work.tag: result for result in made(None, 4).run(mixed_work())}


def lie(engine: Engine) -> list:
    state = engine._slots.state
    return [x.sharding for x in jax.tree.leaves((state, engine._lane.caches))]


# Slots that the devices divide, and that they don't; more devices than slots.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "slots", "draft_ways"),
    [("data=2,model=4", 4, 1), ("data=4,model=2", 5, None), ("model=8", 3, 2)],
)
def test_the_answers_do_not_depend_on_the_mesh(mesh, slots, draft_ways):
    engine = made(mesh, slots, draft_ways)
    laid = lie(engine)
    results = {result.work.tag: result for result in engine.run(mixed_work())}
    assert lie(engine) == laid  # and no program brought anything to every device
    assert results.keys() == alone().keys()
    for tag, result in results.items():
        assert result.tokens == alone()[tag].tokens
        assert result.finish == alone()[tag].finish
    assert sum(result.num_accepted_tokens for result in results.values()) > 0
    for one, other in zip(
        jax.tree.leaves(results[3].logprobs), jax.tree.leaves(alone()[3].logprobs), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_no_device_holds_more_than_its_part():
    engine = made("data=2,model=4", 4)
    state = engine._slots.state
    held = jax.tree.leaves((state.target_cache, state.draft_state, engine._lane.caches))
    caches = [buffer for buffer in held if buffer.ndim == 4]
    assert len(caches) == 2 * 2 * 3  # keys and values of target and draft, in slots and a lane of two pairs
    for buffer in caches:
        assert all(part.data.size == buffer.size // 8 for part in buffer.addressable_shards)
    placement, params = engine._programs._placement, engine._programs._params
    drafter = engine._widest
    plan = plan_memory(
        engine._programs._target,
        params,
        drafter,
        slots=4,
        capacity=CAPACITY,
        available=None,
        placement=placement,
    )
    (device,) = {placement.target.mesh.devices.flat[0]}
    held = sum(
        part.data.nbytes
        for x in jax.tree.leaves((state.target_cache, state.draft_state, engine._lane.caches, params))
        for part in x.addressable_shards
        if part.device == device
    )
    assert plan.weights + 4 * plan.row == held
