"""Reads a GGUF file: metadata and tensors, with every count, size and offset checked against the file before anything is made from it.

Knows the container and its quantised types, not what a model is. The `gguf` package supplies the types and their arithmetic only: its own
reader believes the counts it finds.
"""

import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from services.worker.engine.config import ModelFileError
from services.worker.engine.gguf_blocks import from_gguf
from services.worker.engine.quantization import Quantized

_MAX_COUNT = 1 << 16  # tensors, metadata fields
_MAX_ARRAY = 1 << 22  # elements; a vocabulary's size
_MAX_NAME = 1 << 12  # bytes of a metadata key or a tensor name
_MAX_ALIGNMENT = 1 << 16
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` has rows first, as numpy and torch have it; GGUF writes it reversed."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # from the start of the file
    num_bytes: int


class GGUFFile:
    """An open GGUF file, mapped. `metadata` leaves out arrays of strings: vocabularies are the tokenizer's business."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
            raise ModelFileError(f"{path.name}: can't be read: {error}") from error
        self.metadata: dict[str, object] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._position = 0
        try:
            self._read_header()
        except ModelFileError as error:
            self.close()
            raise ModelFileError(f"{path.name}: {error}") from None

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def header(self) -> bytes:
        """All bytes before the tensors' data."""
        return self._map[: self._position]

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor in fp32, a fresh array of its `shape`."""
        info = self.tensors[name]
        *rows, width = info.shape
        raw = np.frombuffer(self._map[info.offset : info.offset + info.num_bytes], np.uint8)
        if info.kind is GGMLQuantizationType.F64:
            return raw.view(np.float64).astype(np.float32).reshape(info.shape)
        block_size, block_bytes = GGML_QUANT_SIZES[info.kind]
        with np.errstate(all="ignore"):  # hostile scales overflow to infinity; that is for the logits' check to say
            values = dequantize(raw.reshape(*rows, width // block_size * block_bytes), info.kind)
        return np.require(values.reshape(info.shape), np.float32, ["C", "W"])

    def read_quantized(self, name: str) -> Quantized | None:
        """The matrix in its own 8- or 4-bit values; None where its type has no such form."""
        info = self.tensors[name]
        if len(info.shape) != 2 or info.kind not in GGML_QUANT_SIZES:
            return None
        block_size, block_bytes = GGML_QUANT_SIZES[info.kind]
        raw = np.frombuffer(self._map[info.offset : info.offset + info.num_bytes], np.uint8)
        return from_gguf(raw.reshape(info.shape[0], info.shape[1] // block_size * block_bytes), info.kind)

    def _read_header(self) -> None:
        magic = self._take(4)
        if magic != b"GGUF":
            raise ModelFileError(f"starts with {magic!r}, not 'GGUF': not a GGUF file")
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelFileError(f"GGUF version {version} isn't served; known are 2 and 3, little-endian")
        num_tensors, num_fields = self._count("tensors", 24), self._count("metadata fields", 13)
        for _ in range(num_fields):
            self._read_field()
        infos = [self._read_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ModelFileError(f"general.alignment is {alignment!r}; it must be a power of two from 8 to {_MAX_ALIGNMENT}")
        self._position = -(-self._position // alignment) * alignment
        self._place(infos, alignment)

    def _place(self, infos: list[tuple[str, TensorInfo]], alignment: int) -> None:
        """Turn offsets into places in the file, and refuse any that leave it or share bytes."""
        end = self._position
        for name, info in sorted(infos, key=lambda pair: pair[1].offset):
            start = self._position + info.offset
            if info.offset % alignment:
                raise ModelFileError(f"tensor {name!r} lies at {info.offset}, not a multiple of the alignment {alignment}")
            if start < end:
                raise ModelFileError(f"tensor {name!r} overlaps the one before it")
            end = start + info.num_bytes
            if end > len(self._map):
                raise ModelFileError(f"tensor {name!r} ends at byte {end}, but the file has {len(self._map)}: is it cut off?")
            if name in self.tensors:
                raise ModelFileError(f"tensor {name!r} is there twice")
            self.tensors[name] = TensorInfo(info.shape, info.kind, start, info.num_bytes)

    def _read_info(self) -> tuple[str, TensorInfo]:
        name = self._name("a tensor")
        num_dims = int(self._scalar("I"))
        if not 1 <= num_dims <= 4:
            raise ModelFileError(f"tensor {name!r} has {num_dims} dimensions; it must have from 1 to 4")
        dims = [int(self._scalar("Q")) for _ in range(num_dims)]
        number, offset = self._scalar("I"), int(self._scalar("Q"))
        if not all(dims) or prod(dims) > 8 * 8 * len(self._map):  # no type has less than an eighth of a byte per value
            raise ModelFileError(f"tensor {name!r} has the shape {dims}, which this file can't hold")
        try:
            kind = GGMLQuantizationType(int(number))
        except ValueError:
            raise ModelFileError(f"tensor {name!r} has the unknown type {number}") from None
        if not can_dequantize(kind):
            raise ModelFileError(f"tensor {name!r} has the type {kind.name}, which isn't served")
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if dims[0] % block_size:
            raise ModelFileError(f"tensor {name!r}: rows of {dims[0]} aren't whole blocks of {kind.name} ({block_size})")
        return name, TensorInfo(tuple(reversed(dims)), kind, offset, prod(dims) // block_size * block_bytes)

    def _read_field(self) -> None:
        key = self._name("a metadata field")
        if key in self.metadata:
            raise ModelFileError(f"metadata field {key!r} is there twice")
        kind = self._scalar("I")
        if kind == _ARRAY:
            self.metadata[key] = self._array(key)
        elif kind == _STRING:
            self.metadata[key] = self._take(self._length(key)).decode("utf-8", "replace")
        elif kind in _SCALARS:
            self.metadata[key] = self._scalar(_SCALARS[int(kind)])
        else:
            raise ModelFileError(f"metadata field {key!r} has the unknown type {kind}")

    def _array(self, key: str) -> list[object] | None:
        """A list of scalars; None for strings, which are stepped over."""
        kind, count = int(self._scalar("I")), int(self._scalar("Q"))
        if count > _MAX_ARRAY:
            raise ModelFileError(f"metadata field {key!r} has {count} elements; at most {_MAX_ARRAY} are served")
        if kind in _SCALARS:
            form = f"<{count}{_SCALARS[kind]}"
            return list(struct.unpack(form, self._take(struct.calcsize(form))))
        if kind != _STRING:
            raise ModelFileError(f"metadata field {key!r} is an array of type {kind}; only scalars and strings are served")
        self._skip_strings(key, count)
        return None

    def _skip_strings(self, key: str, count: int) -> None:
        """Step over a vocabulary: 100,000 strings and more, so the one loop here that is written to be fast."""
        position, end = self._position, len(self._map)
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if position + 8 > end:
                break
            position += 8 + length_at(self._map, position)[0]
        if position > end or count * 8 > position - self._position:
            raise ModelFileError(f"metadata field {key!r} says it has {count} strings, but the file ends before: is it cut off?")
        self._position = position

    def _count(self, what: str, least_bytes: int) -> int:
        count = int(self._scalar("Q"))
        if count > min(_MAX_COUNT, len(self._map) // least_bytes):
            raise ModelFileError(f"says it has {count} {what}, more than its {len(self._map)} bytes can hold or {_MAX_COUNT}")
        return count

    def _name(self, what: str) -> str:
        length = self._length(what)
        if not 0 < length <= _MAX_NAME:
            raise ModelFileError(f"the name of {what} has {length} bytes; it must have from 1 to {_MAX_NAME}")
        return self._take(length).decode("utf-8", "replace")

    def _length(self, what: str) -> int:
        length = int(self._scalar("Q"))
        if length > len(self._map) - self._position:
            raise ModelFileError(f"{what} says it has {length} bytes, but the file ends before: is it cut off?")
        return length

    def _scalar(self, form: str) -> int | float | bool:
        value: int | float | bool = struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))[0]
        return value

    def _take(self, length: int) -> bytes:
        start = self._position
        self._skip(length)
        return self._map[start : self._position]

    def _skip(self, length: int) -> None:
        if length > len(self._map) - self._position:
            raise ModelFileError(f"ends at byte {len(self._map)}, within its header: is it cut off?")
        self._position += length


@lru_cache
def can_dequantize(kind: GGMLQuantizationType) -> bool:
    """Whether `GGUFFile.read` can turn this type into fp32."""
    if kind is GGMLQuantizationType.F64:
        return True
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
