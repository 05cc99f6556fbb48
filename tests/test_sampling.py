"""The warp against loops, the addresses of noise, and the law of a draw."""

from __future__ import annotations

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tables
from runs import assert_counts_follow

from specjax import sampling
from specjax.sampling import Role, keys_at, make_sampling, sample, uniform
from specjax.types import Address, Context

OPTIONS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    for temperature, top_k, top_p in [
        *itertools.product((0.3, 1.0, 1.7), (0, 2, 7), (0.05, 0.5, 0.9, 1.0)),
        *itertools.product((0.0,), (0, 3), (0.4, 1.0)),
        (0.8, 1, 0.5),
        (1.0, 1, 1.0),
        (0.05, 0, 1.0),
        (1e3, 5, 0.9),
        (1.0, 10**6, 1.0),
    ]
]


def batch_of(options: list[dict]):
    columns = {name: [row[name] for row in options] for name in options[0]}
    return make_sampling(len(options), **columns)


@jax.jit
def warp(logits, values):
    """The library's warp, where no option looks at the text."""
    batch = len(logits)
    one = jnp.ones(batch, jnp.int32)
    return sampling.warp(
        logits, values, Context(jnp.zeros((batch, 8), jnp.int32), one, one, one[:, None] - 2)
    )


def check_warp(logits: np.ndarray, options: list[dict], tolerance: float) -> None:
    """Every row and position of ``logits`` [B, T, V] against the reference."""
    warped = np.asarray(warp(jnp.asarray(logits), batch_of(options)))
    assert warped.dtype == np.promote_types(logits.dtype, np.float32)
    for row, option in enumerate(options):
        for position in range(logits.shape[1]):
            probs = tables.warp(logits[row, position], **option)
            np.testing.assert_array_equal(np.isfinite(warped[row, position]), probs > 0, err_msg=str(option))
            np.testing.assert_allclose(
                tables.softmax(warped[row, position]),
                probs,
                rtol=tolerance,
                atol=tolerance,
                err_msg=str(option),
            )


@pytest.mark.parametrize("vocab_size", [2, 3, 50, 1000])
def test_warp_of_mixed_rows_equals_the_loops(vocab_size):
    logits = np.random.default_rng(vocab_size).normal(0, 3, (len(OPTIONS), 2, vocab_size)).astype(np.float32)
    check_warp(logits, OPTIONS, 2e-5)


def test_warp_keeps_float64():
    logits = np.random.default_rng(0).normal(0, 3, (len(OPTIONS), 2, 50))
    with jax.enable_x64(True):
        check_warp(logits, OPTIONS, 1e-13)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_greedy_is_one_hot_at_the_lowest_id_among_equals(dtype):
    # In few bits many of the thousand are equal; 9 and 9 + 2**-9 are one number in bfloat16.
    logits = np.random.default_rng(1).normal(0, 1, (4, 3, 1000))
    logits[:, 0, [10, 20, 30]] = 9
    logits[:, 1, 5], logits[:, 1, 3] = 9 + 2**-9, 9
    logits = jnp.asarray(logits, dtype)
    values = make_sampling(4, temperature=[0, 0, 0.5, 2], top_k=[0, 7, 1, 1], top_p=[1, 0.3, 1, 0.5])
    warped = np.asarray(warp(logits, values))
    best = np.argmax(np.asarray(logits, np.float32), axis=-1)
    assert best[0, 0] == 10
    np.testing.assert_array_equal(warped, np.where(np.arange(1000) == best[..., None], 0, -np.inf))


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-38, 1e-45])
def test_the_smallest_temperatures_are_greedy_in_all_but_name(temperature):
    # 9 / 1e-38 is no float32: the best token must be found before the division.
    logits = jnp.asarray([[[8.0, 9.0, -50.0, -np.inf]]])
    for options in ({}, {"top_k": 2}, {"top_p": 0.9}):
        warped = np.asarray(warp(logits, make_sampling(1, temperature=temperature, **options)))[0, 0]
        assert not np.isnan(warped).any()
        np.testing.assert_array_equal(tables.softmax(warped), [0, 1, 0, 0])


def test_equal_logits_stay_or_go_together():
    logits = np.array([[[1, 2, 2, 0, 2, -1]]] * 3, np.float32)
    warped = warp(jnp.asarray(logits), make_sampling(3, temperature=1.0, top_k=[2, 4, 0], top_p=[1, 1, 0.3]))
    kept = np.isfinite(np.asarray(warped))[:, 0]
    np.testing.assert_array_equal(kept, [[0, 1, 1, 0, 1, 0], [1, 1, 1, 0, 1, 0], [0, 1, 1, 0, 1, 0]])


def test_top_p_is_taken_of_what_top_k_left():
    # Of (.4, .3, .2, .1), top_k = 2 leaves (4/7, 3/7): half of that is the first alone.
    logits = jnp.log(jnp.array([[[0.4, 0.3, 0.2, 0.1]]]))
    warped = np.asarray(warp(logits, make_sampling(1, temperature=1.0, top_k=2, top_p=0.5)))
    np.testing.assert_array_equal(np.isfinite(warped[0, 0]), [True, False, False, False])


def test_temperature_comes_before_top_p():
    # Squared and normalised, (.5, .3, .2) is (.66, .24, .11): at T = 1/2 the first is sixty per cent alone.
    logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))
    warped = np.asarray(warp(logits, make_sampling(1, temperature=0.5, top_p=0.6)))
    np.testing.assert_array_equal(np.isfinite(warped[0, 0]), [True, False, False])


def test_masked_tokens_stay_masked():
    logits = np.random.default_rng(2).normal(0, 2, (len(OPTIONS), 2, 50)).astype(np.float32)
    logits[:, :, ::3] = -np.inf
    check_warp(logits, OPTIONS, 2e-5)


@pytest.mark.parametrize("spare", [0, 4, 49])
def test_all_masked_but_one(spare):
    logits = np.full((len(OPTIONS), 2, 50), -np.inf, np.float32)
    logits[..., spare] = -3.0
    warped = warp(jnp.asarray(logits), batch_of(OPTIONS))
    np.testing.assert_array_equal(np.isfinite(warped).sum(axis=2), 1)
    keys = jax.random.split(jax.random.key(0), len(OPTIONS))
    np.testing.assert_array_equal(sample(keys, warped[:, 0]), spare)


def test_a_row_of_nan_leaves_its_neighbours_alone():
    logits = np.random.default_rng(3).normal(0, 3, (len(OPTIONS), 2, 50)).astype(np.float32)
    poisoned = logits.copy()
    poisoned[::2] = np.nan
    healthy, beside = (np.asarray(warp(jnp.asarray(x), batch_of(OPTIONS))) for x in (logits, poisoned))
    np.testing.assert_array_equal(healthy[1::2], beside[1::2])


def test_a_row_is_warped_the_same_alone():
    logits = jnp.asarray(np.random.default_rng(4).normal(0, 3, (len(OPTIONS), 2, 50)), jnp.float32)
    together = np.asarray(warp(logits, batch_of(OPTIONS)))
    for row in range(0, len(OPTIONS), 5):
        np.testing.assert_array_equal(
            warp(logits[row : row + 1], batch_of(OPTIONS[row : row + 1]))[0], together[row]
        )


def key_words(seeds, starts, offsets, role) -> np.ndarray:
    address = Address(jnp.asarray(seeds, jnp.uint32), jnp.asarray(starts, jnp.int32))
    return np.asarray(_key_data(address, jnp.asarray(offsets, jnp.int32), role))


_key_data = jax.jit(lambda *where: jax.random.key_data(keys_at(*where)), static_argnums=2)


def test_another_address_is_another_key():
    grid = list(itertools.product((0, 1, 2, 2**31, 2**32 - 1), (1, 2, 3, 64, 65), range(9)))
    seeds, starts, offsets = np.array(grid).T
    words = np.concatenate([key_words(seeds, starts, offsets, role) for role in Role])
    assert len(np.unique(words, axis=0)) == len(grid) * len(Role)


def test_a_key_depends_on_its_address_alone():
    rng = np.random.default_rng(5)
    seeds, starts = rng.integers(0, 2**32, 6), rng.integers(1, 1000, 6)
    offsets = rng.integers(0, 8, (6, 4))
    together = key_words(seeds, starts, offsets, Role.ACCEPT)
    for row, column in itertools.product(range(6), range(4)):
        alone = key_words(
            seeds[row : row + 1], starts[row : row + 1], offsets[row : row + 1, column], Role.ACCEPT
        )
        np.testing.assert_array_equal(together[row, column], alone[0])


def test_uniforms_are_below_one_and_differ():
    address = Address(jnp.arange(1000, dtype=jnp.uint32), jnp.full(1000, 7, jnp.int32))
    drawn = np.asarray(uniform(keys_at(address, jnp.tile(jnp.arange(8), (1000, 1)), Role.ACCEPT)))
    assert drawn.shape == (1000, 8)
    assert 0 <= drawn.min() < 0.001
    assert 0.999 < drawn.max() < 1
    assert len(np.unique(drawn)) > 7990
    assert abs(drawn.mean() - 0.5) < 4 * np.sqrt(1 / 12 / drawn.size)
    # Neighbouring offsets and neighbouring seeds are uncorrelated.
    for one, other in ((drawn[:, :-1], drawn[:, 1:]), (drawn[:-1], drawn[1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / np.sqrt(one.size)


def test_draws_follow_their_law():
    probs = np.array([0.55, 0.3, 0.0, 0.1, 0.0499, 0.0001])
    batch = 200_000
    address = Address(jnp.arange(batch, dtype=jnp.uint32), jnp.ones(batch, jnp.int32))
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(probs, jnp.float32)) + 3, (batch, 6))
    keys = keys_at(address, jnp.zeros(batch, jnp.int32), Role.SAMPLE)
    drawn = np.asarray(jax.jit(sample)(keys, logits))
    assert drawn.dtype == np.int32
    assert_counts_follow(np.bincount(drawn, minlength=6), probs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_ends_of_the_noise_never_reach_a_masked_token(dtype):
    with jax.enable_x64(dtype == "float64"):
        logits = jnp.asarray([[-np.inf, -50.0, -np.inf]], dtype)
        ends = jax.random.gumbel(jax.random.key(0), (1 << 16,), dtype, mode="high")
        assert bool(jnp.all(jnp.isfinite(ends)))
        # The smallest and the largest that a draw's formula gives, the largest at the masked tokens.
        tiny, eps = jnp.finfo(dtype).tiny, jnp.finfo(dtype).eps
        noise = -jnp.log(-jnp.log1p(-jnp.asarray([tiny, 1 - eps / 2, tiny], dtype)))
        assert bool(jnp.all(jnp.isfinite(noise)))
        with mock.patch.object(jax.random, "gumbel", return_value=noise):
            drawn = sample(jax.random.split(jax.random.key(0), 1), logits)
        assert drawn.tolist() == [1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be at least 0, not -0\.1"),
        ({"temperature": float("nan")}, "temperature must be at least 0, not nan"),
        ({"temperature": float("inf")}, "temperature must be at least 0, not inf"),
        ({"temperature": [1.0, 1.0, -1.0]}, "temperature must be at least 0"),
        ({"top_k": -1}, "top_k must be at least 0, not -1"),
        ({"top_k": 2**31}, "top_k must be at least 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], not 0\.0"),
        ({"top_p": 1.01}, r"top_p must be in \(0, 1\], not 1\.01"),
        ({"top_p": float("nan")}, r"top_p must be in \(0, 1\], not nan"),
        ({"seed": -1}, r"seed must be at least 0 and below 2\*\*32, not -1"),
        ({"seed": 2**32}, r"seed must be at least 0 and below 2\*\*32"),
        ({"seed": [1, 2]}, r"seed needs one value, or one for each of 3 rows, not shape \(2,\)"),
        ({"top_p": [[0.5]]}, "top_p needs one value, or one for each of 3 rows"),
    ],
)
def test_a_value_out_of_range_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        make_sampling(3, **values)


def test_sampling_values_by_default_and_by_row():
    values = make_sampling(3)
    assert values.temperature.tolist() == [0.0] * 3
    assert values.filters is None
    assert values.edits is None
    assert make_sampling(2, top_p=[1.0, 0.5]).filters.top_k.tolist() == [0, 0]
    assert make_sampling(2, min_tokens=3).edits.repetition_penalty.tolist() == [1.0, 1.0]
    assert make_sampling(2, temperature=0.7, top_k=[1, 2]).temperature.tolist() == pytest.approx([0.0, 0.7])
    assert values.seed.tolist() == [0, 1, 2]
    assert values.seed.dtype == jnp.uint32
    assert make_sampling(3, seed=7).seed.tolist() == [7, 7, 7]
    assert make_sampling(3, seed=[5, 2**32 - 1, 0]).seed.tolist() == [5, 2**32 - 1, 0]
