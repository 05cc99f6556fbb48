"""Training sequences: a prompt and the target's response, in ArrayRecord shards.

A shard is whole or not there: it is written beside its name and renamed. Which sequences are held out is
a function of the prompt alone, so that no prompt is on both sides, however the shards grow.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from array_record.python import array_record_module

__all__ = ["TokenSequence", "is_held_out", "prompt_digest", "read_shards", "shard_path", "write_shard"]

_HEADER = struct.Struct("<4sIf")  # magic, prompt length, temperature
_MAGIC = b"sjx1"


@dataclasses.dataclass(frozen=True)
class TokenSequence:
    """One conversation, or piece of text, as the target sees it."""

    tokens: np.ndarray  # [N] int32: the prompt, then the response
    prompt_length: int  # tokens that were given
    temperature: float  # at which the target sampled the response; NaN where it didn't

    def to_bytes(self) -> bytes:
        """One record."""
        head = _HEADER.pack(_MAGIC, self.prompt_length, self.temperature)
        return head + np.asarray(self.tokens, "<i4").tobytes()

    @classmethod
    def from_bytes(cls, record: bytes) -> TokenSequence:
        """Reads a record.

        Raises:
          ValueError: it isn't one.
        """
        size = len(record) - _HEADER.size
        if size < 4 or size % 4 or record[:4] != _MAGIC:
            raise ValueError("a record is no token sequence: make the shard anew")
        _, prompt_length, temperature = _HEADER.unpack_from(record)
        tokens = np.frombuffer(record, "<i4", offset=_HEADER.size).astype(np.int32)
        if not 0 <= prompt_length <= len(tokens):
            raise ValueError("a record's prompt is longer than the sequence: make the shard anew")
        return cls(tokens, prompt_length, temperature)


def prompt_digest(sequence: TokenSequence) -> bytes:
    """16 bytes that name the prompt; where there is none, the whole text."""
    prompt = np.asarray(sequence.tokens[: sequence.prompt_length or None], "<i4").tobytes()
    return hashlib.blake2b(prompt, digest_size=16).digest()


def is_held_out(sequence: TokenSequence, share: float) -> bool:
    """Whether the sequence's prompt belongs to the held-out ``share`` of all prompts."""
    return int.from_bytes(prompt_digest(sequence)[:4], "little") < share * 2**32


def shard_path(folder: str | os.PathLike[str], index: int) -> Path:
    """Where shard ``index`` of a folder lies."""
    return Path(folder) / f"{index:05d}.arrayrecord"


def write_shard(path: str | os.PathLike[str], sequences: Iterable[TokenSequence]) -> None:
    """Writes a shard, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    writer = array_record_module.ArrayRecordWriter(str(unfinished), "group_size:1")
    for sequence in sequences:
        writer.write(sequence.to_bytes())
    writer.close()
    unfinished.replace(path)


def read_shards(paths: Sequence[str | os.PathLike[str]]) -> list[TokenSequence]:
    """Reads shards in order, leaving out what an earlier record holds already.

    Raises:
      ValueError: a record is no token sequence.
    """
    sequences, seen = [], set()
    for path in paths:
        reader = array_record_module.ArrayRecordReader(str(path))
        try:
            for record in reader.read_all():
                sequence = TokenSequence.from_bytes(record)
                key = hashlib.blake2b(sequence.tokens.tobytes(), digest_size=16).digest()
                if key not in seen:
                    seen.add(key)
                    sequences.append(sequence)
        finally:
            reader.close()
    return sequences
