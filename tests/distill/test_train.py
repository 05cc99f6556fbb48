"""The step: parts equal the whole, padding is nothing, one batch can be learnt by heart, any devices."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_target

from specjax.distill.checkpoints import Checkpoints
from specjax.distill.fit import make_step
from specjax.distill.spread import training_shardings
from specjax.distill.train import Objective, Schedule, init_state, make_optimizer
from specjax.generate import generate
from specjax.parallel.sharding import make_placement, put
from specjax.sampling import make_sampling

VOCABULARY = np.arange(48, dtype=np.int32)


@functools.cache
def a_batch():
    return tiny_target.batch_of(tiny_target.sequences(16, 33), VOCABULARY)


@functools.cache
def made(kind):
    return tiny_target.draft(kind, VOCABULARY)


@functools.cache
def plain_step(kind, **objective):
    """A step of plain gradient descent: what it changes is the gradient."""
    student, *_ = made(kind)
    return make_step(student, Objective(**objective), optax.sgd(1.0))


def gradient(kind, batch, **objective):
    """The gradient of a batch [A, B, ...], and the metrics."""
    _, trained, frozen, _ = made(kind)
    state, metrics = plain_step(kind, **objective)(init_state(trained, optax.sgd(1.0)), batch, frozen)
    return jax.tree.map(jnp.subtract, trained, state.params), metrics


def assert_close(a, b, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=atol), a, b)


@pytest.mark.parametrize("kind", ["head", "layers"])
def test_two_unequal_halves_equal_the_whole(kind):
    batch = a_batch()
    # The halves must not weigh the same: an average of averages would pass otherwise.
    shorter = jnp.arange(16)[:, None] < 8
    batch = dataclasses.replace(
        batch, mask=batch.mask & (shorter | (jnp.arange(batch.tokens.shape[1])[None] > 25))
    )
    whole, halves = (gradient(kind, tiny_target.in_parts(batch, parts)) for parts in (1, 2))
    assert_close(whole, halves)


def test_padding_is_nothing_whatever_stands_there():
    batch = a_batch()
    lengths = jnp.where(jnp.arange(16) % 2, 20, 33)
    live = jnp.arange(33)[None] < lengths[:, None]
    batch = dataclasses.replace(batch, lengths=lengths, mask=batch.mask & live & (jnp.arange(33) < 19)[None])
    clean = dataclasses.replace(batch, features=jnp.where(live[..., None], batch.features, 0))
    dirty = dataclasses.replace(
        batch,
        features=jnp.where(live[..., None], batch.features, jnp.nan),
        log_normalizer=jnp.where(batch.mask, batch.log_normalizer, jnp.nan),
        tokens=jnp.where(live, batch.tokens, 7),
    )
    results = [gradient("head", tiny_target.in_parts(b, 1)) for b in (clean, dirty)]
    assert_close(*results)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(results[1]))


def test_rematerialised_and_chunked_gradients_are_the_same():
    batch = tiny_target.in_parts(a_batch(), 1)
    assert_close(gradient("head", batch), gradient("head", batch, remat=True, chunk=7))


def test_one_batch_is_learnt_by_heart():
    student, trained, frozen, _ = made("head")
    optimizer = make_optimizer(Schedule(400, 1e-2, 10))
    step = make_step(student, Objective(), optimizer)
    state = init_state(trained, optimizer)
    batch = tiny_target.in_parts(jax.tree.map(lambda x: x[:4], a_batch()), 1)
    for _ in range(400):
        state, metrics = step(state, batch, frozen)
    assert float(metrics.acceptance.min()) > 0.99
    assert int(state.step) == 400


def test_eight_devices_do_what_one_does():
    # The step knows of no device: shardings stand at the edge. Two share the sequences, four the weights.
    placement = make_placement("data=2,model=4")
    student, trained, frozen, model = made("layers")
    batch = tiny_target.in_parts(a_batch(), 1)
    optimizer = optax.sgd(1.0)
    state = init_state(trained, optimizer)
    lie = training_shardings(placement, model, state, frozen, optimizer)
    step = make_step(student, Objective(), optimizer, out_shardings=(lie[0], placement.everywhere))
    state, metrics = step(put(state, lie[0]), put(batch, placement.parts_of_rows), put(frozen, lie[1]))
    kernel = state.params["blocks"][0]["mlp"]["down"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (32, 12)  # of 48
    assert len(kernel.sharding.device_set) == 8
    expected = gradient("layers", batch)
    assert_close((jax.tree.map(jnp.subtract, trained, jax.device_get(state.params)), metrics), expected)


@pytest.mark.parametrize("kind", ["head", "layers"])
def test_what_adam_keeps_lies_with_its_weight_and_is_loaded_on_one_device(kind, tmp_path):
    _, trained, frozen, model = made(kind)
    optimizer = make_optimizer(Schedule(10))
    fresh = init_state(trained, optimizer)
    state, _ = training_shardings(make_placement("data=2,model=4"), model, fresh, frozen, optimizer)
    spread = put(fresh, state)
    checkpoints = Checkpoints(str(tmp_path))
    checkpoints.save(1, spread, {"next_index": 0})
    checkpoints.wait()
    loaded, _ = checkpoints.load(1, fresh)
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, loaded, fresh)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(loaded)} == {1}
    adam = optax.tree.get(spread.opt_state, "mu"), optax.tree.get(spread.opt_state, "nu")
    for kept in adam:
        assert jax.tree.map(lambda x: x.sharding.spec, kept) == jax.tree.map(
            lambda x: x.sharding.spec, spread.params
        )
    # All but the norms and what joins state and token is spread.
    weights = [x for x in jax.tree.leaves(spread.params["blocks"]) if x.ndim > 1]
    assert not all(x.sharding.is_fully_replicated for x in weights)


def test_bfloat16_products_keep_float32_weights():
    grads, metrics = gradient("head", tiny_target.in_parts(a_batch(), 1), dtype="bfloat16")
    exact, expected = gradient("head", tiny_target.in_parts(a_batch(), 1))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(grads))
    np.testing.assert_allclose(metrics.loss, expected.loss, rtol=0.03)
    dot = sum(float(jnp.vdot(a, b)) for a, b in zip(*map(jax.tree.leaves, (grads, exact)), strict=True))
    assert dot > 0.95 * float(optax.tree.norm(grads) * optax.tree.norm(exact))


@pytest.mark.slow
def test_a_random_draft_at_least_doubles_its_acceptance_through_the_decoder():
    from specjax.drafters import FeatureDrafter

    student, trained, frozen, model = made("head")
    # A draft that knows nothing: its first weights are noise, not the target's.
    keys = iter(jax.random.split(jax.random.key(0), 99))
    trained = jax.tree.map(
        lambda x: jax.random.normal(next(keys), x.shape) * 0.1 if x.ndim > 1 else x, trained
    )
    drafter = FeatureDrafter(model, 4, 48)
    own = {name: x for name, x in frozen.items() if name != "target_head"}

    def measured(params):
        rows = generate(
            *tiny_target.target(),
            [[i, 2, 5] for i in range(16)],
            max_tokens=30,
            drafter=drafter,
            draft_params={**own, **params},
            sampling=make_sampling(16, temperature=1.0, seed=np.arange(16) + 900),
        )
        return sum(row.num_accepted_tokens for row in rows) / sum(row.num_draft_tokens for row in rows)

    before = measured(trained)
    optimizer = make_optimizer(Schedule(300, 5e-3, 10))
    step = make_step(student, Objective((("lk_hybrid", 1.0),)), optimizer)
    state = init_state(trained, optimizer)
    rows = tiny_target.sequences(64, 33, seed=1)
    batches = [
        tiny_target.in_parts(tiny_target.batch_of(rows[i : i + 16], VOCABULARY), 1) for i in range(0, 64, 16)
    ]
    for i in range(300):
        state, _ = step(state, batches[i % 4], frozen)
    assert measured(state.params) > 2 * before
