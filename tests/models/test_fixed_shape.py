"""In float32 drafts change no greedy token; in bfloat16 none at a fixed verify shape."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from specjax.drafters import LookupDrafter, ModelDrafter, SilentDrafter
from specjax.generate import generate
from specjax.models import ModelConfig, Transformer, to_model

K = 3
PROMPTS = [[1, 2, 3, 1, 2], [5, 6, 5, 6], [7], [9, 8, 9, 8, 9]]


def model(dtype, seed=0):
    cfg = ModelConfig(
        vocab_size=64,
        num_layers=2,
        width=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_width=96,
        context_length=256,
        dtype=dtype,
    )
    return to_model(Transformer(cfg, nnx.Rngs(seed)))


def decode(target, params, drafter, draft_params=None):
    rows = generate(target, params, PROMPTS, max_tokens=60, drafter=drafter, draft_params=draft_params)
    return [row.tokens for row in rows], sum(row.num_accepted_tokens for row in rows)


@pytest.mark.parametrize(
    ("dtype", "plain", "always_full"), [("float32", None, False), ("bfloat16", SilentDrafter(K), True)]
)
def test_greedy_output_is_identical(dtype, plain, always_full):
    target, params = model(dtype)
    near = jax.tree.map(lambda x: x + 0.02 * jnp.sign(jnp.sin(1e3 * x)).astype(x.dtype), params)
    expected, _ = decode(target, params, plain)
    accepted = []
    for drafter, draft_params in (
        (LookupDrafter(K, 1, 3, always_full=always_full), None),
        (ModelDrafter(target, K), params),
        (ModelDrafter(target, K), near),
    ):
        tokens, count = decode(target, params, drafter, draft_params)
        assert tokens == expected
        accepted.append(count)
    assert all(accepted)
    assert accepted[2] < accepted[1]  # the changed draft was wrong at times, so rollback was exercised


def test_a_silent_draft_says_what_plain_decoding_says():
    target, params = model("float32")
    assert decode(target, params, SilentDrafter(K)) == decode(target, params, None)
