"""Attention by blocks over a long cache is attention over all of it, and reads no further than needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax.models.attend import attend

B, KV, H, DH, T, L = 8, 2, 4, 8, 2, 2
S = 2048


def filled(capacity, stacked, width=DH):
    """A cache of noise, whose first S slots don't depend on its capacity."""
    rng = np.random.default_rng(0)
    layers = np.pad(
        rng.normal(size=(2, L, B, KV, S, DH)), [(0, 0)] * 4 + [(0, capacity - S), (0, width - DH)]
    )
    if stacked:
        return kv.KVCache(*(jnp.asarray(x.transpose(1, 2, 0, 3, 4), jnp.float32) for x in layers))
    return kv.KVCache(*(tuple(jnp.asarray(layer, jnp.float32) for layer in x) for x in layers))


def run(cache, last, stacked):
    """What queries say that end at positions ``last``, of the rows by turns, from layer 1."""
    queries = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, H, DH)), jnp.float32)
    positions = (
        jnp.asarray(np.resize(last, B), jnp.int32)[:, None] + jnp.arange(1 - T, 1, dtype=jnp.int32)[None]
    )
    layer = jnp.int32(1) if stacked else 1
    return np.asarray(attend(queries, cache, layer, positions, jnp.max(positions)))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("last", [(1, 300, 511), (5, 512, 1023), (1, 2047, 1024), (2047, 2100, 9999)])
def test_blocks_give_what_the_whole_gives(stacked, last):
    # A capacity that blocks don't divide is read whole.
    whole = run(filled(S + 8, stacked), [min(position, S - 1) for position in last], stacked)
    np.testing.assert_allclose(run(filled(S, stacked), last, stacked)[:, -1], whole[:, -1], atol=1e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_what_lies_past_the_newest_block_is_not_read(stacked):
    poisoned = jax.tree.map(lambda x: x.at[..., 1024:, :].set(jnp.nan), filled(S, stacked))
    assert np.isfinite(run(poisoned, (3, 600, 1023), stacked)).all()
    assert np.isnan(run(poisoned, (3, 600, 1024), stacked)).any()


def test_rows_of_like_length_read_no_further_than_their_longest():
    last = (3, 2000, 60, 700, 255, 300, 10, 1023)
    poisoned = jax.tree.map(lambda x: x.at[::2, :, 256:].set(jnp.nan), filled(S, False))
    assert np.isfinite(run(poisoned, last, False)).all()
    assert np.isnan(run(poisoned, (3, 2000, 60, 700, 256, 300, 10, 1023), False)).any()


def test_a_cache_wider_than_a_head_gives_the_same():
    last = (5, 512, 1023)
    wide = run(filled(S, True, width=32), last, True)
    np.testing.assert_allclose(wide, run(filled(S, True), last, True), atol=1e-5)
