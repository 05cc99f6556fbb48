"""The cache: blocks that end at, before and past its end, on rows that stand at different positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv

B, KV, S, DH, L = 3, 2, 8, 4, 3


def random_cache(stacked: bool) -> kv.KVCache:
    """A cache full of noise, so that a slot which should not have been touched shows."""
    empty = kv.init_cache(L, B, KV, S, DH, stacked=stacked)
    leaves, treedef = jax.tree.flatten(empty)
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(treedef, [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in leaves])


def written(before: np.ndarray, block: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The same with loops: [B, KV, S, Dh] after block [B, T, KV, Dh] went to its positions."""
    after = before.copy()
    for row in range(block.shape[0]):
        for t, position in enumerate(positions[row]):
            if position < S:
                after[row, :, position] = block[row, t]
    return after


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "starts",
    [(0, 0, 0), (0, 2, 4), (S - 3, S - 3, S - 3), (S - 2, S - 1, S), (0, S - 1, S + 100)],
    ids=["start", "rows apart", "ends at the end", "past the end", "one row far out"],
)
@pytest.mark.parametrize("jit", [False, True])
def test_write_keeps_what_fits_and_drops_the_rest(stacked, starts, jit):
    cache = random_cache(stacked)
    rng = np.random.default_rng(1)
    keys, values = (rng.normal(size=(B, 3, KV, DH)).astype(np.float32) for _ in range(2))
    positions = np.array(starts, np.int32)[:, None] + np.arange(3, dtype=np.int32)[None, :]
    write = jax.jit(kv.write, static_argnums=() if stacked else 1) if jit else kv.write
    after = write(cache, 1, jnp.asarray(keys), jnp.asarray(values), jnp.asarray(positions))
    for layer in range(L):
        for old, new, block in zip(kv.read(cache, layer), kv.read(after, layer), (keys, values), strict=True):
            expected = written(np.asarray(old), block, positions) if layer == 1 else np.asarray(old)
            np.testing.assert_array_equal(np.asarray(new), expected)


def test_write_takes_the_dtype_of_the_cache():
    cache = kv.init_cache(1, 1, 1, 4, 2, jnp.bfloat16)
    block = jnp.full((1, 1, 1, 2), 1.5, jnp.float32)
    after = kv.write(cache, 0, block, block, jnp.array([[2]], jnp.int32))
    assert {x.dtype for x in jax.tree.leaves(after)} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(np.asarray(kv.read(after, 0)[0][0, 0, :, 0], np.float32), [0, 0, 1.5, 0])


def test_mask_shows_what_lies_at_or_before_the_query():
    seen = kv.mask(jnp.array([[0, 1, 3], [2, 3, 9]], jnp.int32), 4)
    np.testing.assert_array_equal(
        np.asarray(seen, int),
        [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]], [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]],
    )


@pytest.mark.parametrize("stacked", [False, True])
def test_buffers_are_distinct_and_sized(stacked):
    cache = kv.init_cache(L, B, KV, S, DH, stacked=stacked)
    leaves = jax.tree.leaves(cache)
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves) == (2 if stacked else 2 * L)
    assert sum(x.size for x in leaves) == 2 * L * B * KV * S * DH
    assert kv.capacity(cache) == S


@pytest.mark.parametrize("stacked", [False, True])
def test_a_donated_cache_is_written_in_place(stacked):
    # 64 KiB a buffer: holding one twice would show in the program's own memory.
    cache = jax.eval_shape(lambda: kv.init_cache(L, 1, 1, 1024, 16, stacked=stacked))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    block = jax.ShapeDtypeStruct((1, 2, 1, 16), jnp.float32)
    start = jax.ShapeDtypeStruct((), jnp.int32)

    def steps(cache, block, start):
        def body(state):
            position, cache = state
            positions = position + jnp.arange(2, dtype=jnp.int32)[None, :]
            for layer in range(L):
                cache = kv.write(cache, layer, block, block, positions)
            return position + 2, cache

        return jax.lax.while_loop(lambda state: state[0] < 100, body, (start, cache))[1]

    memory = jax.jit(steps, donate_argnums=0).lower(cache, block, start).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / (2 * L)


@pytest.mark.parametrize("position", [0, S - 1, S, S + 5])
def test_one_token_of_one_row(position):
    cache = kv.init_cache(1, 1, KV, S, DH)
    block = jnp.ones((1, 1, KV, DH))
    after = kv.write(cache, 0, block, 2 * block, jnp.array([[position]], jnp.int32))
    for slots, expected in zip(kv.read(after, 0), (1, 2), strict=True):
        is_written = np.arange(S) == position
        np.testing.assert_array_equal(np.asarray(slots[0, 1, :, 2]), expected * is_written)


@pytest.mark.parametrize("name", ["num_layers", "batch", "num_kv_heads", "capacity", "head_dim"])
def test_sizes_must_be_positive(name):
    sizes = {"num_layers": 1, "batch": 1, "num_kv_heads": 1, "capacity": 1, "head_dim": 1, name: 0}
    with pytest.raises(ValueError, match=name):
        kv.init_cache(**sizes)
