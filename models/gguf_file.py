"""Reads the container format GGUF: its metadata, its table of tensors, and single tensors.

The file is not trusted. Every count and length in it is compared with the bytes that are really there
before anything is allocated or looped over, and sizes are multiplied as Python integers, which don't
wrap; so a damaged or hostile file costs a quick :class:`ModelFileError`. (The reader of the ``gguf``
package believes the file; from that package come the names of the types and the dequantizing.)

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from specjax.models.errors import ModelFileError

__all__ = ["GgufFile", "TensorInfo", "open_gguf"]

_SCALARS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_MAX_RANK = 4
_BROKEN = "the file is damaged or no GGUF file ({}); download it again"


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies; its bounds have been checked against the file."""

    name: str
    shape: tuple[int, ...]  # rows first, as NumPy counts (GGUF stores the fastest axis first)
    kind: gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A GGUF file whose header was read; tensors are read on demand."""

    path: Path
    metadata: Mapping[str, Any]  # numbers, strings, NumPy arrays and lists of strings
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Dequantizes one tensor.

        Args:
          name: as in :attr:`tensors`.
          shape: what it must be, rows first.

        Returns:
          float32 of that shape, in memory of its own.

        Raises:
          ModelFileError: the tensor has another shape, or a quantization that can't be taken back.
        """
        info = self.tensors[name]
        if info.shape != shape:
            raise ModelFileError(
                self.path, f"tensor {name!r} has shape {info.shape}, the configuration says {shape}"
            )
        raw = np.asarray(np.memmap(self.path, np.uint8, "r", info.offset, (info.num_bytes,)))
        if info.kind == gguf.GGMLQuantizationType.F32:
            return np.array(raw).view("<f4").reshape(shape)
        if info.kind == gguf.GGMLQuantizationType.F16:
            return np.array(raw).view("<f2").reshape(shape).astype(np.float32)
        try:
            rows = raw.reshape(*shape[:-1], -1)
            return np.asarray(gguf.quants.dequantize(rows, info.kind), np.float32).reshape(shape)
        except NotImplementedError as error:
            raise ModelFileError(
                self.path, f"tensor {name!r} is stored as {info.kind.name}, which can't be dequantized here; "
                "use a file in F32, F16, BF16, Q8_0, Q4_0, Q4_1 or a K-quant"
            ) from error  # fmt: skip


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Reads the header of a GGUF file.

    Args:
      path: the file.

    Returns:
      Its metadata and the table of its tensors, all of which lie inside the file.

    Raises:
      ModelFileError: the file is missing, is no GGUF file of version 2 or 3, is cut short, or claims sizes
        that it doesn't have.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelFileError(path, _BROKEN.format("it is empty"))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(path, data).header()
    except OSError as error:
        raise ModelFileError(
            path, f"can't be read ({error.strerror}); give the path of a .gguf file"
        ) from error


class _Cursor:
    """Walks through a header, never past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def fail(self, why: str) -> ModelFileError:
        return ModelFileError(self.path, _BROKEN.format(why))

    def take(self, size: int, what: str) -> bytes:
        if size > len(self.data) - self.at:
            raise self.fail(f"{what} needs {size} bytes at offset {self.at}, the file has {len(self.data)}")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code), what))[0]

    def text(self, what: str) -> str:
        return self.take(self.number("Q", what), what).decode("utf-8", errors="replace")

    def header(self) -> GgufFile:
        if self.take(4, "the magic number") != b"GGUF":
            raise self.fail("it doesn't start with 'GGUF'")
        version = self.number("I", "the version")
        if version not in (2, 3):
            raise ModelFileError(
                self.path, f"GGUF version {version} is not supported; convert it to version 3"
            )
        num_tensors, num_entries = self.number("Q", "the counts"), self.number("Q", "the counts")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):  # each needs bytes, so the file's end bounds the loop
            key = self.text("a metadata key")
            metadata[key] = self.value(self.number("I", key), key)
        infos = [self.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.fail(f"alignment {alignment!r} is no power of two")
        start = -(-self.at // alignment) * alignment
        tensors = {}
        for info in infos:
            info = dataclasses.replace(info, offset=start + info.offset)
            end = info.offset + info.num_bytes
            if end > len(self.data):
                raise self.fail(
                    f"tensor {info.name!r} {info.shape} ends at {end}, the file at {len(self.data)}"
                )
            if info.name in tensors:
                raise self.fail(f"tensor {info.name!r} occurs twice")
            tensors[info.name] = info
        return GgufFile(self.path, metadata, tensors)

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.text(key)
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.take(dtype.itemsize, key), dtype)[0].item()
        if kind != _ARRAY:
            raise self.fail(f"{key!r} has unknown type {kind}")
        item, count = self.number("I", key), self.number("Q", key)
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item])
            return np.frombuffer(self.take(dtype.itemsize * count, key), dtype)
        if item != _STRING:
            raise self.fail(f"{key!r} is an array of type {item}")
        return [self.text(key) for _ in range(count)]

    def tensor(self) -> TensorInfo:
        name = self.text("a tensor's name")
        rank = self.number("I", name)
        if not 1 <= rank <= _MAX_RANK:
            raise self.fail(f"tensor {name!r} has {rank} dimensions")
        shape = tuple(self.number("Q", name) for _ in range(rank))[::-1]
        kind_number, offset = self.number("I", name), self.number("Q", name)
        try:
            kind = gguf.GGMLQuantizationType(kind_number)
        except ValueError as error:
            raise ModelFileError(self.path, f"tensor {name!r} has unknown type {kind_number}") from error
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise self.fail(f"tensor {name!r} of shape {shape} doesn't divide into blocks of {block}")
        return TensorInfo(name, shape, kind, offset, prod(shape) // block * block_bytes)
