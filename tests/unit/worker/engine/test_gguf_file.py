"""Hostile and damaged GGUF files: each is one clean error, soon and in little memory."""

import random
import resource
import struct
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from transformers import LlamaConfig

from services.worker.engine.config import ModelFileError
from services.worker.engine.gguf_file import GGUFFile
from services.worker.engine.loader import load
from tests.tiny_models import load_every_way, make_model, write_gguf

_HOSTILE = [0, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    write_gguf(path, make_model(LlamaConfig(vocab_size=64, num_hidden_layers=1, **shape)), "Q8_0")
    return path.read_bytes()


def find_integers(data: bytes, folder: Path) -> list[tuple[int, str]]:
    """(place, struct form) of every count, length, type, dimension and offset that a reader of the header meets."""
    path = folder / "healthy.gguf"
    path.write_bytes(data)
    found: list[tuple[int, str]] = []
    scalar, field = GGUFFile._scalar, GGUFFile._read_field
    value_forms = []

    def spy(self: GGUFFile, form: str) -> int | float | bool:
        found.append((self._position, form))
        return scalar(self, form)

    def spy_field(self: GGUFFile) -> None:
        start = len(found)
        field(self)
        if len(found) == start + 3 and struct.unpack_from("<I", data, found[start + 1][0])[0] not in (8, 9):
            value_forms.append(found.pop())  # the value of a scalar field, not the container's structure

    with patch.object(GGUFFile, "_scalar", spy), patch.object(GGUFFile, "_read_field", spy_field):
        GGUFFile(path).close()
    assert value_forms
    return found


def check_refused(data: bytes, path: Path) -> None:
    path.write_bytes(data)
    started, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in load_every_way(path):
        with pytest.raises(ModelFileError) as caught:
            read()
        assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1 << 20  # KiB, so 1 GiB


def test_every_hostile_integer_is_refused(healthy: bytes, tmp_path: Path) -> None:
    integers = find_integers(healthy, tmp_path)
    mutants = 0
    for place, form in integers:
        for value in _HOSTILE:
            raw = struct.pack("<Q", value)[: struct.calcsize("<" + form)]
            mutant = healthy[:place] + raw + healthy[place + len(raw) :]
            # The first type in the list is 0, F32 or UINT8: what was 0 stays healthy. A tensor may lie at offset 0 only once.
            if mutant != healthy:
                check_refused(mutant, tmp_path / "mutant.gguf")
                mutants += 1
    assert mutants > 200


def test_every_cut_is_refused(healthy: bytes, tmp_path: Path) -> None:
    for i in range(100):
        check_refused(healthy[: len(healthy) * i // 100], tmp_path / "mutant.gguf")
    check_refused(healthy[:-1], tmp_path / "mutant.gguf")


def test_random_damage_loads_or_is_refused(healthy: bytes, tmp_path: Path) -> None:
    """Bytes of the data and of values may change unseen; nothing else than ModelFileError may come of it."""
    rng = random.Random(1)
    header = healthy.index(b"output_norm") + 100
    refused = 0
    for _ in range(200):
        data = bytearray(healthy)
        for _ in range(rng.choice([1, 2, 8])):
            data[rng.randrange(header)] = rng.randrange(256)
        path = tmp_path / "mutant.gguf"
        path.write_bytes(data)
        try:
            load(path)
        except ModelFileError:
            refused += 1
    assert refused > 100


def craft(fields: bytes, num_fields: int, num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + fields


def field(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (craft(field(b"a", 9, struct.pack("<IQ", 9, 1) * 1000), 1), "array of type 9"),
        (craft(field(b"a", 9, struct.pack("<IQ", 8, 1 << 22) + bytes(1 << 10)), 1), "file ends before"),
        (craft(field(b"a", 9, struct.pack("<IQ", 0, 1 << 62)), 1), "at most"),
        (craft(field(b"a", 8, struct.pack("<Q", 1 << 40)), 1), "cut off"),
        (craft(field(b"a", 4, bytes(4)) * 2, 2), "twice"),
        (craft(field(b"a", 77, bytes(40)), 1), "unknown type 77"),
        (craft(field(b"", 4, bytes(40)), 1), "the name of a metadata field has 0 bytes"),
        (craft(field(b"general.alignment", 4, struct.pack("<I", 1 << 31)), 1), "general.alignment is 2147483648"),
        (craft(field(b"general.alignment", 4, struct.pack("<I", 0)), 1), "general.alignment is 0"),
        (craft(field(b"general.alignment", 4, struct.pack("<I", 48)), 1), "power of two"),
        (craft(field(b"general.alignment", 8, struct.pack("<Q", 3) + b"abc"), 1), "general.alignment is 'abc'"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (craft(b"", 0, num_tensors=1 << 63), "tensors"),
        (b"GGML" + bytes(100), "not a GGUF file"),
    ],
)
def test_an_error_says_what_is_wrong(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError) as caught:
        load(path)
    assert words in str(caught.value)
    assert "model.gguf" in str(caught.value)


def test_tensors_may_not_share_bytes(healthy: bytes, tmp_path: Path) -> None:
    name = b"blk.0.attn_norm.weight"
    place = healthy.index(name) + len(name) + 4 + 8 + 4
    path = tmp_path / "model.gguf"
    path.write_bytes(healthy[:place] + bytes(8) + healthy[place + 8 :])
    with pytest.raises(ModelFileError, match="overlaps"):
        load(path)
