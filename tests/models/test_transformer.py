"""The transformer against NumPy with loops, and against itself fed in other ways."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.models.config import ModelConfig
from specjax.models.functional import abstract_model, to_model
from specjax.models.transformer import Transformer

CFG = ModelConfig(
    vocab_size=32,
    num_layers=2,
    width=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=40,
    rope_base=100.0,
)
B, S = 3, 16


@pytest.fixture(scope="module", params=[False, True], ids=["unrolled", "scanned"])
def built(request):
    """A model with random params, large enough for attention not to be flat."""
    model, shapes = abstract_model(dataclasses.replace(CFG, scan_layers=request.param))
    rng = np.random.default_rng(0)
    return model, jax.tree.map(lambda x: jnp.asarray(rng.normal(0.1, 0.4, x.shape), x.dtype), shapes)


def at(*starts, length):
    """Positions [B, length] of blocks that begin at ``starts``."""
    return jnp.array(starts, jnp.int32)[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]


def random_tokens(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, CFG.vocab_size, shape), jnp.int32)


def layer_of(params, layer):
    blocks = jax.tree.map(np.asarray, params["blocks"])
    return blocks[layer] if layer in blocks else jax.tree.map(lambda x: x[layer], blocks)


def reference(params, tokens, cfg=CFG):
    """Logits [T, V] of one row, written from the equations: no cache, no fusing, a loop a head."""

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.norm_eps) * scale

    def turn(x, position):
        half = cfg.head_dim // 2
        out = np.empty_like(x)
        for i in range(half):
            angle = position * cfg.rope_base ** (-2 * i / cfg.head_dim)
            c, s = np.cos(angle), np.sin(angle)
            out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
        return out

    x = np.asarray(params["embedding"], np.float64)[np.asarray(tokens)]
    dh, heads, kv_heads = cfg.head_dim, cfg.num_heads, cfg.num_kv_heads
    for layer in range(cfg.num_layers):
        block = layer_of(params, layer)
        normed = norm(x, block["attention_norm"]["scale"])
        mixed = np.zeros((len(x), heads * dh))
        for head in range(heads):
            group, place = divmod(head, heads // kv_heads)
            # The kernel of a group: its query heads, its key, its value.
            *qs, k, v = np.split(
                normed @ block["attention"]["qkv"]["kernel"][group].T, heads // kv_heads + 2, 1
            )
            q = qs[place]
            if cfg.qk_norm:
                q, k = (
                    norm(y, block["attention"][name]["scale"])
                    for y, name in ((q, "query_norm"), (k, "key_norm"))
                )
            for i in range(len(x)):
                scores = np.array([turn(q[i], i) @ turn(k[j], j) for j in range(i + 1)]) / np.sqrt(dh)
                weights = np.exp(scores - scores.max())
                mixed[i, head * dh : (head + 1) * dh] = weights / weights.sum() @ v[: i + 1]
        x = x + mixed @ block["attention"]["out"]["kernel"].T
        gate, up = (norm(x, block["mlp_norm"]["scale"]) @ w.T for w in block["mlp"]["gate_up"]["kernel"])
        x = x + (gate / (1 + np.exp(-gate)) * up) @ block["mlp"]["down"]["kernel"].T
    x = norm(x, np.asarray(params["norm"]["scale"]))
    return x @ np.asarray(params.get("head", params["embedding"]), np.float64).T


@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_equals_the_equations(built, length):
    model, params = built
    tokens = random_tokens(B, length)
    out = jax.jit(model.apply)(params, tokens, model.init_cache(B, S), at(0, 0, 0, length=length))
    for row in range(B):
        np.testing.assert_allclose(
            np.asarray(out.logits[row]), reference(params, tokens[row]), atol=2e-4, rtol=1e-4
        )


def test_norms_of_queries_and_keys_equal_the_equations():
    cfg = dataclasses.replace(CFG, qk_norm=True)
    model, shapes = abstract_model(cfg)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0.1, 0.4, x.shape), x.dtype), shapes)
    tokens = random_tokens(1, 5)
    out = jax.jit(model.apply)(params, tokens, model.init_cache(1, S), at(0, length=5))
    expected = reference(params, tokens[0], cfg)
    np.testing.assert_allclose(np.asarray(out.logits[0]), expected, atol=2e-4, rtol=1e-4)
    assert np.abs(expected - reference(params, tokens[0])).max() > 0.1  # they make a difference


def test_untied_head_is_used():
    model, params = to_model(Transformer(dataclasses.replace(CFG, tied_embeddings=False), nnx.Rngs(0)))
    tokens = random_tokens(1, 4)
    out = jax.jit(model.apply)(params, tokens, model.init_cache(1, S), at(0, length=4))
    np.testing.assert_allclose(np.asarray(out.logits[0]), reference(params, tokens[0]), atol=1e-4, rtol=1e-4)
    head = np.asarray(out.features[0]) @ np.asarray(params["head"]).T  # features are what the head multiplies
    np.testing.assert_allclose(np.asarray(out.logits[0]), head, atol=1e-5)


@pytest.mark.parametrize("cuts", [(1,) * 12, (5, 1, 6), (8, 4), (3, 9)])
def test_fed_in_blocks_equals_fed_at_once(built, cuts):
    model, params = built
    apply = jax.jit(model.apply)
    tokens = random_tokens(B, 12)
    whole = apply(params, tokens, model.init_cache(B, S), at(0, 0, 0, length=12)).logits
    cache, start, parts = model.init_cache(B, S), 0, []
    for size in cuts:
        out = apply(params, tokens[:, start : start + size], cache, at(start, start, start, length=size))
        cache, start = out.cache, start + size
        parts.append(out.logits)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), np.asarray(whole), atol=1e-4)


def test_rows_at_other_positions_and_rolled_back_equal_their_solo_runs(built):
    # Each row drafts four tokens and takes back 4, 3 and 0 of them: the stale keys must stay invisible.
    model, params = built
    apply = jax.jit(model.apply)
    prompt, wrong, right = random_tokens(B, 6), random_tokens(B, 4, seed=1), random_tokens(B, 3, seed=2)
    cache = apply(params, prompt, model.init_cache(B, S), at(0, 0, 0, length=6)).cache
    cache = apply(params, wrong, cache, at(6, 6, 6, length=4)).cache
    kept = (0, 1, 4)
    out = apply(params, right, cache, at(*(6 + n for n in kept), length=3))
    for row, n in enumerate(kept):
        tokens = jnp.concatenate([prompt[row], wrong[row, :n], right[row]])
        expected = reference(params, tokens)[-3:]
        np.testing.assert_allclose(np.asarray(out.logits[row]), expected, atol=2e-4, rtol=1e-4)


def test_a_block_past_the_end_leaves_the_live_slots_alone(built):
    model, params = built
    apply = jax.jit(model.apply)
    tokens = random_tokens(1, S)
    before = apply(params, tokens[:, : S - 1], model.init_cache(1, S), at(0, length=S - 1)).cache
    past = apply(params, random_tokens(1, 5, seed=3), before, at(S - 1, length=5)).cache
    clean = apply(params, tokens[:, -1:], before, at(S - 1, length=1)).logits
    after = apply(params, tokens[:, -1:], past, at(S - 1, length=1)).logits
    np.testing.assert_array_equal(np.asarray(after), np.asarray(clean))


def test_what_a_fresh_cache_holds_is_never_seen(built):
    model, params = built
    tokens, positions = random_tokens(B, 3), at(0, 0, 0, length=3)
    apply = jax.jit(model.apply)
    clean = apply(params, tokens, model.init_cache(B, S), positions).logits
    dirty = jax.tree.map(lambda x: jnp.full_like(x, 1e4), model.init_cache(B, S))
    np.testing.assert_array_equal(
        np.asarray(apply(params, tokens, dirty, positions).logits), np.asarray(clean)
    )


@pytest.mark.parametrize("scan", [False, True])
def test_bfloat16_gives_float32_logits_near_those_of_float32(scan):
    cfg = dataclasses.replace(CFG, scan_layers=scan)
    model, params = to_model(Transformer(cfg, nnx.Rngs(0)))
    half, _ = abstract_model(dataclasses.replace(cfg, dtype="bfloat16"))
    tokens, positions = random_tokens(B, 5), at(0, 0, 0, length=5)
    wide = jax.jit(model.apply)(params, tokens, model.init_cache(B, S), positions)
    low = jax.jit(half.apply)(
        jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), tokens, half.init_cache(B, S), positions
    )
    assert low.logits.dtype == jnp.float32
    assert low.features.dtype == low.cache.keys[0].dtype == jnp.bfloat16
    scale = float(jnp.std(wide.logits))
    np.testing.assert_allclose(np.asarray(low.logits), np.asarray(wide.logits), atol=0.1 * scale)


def test_models_built_alike_are_one_static_argument():
    traces = []

    def forward(model, params, tokens, cache, positions):
        traces.append(None)
        return model.apply(params, tokens, cache, positions).logits

    forward = jax.jit(forward, static_argnums=0)
    tokens, positions = random_tokens(1, 2), at(0, length=2)
    for seed in (0, 1):
        model, params = to_model(Transformer(CFG, nnx.Rngs(seed)))
        assert model == abstract_model(CFG)[0]
        assert hash(model) == hash(abstract_model(CFG)[0])
        forward(model, params, tokens, model.init_cache(1, S), positions)
    assert len(traces) == 1
    assert model != abstract_model(dataclasses.replace(CFG, rope_base=7.0))[0]


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 2), (1, 6), (3, 1)])
def test_a_step_holds_the_cache_once(rows, length):
    cfg = dataclasses.replace(CFG, num_layers=4, num_heads=2)
    model, params = abstract_model(cfg)
    cache = jax.eval_shape(lambda: model.init_cache(rows, 4096))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    compiled = jax.jit(model.apply, donate_argnums=2).lower(params, tokens, cache, tokens).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 2  # scores of a layer, not a copy of its keys


def test_weights_are_arguments_not_constants(built):
    model, params = built
    jaxpr = jax.make_jaxpr(model.apply)(params, random_tokens(1, 2), model.init_cache(1, S), at(0, length=2))
    assert all(np.size(const) <= CFG.head_dim for const in jaxpr.consts)


def test_abstract_params_are_those_of_the_module(built):
    model, params = built
    shapes = abstract_model(model.config)[1]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), params
    )


def test_the_gradient_reaches_every_weight(built):
    model, params = built
    tokens, positions = random_tokens(2, 4), at(0, 0, length=4)

    def loss(params):
        return jnp.mean(
            jax.nn.logsumexp(model.apply(params, tokens, model.init_cache(2, S), positions).logits, -1)
        )

    for path, grad in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params)):
        assert np.isfinite(np.asarray(grad)).all(), path
        assert np.abs(np.asarray(grad)).max() > 0, path


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_heads": 5}, "multiple"),
        ({"head_dim": 7}, "even"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_layers": 2.0}, "num_layers"),
        ({"width": True}, "width"),
        ({"rope_base": float("nan")}, "rope_base"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"dtype": "int8"}, "floating"),
        ({"dtype": "float31"}, "dtype"),
    ],
)
def test_senseless_sizes_are_refused_by_name(change, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(CFG, **change)


def test_one_dtype_has_one_name():
    assert dataclasses.replace(CFG, dtype=jnp.bfloat16) == dataclasses.replace(CFG, dtype="bfloat16")
