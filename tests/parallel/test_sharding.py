"""Eight CPU devices: the tokens of one device on every mesh, and nothing whole where it should be spread."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from specjax.drafters import ModelDrafter
from specjax.generate import Decoding, generate
from specjax.models import ModelConfig, Transformer, to_model
from specjax.parallel import sharding
from specjax.parallel.sharding import make_placement, parse_mesh, put, shard
from specjax.sampling import likeliest, make_sampling
from specjax.types import Address, Draft
from specjax.verify import RULES

V, K = 8 * 13, 2
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [3, 2], [4, 5, 4, 5], [5, 5], [1], [2, 2, 2]]
# Greedy and sampled rows side by side; under the token rule filtered ones too.
TEMPERATURE = np.array([0, 0.7, 1, 1.3, 1, 0, 0.5, 1])
TOP_P = np.array([1, 0.9, 1, 0.8, 1, 1, 1, 0.95])


def config(vocab_size=V, **sizes):
    # Eight key-value heads, so that eight devices have one each.
    return ModelConfig(vocab_size, 1, 32, 16, 8, 4, 64, **sizes)


def prepare(mesh, rule, batch, vocab_size=V, draft_ways=None):
    """A batch before its first step, with a draft that agrees with the target now and then."""
    target, target_params = to_model(Transformer(config(vocab_size, qk_norm=True), nnx.Rngs(0)))
    draft, draft_params = target, jax.tree.map(lambda x: x + 0.1 * jnp.sign(jnp.sin(1e3 * x)), target_params)
    placement = None if mesh is None else make_placement(mesh, draft_ways)
    if placement is not None:
        target, target_params = placement.target.lay(target, target_params)
        draft, draft_params = placement.draft.lay(draft, draft_params)
    options = dict(temperature=TEMPERATURE[:batch]) if rule != "greedy" else {}
    options |= dict(top_p=TOP_P[:batch]) if rule == "token" else {}
    return Decoding(
        target,
        target_params,
        PROMPTS[:batch],
        max_tokens=9,
        drafter=ModelDrafter(draft, K),
        draft_params=draft_params,
        rule=rule,
        sampling=make_sampling(batch, **options),
        placement=placement,
    )


def decode(*how, **more):
    decoding = prepare(*how, **more)
    assert decoding.advance()
    return decoding.rows()


@functools.cache
def alone(rule, vocab_size=V):
    """The rows that one device gives."""
    return decode(None, rule, len(PROMPTS), vocab_size)


def assert_same(rows, expected):
    """The same tokens, from the same drafts, accepted alike."""
    assert (
        0 < sum(row.num_accepted_tokens for row in expected) < sum(row.num_draft_tokens for row in expected)
    )
    for row, other in zip(rows, expected[: len(rows)], strict=True):
        assert row.tokens == other.tokens
        assert row.sources == other.sources


@pytest.fixture(scope="module")
def spread():
    """Rows over two, models over four: the batch before it decodes, and the program that does."""
    decoding = prepare("data=2,model=4", "token", len(PROMPTS))
    arguments = *decoding._params, decoding._state, decoding._record, np.int32(99)
    return decoding, decoding._advance.lower(*arguments).compile()


def test_a_mesh_of_both_kinds_gives_the_ids_of_one_device():
    assert_same(decode("data=2,model=4", "token", len(PROMPTS)), alone("token"))


# Batches that divide, that don't, and with fewer rows than devices.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "rule", "batch", "draft_ways"),
    [
        ("data=1,model=1", "token", 5, None),
        ("data=8", "block", 3, None),
        ("model=8", "coupled", 5, 2),
        ("data=4,model=2", "token", 3, 1),
    ],
)
def test_the_ids_do_not_depend_on_the_mesh(mesh, rule, batch, draft_ways):
    assert_same(decode(mesh, rule, batch, draft_ways=draft_ways), alone(rule))


@pytest.mark.slow
def test_a_vocabulary_that_does_not_divide():
    assert_same(decode("data=2,model=4", "greedy", 5, vocab_size=51), alone("greedy", 51))


@pytest.mark.parametrize("rule", ["token", "block", "coupled", "greedy"])
def test_a_rule_judges_a_spread_vocabulary_alike(rule):
    batch = 4
    rng = np.random.default_rng(0)
    target = rng.normal(0, 2, (batch, K + 1, V)).astype(np.float32)
    draft = (target[:, :K] + rng.normal(0, 0.5, (batch, K, V))).astype(np.float32)
    target, draft = (x - x.max(-1, keepdims=True) for x in (target, draft))
    tokens = draft.argmax(-1).astype(np.int32)
    address = Address(np.arange(batch, dtype=np.uint32), np.full(batch, 7, np.int32))
    lengths = np.array([2, 2, 1, 0], np.int32)
    layout = make_placement("data=2,model=4").target
    verify = jax.jit(lambda target, draft: RULES[rule].verify(address, Draft(tokens, draft, lengths), target))
    expected = verify(target, draft)
    got = verify(*(put(x, layout.sharding(("rows", None, "vocab"), x.shape)) for x in (target, draft)))
    np.testing.assert_array_equal(got.num_accepted, expected.num_accepted)
    np.testing.assert_array_equal(got.next_token, expected.next_token)
    np.testing.assert_allclose(got.accept_probs, expected.accept_probs, rtol=1e-5)


def shapes(text):
    """The dimensions of every array in a program."""
    return [tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\d+\[([\d,]+)\]", text)]


def test_no_device_holds_a_whole_vocabulary(spread):
    found = {size for shape in shapes(spread[1].as_text()) for size in shape}
    assert V // 4 in found
    assert V not in found


def largest_moved(text, how="all-gather|all-to-all|collective-permute"):
    """The numbers in the largest array that a program brings elsewhere."""
    moved = re.findall(rf"^ *(?:ROOT )?%\S+ = (.*?) (?:{how})\S*\(", text, re.MULTILINE)
    return max((np.prod(shape) for results in moved for shape in shapes(results)), default=0)


def test_rows_stay_where_they_are(spread):
    assert largest_moved(spread[1].as_text()) <= len(PROMPTS) * (K + 1)  # a number a token at most


def test_rows_with_long_caches_stay_where_they_are():
    # Caches that one device reads block by block, a few rows at a time.
    layout = make_placement("data=2,model=4").target
    model, params = layout.lay(*to_model(Transformer(config(), nnx.Rngs(0))))
    rows, capacity = 8, 1024
    cache = jax.jit(lambda: model.init_cache(rows, capacity))()
    tokens, positions = np.zeros((2, rows, 1), np.int32)
    text = jax.jit(model.apply).lower(params, tokens, cache, positions).compile().as_text()
    assert "while" in text
    # States at most: of the caches four rows and a block would be 32 times as much.
    assert largest_moved(text, "all-") <= rows * 32


def test_caches_are_spread_and_given_away(spread):
    decoding, compiled = spread
    buffers = [
        x for x in jax.tree.leaves((decoding._state.target_cache, decoding._state.draft_state)) if x.ndim == 4
    ]
    assert {x.sharding.shard_shape(x.shape)[:2] for x in buffers} == {(4, 2)}  # of [8, 8, S, Dh]
    held = sum(x.nbytes for x in buffers) // 8
    assert compiled.memory_analysis().alias_size_in_bytes >= held


def test_the_likeliest_tokens_are_found_where_they_lie():
    layout = make_placement("data=2,model=4").target
    logits = np.random.default_rng(0).integers(0, 9, (4, 2, 64 * 13)).astype(np.float32)  # many are equal
    spread = put(logits, layout.sharding(("rows", None, "vocab"), logits.shape))
    program = jax.jit(likeliest, static_argnums=1).lower(spread, 5).compile()
    assert 64 * 13 not in {size for shape in shapes(program.as_text()) for size in shape}
    values, ids = program(spread)
    expected = np.argsort(-logits, axis=-1, kind="stable")[..., :5]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, axis=-1))


@pytest.mark.parametrize("count", [0, 1, 13, 14, 99])
def test_any_number_of_likeliest_tokens(count):
    logits = np.random.default_rng(0).integers(0, 9, (2, 104)).astype(np.float32)
    values, ids = likeliest(jnp.asarray(logits), count)
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, axis=-1))


def test_two_all_reduces_a_layer():
    placement = make_placement("model=8")
    counts = {}
    for layers in (1, 3):
        model, params = to_model(Transformer(dataclasses.replace(config(), num_layers=layers), nnx.Rngs(0)))
        model, params = placement.target.lay(model, params)
        tokens = jnp.zeros((2, 3), jnp.int32)

        def forward(params, tokens, model=model):
            return model.apply(params, tokens, model.init_cache(2, 16), tokens)

        text = jax.jit(forward).lower(params, tokens).compile().as_text()
        counts[layers] = collections.Counter(
            re.findall(
                r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text
            )
        )
    assert counts[3] - counts[1] == {"all-reduce": 4}


def test_equal_batches_share_their_programs():
    before = sharding._jit.cache_info()
    for seed in (0, 1):
        placement = make_placement("data=2")
        target, params = to_model(Transformer(config(), nnx.Rngs(0)))
        target, params = placement.target.lay(target, params)
        sampling = make_sampling(2, temperature=1.0, seed=seed)
        generate(target, params, [[1], [2, 3]], max_tokens=2, sampling=sampling, placement=placement)
    after = sharding._jit.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (2, 2)  # start and steps


def test_more_rows_hold_what_the_last_one_does():
    placement = make_placement("data=4,model=2")
    rows = placement.lay_rows((jnp.array([[1, 2], [3, 4], [5, 6]]), np.arange(3)))
    np.testing.assert_array_equal(rows[0], [[1, 2], [3, 4], [5, 6], [5, 6]])
    np.testing.assert_array_equal(rows[1], [0, 1, 2, 2])
    np.testing.assert_array_equal(placement.lay_rows(np.ones(5, int), fill=0), [1, 1, 1, 1, 1, 0, 0, 0])
    assert rows[0].sharding.spec == PartitionSpec("data")


def test_weights_lie_by_name_and_what_does_not_divide_is_whole():
    placement = make_placement("data=2,model=4")
    model, params = to_model(Transformer(config(vocab_size=51, scan_layers=True), nnx.Rngs(0)))
    _, laid = placement.target.lay(model, params)
    over = ("copies", "model")
    attention, mlp = laid["blocks"]["attention"], laid["blocks"]["mlp"]
    assert attention["qkv"]["kernel"].sharding.spec == PartitionSpec(None, over, None, None)
    assert attention["out"]["kernel"].sharding.spec == PartitionSpec(None, None, over)
    assert mlp["gate_up"]["kernel"].sharding.spec == PartitionSpec(None, None, over, None)
    assert laid["embedding"].sharding.spec == PartitionSpec(None, None)
    np.testing.assert_array_equal(laid["embedding"], params["embedding"])
    assert shard(laid["embedding"], "vocab", None) is laid["embedding"]  # no layout is active


@pytest.mark.parametrize("text", ["", "data", "data=0", "data=2,data=2", "rows=2", "model=-1", "model=two"])
def test_a_mesh_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="data=2,model=4"):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("mesh", "draft_ways", "complaint"),
    [
        ("data=3,model=3", None, "needs 9 devices, not 8"),
        ("model=4", 3, "must divide model=4"),
        ("model=4", 0, "must divide model=4"),
    ],
)
def test_a_mesh_that_cannot_be_laid(mesh, draft_ways, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_placement(mesh, draft_ways)
