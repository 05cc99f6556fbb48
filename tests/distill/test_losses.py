"""Losses and their gradients against float64 NumPy, written as the formulas are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import losses_by_hand as reference
import numpy as np
import pytest

from specjax.distill.chunked import Scores, chunked_sums, log_normalizer
from specjax.distill.losses import LOSSES, loss_of, mix, position_losses

P = np.array([0.3, -1.2, 0.9])
Q = np.array([1.1, 0.2, -0.4])


def both(name, target, draft, **options):
    """Value and gradient, jitted, in float32."""
    label = options.pop("label", 0)
    target, draft = jnp.asarray(target, jnp.float32), jnp.asarray(draft, jnp.float32)

    @jax.jit
    def run(draft):
        return loss_of(name, target, draft, jnp.int32(label), **options)

    return jax.value_and_grad(run)(draft)


def check(name, target, draft, **options):
    value, gradient = both(name, target, draft, **options)
    np.testing.assert_allclose(value, reference.loss(name, target, draft, **options), rtol=2e-5, atol=2e-6)
    expected = reference.gradient(name, target, draft, **options)
    np.testing.assert_allclose(gradient, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "lk_hybrid"])
def test_three_tokens_by_hand(name, temperature):
    check(name, P, Q, temperature=temperature, label=2)


def test_lk_hybrid_by_hand():
    for eta in (0.0, 3.0, 50.0):
        check("lk_hybrid", P, Q, eta=eta)


@pytest.mark.parametrize("beta", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_jsd_neither_swaps_its_mixture_nor_vanishes_at_the_ends(beta):
    check("jsd", P, Q, beta=beta)
    value, gradient = both("jsd", P, Q, beta=beta)
    assert value > 0.05
    assert np.abs(gradient).max() > 0.05


def test_the_kls_are_the_limits_of_jsd():
    near_0, near_1 = (float(both("jsd", P, Q, beta=beta)[0]) for beta in (1e-4, 1 - 1e-4))
    assert abs(near_0 - float(both("forward_kl", P, Q)[0])) < 1e-3
    assert abs(near_1 - float(both("reverse_kl", P, Q)[0])) < 1e-3


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ([1e4, 0.0, -1e4], [0.0, 1.0, 2.0]),
        ([0.0, 1.0, 2.0], [1e4, 9999.0, -1e4]),
        ([2.0, 2.0, 2.0], [5.0, 5.0, 5.0]),  # ties
        ([1e4, 1e4, 0.0], [0.0, 3.0, 3.0]),
    ],
)
def test_extreme_logits(name, target, draft):
    value, gradient = both(name, target, draft)
    expected = reference.loss(name, target, draft)
    assert np.isfinite(gradient).all()
    if np.isfinite(expected) and expected < 1e4:
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=2e-6)
    else:
        assert np.isfinite(value)


@pytest.mark.parametrize("name", list(LOSSES))
def test_what_is_left_out_gives_no_nan_and_no_mass(name):
    target, draft = np.array([0.5, -np.inf, 1.0, 0.2]), np.array([0.1, 0.3, -np.inf, 0.4])
    value, gradient = both(name, target, draft)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert gradient[2] == 0
    if name in ("forward_kl", "tv", "lk"):
        np.testing.assert_allclose(value, reference.loss(name, target, draft), rtol=2e-5)


@pytest.mark.parametrize("name", list(LOSSES))
def test_equal_laws_lose_nothing(name):
    if name == "cross_entropy":
        return
    value, gradient = both(name, P, P + 3)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    if name not in ("tv", "lk", "lk_hybrid"):  # these have a kink there
        np.testing.assert_allclose(gradient, 0, atol=1e-6)


def test_tv_is_what_acceptance_lacks():
    rng = np.random.default_rng(0)
    target, draft = rng.normal(size=(2, 7, 11)) * 3
    sums = position_losses(jnp.asarray(target, jnp.float32), jnp.asarray(draft, jnp.float32))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (target, draft))
    np.testing.assert_allclose(mix(sums, {"tv": 1.0}), np.abs(p - q).sum(-1) / 2, rtol=1e-5)
    np.testing.assert_allclose(sums.overlap, 1 - np.abs(p - q).sum(-1) / 2, rtol=1e-5)


def test_a_mixture_is_the_weighted_sum():
    sums = position_losses(jnp.asarray(P, jnp.float32), jnp.asarray(Q, jnp.float32), jnp.int32(1))
    parts = {"forward_kl": 0.7, "cross_entropy": 0.2, "tv": 2.0}
    expected = sum(w * reference.loss(name, P, Q, label=1) for name, w in parts.items())
    np.testing.assert_allclose(mix(sums, parts), expected, rtol=1e-5)


def test_an_unknown_loss_is_refused_by_name():
    sums = position_losses(jnp.zeros(3), jnp.zeros(3))
    with pytest.raises(ValueError, match="no loss is named 'forwardkl'"):
        mix(sums, {"forwardkl": 1.0})


def test_masked_positions_give_no_gradient_even_where_nothing_is_a_number():
    target = jnp.asarray([P, [np.nan] * 3, [-np.inf] * 3], jnp.float32)
    draft = jnp.asarray([Q, [np.nan] * 3, [-np.inf] * 3], jnp.float32)
    mask = jnp.asarray([True, False, False])

    def total(draft):
        sums = position_losses(target, draft, mask=mask)
        return jnp.sum(jnp.where(mask, mix(sums, dict.fromkeys(LOSSES, 1.0)), 0))

    value, gradient = jax.value_and_grad(total)(draft)
    assert np.isfinite(value)
    assert np.abs(gradient[0]).max() > 0
    assert (np.asarray(gradient[1:]) == 0).all()


def test_padding_of_the_vocabulary_adds_no_mass():
    rng = np.random.default_rng(1)
    target, draft = rng.normal(size=128), rng.normal(size=128)
    padded = jnp.asarray(np.concatenate([draft, np.full(8, 5.0)]), jnp.float32)
    for name in LOSSES:
        got = loss_of(name, jnp.asarray(target, jnp.float32), padded, jnp.int32(3))
        np.testing.assert_allclose(got, reference.loss(name, target, draft, label=3), rtol=1e-4)
    # The other way round the draft can't say the last eight tokens, and their mass is lost to it.
    wide = np.concatenate([target, np.full(8, 1.0)])
    narrow = np.concatenate([draft, np.full(8, -np.inf)])
    got = loss_of("tv", jnp.asarray(wide, jnp.float32), jnp.asarray(draft, jnp.float32))
    np.testing.assert_allclose(got, reference.loss("tv", wide, narrow), rtol=1e-4)


def test_bfloat16_logits_are_summed_in_float32():
    target, draft = (jnp.asarray(x, jnp.bfloat16) for x in (P, Q))
    value = loss_of("forward_kl", target, draft)
    assert value.dtype == jnp.float32
    expected = reference.loss("forward_kl", np.float64(target), np.float64(draft))
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize("chunk", [3, 8, 13, 40])
def test_chunked_equals_whole(chunk):
    rng = np.random.default_rng(2)
    features, states = (jnp.asarray(rng.normal(size=(5, 6)), jnp.float32) for _ in range(2))
    target_head, draft_head = (jnp.asarray(rng.normal(size=(13, 6)), jnp.float32) for _ in range(2))
    labels = jnp.asarray([0, 12, -1, 3, 7])
    weights = {name: 1.0 + place for place, name in enumerate(LOSSES)}

    def chunked(states, head):
        sums = chunked_sums(
            Scores(features, target_head), Scores(states, head), labels, chunk=chunk, beta=0.3
        )
        return jnp.sum(mix(sums, weights)), sums

    def whole(states, head):
        sums = position_losses(features @ target_head.T, states @ head.T, labels, beta=0.3)
        return jnp.sum(mix(sums, weights)), sums

    results = [
        jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(states, draft_head) for f in (chunked, whole)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), *results)


def test_a_smaller_vocabulary_keeps_the_targets_true_probabilities():
    rng = np.random.default_rng(3)
    features, states = (jnp.asarray(rng.normal(size=(4, 6)), jnp.float32) for _ in range(2))
    target_head = jnp.asarray(rng.normal(size=(13, 6)), jnp.float32)
    draft_head = jnp.asarray(rng.normal(size=(5, 6)), jnp.float32)
    tokens = np.array([1, 4, 6, 9, 12])
    total = log_normalizer(features, target_head, chunk=4)
    np.testing.assert_allclose(total, np.log(np.exp(np.float64(features @ target_head.T)).sum(-1)), rtol=1e-5)
    sums = chunked_sums(Scores(features, target_head[tokens], total), Scores(states, draft_head), chunk=2)
    wide = np.full((4, 13), -np.inf)
    wide[:, tokens] = states @ draft_head.T
    expected = position_losses(features @ target_head.T, jnp.asarray(wide, jnp.float32))
    np.testing.assert_allclose(sums.overlap, expected.overlap, rtol=1e-5)
    np.testing.assert_allclose(sums.forward_kl, expected.forward_kl, rtol=1e-5)
