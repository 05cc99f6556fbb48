"""The product with a weight, in the form that a CPU streams fastest."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from specjax.types import Array

__all__ = ["project"]

_FEW_ROWS = 32
_VECTOR = 8


def project(x: Array, weight: Array, dtype: jax.typing.DTypeLike | None = None) -> Array:
    r"""Multiplies by a weight that is stored [out, in]: :math:`y_{bto} = \sum_i w_{oi}\, x_{bti}`.

    On a CPU the product that matters is a few rows, the tokens to be verified, times a large weight. XLA's
    libraries repack the right operand before they start, so with the weight there a second row costs nearly
    as much as another forward; in float32 the weight therefore goes to the left. In bfloat16 they are fast
    with the weight on the right, unless there is but one row.

    Args:
      x: [B, T, in].
      weight: [.., in]; outputs may have several axes.
      dtype: of the result; None is that of ``x``. Sums are float32.

    Returns:
      [B, T, ..].
    """
    chex.assert_rank([x, weight], [3, {2, 3}])
    rows = x.reshape(-1, x.shape[-1])
    y = jax.lax.platform_dependent(rows, weight, cpu=_on_cpu, default=_weight_right)
    return y.reshape(*x.shape[:2], *weight.shape[:-1]).astype(dtype or x.dtype)


def _on_cpu(rows: Array, weight: Array) -> Array:
    if weight.dtype == jnp.float32:
        return _weight_left(rows, weight) if len(rows) <= _FEW_ROWS else _weight_right(rows, weight)
    if len(rows) == 1:
        return _weight_right(jnp.pad(rows, ((0, 1), (0, 0))), weight)[:1]
    return _weight_right(rows, weight)


def _weight_right(rows: Array, weight: Array) -> Array:
    return jnp.einsum("ni,...i->n...", rows, weight, preferred_element_type=jnp.float32)


def _weight_left(rows: Array, weight: Array) -> Array:
    count = len(rows)
    if count > _VECTOR // 2:  # whole vectors: six columns cost more than eight
        rows = jnp.pad(rows, ((0, -count % _VECTOR), (0, 0)))
    # The barriers keep XLA from seeing through the transposes, and turning the product round again.
    columns = jax.lax.optimization_barrier(rows.T)
    y = jnp.dot(weight, columns, preferred_element_type=jnp.float32)
    return jnp.moveaxis(jax.lax.optimization_barrier(y)[..., :count], -1, 0)
