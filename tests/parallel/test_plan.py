"""Programs for TPUs that aren't here, by their own compiler: what they must hold, and mustn't.

Needs libtpu (the extra ``tpu``).
"""

import dataclasses
import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import ModelConfig, abstract_model
from specjax.models.shapes import SHAPES
from specjax.parallel import plan, program
from specjax.parallel.sharding import make_placement
from specjax.scripts import plan as script
from specjax.verify import RULES

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)

# A head as wide as the chip's vectors, as in the models that are planned for; few layers compile fast.
CONFIG = ModelConfig(
    vocab_size=4 * 1013,
    num_layers=2,
    width=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    mlp_width=512,
    tied_embeddings=False,
    dtype="bfloat16",
)
# Caches that don't fit the chip's own memory, as in earnest.
BATCH = plan.Batch(rows=8, capacity=16384, num_draft_tokens=2, live=512)


def shape(**changes):
    def build(num_layers, scanned):
        return abstract_model(
            dataclasses.replace(CONFIG, num_layers=num_layers, scan_layers=scanned, **changes)
        )

    return plan.Shape("tiny", CONFIG.num_layers, build)


@pytest.fixture(scope="module")
def compiled():
    """A tiny step for four chips, and its text."""
    placement = make_placement("model=4", devices=plan.devices_of("v5e:2x2"))
    draft = shape(head_dim=64)  # narrower than the chip's registers
    step = plan.Step.make(shape(), draft, placement, BATCH)
    found = plan.compile_step(step, RULES["token"])
    return step, found, found.as_text()


@needs_libtpu
@pytest.mark.slow
def test_caches_are_updated_in_place(compiled):
    step, found, _ = compiled
    memory, parts = program.memory(found), step.bytes_a_device()
    caches = parts["target_cache"] + parts["draft_cache"]
    # [B, KV, L, S, Dh] in bfloat16, keys and values, heads over four chips, of two models
    assert caches == pytest.approx(8 * 1 * 2 * 16384 * 128 * 2 * 2 * 2, rel=0.01)
    assert memory.in_place >= caches
    assert memory.temporary < 0.1 * caches


@needs_libtpu
@pytest.mark.slow
def test_keys_are_written_by_the_chips_own_scatter_not_one_after_the_other(compiled):
    # Keys and values, where the target verifies, where it drafts its first token, its others, catches up.
    assert len(re.findall(r"= bf16\[8,2,16384,128\]\S* fusion\(.*kind=kCustom", compiled[2])) == 2 * 4
    assert " dynamic-update-slice(bf16" not in compiled[2]


@needs_libtpu
@pytest.mark.slow
def test_no_chip_holds_a_whole_vocabulary(compiled):
    sizes = program.sizes(compiled[2])
    assert 1013 in sizes
    assert 4 * 1013 not in sizes


@needs_libtpu
@pytest.mark.slow
def test_nothing_goes_to_the_host(compiled):
    assert program.host_transfers(compiled[2]) == []


@needs_libtpu
@pytest.mark.slow
def test_products_are_bfloat16_and_their_sums_float32(compiled):
    # On the chip a product is a convolution; its inputs must be narrow, what it gives wide.
    lines = [line for line in compiled[2].splitlines() if " convolution(" in line]
    assert lines
    assert all(" = f32[" in line for line in lines if "bf16" in line)


@needs_libtpu
@pytest.mark.slow
def test_two_all_reduces_a_layer_and_their_sizes():
    devices = plan.devices_of("v5e:2x2")
    layout = make_placement("model=4", devices=devices).target
    chip = plan.CHIPS[devices[0].device_kind]
    deep = dataclasses.replace(shape(), num_layers=10)
    found = plan.forward(deep, layout, chip, BATCH, 3)
    assert found.collectives == 2 * 10 + 1  # and one for the embedding, whose vocabulary is spread
    assert found.collective_bytes == pytest.approx(found.collectives * 8 * 3 * 256 * 2)
    products = 2 * 8 * 3 * (10 * (256 * 16 * 128 + 8 * 128 * 256 + 3 * 256 * 512) + 256 * 4 * 1013) / 4
    attention = 2 * 2 * 8 * 3 * 10 * 8 * 512 * 128 / 4  # a block of 512 slots; norms come on top
    assert found.flops == pytest.approx(products + attention, rel=0.05)
    weights = 2 * (10 * (256 * 16 * 128 + 8 * 128 * 256 + 3 * 256 * 512) + 256 * 4 * 1013) / 4
    caches = 2 * 10 * 8 * 512 * 128 * 2
    assert found.bytes_read == pytest.approx(weights + caches, rel=0.01)
    assert found.seconds >= found.floor > 0


def forward(seconds):
    return plan.Forward(1, 1, 1, 1, 1, seconds, seconds)


def test_costs_are_weighed_as_the_theory_says():
    costs = plan.Costs(decode=forward(10e-3), verify=forward(12e-3), draft=forward(1e-3), num_draft_tokens=4)
    assert costs.draft_cost == pytest.approx(0.1)
    assert costs.verify_cost(2) == pytest.approx(1.1)
    # At acceptance 1 a step of 16 ms gives 5 tokens to each of 32 rows.
    assert costs.tokens_a_second(32, 1.0, 4) == pytest.approx(32 * 5 / 16e-3)
    even = costs.break_even()
    assert costs.tokens_a_second(1, even, 4) >= 100 > costs.tokens_a_second(1, even - 0.002, 4)
    assert costs.best(0.0) == 0
    assert costs.best(1.0) == 8
    slow = dataclasses.replace(costs, draft=forward(20e-3))
    assert slow.break_even() is None


TEXT = """
%all-reduce.1 = bf16[32,6,4096]{2,0,1:T(8,128)} all-reduce(%x), channel_id=1
%all-gather.2 = (f32[4]{0}, f32[8]{0}) all-gather-start(%y), metadata={op_name="all-reduce(z)"}
%fusion.3 = pred[7,5]{1,0} fusion(%all-reduce.1), calls=%c, backend_config={"estimated_cycles":"12"}
%outfeed.4 = token[] outfeed(%fusion.3), backend_config={"estimated_cycles":"30"}
"""


def test_a_program_is_read():
    found = program.collectives(TEXT)
    assert found == [
        program.Collective("all-reduce", 32 * 6 * 4096 * 2),
        program.Collective("all-gather", 48),
    ]
    assert program.sizes(TEXT) == {32, 6, 4096, 4, 8, 7, 5}
    assert program.cycles(TEXT) == 42
    assert program.host_transfers(TEXT) == ["outfeed"]


MOVES = """
%body.1 (p.0: (s32[], f32[8,100])) -> (s32[], f32[8,100]) {
  %p.1 = (s32[], f32[8,100]{1,0}) parameter(0)
  %x.1 = f32[8,100]{1,0} get-tuple-element(%p.1), index=1
  %far.1 = f32[8]{0:T(8)S(1)} fusion(%x.1), kind=kLoop, calls=%never
}

%cheap.1 (p.2: f32[8,100]) -> f32[8] {
  %p.2 = f32[8,100]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %near.1 = f32[8]{0:T(8)S(1)} fusion(%p.2), kind=kLoop, calls=%never
}

%dear.1 (p.3: f32[8,100]) -> f32[8] {
  %p.3 = f32[8,100]{1,0:T(8,128)} parameter(0)
  ROOT %near.2 = f32[8]{0:T(8)S(1)} fusion(%p.3), kind=kLoop, calls=%never
}

ENTRY %main.1 (a: f32[8,100]) -> f32[8] {
  %a = f32[8,100]{1,0:T(8,128)} parameter(0)
  %start.1 = (f32[8,100]{1,0:T(8,128)S(1)}, f32[8,100]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %done.1 = f32[8,100]{1,0:T(8,128)S(1)} copy-done(%start.1)
  %free.1 = f32[8,100]{1,0:T(8,128)S(1)} fusion(%done.1), kind=kLoop, calls=%never
  %out.1 = bf16[8,100]{1,0:T(8,128)} fusion(%free.1), kind=kLoop, calls=%never
  %part.1 = ((f32[8,100]{1,0:T(8,128)}), f32[8,25]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%a), slice={}
  %cond.1 = f32[8]{0:T(8)S(1)} conditional(%s, %a, %a), branch_computations={%cheap.1, %dear.1}
  %loop.1 = (s32[], f32[8,100]{1,0}) while(%t), condition=%never, body=%body.1
}
"""


def test_what_a_program_moves_is_counted():
    whole = 4 * 8 * 100
    copied, written, sliced, branch, loop = whole, whole // 2, whole // 4, whole, 7 * whole
    assert program.traffic(MOVES, 7) == copied + written + sliced + branch + loop


@needs_libtpu
@pytest.mark.slow
def test_the_rule_reads_each_models_logits_once_or_twice():
    placement = make_placement("model=4", devices=plan.devices_of("v5e:2x2"))
    step = plan.Step.make(shape(), shape(), placement, BATCH)
    text = plan.compile_rule(step, RULES["token"]).as_text()
    logits = 4 * BATCH.rows * 1013 * (BATCH.num_draft_tokens + 1)
    # The threshold of top-p is looked for on the chip, where the logits stay.
    assert logits < program.traffic(text, 32) < 3 * logits


def test_the_shapes_have_the_parameters_that_their_names_say():
    for name, billions in (
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.6),
        ("llama-3.2-1b", 1.24),
        ("qwen3-0.6b", 0.596),
        ("qwen3-4b", 4.02),
        ("qwen3-32b", 32.8),
        ("smollm2-135m", 0.1345),
    ):
        _, params = abstract_model(dataclasses.replace(SHAPES[name], scan_layers=True))
        assert sum(x.size for x in jax.tree.leaves(params)) / 1e9 == pytest.approx(billions, rel=0.01), name


def test_the_exported_step_decodes():
    pytest.importorskip("flatbuffers")
    small = plan.Batch(rows=2, capacity=64, num_draft_tokens=2, live=64)
    tiny = shape(width=32, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=16, vocab_size=50)
    loaded = jax.export.deserialize(bytearray(plan.export_step(tiny, tiny, small, RULES["greedy"])))
    assert set(loaded.platforms) == {"cpu", "cuda", "tpu"}
    tokens, length = loaded.in_avals[0], loaded.in_avals[1]
    assert (tokens.shape, length.shape) == ((2, 64), (2,))
    leaves = [jnp.ones(x.shape, x.dtype) for x in loaded.in_avals]
    leaves[3] = jnp.full((2, 1), -1, jnp.int32)  # no stop token
    leaves[4] = jnp.full(2, 60, jnp.int32)  # the limit
    leaves[5], leaves[6] = jnp.zeros(2, bool), jnp.zeros(2)  # not done, and greedy
    outputs = loaded.call(*leaves)
    # All weights are one, so every logit is alike: the lowest id wins, and the draft agrees.
    np.testing.assert_array_equal(outputs[1], [4, 4])
    np.testing.assert_array_equal(outputs[0][:, :5], [[1, 0, 0, 0, 1]] * 2)


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        (["--target", "llama-9"], "no shape is named 'llama-9'"),
        (["--target", "qwen3-4b"], "the vocabularies differ: 151936 and 128256"),
        (["--capacity", "1000"], "multiples of 512"),
        (["--acceptance", "2"], "--acceptance needs values in 0 .. 1"),
    ],
)
def test_bad_input_gets_one_line(option, complaint, capsys):
    assert script._cli.run(script.main, option) == 2
    assert complaint in capsys.readouterr().err


@needs_libtpu
def test_a_topology_that_is_none(capsys):
    assert script._cli.run(script.main, ["--topology", "v5e:7x9"]) == 2
    assert "v5e:2x4" in capsys.readouterr().err


@needs_libtpu
@pytest.mark.slow
def test_the_job_prints_and_writes_its_figures(write_gguf, tmp_path, capsys):
    path, out = str(write_gguf()), tmp_path / "plan.json"
    options = ["--topology", "v5e:2x2", "--rows", "4", "--capacity", "512", "--live", "512"]
    options += ["--num-speculative-tokens", "2", "--json", str(out)]
    assert script.main(["--target", path, "--draft", path, *options]) == 0
    said = " ".join(capsys.readouterr().out.split())  # wherever its lines were broken
    assert "Nothing was run or measured" in said
    assert "warp and rule (token) move" in said
    figures = json.loads(out.read_text())
    assert figures["mesh"] == "data=2,model=2"
    assert figures["fits"]
    assert figures["rule_bytes"] > 0
    assert figures["rows"]["4"]["verify"]["seconds"] > 0
