"""The product with a weight is the same product whatever form it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.products import project


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 5), (2, 3), (8, 1), (3, 3), (4, 8), (1, 33), (5, 9)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_number_of_rows_gives_the_product(shape, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(*shape, 24)), dtype)
    weight = jnp.asarray(rng.normal(size=(40, 24)), dtype)
    y = jax.jit(project, static_argnums=2)(x, weight, jnp.float32)
    assert y.dtype == jnp.float32
    # Inputs are exact in float64, so what differs is only how float32 sums.
    np.testing.assert_allclose(np.asarray(y), np.asarray(x, float) @ np.asarray(weight, float).T, atol=2e-5)
    assert project(x, weight).dtype == dtype


@pytest.mark.parametrize("count", [1, 6])
def test_it_can_be_differentiated_and_mapped(count):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, count, 4)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)
    grad = jax.jit(jax.grad(lambda w: project(x, w).sum()))(weight)
    np.testing.assert_allclose(np.asarray(grad), np.broadcast_to(np.asarray(x[0]).sum(0), (3, 4)), rtol=1e-5)
    mapped = jax.jit(jax.vmap(lambda w: project(x, w)))(jnp.stack([weight, 2 * weight]))
    np.testing.assert_allclose(np.asarray(mapped[1]), 2 * np.asarray(mapped[0]), rtol=1e-6)


def test_the_program_for_an_accelerator_is_the_plain_product():
    exported = jax.export.export(jax.jit(project), platforms=["cuda"])(
        jax.ShapeDtypeStruct((1, 6, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    )
    text = exported.mlir_module()
    assert "dot_general" in text
    assert "optimization_barrier" not in text
