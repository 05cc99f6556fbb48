"""The audit passes a sound decoder and fails a planted fault."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from tables import TableModel, random_table

from specjax import sampling, verify
from specjax.audit import Audit
from specjax.drafters import LookupDrafter, ModelDrafter

V = 12
TARGET = jnp.asarray(random_table(0, V))
DRAFT = jnp.asarray(0.5 * random_table(0, V) + 0.5 * random_table(1, V))
PROMPTS = [[i, j] for i in range(3) for j in range(2)]


def audit(drafter, draft_params, rule="token", **options) -> Audit:
    options = {"temperature": 0.8} | options
    return Audit(
        TableModel(V),
        TARGET,
        drafter,
        draft_params,
        PROMPTS,
        rule=rule,
        options=options,
        batch_size=512,
        max_tokens=12,
        num_draws=2048,
    )


def failing(checks):
    return {check.name for check in checks if not check.passed}


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_a_sound_decoder_passes(rule):
    checks = list(audit(ModelDrafter(TableModel(V), 3), DRAFT, rule).run())
    assert not failing(checks), checks
    assert ("tokens a step" in {check.name for check in checks}) == (rule != "coupled")
    assert checks[0].figures["tokens"] == 12 * len(PROMPTS)


def test_options_and_a_lookup_draft_pass():
    options = {"top_p": 0.9, "presence_penalty": 0.3, "repetition_penalty": 1.2, "min_p": 0.01}
    assert not failing(audit(LookupDrafter(3, 1, 2), None, **options).run())


@pytest.fixture
def plant(monkeypatch):
    """Replaces a function of the library while one audit runs, traces included."""

    def replace(module, name, fault):
        monkeypatch.setattr(module, name, fault)
        jax.clear_caches()

    yield replace
    monkeypatch.undo()
    jax.clear_caches()


def test_drawing_the_target_in_place_of_the_residual_fails(plant):
    real = verify.residual_logits
    plant(
        verify,
        "residual_logits",
        lambda draft, logits, n, scale: real(dataclasses.replace(draft, lengths=n), logits, n, scale),
    )
    found = failing(audit(ModelDrafter(TableModel(V), 3), DRAFT).sampled_law())
    assert {"law at context 0", "law of every token"} <= found


def test_accepting_too_much_fails(plant):
    real = verify.uniform
    plant(verify, "uniform", lambda keys: 0.5 * real(keys))
    assert {"law of every token", "tokens a step"} <= failing(
        audit(ModelDrafter(TableModel(V), 3), DRAFT).sampled_law()
    )


def test_the_coupled_rule_with_other_noise_fails(plant):
    plant(
        verify,
        "_position_keys",
        lambda address, i: sampling.keys_at(address, jnp.full_like(address.start, i), 0),
    )
    assert not audit(ModelDrafter(TableModel(V), 3), DRAFT, "coupled").coupled_identity().passed


def test_a_drafted_token_that_greedy_decoding_would_not_say_fails(plant):
    def sloppy(address, draft, logits):
        verdict = verify.greedy(address, draft, logits)
        return dataclasses.replace(verdict, num_accepted=jnp.minimum(verdict.num_accepted + 1, draft.lengths))

    rules = verify.RULES | {"greedy": dataclasses.replace(verify.RULES["greedy"], verify=sloppy)}
    plant(verify, "RULES", rules)
    from specjax import generate

    plant(generate, "RULES", rules)
    check = audit(ModelDrafter(TableModel(V), 3), DRAFT).greedy_identity()
    assert not check.passed
    assert check.figures["divergences"][0]["top_2_gap"] > 0
    assert "apart near" in check.summary
