"""Reads a Hugging Face folder: config.json and safetensors files, one or sharded by an index.

Knows files, not what a model is. The safetensors library checks a file's header against its size; what leads to the file is checked here.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.worker.engine.config import ModelFileError

_MAX_JSON_BYTES = 16 << 20
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class SafetensorsFolder:
    """The open weights of a folder. `shapes` are by tensor name."""

    def __init__(self, path: Path, unused: Collection[str] = ()) -> None:
        """`unused`: tensors that aren't looked at, whatever their type."""
        self._unused = unused
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # by tensor name
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._num_bytes: dict[str, int] = {}
        try:
            for file in weight_files(path):
                self._open(file)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._files.clear()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def num_bytes(self, name: str) -> int:
        """Bytes of the tensor in its file."""
        return self._num_bytes[name]

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name in self._unused:
                    continue
                if name in self.shapes:
                    raise ModelFileError(f"{path.name}: tensor {name!r} is in another file, too")
                view = file.get_slice(name)
                kind = view.get_dtype()
                if kind not in _ELEMENT_BYTES:
                    raise ModelFileError(f"{path.name}: tensor {name!r} has the type {kind}; known are {', '.join(_ELEMENT_BYTES)}")
                shape = tuple(view.get_shape())
                self._files[name], self.shapes[name] = file, shape
                self._num_bytes[name] = torch.Size(shape).numel() * _ELEMENT_BYTES[kind]
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{path.name}: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The folder's weight files, by name. Only files right inside it: an index that names another place is refused."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        raise ModelFileError(f"{folder}: has neither {_WEIGHTS} nor {_INDEX}; weights in other formats aren't served")
    places = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(places, Mapping) or not places:
        raise ModelFileError(f"{_INDEX}: has no weight_map")
    names = {str(place) for place in places.values()}
    for name in sorted(names):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFileError(f"{_INDEX}: {name!r} isn't a safetensors file of this folder")
        if not (folder / name).is_file():
            raise ModelFileError(f"{_INDEX}: {name!r} isn't there: is the download complete?")
    return [folder / name for name in sorted(names)]


def read_json(path: Path) -> dict[str, object]:
    """A JSON object of bounded size."""
    value = _read_json(path)
    if not isinstance(value, dict):
        raise ModelFileError(f"{path.name}: isn't a JSON object")
    return value


def read_json_list(path: Path) -> list[object]:
    """A JSON array of bounded size."""
    value = _read_json(path)
    if not isinstance(value, list):
        raise ModelFileError(f"{path.name}: isn't a JSON array")
    return value


def _read_json(path: Path) -> object:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelFileError(f"{path.name}: is larger than {_MAX_JSON_BYTES >> 20} MiB")
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path.name}: {error}") from error
