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
    libraries take the right operand to be the small one that is used often, and repack it first: with the
    weight there, a second row costs as much as 0.7 forwards. So the weight goes to the left for few rows.

    Args:
      x: [B, T, in].
      weight: [out, in].
      dtype: of the result; None is that of ``x``. Sums are float32.

    Returns:
      [B, T, out].
    """
    chex.assert_rank([x, weight], [3, 2])
    rows = x.shape[0] * x.shape[1]
    few = rows <= _FEW_ROWS
    y = jax.lax.platform_dependent(
        x, weight, cpu=_weight_left if few else _weight_right, default=_weight_right
    )
    return y.astype(dtype or x.dtype)


def _weight_right(x: Array, weight: Array) -> Array:
    return jnp.einsum("bti,oi->bto", x, weight, preferred_element_type=jnp.float32)


def _weight_left(x: Array, weight: Array) -> Array:
    columns = x.reshape(-1, x.shape[-1]).T
    rows = columns.shape[1]
    if rows > _VECTOR // 2:  # whole vectors: six columns cost more than eight
        columns = jnp.pad(columns, ((0, 0), (0, -rows % _VECTOR)))
    # The barriers keep XLA from seeing through the transposes, and turning the product round again.
    columns = jax.lax.optimization_barrier(columns)
    y = jnp.dot(weight, columns, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(y)[:, :rows].T.reshape(*x.shape[:2], -1)
