"""What the first process alone knows, told to the others: the work of a job, and measured times.

Several processes run one program over the same arrays, so they must take the same decisions. What a decision
rests on besides the arrays comes from the first process, in one order, through the store that all share.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
from jax._src import distributed  # the store that processes share has no public name

__all__ = ["relay", "tell"]

T = TypeVar("T")
PATIENCE = 24 * 3600
"""Seconds to wait for the first process: it may be waiting for its own input, and if it ends, all do."""
KEPT = 1000
"""Messages kept for the slowest process. All meet in every run of steps, far more often than that."""
_numbers = itertools.count()


def tell(value: Any = None) -> Any:
    """The first process's ``value``, on every process; alone, the value itself.

    All processes must call this equally often. The value is made of numbers, text, None, lists, tuples and
    dicts.
    """
    if jax.process_count() == 1:
        return value
    client: Any = distributed.global_state.client
    number = next(_numbers)
    if jax.process_index() == 0:
        client.key_value_set(f"specjax/told/{number}", repr(value))
        if number >= KEPT:
            client.key_value_delete(f"specjax/told/{number - KEPT}")
        return value
    # Text is read as a value, never run.
    return ast.literal_eval(client.blocking_key_value_get(f"specjax/told/{number}", 1000 * PATIENCE))


def relay(source: Iterable[T], pack: Callable[[T], Any], unpack: Callable[[Any], T]) -> Iterator[T]:
    """What ``source`` gives on the first process, on every process; alone, an iterator over it.

    Args:
      source: read on the first process alone, item by item, as they are asked for.
      pack: makes of an item what :func:`tell` takes.
      unpack: makes an item of that again, on the other processes.
    """
    if jax.process_count() == 1:
        return iter(source)
    return _give(source, pack) if jax.process_index() == 0 else _take(unpack)


def _give(source: Iterable[T], pack: Callable[[T], Any]) -> Iterator[T]:
    for item in source:
        tell((pack(item),))
        yield item
    tell(())


def _take(unpack: Callable[[Any], T]) -> Iterator[T]:
    while packed := tell():
        yield unpack(*packed)
