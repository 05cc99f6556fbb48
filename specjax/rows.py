"""Writing into each row at places of its own."""

from __future__ import annotations

import dataclasses

import jax

from specjax.types import Array, Context

__all__ = ["append", "put"]


def put(rows: Array, places: Array, block: Array) -> Array:
    """Writes ``block`` [B, N, ..] into ``rows`` [B, S, ..] at ``places`` [B, N]; past S it is dropped."""
    # Mapped over rows, not indexed by them: rows on several devices stay where they are.
    return jax.vmap(lambda row, at, new: row.at[at].set(new.astype(row.dtype), mode="drop"))(
        rows, places, block
    )


def append(context: Context, token: Array) -> Context:
    """The context with one token [B] more in every row, as a draft goes on."""
    tokens = put(context.tokens, context.length[:, None], token[:, None])
    return dataclasses.replace(context, tokens=tokens, length=context.length + 1)
