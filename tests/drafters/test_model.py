"""A model as the draft: its tokens, the logits they come from, and its cache over many steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tables
from runs import assert_counts_follow, count_sequences

from specjax.drafters import ModelDrafter
from specjax.sampling import Role, keys_at, make_sampling, sample
from specjax.types import Address, Context

CAPACITY = 16


def propose(drafter, params, texts, sampling, known=None):
    """One proposal after each text, of which the drafter has read only the first ``known`` tokens."""
    tokens = np.zeros((len(texts), CAPACITY), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    length = jnp.array([len(text) for text in texts], jnp.int32)
    stops = jnp.full((len(texts), 1), -1, jnp.int32)

    @jax.jit
    def run(params, tokens, length, known, sampling):
        given = jnp.where(jnp.arange(CAPACITY)[None] < known[:, None], tokens, 0)
        positions = jnp.broadcast_to(jnp.arange(CAPACITY), tokens.shape)
        state = drafter.read(params, drafter.init(*tokens.shape), given, positions, known, None)
        context = Context(tokens, length, known, stops)
        address = Address(sampling.seed, length)
        keys = lambda i: keys_at(address, jnp.full_like(length, i), Role.DRAFT)  # noqa: E731
        return drafter.propose(params, keys, state, context, sampling)[0]

    known = length if known is None else jnp.asarray(known, jnp.int32)
    return jax.device_get(run(jnp.asarray(params), jnp.asarray(tokens), length, known, sampling))


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_greedy_tokens_are_the_models_own(num_draft_tokens):
    table = tables.random_history(0, 7)
    drafter = ModelDrafter(tables.HistoryModel(7), num_draft_tokens)
    texts = [[3], [1, 2], [6, 5, 4, 3, 2, 1, 0], [0] * 9]
    draft = propose(drafter, table, texts, make_sampling(4))
    for row, text in enumerate(texts):
        expected = tables.greedy_continuation(tables.history_logits, table, text, num_draft_tokens)
        assert draft.tokens[row].tolist() == expected
    assert draft.lengths.tolist() == [num_draft_tokens] * 4
    assert drafter.always_full


def test_one_token_that_was_never_fed_is_caught_up_with():
    # After a block that was kept whole, its last token and the one drawn after it stand in the text but in
    # no cache; the slot of the first may hold what was there before.
    table = tables.random_history(1, 7)
    texts = [[1, 2, 3, 4], [5, 6, 0, 1, 2, 3]]
    fed_but_one = propose(
        ModelDrafter(tables.HistoryModel(7), 3), table, texts, make_sampling(2), known=[2, 4]
    )
    everything = propose(ModelDrafter(tables.HistoryModel(7), 3), table, texts, make_sampling(2))
    np.testing.assert_array_equal(fed_but_one.tokens, everything.tokens)


@pytest.mark.parametrize("known", [0, 1, 5])
def test_a_row_that_is_far_behind_is_caught_up_with(known):
    table = tables.random_history(1, 7)
    texts = [[1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5], [5, 6, 0, 1, 2, 3], [1] * 9]
    behind = propose(ModelDrafter(tables.HistoryModel(7), 3), table, texts, make_sampling(3), [known, 6, 2])
    everything = propose(ModelDrafter(tables.HistoryModel(7), 3), table, texts, make_sampling(3))
    np.testing.assert_array_equal(behind.tokens, everything.tokens)


def test_the_logits_are_what_the_tokens_were_drawn_from():
    # Warped, each row its own way: the law of the tokens is the law of the logits given with them.
    table, batch, options = tables.random_table(2, 4, 0.7), 100_000, {"temperature": 0.7, "top_p": 0.8}
    drafter = ModelDrafter(tables.TableModel(4), 2)
    sampling = make_sampling(batch, seed=np.arange(batch), **options)
    draft = propose(drafter, table, [[1, 2]] * batch, sampling)
    assert_counts_follow(count_sequences(draft.tokens, 4), tables.sequence_law(table, [1, 2], 2, **options))
    for first in np.unique(draft.tokens[:, 0]):
        (row, *_) = np.flatnonzero(draft.tokens[:, 0] == first)
        for i, context in enumerate(([1, 2], [2, first])):
            expected = tables.warp(table[*context], **options)
            np.testing.assert_allclose(tables.softmax(draft.logits[row, i]), expected, atol=1e-6)
            assert np.isneginf(draft.logits[row, i][expected == 0]).all()


def test_the_tokens_can_be_drawn_again_from_the_logits():
    # Bit for bit: a draw in fewer bits than the ratio is taken in would part from it somewhere.
    table, batch = tables.random_table(4, 9, 0.3), 20_000
    sampling = make_sampling(batch, temperature=1.0)
    draft = propose(ModelDrafter(tables.TableModel(9), 2), table, [[1, 2]] * batch, sampling)
    address = Address(sampling.seed, jnp.full(batch, 2, jnp.int32))
    for i in range(2):
        keys = keys_at(address, jnp.full(batch, i), Role.DRAFT)
        np.testing.assert_array_equal(jax.jit(sample)(keys, draft.logits[:, i]), draft.tokens[:, i])


def test_a_draft_does_not_depend_on_its_neighbours():
    table = tables.random_history(3, 7)
    drafter = ModelDrafter(tables.HistoryModel(7), 3)
    texts = [[3], [1, 2], [6, 5, 4, 3, 2, 1, 0], [0] * 9]
    options = {"temperature": [1.0, 0.0, 0.7, 1.5], "top_k": [0, 0, 3, 0], "top_p": [1.0, 1.0, 1.0, 0.8]}
    together = propose(drafter, table, texts, make_sampling(4, seed=[7, 8, 9, 10], **options))
    for row in (0, 2, 3):
        own = {name: column[row] for name, column in options.items()}
        alone = propose(drafter, table, texts[row : row + 1], make_sampling(1, seed=7 + row, **own))
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])


def test_no_tokens_to_draft_is_refused():
    with pytest.raises(ValueError, match="num_draft_tokens must be at least 1, not 0"):
        ModelDrafter(tables.TableModel(4), 0)
