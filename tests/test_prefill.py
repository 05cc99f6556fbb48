"""Reading prompts in chunks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tables

from specjax.prefill import CHUNK, prefill

MODEL = tables.HistoryModel(7)


def read(model, params, tokens, length):
    return prefill(
        lambda cache, block, positions: model.apply(params, block, cache, positions).cache,
        model.init_cache(*tokens.shape),
        tokens,
        length,
    )


@pytest.mark.parametrize("capacity", [8, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_the_cache_holds_every_token_but_the_newest(capacity):
    rng = np.random.default_rng(capacity)
    lengths = np.unique(np.clip([1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, capacity], 1, capacity))
    tokens = rng.integers(0, 7, (len(lengths), capacity)).astype(np.int32)
    table = jnp.asarray(tables.random_history(0, 7))

    @jax.jit
    def run(tokens, length):
        cache = read(MODEL, table, tokens, length)
        newest = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
        return cache, MODEL.apply(table, newest, cache, length[:, None] - 1).logits

    cache, logits = jax.device_get(run(jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32)))
    assert cache.shape == tokens.shape
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(cache[row, : length - 1], tokens[row, : length - 1])
        expected = tables.history_logits(np.asarray(table), tokens[row, :length].tolist())
        np.testing.assert_array_equal(logits[row, 0], expected)


def test_only_the_chunks_that_the_longest_prompt_needs_are_fed():
    fed = []

    class Watched(tables.TableModel):
        def apply(self, params, tokens, cache, positions):
            jax.debug.callback(lambda first: fed.append(int(first)), positions[0, 0])
            return super().apply(params, tokens, cache, positions)

    run = jax.jit(lambda tokens, length: read(Watched(3), jnp.zeros((3, 3, 3)), tokens, length))
    tokens = jnp.zeros((2, 4 * CHUNK), jnp.int32)
    for longest, chunks in ((1, 0), (2, 1), (CHUNK + 1, 1), (CHUNK + 2, 2), (4 * CHUNK, 4)):
        fed.clear()
        jax.block_until_ready(run(tokens, jnp.array([1, longest], jnp.int32)))
        jax.effects_barrier()
        assert sorted(fed) == [CHUNK * i for i in range(chunks)]
