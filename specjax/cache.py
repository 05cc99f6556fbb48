"""A key-value cache of fixed size, whose slots are addressed by position.

The cache holds no length. Position ``i`` of a row lives in slot ``i`` for good, a query at position
``i`` sees the slots ``<= i``, and so taking tokens back costs nothing: the next forward is given
smaller positions, what it sees ends there, and what it writes replaces the stale slots before any
later query reaches them. Stale slots are masked, never zeroed: a zeroed key would still take its
share of the softmax.

Two layouts, one behaviour. Unrolled layers keep an array a layer, since XLA would copy a layer out of a
stacked array each time it is read; scanned layers need the stacked one, and carry it through the scan.
In both the rows come first, and the slots of one head lie together, which attention reads as they stand.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from specjax.types import Array, pytree

__all__ = ["KVCache", "capacity", "init_cache", "mask", "num_heads", "read", "width", "write"]


@pytree
class KVCache:
    """Keys (already rotated) and values of ``S`` positions a row."""

    keys: Array | tuple[Array, ...]  # L arrays [B, KV, S, Dh], or one [B, KV, L, S, Dh]
    values: Array | tuple[Array, ...]  # laid out as the keys


def init_cache(
    num_layers: int,
    batch: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    stacked: bool = False,
) -> KVCache:
    """Makes an empty cache; its zeros are never read, since no position is live yet.

    Args:
      num_layers: L.
      batch: B.
      num_kv_heads: KV.
      capacity: S, the number of positions a row can hold.
      head_dim: Dh.
      dtype: what keys and values are stored as.
      stacked: one array over all layers, for layers that are scanned.

    Returns:
      A cache whose buffers are all distinct, so that it can be donated.

    Raises:
      ValueError: a size is below 1.
    """
    sizes = dict(
        num_layers=num_layers, batch=batch, num_kv_heads=num_kv_heads, capacity=capacity, head_dim=head_dim
    )
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if stacked:
        whole = (batch, num_kv_heads, num_layers, capacity, head_dim)
        return KVCache(*(jnp.zeros(whole, dtype) for _ in range(2)))
    shape = (batch, num_kv_heads, capacity, head_dim)
    return KVCache(*(tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)) for _ in range(2)))


def capacity(cache: KVCache) -> int:
    """Returns S, the number of slots a row."""
    return jax.tree.leaves(cache)[0].shape[-2]


def width(cache: KVCache) -> int:
    """Returns Dh, the width of a key as it is stored."""
    return jax.tree.leaves(cache)[0].shape[-1]


def num_heads(cache: KVCache) -> int:
    """Returns KV, the number of key-value heads."""
    return jax.tree.leaves(cache)[0].shape[1]


def write(cache: KVCache, layer: int | Array, keys: Array, values: Array, positions: Array) -> KVCache:
    """Stores the keys and values of one layer, each at the slot of its position.

    A scatter, not ``dynamic_update_slice``: the latter clamps its start, so that a block reaching past
    the end would shift back over live slots. Here what lies past the end is dropped, the rest written.

    Args:
      cache: with layers of [B, KV, S, Dh].
      layer: which layer; a traced index only where the cache is stacked.
      keys: [B, T, KV, Dh], or narrower: zeros fill them up.
      values: [B, T, KV, Dh], likewise.
      positions: [B, T] int32 >= 0; those >= S are dropped.

    Returns:
      The cache with that layer's slots replaced, in place where the buffers may be reused.
    """
    chex.assert_rank([keys, values, positions], [4, 4, 2])
    chex.assert_equal_shape([keys, values])
    chex.assert_equal_shape_prefix([keys, positions], 2)

    def put(buffer: Array | tuple[Array, ...], block: Array) -> Array | tuple[Array, ...]:
        if isinstance(buffer, tuple):
            assert isinstance(layer, int), "unrolled layers are counted in Python"
            slots = _scatter(buffer[layer], block, positions[..., None])
            # XLA turns the scatter of a single token into a select and an update-slice, fuses that into
            # whoever reads the slots, and copies the buffer for it, four times a step. The barrier stops it.
            slots = jax.lax.optimization_barrier(slots)
            return (*buffer[:layer], slots, *buffer[layer + 1 :])
        place = jnp.stack([jnp.full_like(positions, layer), positions], axis=-1)
        return _scatter(buffer, block, place)

    return KVCache(keys=put(cache.keys, keys), values=put(cache.values, values))


def _scatter(buffer: Array, block: Array, place: Array) -> Array:
    """Puts ``block`` [B, T, KV, Dh] into [B, KV, .., S, Dh] at ``place`` [B, T, 1 or 2]: the layer, the slot.

    Rows and heads are batch dimensions of the scatter, not indices and windows. So what lies on several
    devices stays there; and a TPU, whose own scatter puts single vectors of a matrix, can see the cache as
    one, all dimensions but the last being counted through in their order.
    """
    indexed = tuple(range(2, buffer.ndim - 1))
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(3,),
        inserted_window_dims=indexed,
        scatter_dims_to_operand_dims=indexed,
        operand_batching_dims=(0, 1),
        scatter_indices_batching_dims=(0, 1),
    )
    vectors = block.swapaxes(1, 2).astype(buffer.dtype)  # [B, KV, T, Dh]
    vectors = jnp.pad(vectors, [(0, 0)] * 3 + [(0, buffer.shape[-1] - block.shape[-1])])
    place = jnp.broadcast_to(place[:, None], (*vectors.shape[:3], place.shape[-1]))
    drop = jax.lax.GatherScatterMode.FILL_OR_DROP
    return jax.lax.scatter(buffer, place, vectors, numbers, mode=drop)


def read(
    cache: KVCache,
    layer: int | Array,
    slots: tuple[int | Array, int] | None = None,
    rows: Array | None = None,
) -> tuple[Array, Array]:
    """Returns the keys and values of one layer, each [rows, KV, slots, Dh].

    Args:
      cache: of S slots.
      layer: which layer; a traced index only where the cache is stacked.
      slots: the first one, at most S - count, and how many; None reads all.
      rows: [n] int32, those of whom to read ``slots``, in a cache that isn't stacked; None reads all.
    """

    def get(buffer: Array | tuple[Array, ...]) -> Array:
        if isinstance(buffer, tuple):
            assert isinstance(layer, int), "unrolled layers are counted in Python"
            own = buffer[layer]
            if slots is None:
                return own
            first, count = slots
            if rows is None:
                return jax.lax.dynamic_slice_in_dim(own, first, count, axis=2)
            sizes = (1, *own.shape[1:2], count, own.shape[3])
            return jax.vmap(lambda row: jax.lax.dynamic_slice(own, (row, 0, first, 0), sizes)[0])(rows)
        if slots is None:
            return jax.lax.dynamic_index_in_dim(buffer, layer, axis=2, keepdims=False)
        # One slice, not one of another: a program that takes the layer first may copy it whole.
        sizes = (*buffer.shape[:2], 1, slots[1], buffer.shape[4])
        return jax.lax.dynamic_slice(buffer, (0, 0, layer, slots[0], 0), sizes)[:, :, 0]

    return get(cache.keys), get(cache.values)


def mask(positions: Array, count: int, first: int | Array = 0) -> Array:
    """Says which of some slots each query sees: those up to its own position.

    For queries at positions 0, 1 and 3 of a row in a cache of four slots::

      1 0 0 0
      1 1 0 0
      1 1 1 1

    Args:
      positions: [B, T] int32.
      count: how many slots.
      first: the first of them.

    Returns:
      [B, T, count] bool.
    """
    chex.assert_rank(positions, 2)
    return (first + jnp.arange(count))[None, None, :] <= positions[:, :, None]
