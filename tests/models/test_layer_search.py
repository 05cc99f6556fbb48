"""The search for layers: what does nothing goes first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_target

from specjax.models.derive import output_rows
from specjax.models.layer_search import search_layers


def without_effect(params, layer):
    """The params with a layer that passes on what it gets."""
    block = params["blocks"][layer]
    silent = jax.tree.map(
        jnp.zeros_like, {"attention": block["attention"]["out"], "mlp": block["mlp"]["down"]}
    )
    block = {
        **block,
        "attention": {**block["attention"], "out": silent["attention"]},
        "mlp": {**block["mlp"], "down": silent["mlp"]},
    }
    return {**params, "blocks": {**params["blocks"], layer: block}}


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_layer_that_does_nothing_goes_first(silent):
    model, params = tiny_target.target()
    params = without_effect(params, silent)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 48, (2, 16)))
    positions = jnp.broadcast_to(jnp.arange(16)[None], tokens.shape)
    whole = model.apply(params, tokens, model.init_cache(2, 16), positions).features
    head = output_rows(params)
    target = jax.nn.softmax(whole @ head.T)
    seen = []

    def overlap(states):
        seen.append(float(jnp.mean(jnp.sum(jnp.minimum(target, jax.nn.softmax(states @ head.T)), axis=-1))))
        return seen[-1]

    assert search_layers(model, params, tokens, 2, overlap) == tuple({0, 1, 2} - {silent})
    # The blocks without a cache are the target's own: what lacks the silent layer alone is the target.
    np.testing.assert_allclose(seen[silent], 1, atol=1e-4)
    assert len(seen) == 3


def test_no_more_layers_than_there_are():
    model, params = tiny_target.target()
    for keep in (0, 4):
        with pytest.raises(ValueError, match=rf"1 \.\. 3 layers of an unrolled target, not {keep}"):
            search_layers(model, params, jnp.zeros((1, 4), jnp.int32), keep, lambda x: 0.0)
