"""What has no law is reported and costs its own row only; a draft that breaks costs only speed."""

import jax.numpy as jnp
import numpy as np
import pytest
from tables import TableModel, random_table

from specjax.drafters import LookupDrafter, ModelDrafter
from specjax.generate import generate
from specjax.sampling import make_sampling

V, K = 7, 3
MODEL, TARGET = TableModel(V), jnp.asarray(random_table(0, V))
PROMPTS = [[1, 2], [3], [4, 5, 6]]
STOP = 3


def texts(**options):
    return [row.tokens for row in generate(MODEL, TARGET, PROMPTS, max_tokens=8, **options)]


@pytest.mark.parametrize("rule", ["token", "block", "coupled", "greedy"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_draft_without_a_law_is_not_listened_to(rule, bad):
    sampling = make_sampling(3, temperature=0.0 if rule == "greedy" else 1.0)
    broken = TARGET.at[..., 2].set(bad)
    drafted = texts(drafter=ModelDrafter(MODEL, K), draft_params=broken, rule=rule, sampling=sampling)
    # Without a draft a step draws as plain decoding does, so the very tokens are the same.
    assert drafted == texts(rule=rule, sampling=sampling)


@pytest.mark.parametrize("drafter", [None, LookupDrafter(K, 1, 2)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_forbids_everything_ends_the_row(drafter, temperature):
    def only_stop(context, count):
        row = jnp.arange(context.length.shape[0])[:, None, None]
        ids = jnp.arange(V)[None, None]
        return jnp.broadcast_to((row != 1) | (ids == STOP), (context.length.shape[0], count, V))

    rows = generate(
        MODEL,
        TARGET,
        PROMPTS,
        max_tokens=5,
        drafter=drafter,
        stop_tokens=[STOP],
        allowed=only_stop,
        sampling=make_sampling(3, temperature=temperature, min_tokens=[0, 2, 0]),
    )
    assert [row.failed for row in rows] == [False, True, False]
    assert rows[1].tokens == []
    assert rows[0].tokens
    assert rows[2].tokens


@pytest.mark.parametrize("width", [V - 2, V + 2])
def test_a_draft_may_be_padded_otherwise(width):
    draft_table = jnp.asarray(random_table(1, width))
    drafter = ModelDrafter(TableModel(width), K, vocab_size=V)
    sampling = make_sampling(3, temperature=[0.0, 0.7, 1.0])
    drafted = texts(drafter=drafter, draft_params=draft_table, rule="coupled", sampling=sampling)
    assert drafted == texts(rule="coupled", sampling=sampling)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_logprobs": -1}, "num_logprobs must be in 0 .. 7"),
        ({"num_logprobs": V + 1}, "num_logprobs must be in 0 .. 7"),
        ({"max_tokens": [1, 2]}, "max_tokens needs one value, or one for each of 3"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        generate(MODEL, TARGET, PROMPTS, **{"max_tokens": 3} | options)


def test_numbers_of_any_size_are_answered_in_words():
    for values in ({"seed": 10**30}, {"seed": [1, None, 2]}, {"temperature": 1e300}, {"top_k": 2.5}):
        with pytest.raises(ValueError, match=next(iter(values))):
            make_sampling(3, **values)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        generate(MODEL, TARGET, [[2**40]], max_tokens=3)
    assert len(generate(MODEL, TARGET, [[1]], max_tokens=10**23, stop_tokens=range(V))[0].tokens) == 1
