r"""What a draft should reach, from scored sequences: acceptance by position, and tokens a step.

A step that starts at position u drafts its s-th token at u + s by pass s. With acceptance :math:`a_s(t)` of
that pass at position t, the expected tokens a step are :math:`1 + E_u \sum_s \prod_{j \le s} a_j(u + j)`
(Leviathan et al. 2023). The decoder's own figure is what counts: see ``specjax distill``.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specjax.distill.batches import Source, stack
from specjax.distill.losses import sums_of
from specjax.distill.train import Batch, Student, join_params
from specjax.types import Array, Params

__all__ = ["Prediction", "acceptances", "predict"]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """At one temperature, over the positions of sequences that were sampled at it."""

    by_position: list[float]  # acceptance of the first, second .. K-th drafted token, if those before stood
    tokens_a_step: float
    positions: int

    @property
    def acceptance(self) -> float:
        """Of the first drafted token."""
        return self.by_position[0]


@partial(jax.jit, static_argnames=("student",))
def acceptances(trained: Params, frozen: Params, batch: Batch, *, student: Student) -> tuple[Array, Array]:
    """Acceptance at every position, by pass.

    Returns:
      [P, B, T] float32 sum min(p, q) at temperature 1, and whether the argmaxes agree, as 0 and 1; NaN where
      nothing counts.
    """
    params = join_params(trained, frozen)
    target_head = params.pop("target_head")
    features = batch.features.astype(jnp.float32)
    states, counts = student.states(params, batch.tokens, features)

    def row(x: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        features, normalizer, best, states = x  # of one sequence; states [P, T, D]
        log_p = jnp.einsum("td,vd->tv", features, target_head) - normalizer[:, None]
        logits = jnp.einsum("ptd,vd->ptv", states, params["head"])
        log_q = jax.nn.log_softmax(logits, axis=-1)
        overlap = jax.vmap(lambda log_q: sums_of(log_p, log_q).overlap)(log_q)
        return overlap, (jnp.argmax(logits, axis=-1) == best[None]).astype(jnp.float32)

    by_row = jax.lax.map(row, (features, batch.log_normalizer, batch.best, jnp.swapaxes(states, 0, 1)))
    live = counts[:, None] & batch.mask[None]
    overlap, same = (jnp.where(live, jnp.swapaxes(x, 0, 1), jnp.nan) for x in by_row)
    return overlap, same


def predict(
    trained: Params,
    frozen: Params,
    source: Source,
    temperatures: np.ndarray,
    *,
    student: Student,
    num_draft_tokens: int,
    batch: int = 8,
) -> dict[float, Prediction]:
    """Predictions by temperature (0 and 1) over a source of held-out sequences.

    Args:
      trained: weights.
      frozen: as in :func:`specjax.distill.train.train_step`.
      source: sequences.
      temperatures: of each.
      student: what is trained.
      num_draft_tokens: K.
      batch: sequences of a forward.
    """
    found: dict[float, list[np.ndarray]] = {0.0: [], 1.0: []}
    for begin in range(0, len(source), batch):
        indices = list(range(begin, min(begin + batch, len(source))))
        filled = (indices * batch)[:batch]  # one compiled shape
        both = jax.device_get(acceptances(trained, frozen, stack(source, filled), student=student))
        for place, index in enumerate(indices):
            temperature = float(temperatures[index])
            if temperature in found:
                found[temperature].append(both[temperature == 0][:, place])
    return {
        temperature: _chain(np.stack(rows, axis=1), num_draft_tokens)
        for temperature, rows in found.items()
        if rows
    }


def _chain(accepted: np.ndarray, num_draft_tokens: int) -> Prediction:
    """From acceptances [P, N, T], NaN where nothing counts."""
    passes, _, length = accepted.shape
    starts = length - num_draft_tokens + 1
    chain = np.ones(accepted.shape[1:])[:, :starts]
    reached, means = [np.ones_like(chain)], []
    for s in range(num_draft_tokens):
        reached.append(reached[-1] * accepted[min(s, passes - 1)][:, s : s + starts])
    whole = ~np.isnan(reached[-1])  # starts from which all K positions count
    for before, after in itertools.pairwise(reached):
        means.append(float(after[whole].sum() / max(before[whole].sum(), 1e-9)))
    expected = 1 + sum(float(x[whole].mean()) for x in reached[1:]) if whole.any() else 1.0
    return Prediction(means, expected, int(whole.sum()))
