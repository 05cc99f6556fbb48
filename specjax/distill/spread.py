"""Where training lies on a mesh: batches over ``data``, weights and what is kept of them by their names."""

from __future__ import annotations

from typing import Any

import optax

from specjax.distill.train import TrainState
from specjax.parallel.sharding import Placement
from specjax.types import Params

__all__ = ["training_shardings"]


def training_shardings(
    placement: Placement,
    model: Any,
    state: TrainState,
    frozen: Params,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Params]:
    """The shardings of what a step changes and of what it leaves.

    Args:
      placement: how the draft lies on the mesh.
      model: the draft, which names its weights.
      state: a fresh one.
      frozen: see :func:`specjax.distill.train.train_step`.
      optimizer: whose state it is; what it keeps for each weight lies where the weight does.

    Returns:
      The same trees, of shardings.
    """
    layout, everywhere = placement.draft, placement.everywhere
    others = {name: x for name, x in frozen.items() if name != "target_head"}
    weights = layout.param_shardings(model, {**others, **state.params})
    trained = {name: weights[name] for name in state.params}
    kept = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        state.opt_state,
        trained,
        transform_non_params=lambda _: everywhere,
    )
    still = {name: weights[name] for name in others}
    still |= {
        name: layout.sharding(("vocab", None), x.shape) for name, x in frozen.items() if name not in others
    }
    step: Any = everywhere
    return TrainState(trained, kept, step), still
