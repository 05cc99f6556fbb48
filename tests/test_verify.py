"""Each rule against the same rule written with loops, with the uniforms given."""

from __future__ import annotations

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import assert_counts_follow
from tables import softmax

from specjax import verify
from specjax.sampling import Role, keys_at, sample, uniform
from specjax.types import Address, Draft

ROWS, K, V = 600, 4, 5


def log(probs: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(probs)


def random_probs(rng: np.random.Generator, shape: tuple[int, ...], impossible: float) -> np.ndarray:
    """Skewed distributions over the last axis, some of whose tokens cannot occur."""
    weights = np.exp(rng.normal(0, 2, shape)) * (rng.random(shape) >= impossible)
    weights[..., 0] += weights.sum(axis=-1) == 0
    return weights / weights.sum(axis=-1, keepdims=True)


def judge(rule, target_probs, draft_probs, tokens, lengths, uniforms, dtype=np.float64):
    """The library's verdict on a batch, its acceptance uniforms replaced by ``uniforms`` [B, K]."""
    batch = len(tokens)
    with jax.enable_x64(dtype == np.float64):

        @jax.jit
        def run(target_logits, draft_logits, tokens, lengths, uniforms):
            address = Address(jnp.arange(batch, dtype=jnp.uint32), 3 + jnp.arange(batch, dtype=jnp.int32) % 7)
            with mock.patch.object(verify, "uniform", return_value=uniforms):
                return verify.RULES[rule].verify(address, Draft(tokens, draft_logits, lengths), target_logits)

        draft_logits = None if draft_probs is None else jnp.asarray(log(draft_probs), dtype)
        # Logits are known up to a constant only.
        return jax.device_get(
            run(
                jnp.asarray(log(target_probs) + 1.5, dtype),
                draft_logits,
                jnp.asarray(tokens, jnp.int32),
                jnp.asarray(lengths, jnp.int32),
                jnp.asarray(uniforms, dtype),
            )
        )


def token_loop(p, q, d, u, length):
    """One row of the token rule: tokens kept, acceptance probabilities, the last token's law."""
    accept = [min(1.0, p[i][d[i]] / q[i][d[i]]) for i in range(length)]
    kept = 0
    while kept < length and u[kept] < accept[kept]:
        kept += 1
    rest = p[kept] if kept == length else np.maximum(p[kept] - q[kept], 0)
    return kept, accept, rest


def block_loop(p, q, d, u, length):
    """One row of the block rule."""
    prefix = [1.0]
    for i in range(length):
        prefix.append(min(1.0, prefix[i] * p[i][d[i]] / q[i][d[i]]))
    kept, accept = 0, []
    for i in range(1, length + 1):
        if i == length:
            accept.append(prefix[i])
        else:
            leftover = sum(max(prefix[i] * p[i][x] - q[i][x], 0) for x in range(len(p[i])))
            # Of 0 / 0 nothing hangs: then p and q agree after token i too, and a later test is sure to pass.
            doubtful = leftover + (1 - prefix[i]) < 1e-9
            accept.append(np.nan if doubtful else leftover / (leftover + (1 - prefix[i])))
        if u[i - 1] < accept[-1]:
            kept = i
    rest = p[kept] if kept == length else np.maximum(prefix[kept] * p[kept] - q[kept], 0)
    return kept, accept, rest


LOOPS = {"token": token_loop, "block": block_loop}


def drafts(kind: str, rng: np.random.Generator):
    """Target, draft and tokens drawn from it, for a batch: p [B, K+1, V], q [B, K, V], d [B, K]."""
    p = random_probs(rng, (ROWS, K + 1, V), 0.2)
    q = random_probs(rng, (ROWS, K, V), 0.0 if kind == "soft" else 0.4)
    if kind in ("soft", "partial"):  # near enough to one another that long prefixes are kept too
        q = 0.5 * q + 0.5 * np.where(q > 0, p[:, :K], 0)
        q /= q.sum(axis=-1, keepdims=True)
    if kind == "equal":
        q = p[:, :K].copy()
    if kind == "disjoint":
        p[..., :2], q[..., 2:] = 0, 0
        p[..., 2], q[..., 0] = p[..., 2] + 0.1, q[..., 0] + 0.1
        p, q = (x / x.sum(axis=-1, keepdims=True) for x in (p, q))
    if kind == "one-hot":
        q = np.eye(V)[
            np.where(rng.random((ROWS, K)) < 0.8, p[:, :K].argmax(axis=-1), rng.integers(0, V, (ROWS, K)))
        ]
    chosen = rng.random((ROWS, K, 1)) > q.cumsum(axis=-1) - 1e-12
    return p, q, chosen.sum(axis=-1)


@pytest.mark.parametrize("kind", ["soft", "partial", "equal", "disjoint", "one-hot"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_rule_equals_its_loop(rule, kind):
    rng = np.random.default_rng(7)
    p, q, d = drafts(kind, rng)
    lengths = rng.integers(0, K + 1, ROWS)
    uniforms = rng.random((ROWS, K)) ** 2
    verdict = judge(rule, p, None if kind == "one-hot" else q, d, lengths, uniforms)
    assert verdict.accept_probs.min() >= 0
    assert verdict.accept_probs.max() <= 1
    counts = np.zeros(K + 1, int)
    for row in range(ROWS):
        kept, accept, rest = LOOPS[rule](p[row], q[row], d[row], uniforms[row], lengths[row])
        accept = np.pad(accept, (0, K - lengths[row]))
        given = np.where(np.isnan(accept), np.nan, verdict.accept_probs[row])
        np.testing.assert_allclose(given, accept, atol=1e-12)
        # Where p and q agree, rounding may part a ratio from 1, and what is left over is rounding too.
        if kind != "equal" or rest.sum() > 1e-9:
            assert verdict.num_accepted[row] == kept
            np.testing.assert_allclose(softmax(verdict.next_logits[row]), rest / rest.sum(), atol=1e-12)
        assert rest[verdict.next_token[row]] > 0
        counts[kept] += 1
    if kind not in ("disjoint", "equal"):
        assert counts.min() > 2, "the batch doesn't stop everywhere"


@pytest.mark.parametrize("rule", ["token", "block"])
def test_float32_agrees_with_float64(rule):
    rng = np.random.default_rng(8)
    p, q, d = drafts("soft", rng)
    lengths, uniforms = rng.integers(0, K + 1, ROWS), rng.random((ROWS, K))
    exact = judge(rule, p, q, d, lengths, uniforms)
    single = judge(rule, p, q, d, lengths, uniforms, np.float32)
    assert single.accept_probs.max() <= 1
    assert single.accept_probs.dtype == single.next_logits.dtype == np.float32
    np.testing.assert_allclose(single.accept_probs, exact.accept_probs, atol=2e-5)
    assert np.mean(single.num_accepted == exact.num_accepted) > 0.995


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_perfect_draft_is_accepted_whole(rule, dtype):
    rng = np.random.default_rng(9)
    p, q, d = drafts("equal", rng)
    lengths = rng.integers(0, K + 1, ROWS)
    almost_one = np.full((ROWS, K), 1 - 1e-6)
    verdict = judge(rule, p, q, d, lengths, almost_one, dtype)
    np.testing.assert_array_equal(verdict.num_accepted, lengths)
    np.testing.assert_allclose(
        softmax(verdict.next_logits), p[np.arange(ROWS), lengths], atol=np.finfo(dtype).eps * 50
    )


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_an_impossible_token_never_passes(rule, one_hot):
    # u = 0 is a value that a uniform takes: held against probability 0 it must fail.
    p = np.array([[[0.0, 1.0], [1.0, 0.0]]])
    q = np.array([[[0.5, 0.5]]])
    verdict = judge(rule, p, None if one_hot else q, [[0]], [1], np.zeros((1, 1)))
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.next_token.tolist() == [1]
    assert np.isneginf(verdict.next_logits[0, 0])


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_uniform_equal_to_the_ratio_rejects(rule):
    p, q = np.array([[[0.25, 0.75], [0.5, 0.5]]] * 2), np.array([[[0.5, 0.5]]] * 2)
    (ratio,) = {float(x) for x in judge(rule, p, q, [[0]] * 2, [1, 1], np.zeros((2, 1))).accept_probs.ravel()}
    assert ratio == pytest.approx(0.5, abs=1e-15)
    verdict = judge(rule, p, q, [[0]] * 2, [1, 1], [[ratio], [np.nextafter(ratio, 0)]])
    assert verdict.num_accepted.tolist() == [0, 1]


def test_the_block_rule_keeps_the_longest_prefix_that_passes():
    rng = np.random.default_rng(10)
    p, q, d = drafts("soft", rng)
    # The first tests fail for certain (u = 1) and the last one may pass.
    uniforms = np.ones((ROWS, K))
    uniforms[:, -1] = rng.random(ROWS)
    verdict = judge("block", p, q, d, np.full(ROWS, K), uniforms)
    np.testing.assert_array_equal(
        verdict.num_accepted, np.where(uniforms[:, -1] < verdict.accept_probs[:, -1], K, 0)
    )
    assert (verdict.num_accepted == K).sum() > 20


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_what_the_draft_never_says_is_still_reached(rule, one_hot):
    # q(2) = 0 < p(2): the residual carries it all.
    p = np.array([[[0.3, 0.5, 0.2], [1, 0, 0]]])
    q = np.array([[[0.0, 1.0, 0.0]]])
    verdict = judge(rule, p, None if one_hot else q, [[1]], [1], np.ones((1, 1)))
    assert verdict.num_accepted.tolist() == [0]
    np.testing.assert_allclose(softmax(verdict.next_logits[0]), [0.6, 0, 0.4], atol=1e-12)


@pytest.mark.parametrize("rule", ["token", "block", "coupled", "greedy"])
def test_no_draft_is_plain_sampling(rule):
    p = random_probs(np.random.default_rng(11), (ROWS, 1, V), 0.3)
    verdict = judge(rule, p, None, np.zeros((ROWS, 0), int), np.zeros(ROWS, int), np.zeros((ROWS, 0)))
    assert verdict.accept_probs.shape == (ROWS, 0)
    assert not verdict.num_accepted.any()
    with jax.enable_x64(True):
        drawn = plain_draws(log(p[:, 0]) + 1.5, 0)
    expected = p[:, 0].argmax(axis=-1) if rule == "greedy" else drawn
    np.testing.assert_array_equal(verdict.next_token, expected)


@partial(jax.jit, static_argnums=1)
def plain_draws(logits, ahead):
    """What plain decoding draws ``ahead`` positions after the starts that ``judge`` gives its rows."""
    rows = jnp.arange(len(logits), dtype=jnp.int32)
    address = Address(rows.astype(jnp.uint32), 3 + rows % 7 + ahead)
    return sample(keys_at(address, jnp.zeros_like(rows), Role.SAMPLE), logits)


@pytest.mark.parametrize("one_hot", [False, True])
def test_coupled_says_what_plain_sampling_says(one_hot):
    rng = np.random.default_rng(12)
    p, q, d = drafts("partial", rng)
    lengths = rng.integers(0, K + 1, ROWS)
    with jax.enable_x64(True):
        said = np.stack([plain_draws(log(p[:, i]) + 1.5, i) for i in range(K + 1)], axis=1)
    d = np.where(rng.random(d.shape) < 0.7, said[:, :K], d)
    verdict = judge("coupled", p, None if one_hot else q, d, lengths, np.zeros((ROWS, K)))
    for row in range(ROWS):
        kept = 0
        while kept < lengths[row] and d[row, kept] == said[row, kept]:
            kept += 1
        assert verdict.num_accepted[row] == kept
        assert verdict.next_token[row] == said[row, kept]
    assert np.bincount(verdict.num_accepted, minlength=K + 1).min() > 10


def test_greedy_keeps_what_the_argmax_says():
    rng = np.random.default_rng(13)
    logits = rng.integers(0, 3, (ROWS, K + 1, V))  # many ties: the lowest id counts
    best = logits.argmax(axis=-1)
    d = np.where(rng.random((ROWS, K)) < 0.7, best[:, :K], rng.integers(0, V, (ROWS, K)))
    lengths = rng.integers(0, K + 1, ROWS)
    verdict = judge("greedy", np.exp(logits), None, d, lengths, np.zeros((ROWS, K)))
    for row in range(ROWS):
        kept = 0
        while kept < lengths[row] and d[row, kept] == best[row, kept]:
            kept += 1
        assert verdict.num_accepted[row] == kept
        assert verdict.next_token[row] == best[row, kept]


def key_words(keys) -> np.ndarray:
    return np.asarray(jax.random.key_data(keys)).reshape(-1, 2)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_draws_of_a_step_have_addresses_of_their_own(rule):
    address = Address(jnp.arange(3, dtype=jnp.uint32), jnp.array([5, 5, 6], jnp.int32))
    offsets = jnp.tile(jnp.arange(K + 1), (3, 1))
    draft = [key_words(verify.RULES[rule].draft_keys(address, jnp.int32(i))) for i in range(K)]
    judge = [key_words(keys_at(address, offsets, role)) for role in (Role.ACCEPT, Role.SAMPLE)]
    words = np.concatenate([*draft, *judge])
    assert len(np.unique(words, axis=0)) == len(words)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_rule_draws_from_the_addresses_of_its_step(rule):
    # Uniforms from offsets 0 .. K-1 in one role, the last token from the offset of the stop in another.
    rng = np.random.default_rng(14)
    p, q, d = drafts("soft", rng)
    lengths = rng.integers(0, K + 1, ROWS)

    @jax.jit
    def run(target_logits, draft_logits, tokens, lengths):
        address = Address(jnp.arange(ROWS, dtype=jnp.uint32), 3 + jnp.arange(ROWS, dtype=jnp.int32) % 7)
        verdict = verify.RULES[rule].verify(address, Draft(tokens, draft_logits, lengths), target_logits)
        passed = (
            uniform(keys_at(address, jnp.tile(jnp.arange(K), (ROWS, 1)), Role.ACCEPT)) < verdict.accept_probs
        )
        last = sample(keys_at(address, verdict.num_accepted, Role.SAMPLE), verdict.next_logits)
        return verdict, passed, last

    verdict, passed, last = run(
        *(log(probs).astype(np.float32) for probs in (p, q)), *(x.astype(np.int32) for x in (d, lengths))
    )
    passed, last = np.asarray(passed), np.asarray(last)
    np.testing.assert_array_equal(verdict.next_token, last)
    stop = np.cumprod(passed, axis=1).sum(axis=1)
    if rule == "block":
        stop = np.max(passed * np.arange(1, K + 1), axis=1)
    np.testing.assert_array_equal(verdict.num_accepted, stop)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_the_residual_has_noise_of_its_own(rule):
    # The vector that separates: with the draft's noise used again token 2 comes out .370, not .300.
    batch, p, q = 400_000, np.array([0.1, 0.6, 0.3]), np.array([0.6, 0.38, 0.02])

    @jax.jit
    def first_token(seed):
        address = Address(seed, jnp.full(batch, 9, jnp.int32))
        target, draft = (
            jnp.broadcast_to(jnp.log(jnp.asarray(x, jnp.float32)), (batch, 2, 3)) for x in (p, q)
        )
        tokens = sample(verify.RULES[rule].draft_keys(address, jnp.int32(0)), draft[:, 0])
        drafted = Draft(tokens[:, None], draft[:, :1], jnp.ones(batch, jnp.int32))
        verdict = verify.RULES[rule].verify(address, drafted, target)
        return jnp.where(verdict.num_accepted > 0, tokens, verdict.next_token)

    assert_counts_follow(np.bincount(first_token(jnp.arange(batch, dtype=jnp.uint32)), minlength=3), p)


def test_shapes_that_do_not_fit_are_refused():
    draft = Draft(jnp.zeros((2, 3), jnp.int32), None, jnp.zeros(2, jnp.int32))
    address = Address(jnp.zeros(2, jnp.uint32), jnp.zeros(2, jnp.int32))
    with pytest.raises(AssertionError):
        verify.token(address, draft, jnp.zeros((2, 3, V)))
    with pytest.raises(AssertionError):
        verify.block(address, Draft(draft.tokens, jnp.zeros((2, 2, V)), draft.lengths), jnp.zeros((2, 4, V)))
