"""What the target says of the training sequences, computed in one pass and kept.

Kept are the states that the target's head multiplies, in float16, and of each law its normaliser and its
argmax. The exact scores of any tokens come back by one product with their rows of the head, so a training
step costs the draft alone. A position takes 2 D + 8 bytes (SmolLM2-135M: 1160), and the pass one forward of
the target: against that, making them anew in each step takes most of its time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.distill.sequences import TokenSequence, is_held_out, read_shards
from specjax.types import Array, Model, Params

__all__ = ["ScoredSequences", "score_shards", "target_laws"]

_FIELDS = {"tokens": np.int32, "features": np.float16, "log_normalizer": np.float32, "best": np.int32}


@partial(jax.jit, static_argnames=("model",))
def target_laws(params: Params, head: Array, tokens: Array, *, model: Model) -> tuple[Array, Array, Array]:
    """Runs the target over whole sequences.

    Args:
      params: its weights.
      head: [V, D], its head.
      tokens: [B, T] int32.
      model: static.

    Returns:
      States [B, T, D]; log sum exp of the logits [B, T] float32; their argmax [B, T] int32.
    """
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
    features = model.apply(params, tokens, model.init_cache(batch, length), positions).features
    assert features is not None, "the target hands no features on"

    def laws(row: Array) -> tuple[Array, Array]:  # one row at a time: [B, T, V] would be gigabytes
        logits = jnp.einsum("td,vd->tv", row, head, preferred_element_type=jnp.float32)
        return jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return features, *lax.map(laws, features)


def score_shards(
    model: Model,
    params: Params,
    head: Array,
    shards: Sequence[Path],
    *,
    capacity: int,
    batch: int = 16,
) -> Iterator[Path]:
    """Scores each shard that isn't yet, into a folder beside it, whole or not there; yields its path.

    Args:
      model: the target.
      params: its weights.
      head: [V, D], its head.
      shards: as :func:`specjax.distill.sequences.write_shard` wrote them.
      capacity: T; sequences are cut there.
      batch: rows of a forward.
    """
    for path in shards:
        folder = path.with_suffix(f".scored-{capacity}")
        if not folder.exists():
            _score(model, params, head, read_shards([path]), folder, capacity, batch)
        yield folder


def _score(
    model: Model,
    params: Params,
    head: Array,
    sequences: Sequence[TokenSequence],
    folder: Path,
    capacity: int,
    batch: int,
) -> None:
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    count = len(sequences)
    tokens = np.zeros((-(-count // batch) * batch, capacity), np.int32)
    for row, sequence in zip(tokens, sequences, strict=False):
        row[: len(sequence.tokens)] = sequence.tokens[:capacity]
    found = [
        jax.device_get(target_laws(params, head, jnp.asarray(tokens[i : i + batch]), model=model))
        for i in range(0, len(tokens), batch)
    ]
    features, normalizers, best = (np.concatenate(parts)[:count] for parts in zip(*found, strict=True))
    if np.abs(features.astype(np.float32)).max(initial=0) > np.finfo(np.float16).max:
        raise ValueError("the target's states overflow float16")
    arrays = {"tokens": tokens[:count], "features": features, "log_normalizer": normalizers, "best": best}
    for name, dtype in _FIELDS.items():
        np.save(unfinished / f"{name}.npy", arrays[name].astype(dtype))
    spans = [(s.prompt_length, min(len(s.tokens), capacity), s.temperature) for s in sequences]
    np.save(unfinished / "spans.npy", np.array(spans, np.float32).reshape(-1, 3))
    unfinished.rename(folder)


class ScoredSequences:
    """Scored sequences by index, read from disk as they are asked for.

    Args:
      folders: from :func:`score_shards`.
      vocabulary: [W] int32, rising: the tokens that the draft's head lists.
      target_size: V.
      held_out: the share of prompts that are held out.
      which: "train" or "held out".
      first: the first position whose law counts; None for the prompt's last, so that responses alone count.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        vocabulary: np.ndarray,
        target_size: int,
        *,
        held_out: float,
        which: str = "train",
        first: int | None = None,
    ) -> None:
        if which not in ("train", "held out"):
            raise ValueError(f"which must be 'train' or 'held out', not {which!r}")
        self._first = first
        self._row_of = np.full(target_size, -1, np.int32)
        self._row_of[vocabulary] = np.arange(len(vocabulary))
        self._shards = [_open(folder) for folder in folders]
        self._places: list[tuple[int, int]] = []
        seen: set[bytes] = set()
        for number, shard in enumerate(self._shards):
            for index, (prompt, length, temperature) in enumerate(shard["spans"]):
                sequence = TokenSequence(
                    shard["tokens"][index, : int(length)], int(prompt), float(temperature)
                )
                key = sequence.tokens.tobytes()
                if length - prompt > 1 and key not in seen:
                    seen.add(key)
                    if is_held_out(sequence, held_out) == (which == "held out"):
                        self._places.append((number, index))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """The arrays of :class:`specjax.distill.train.Batch`, of one sequence."""
        number, row = self._places[index]
        shard = self._shards[number]
        tokens = np.array(shard["tokens"][row])
        prompt, length = (int(x) for x in shard["spans"][row, :2])
        positions = np.arange(len(tokens))
        # The law at a position is that of the next token: the response's begin at the prompt's last.
        first = prompt - 1 if self._first is None else self._first
        mask = (positions >= first) & (positions < length - 1)
        return {
            "tokens": tokens,
            "features": np.array(shard["features"][row]),
            "log_normalizer": np.array(shard["log_normalizer"][row]),
            "labels": np.where(mask, self._row_of[np.roll(tokens, -1)], -1),
            "best": np.where(mask, self._row_of[shard["best"][row]], -1),
            "mask": mask,
            "lengths": np.array(length, np.int32),
        }

    def temperatures(self) -> np.ndarray:
        """Of each sequence's response, [N]."""
        return np.array([self._shards[number]["spans"][row, 2] for number, row in self._places])


def _open(folder: Path) -> Mapping[str, np.ndarray]:
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in (*_FIELDS, "spans")}
