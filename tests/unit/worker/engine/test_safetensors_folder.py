"""Hostile and damaged safetensors folders: each is one clean error."""

import json
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.worker.engine.config import ModelFileError
from services.worker.engine.loader import load
from tests.tiny_models import load_every_way, save_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model("llama", tmp_path)
    return tmp_path


def check_refused(folder: Path) -> str:
    started, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in load_every_way(folder):
        with pytest.raises(ModelFileError) as caught:
            read()
    assert time.monotonic() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1 << 20  # KiB, so 1 GiB
    return str(caught.value)


def split_header(data: bytes) -> tuple[dict[str, dict[str, object]], bytes]:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, data[8 + length :]


def join_header(header: object, body: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + body


def test_two_hundred_mutants_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    healthy = path.read_bytes()
    header, body = split_header(healthy)
    mutants = [healthy[: len(healthy) * i // 60] for i in range(60)]
    mutants += [struct.pack("<Q", value) + healthy[8:] for value in (0, 1, 7, 1 << 27, 1 << 31, 1 << 62, 1 << 63, (1 << 64) - 1)]
    mutants += [join_header(raw, body) for raw in (b"", b"[]", b"null", b"{", b"\xff\xfe", b'{"a":' * 100_000, b'{"a": 1e999}')]
    for name in header:
        for key, value in [
            ("shape", [1 << 63, 2]),
            ("shape", [-1, 48]),
            ("shape", [0]),
            ("dtype", "F999"),
            ("data_offsets", [0, 1 << 63]),
            ("data_offsets", [len(body) + 8, len(body) + 16]),
            ("data_offsets", [8, 0]),
        ]:
            mutants.append(join_header(header | {name: header[name] | {key: value}}, body))
    assert len(mutants) > 200
    for mutant in mutants:
        path.write_bytes(mutant)
        check_refused(folder)


def test_random_damage_loads_or_is_refused(folder: Path) -> None:
    rng = random.Random(2)
    path = folder / "model.safetensors"
    healthy = path.read_bytes()
    length = int.from_bytes(healthy[:8], "little")
    for _ in range(100):
        data = bytearray(healthy)
        for _ in range(rng.choice([1, 2, 8])):
            data[rng.randrange(8 + length)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            load(folder)
        except ModelFileError:
            continue


def _index(places: object) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(places)) and None


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (_index({"weight_map": {"a": "../secret.safetensors"}}), "'../secret.safetensors' isn't a safetensors file of this folder"),
        (_index({"weight_map": {"a": "/etc/passwd"}}), "'/etc/passwd' isn't"),
        (_index({"weight_map": {"a": ".."}}), "'..' isn't"),
        (_index({"weight_map": {"a": "model.bin"}}), "'model.bin' isn't"),
        (_index({"weight_map": {"a": "model-00001-of-00002.safetensors"}}), "isn't there"),
        (_index({"weight_map": {}}), "no weight_map"),
        (_index({"weight_map": [1]}), "no weight_map"),
        (_index([]), "isn't a JSON object"),
        (lambda folder: None, "has neither"),
    ],
)
def test_an_index_leads_only_to_files_of_its_folder(index: Callable[[Path], None], words: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / f"{folder.name}-elsewhere")
    index(folder)
    assert words in check_refused(folder)


def test_one_tensor_in_two_files_is_refused(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    for name in ("a.safetensors", "b.safetensors"):
        (folder / name).write_bytes(data)
    _index({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})(folder)
    assert "in another file, too" in check_refused(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": ' * 100_000, "\udcff", " " * (17 << 20)])
def test_a_config_that_is_no_json_object_is_refused(text: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert check_refused(folder).startswith("config.json")
