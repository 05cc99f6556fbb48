"""A head on the target's states as the draft: what it draws from, and what it remembers between steps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_target

from specjax.distill.train import join_params
from specjax.drafters import EitherDrafter, FeatureDrafter, LookupDrafter, ModelDrafter
from specjax.generate import Decoding, generate
from specjax.sampling import make_sampling
from specjax.types import ModelOutput

VOCABULARY = np.flatnonzero(np.arange(48) % 5 != 3).astype(np.int32)  # 38 of 48
PROMPTS = [[5], [7, 8, 9], [1, 2, 3, 4] * 5, [40, 3]]


def make(kind):
    """A drafter of three tokens, its params and what it would be trained as."""
    student, trained, frozen, model = tiny_target.draft(kind, VOCABULARY, passes=3)
    params = join_params(trained, frozen)
    del params["target_head"]
    if kind == "head":
        return FeatureDrafter(model, 3, 48), params, student
    return ModelDrafter(model, 3, 48, narrow=True), params, student


@jax.jit
def features_of(tokens):
    """The target's states over whole rows."""
    model, params = tiny_target.target()
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model.apply(params, tokens, model.init_cache(*tokens.shape), positions).features


@pytest.mark.parametrize("kind", ["head", "layers"])
def test_greedy_output_is_plain_decodings(kind):
    drafter, params, _ = make(kind)
    plain = generate(*tiny_target.target(), PROMPTS, max_tokens=24)
    fast = generate(*tiny_target.target(), PROMPTS, max_tokens=24, drafter=drafter, draft_params=params)
    assert [row.tokens for row in fast] == [row.tokens for row in plain]
    assert sum(row.num_accepted_tokens for row in fast) > 0


def test_what_it_draws_from_is_what_it_is_trained_as():
    # Draft i of a step is pass i of training: the same states, whatever stood in the cache before.
    drafter, params, student = make("head")
    model, target_params = tiny_target.target()
    decoding = Decoding(
        model,
        target_params,
        PROMPTS,
        max_tokens=24,
        drafter=drafter,
        draft_params=params,
        sampling=make_sampling(4, temperature=1.0),
    )
    propose = jax.jit(
        lambda state: drafter.propose(
            params,
            lambda i: jax.vmap(jax.random.key)(jnp.arange(4) + 10 * i),
            state.draft_state,
            state.context,
            state.sampling,
        )[0]
    )
    decoding.advance(3)
    length = np.asarray(decoding._state.context.length)
    draft = propose(decoding._state)
    # The drafted tokens as if they were the text; what stands behind them no earlier position sees.
    rows = np.arange(4)[:, None]
    tokens = decoding._state.context.tokens.at[rows, length[:, None] + np.arange(3)].set(draft.tokens)
    states, _ = jax.jit(student.states)(params, tokens, features_of(tokens))
    others = np.setdiff1d(np.arange(48), VOCABULARY)
    for i in range(3):
        logits = states[i, np.arange(4), length - 1 + i] @ params["head"].T
        got = jax.nn.log_softmax(draft.logits[:, i])
        np.testing.assert_allclose(got[:, VOCABULARY], jax.nn.log_softmax(logits), atol=1e-4)
        assert np.isneginf(got[:, others]).all()


def test_it_keeps_up_where_another_drafts():
    # Lookup's drafts are accepted too: the states of these tokens must not be lost, or shifted.
    inner, params, _ = make("head")
    drafter = EitherDrafter(LookupDrafter(3), inner)
    prompts = [[1, 2, 3, 4] * 5, [5, 6, 7, 5, 6, 7, 5], [9, 9, 9, 9]]
    model, target_params = tiny_target.target()
    decoding = Decoding(model, target_params, prompts, max_tokens=90, drafter=drafter, draft_params=params)
    assert not decoding.advance(12)
    state = decoding._state
    assert max(row.num_accepted_tokens for row in decoding.rows()) > 4
    features = features_of(state.context.tokens)
    kept = state.draft_state.inner
    assert kept.seen.tolist() == (state.context.length - 1).tolist()
    for row, seen in enumerate(kept.seen.tolist()):
        np.testing.assert_allclose(kept.features[row, :seen], features[row, :seen], atol=1e-4)


@pytest.mark.parametrize("kind", ["head", "layers"])
def test_narrow_draws_follow_every_option(kind):
    drafter, params, _ = make(kind)
    options = dict(repetition_penalty=1.3, presence_penalty=0.5, logit_bias={4: 3.0, 3: 2.0}, top_p=0.9)
    plain = generate(*tiny_target.target(), PROMPTS, max_tokens=16, sampling=make_sampling(4, **options))
    fast = generate(
        *tiny_target.target(),
        PROMPTS,
        max_tokens=16,
        drafter=drafter,
        draft_params=params,
        sampling=make_sampling(4, **options),
    )
    assert [row.tokens for row in fast] == [row.tokens for row in plain]


def test_wide_noise_couples_the_draft_with_the_target():
    accepted = {}
    for wide in (False, True):
        drafter, params, _ = make("layers")
        results = generate(
            *tiny_target.target(),
            [[i, 2, 3] for i in range(16)],
            max_tokens=24,
            drafter=dataclasses.replace(drafter, wide_noise=wide),
            draft_params=params,
            rule="coupled",
            sampling=make_sampling(16, temperature=1.0),
        )
        accepted[wide] = sum(row.num_accepted_tokens for row in results)
        if not wide:
            plain = results
    assert accepted[True] > 1.3 * accepted[False]
    assert [row.tokens for row in results] == [row.tokens for row in plain]


@dataclasses.dataclass(frozen=True)
class Closed:
    """A target that hands no features on."""

    inner: object

    vocab_size = property(lambda self: self.inner.vocab_size)
    context_length = property(lambda self: self.inner.context_length)

    def init_cache(self, batch, capacity):
        return self.inner.init_cache(batch, capacity)

    def apply(self, *arguments):
        output = self.inner.apply(*arguments)
        return ModelOutput(output.logits, None, output.cache)


def test_a_target_without_features_is_refused():
    drafter, params, _ = make("head")
    model, target_params = tiny_target.target()
    with pytest.raises(ValueError, match="hands no features on"):
        generate(Closed(model), target_params, PROMPTS, max_tokens=4, drafter=drafter, draft_params=params)
