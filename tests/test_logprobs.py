"""Log-probabilities are those of a teacher-forced forward, whatever was drafted and warped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import TableModel, random_table

from specjax.drafters import LookupDrafter, ModelDrafter
from specjax.generate import generate
from specjax.sampling import make_sampling

V, N = 7, 3
TARGET, DRAFT = random_table(0, V), random_table(1, V)


@pytest.mark.parametrize("drafter", [None, ModelDrafter(TableModel(V), 3), LookupDrafter(3, 1, 2)])
def test_logprobs_are_those_of_a_teacher_forced_forward(drafter):
    prompts = [[1, 2], [3], [4, 5, 6]]
    rows = generate(
        TableModel(V),
        jnp.asarray(TARGET),
        prompts,
        max_tokens=9,
        drafter=drafter,
        draft_params=DRAFT,
        sampling=make_sampling(3, temperature=[0.7, 0.0, 1.5], top_p=0.9, presence_penalty=0.5),
        num_logprobs=N,
    )
    for prompt, row in zip(prompts, rows, strict=True):
        context = [0, *prompt]
        for i, token in enumerate(row.tokens):
            forced = np.asarray(jax.nn.log_softmax(TARGET[context[-2], context[-1]]))
            order = np.argsort(-forced, kind="stable")[:N]
            np.testing.assert_allclose(row.logprobs.chosen[i], forced[token], rtol=1e-5)
            np.testing.assert_array_equal(row.logprobs.top_tokens[i], order)
            np.testing.assert_allclose(row.logprobs.top[i], forced[order], rtol=1e-5)
            context.append(token)
        assert len(row.logprobs.chosen) == len(row.tokens)


def test_none_are_made_unasked():
    (row,) = generate(TableModel(V), jnp.asarray(TARGET), [[1]], max_tokens=3)
    assert row.logprobs is None
