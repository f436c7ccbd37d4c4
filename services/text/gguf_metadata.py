"""Reads the metadata of a GGUF file that text needs, and no tensor. Every count and length is checked against the file first."""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path

_MAX_FIELDS = 1 << 16
_MAX_ELEMENTS = 1 << 20  # of an array that is read: vocabularies and merges
_MAX_KEY_BYTES = 1 << 12
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class ModelError(ValueError):
    """A model's files can't be used: one line for a person."""


def read_metadata(path: Path, wanted: Callable[[str], bool]) -> dict[str, object]:
    """The metadata fields that `wanted` picks by key: scalars, strings, lists of either. Raises ModelError for a damaged file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).fields(wanted)
    except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
        raise ModelError(f"{path}: {error}") from None


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._position = 0

    def fields(self, wanted: Callable[[str], bool]) -> dict[str, object]:
        magic = self._take(4)
        if magic != b"GGUF":
            raise ModelError(f"starts with {magic!r}, not 'GGUF': not a GGUF file")
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelError(f"is GGUF version {version}; 2 and 3 are known, little-endian")
        self._scalar("Q")  # tensors
        count = self._scalar("Q")
        if not 0 <= count <= _MAX_FIELDS:
            raise ModelError(f"says that it has {count} metadata fields; at most {_MAX_FIELDS} are read")
        found: dict[str, object] = {}
        for _ in range(int(count)):
            key = self._string(_MAX_KEY_BYTES)
            value = self._value(int(self._scalar("I")), keep=wanted(key))
            if value is not None:
                found[key] = value
        return found

    def _value(self, kind: int, *, keep: bool) -> object:
        """A field's value, stepped over and None unless `keep`."""
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            if keep:
                return self._string(self._size)
            self._skip_string()
            return None
        if kind == _ARRAY:
            return self._array(keep=keep)
        raise ModelError(f"has a metadata field of the unknown type {kind}")

    def _array(self, *, keep: bool) -> list[object] | None:
        kind, count = int(self._scalar("I")), int(self._scalar("Q"))
        if kind in _SCALARS:
            form = _SCALARS[kind]
            length = count * struct.calcsize("<" + form)
            if not keep:
                self._skip(length)
                return None
            self._check_elements(count)
            return list(struct.unpack(f"<{count}{form}", self._take(length)))
        if kind != _STRING:
            raise ModelError(f"has a metadata array of type {kind}; arrays of scalars and strings are known")
        # Each string takes 8 bytes at least, so a count that the file can't hold ends with the file.
        if count > (self._size - self._position) // 8:
            raise ModelError(f"says that it has an array of {count} strings, more than fit into its {self._size} bytes")
        if keep:
            self._check_elements(count)
            return [self._string(self._size) for _ in range(count)]
        for _ in range(count):
            self._skip_string()
        return None

    @staticmethod
    def _check_elements(count: int) -> None:
        if count > _MAX_ELEMENTS:
            raise ModelError(f"has a metadata array of {count} elements; at most {_MAX_ELEMENTS} are read")

    def _string(self, most: int) -> str:
        length = int(self._scalar("Q"))
        if length > most:
            raise ModelError(f"has a string of {length} bytes where at most {most} can be")
        # The bytes of a damaged name are nobody's token: kept apart by escapes instead of refused.
        return self._take(length).decode("utf-8", "backslashreplace")

    def _skip_string(self) -> None:
        self._skip(int(self._scalar("Q")))

    def _scalar(self, form: str) -> int | float | bool:
        value: int | float | bool = struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))[0]
        return value

    def _take(self, length: int) -> bytes:
        start = self._position
        self._skip(length)
        return self._data[start : self._position]

    def _skip(self, length: int) -> None:
        if length > self._size - self._position:
            raise ModelError(f"ends within its metadata, at byte {self._size}: is it cut off?")
        self._position += length
