"""The one place where a Flax module becomes the core's function of params."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from specjax.models.config import ModelConfig
from specjax.models.transformer import Transformer, init_cache
from specjax.types import Array, Cache, ModelOutput, Params

__all__ = ["FunctionalModel", "abstract_model", "names_of", "to_model"]


@dataclasses.dataclass(frozen=True)
class FunctionalModel:
    """A :class:`specjax.types.Model` over a Flax module whose weights live outside.

    Equal and hashed by the structure of the module: two that were built alike are one static argument
    to ``jax.jit``, and share a trace.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef[Any]  # the module without its weights

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        return self.config.vocab_size

    @property
    def context_length(self) -> int:
        """The positions that the model was trained for."""
        return self.config.context_length

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Makes an empty cache for ``batch`` rows of ``capacity`` positions."""
        return init_cache(self.config, batch, capacity)

    def apply(self, params: Params, tokens: Array, cache: Cache, positions: Array) -> ModelOutput:
        """Scores ``tokens`` [B, T] standing at ``positions`` [B, T]; see :class:`specjax.types.Model`."""
        return nnx.merge(self.graphdef, params)(tokens, cache, positions)

    def param_names(self, params: Params) -> Any:
        """The logical names of each weight's dimensions; see :func:`names_of`."""
        return names_of(self.graphdef, params)


def to_model(module: Transformer) -> tuple[FunctionalModel, Params]:
    """Splits a module into the function that the core calls and the weights that it is called with.

    Args:
      module: left as it is; the weights are shared, not copied.

    Returns:
      The model, and its params: nested dicts of arrays, named as the module's attributes.
    """
    graphdef, state = nnx.split(module)
    return FunctionalModel(module.cfg, graphdef), nnx.to_pure_dict(state)


def names_of(graphdef: nnx.GraphDef[Any], params: Params) -> Any:
    """The logical names of each weight's dimensions, in the tree of the params, by which they are spread.

    Args:
      graphdef: of a module whose variables have ``names``.
      params: its weights, or as ``jax.ShapeDtypeStruct``.
    """
    _, variables = nnx.split(nnx.merge(graphdef, params))
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    return nnx.to_pure_dict(jax.tree.map(lambda x: x.get_metadata("names"), variables, is_leaf=is_variable))


def abstract_model(cfg: ModelConfig) -> tuple[FunctionalModel, Params]:
    """Returns the model of a configuration and its params as ``jax.ShapeDtypeStruct``, drawing no weights.

    For loaders, which bring the weights, and for planning, which needs none.
    """
    model, params = to_model(nnx.eval_shape(lambda: Transformer(cfg, nnx.Rngs(0))))
    return model, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
