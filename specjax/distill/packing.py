"""Given text as training data: joined, cut into whole sequences, and scored like what the target wrote."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from specjax.distill.sequences import TokenSequence, read_shards, shard_path, write_shard

__all__ = ["pack", "pack_shards"]

_SHARD = 64  # sequences


def pack(texts: Iterable[Sequence[int]], separator: int, capacity: int) -> Iterator[TokenSequence]:
    """Joins texts, a separator after each, and cuts at every ``capacity`` tokens; repeats are left out.

    The sequences have no prompt: all of a sequence is trained on, and which are held out is a function of
    their content.

    Args:
      texts: ids.
      separator: the id that ends a text.
      capacity: tokens of a sequence; the last one may be shorter.
    """
    joined: list[int] = []
    for text in dict.fromkeys(map(tuple, texts)):
        joined += [*text, separator]
        while len(joined) >= capacity:
            yield TokenSequence(np.array(joined[:capacity], np.int32), 0, 1.0)
            del joined[:capacity]
    if len(joined) > 1:
        yield TokenSequence(np.array(joined, np.int32), 0, 1.0)


def pack_shards(
    folder: Path,
    texts: Iterable[Sequence[int]],
    separator: int,
    *,
    num_tokens: int,
    capacity: int,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Packs texts into shards until there are enough tokens, or no more texts.

    Args:
      folder: of these texts and this capacity alone; shards that lie there stay.
      texts: see :func:`pack`.
      separator: likewise.
      num_tokens: that are enough.
      capacity: see :func:`pack`.
      say: told about progress.

    Returns:
      The shards, in order.
    """
    sequences, total = pack(texts, separator, capacity), 0
    shards: list[Path] = []
    while total < num_tokens and (rows := list(itertools.islice(sequences, _SHARD))):
        path = shard_path(folder, len(shards))
        if not path.exists():
            write_shard(path, rows)
        shards.append(path)
        total += sum(len(row.tokens) for row in read_shards([path]))
    say(f"data: {total} tokens of text in {len(shards)} shards")
    return shards
