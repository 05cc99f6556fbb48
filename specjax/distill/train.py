"""The pure training step: a draft's weights one batch nearer to the target.

Nothing here knows of devices, files or loops: :mod:`specjax.distill.fit` puts the jit and the checkpoints
around it, and shardings go to that jit.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

from specjax.distill.chunked import Scores, chunked_sums
from specjax.distill.losses import mix
from specjax.types import Array, Params, pytree

__all__ = [
    "Batch",
    "Metrics",
    "Objective",
    "Schedule",
    "Student",
    "TrainState",
    "init_state",
    "join_params",
    "make_optimizer",
    "split_params",
    "train_step",
]


@pytree
class Batch:
    """Sequences with what the target says of them, computed once; T positions each."""

    tokens: Array  # [B, T] int32
    features: Array  # [B, T, D] the target's states that its head multiplies, any float dtype
    log_normalizer: Array  # [B, T] float32: log sum exp of the target's logits
    labels: Array  # [B, T] int32: the next token as a row of the draft's head, -1 where it has none
    best: Array  # [B, T] int32: the target's argmax, likewise
    mask: Array  # [B, T] bool: positions whose law counts
    lengths: Array  # [B] int32: tokens; what stands behind them is padding


class Student(Protocol):
    """What is trained, hashable by value."""

    def states(self, params: Params, tokens: Array, features: Array) -> tuple[Array, Array]:
        """States [P, B, T, D] that ``params["head"]`` turns into the laws at each position, and where they
        count, [P, T] bool. Pass s of P is the law of a token drafted s tokens past what was verified."""
        ...


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised."""

    losses: tuple[tuple[str, float], ...] = (("forward_kl", 1.0),)  # names in LOSSES, and weights
    eta: float = 3.0  # of lk_hybrid
    beta: float = 0.5  # of jsd
    pass_decay: float = 0.8  # a pass weighs so much of the one before
    chunk: int = 8192  # tokens scored at once
    dtype: str = "float32"  # of the products; weights and sums stay float32
    remat: bool = False  # makes the student's states anew in the backward pass


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How fast, and for how long."""

    steps: int
    learning_rate: float = 1e-3
    warmup: int = 50
    final: float = 0.1  # share of the learning rate that the cosine ends at
    weight_decay: float = 0.0
    clip: float = 1.0  # of the gradient's norm


@pytree
class TrainState:
    """All that a step changes; donate it."""

    params: Params  # float32, the trained ones alone
    opt_state: Any
    step: Array  # int32 []


@pytree
class Metrics:
    """What a step saw, over the positions that count."""

    loss: Array  # []
    acceptance: Array  # [P] sum min(p, q) at temperature 1, by pass
    positions: Array  # [] that counted
    grad_norm: Array  # [] before clipping


def make_optimizer(schedule: Schedule) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine and clipping by the global norm."""
    rate = optax.schedules.warmup_cosine_decay_schedule(
        schedule.learning_rate * min(1.0, 1 / max(schedule.warmup, 1)),
        schedule.learning_rate,
        min(schedule.warmup, max(schedule.steps - 1, 1)),
        max(schedule.steps, 2),
        schedule.learning_rate * schedule.final,
    )
    return optax.chain(
        optax.clip_by_global_norm(schedule.clip),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=schedule.weight_decay),
    )


def split_params(params: Params, frozen: frozenset[str]) -> tuple[Params, Params]:
    """Parts the top-level names of a params dict into trained and frozen ones."""
    trained = {name: value for name, value in params.items() if name not in frozen}
    return trained, {name: value for name, value in params.items() if name in frozen}


def join_params(trained: Params, frozen: Params) -> Params:
    """The whole again."""
    return {**frozen, **trained}


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """A state of no step; the weights are copied, so that it can be donated, and float32."""
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    return TrainState(params, optimizer.init(params), jnp.int32(0))


def train_step(
    state: TrainState,
    batch: Batch,
    frozen: Params,
    *,
    student: Student,
    objective: Objective,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Metrics]:
    """One step of the optimizer on one batch.

    Args:
      state: consumed; donate it.
      batch: [A, B, ...] arrays: A parts, whose gradients add up to that of the whole; positions weigh the
        same whichever part they are in.
      frozen: weights that stay, and ``target_head`` [W, D], the target's rows for the tokens that the
        draft's head lists.
      student: static under jit, like the following.
      objective: what is minimised.
      optimizer: from :func:`make_optimizer`.

    Returns:
      The next state, and what the step saw.
    """
    chex.assert_rank([batch.tokens, batch.features], [3, 4])

    def objective_of(params: Params, part: Batch) -> tuple[Array, tuple[Array, Array, Array]]:
        value, accepted, count = _totals(params, part, frozen, student, objective)
        return value, (value, accepted, count)

    gradient = jax.grad(objective_of, has_aux=True)

    def add(carry: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, carry, gradient(state.params, part)), None

    first = gradient(state.params, jax.tree.map(lambda x: x[0], batch))
    rest = jax.tree.map(lambda x: x[1:], batch)
    (grads, (value, accepted, count)), _ = lax.scan(add, first, rest)

    # Positions were summed: dividing at the end makes parts of unequal weight equal to the whole.
    weight = _pass_weights(objective, len(accepted))
    scale = 1 / jnp.maximum(jnp.sum(count * weight), 1)
    grads = jax.tree.map(lambda x: x * scale, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    metrics = Metrics(
        loss=value * scale,
        acceptance=accepted / jnp.maximum(count, 1),
        positions=count[0],
        grad_norm=optax.tree.norm(grads),
    )
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state, state.step + 1), metrics


def _pass_weights(objective: Objective, passes: int) -> Array:
    return objective.pass_decay ** jnp.arange(passes, dtype=jnp.float32)


def _totals(
    trained: Params, batch: Batch, frozen: Params, student: Student, objective: Objective
) -> tuple[Array, Array, Array]:
    """Summed over positions: the weighted loss [], acceptance [P], and how many counted [P]."""
    dtype = jnp.dtype(objective.dtype)

    def cast(x: Array) -> Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    params = jax.tree.map(cast, join_params(trained, frozen))
    target_head = params.pop("target_head")  # the draft itself has none
    make_states = jax.checkpoint(student.states) if objective.remat else student.states
    # What stands at padding must not come back through the backward pass, whatever it is.
    padding = jnp.arange(batch.tokens.shape[1])[None] >= batch.lengths[:, None]
    features = cast(jnp.where(padding[..., None], 0, batch.features))
    states, counts = make_states(params, batch.tokens, features)
    passes = states.shape[0]
    normalizers = jnp.where(batch.mask, batch.log_normalizer, 0)
    target = Scores(_flat(features), target_head, _flat(normalizers))
    values, accepted, number = [], [], []
    for index in range(passes):
        mask = batch.mask & counts[index][None]
        safe = jnp.where(mask[..., None], states[index], 0)
        sums = chunked_sums(
            target,
            Scores(_flat(safe), params["head"]),
            _flat(batch.labels),
            chunk=objective.chunk,
            beta=objective.beta,
        )
        loss = mix(sums, dict(objective.losses), eta=objective.eta)
        live = _flat(mask)
        values.append(jnp.sum(jnp.where(live, loss, 0)))
        accepted.append(jnp.sum(jnp.where(live, sums.overlap, 0)))
        number.append(jnp.sum(live).astype(jnp.float32))
    value = jnp.sum(jnp.stack(values) * _pass_weights(objective, passes))
    return value, jnp.stack(accepted), jnp.stack(number)


def _flat(x: Array) -> Array:
    return x.reshape(-1, *x.shape[2:])
