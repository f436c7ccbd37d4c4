"""GGUF metadata, whole and damaged: a clean error, at once, and no memory for what a file only claims (X09, the gateway's part)."""

import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from services.text import gguf_vocabulary
from services.text.gguf_metadata import ModelError, read_metadata
from tests.unit.text.vocabularies import byte_level_fields, gguf, smollm2_path

U64 = 2**64 - 1


def read(folder: Path, data: bytes) -> dict[str, object]:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return read_metadata(path, lambda key: key != "unwanted")


def test_every_kind_of_value(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "a": 1,
        "b": 1.5,
        "c": True,
        "d": "é",
        "e": ["x", ""],
        "f": [1, -2],
        "g": [0.5],
        "unwanted": ["x"] * 9,
        "h": "end",
    }
    expected = {key: value for key, value in fields.items() if key != "unwanted"}
    assert read(tmp_path, gguf(fields)) == expected
    assert read(tmp_path, gguf(fields, version=2)) == expected


def test_the_real_file_is_read_in_part(tmp_path: Path) -> None:
    assert read_metadata(smollm2_path(), lambda key: key == "llama.context_length")["llama.context_length"] == 8192


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"), (b"GG", "cut off"), (gguf({}, magic=b"GGML"), "not a GGUF"), (gguf({}, version=1), "version 1"),
        (struct.pack(">4sI", b"GGUF", 3) + bytes(16), "version"), (gguf({}, num_fields=U64), "metadata fields"),
        (gguf({}, num_fields=5), "cut off"),
        (gguf({"a": struct.pack("<I", 13)}), "unknown type 13"), (gguf({"a": struct.pack("<IIQ", 9, 9, 1)}), "array of type 9"),
        (gguf({"a": struct.pack("<IIQ", 9, 8, U64)}), "array of"), (gguf({"a": struct.pack("<IIQ", 9, 8, 2**40)}), "array of"),
        (gguf({"a": struct.pack("<IIQ", 9, 4, U64)}), "elements"), (gguf({"a": struct.pack("<IIQ", 9, 4, 2**20)}), "cut off"),
        (gguf({"a": struct.pack("<IQ", 8, U64)}), "string of"), (gguf({"a": struct.pack("<IQ", 8, 2**40)}), "string of"),
        (gguf({"unwanted": struct.pack("<IIQ", 9, 4, U64)}), "cut off"), (gguf({"unwanted": struct.pack("<IQ", 8, U64)}), "cut off"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**30), "string of"),
    ],
)  # fmt: skip
def test_damage_is_named(tmp_path: Path, data: bytes, why: str) -> None:
    with pytest.raises(ModelError, match=why) as caught:
        read(tmp_path, data)
    assert "model.gguf" in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        read_metadata(tmp_path / "nothing.gguf", lambda _: True)


def test_random_damage_gives_a_tokenizer_or_a_clean_error(tmp_path: Path) -> None:
    whole = gguf(byte_level_fields())
    rng = random.Random(9)
    num_refused = 0
    start = time.monotonic()
    for number in range(200):
        data = bytearray(whole)
        if number % 4 == 0:
            del data[rng.randrange(len(data)) :]
        else:
            for _ in range(rng.randrange(1, 20)):
                # The first bytes hold the counts; elsewhere damage hits text most of the time.
                position = rng.randrange(rng.choice([64, 2000, len(data)]))
                data[position] = rng.choice([0, 0x7F, 0xFF, rng.randrange(256)])
        try:
            gguf_vocabulary.build(read(tmp_path, bytes(data)))
        except ModelError:
            num_refused += 1
    assert num_refused > 100
    assert time.monotonic() - start < 40
