"""Files whose damage no check of a header can see, at 4 bits: an error of the file, tokens, or an error of the request; never a crash."""

import random
import resource
from collections import Counter
from pathlib import Path

import pytest
from transformers import LlamaConfig

from services.worker.engine.config import EngineConfig, ModelFileError
from services.worker.engine.engine import Engine, EngineRequest, FinishReason, SamplingParams
from tests.tiny_models import make_model, write_gguf

NUM_MUTANTS = 100
MODEL = make_model(
    LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
)


def write_safetensors(folder: Path) -> tuple[Path, int]:
    """(file, bytes of its header)"""
    MODEL.save_pretrained(folder)
    path = folder / "model.safetensors"
    return path, 8 + int.from_bytes(path.read_bytes()[:8], "little")


def write_blocks(folder: Path, kind: str) -> tuple[Path, int]:
    path = folder / "model.gguf"
    write_gguf(path, MODEL, kind)
    return path, path.read_bytes().index(b"output_norm") + 100


def damage(healthy: bytes, header: int, rng: random.Random) -> bytes:
    """A few bytes of the header, or many of the weights: some of those are scales."""
    data = bytearray(healthy)
    in_header = rng.random() < 0.3
    for _ in range(rng.choice([1, 2]) if in_header else rng.choice([1, 30, 1000])):
        place = rng.randrange(header) if in_header else rng.randrange(header, len(data))
        data[place] = rng.choice([rng.randrange(256), 0x7C, 0xFF])
    return bytes(data)


def outcome(path: Path, backend: str) -> str:
    """What came of loading it and asking for three tokens."""
    try:
        engine = Engine.from_path(path, EngineConfig(num_blocks=4, level="int4", backend=backend, num_threads=1))
    except ModelFileError as error:
        return "refused" if "\n" not in str(error) else "refused in several lines"
    engine.add(EngineRequest("0", [1, 2, 3], SamplingParams(max_tokens=3, temperature=0)))
    outputs = []
    while engine.has_work:
        outputs += engine.step(0.0)
    engine.check_integrity()
    reason = outputs[-1].finish_reason
    assert reason is not None
    if reason is not FinishReason.ERROR:
        assert 1 <= sum(len(output.token_ids) for output in outputs) <= 3
    return reason.value


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "safetensors"])
def test_damage_is_refused_or_computed_or_an_error(kind: str, backend: str, tmp_path: Path) -> None:
    path, header = write_safetensors(tmp_path) if kind == "safetensors" else write_blocks(tmp_path, kind)
    healthy, rng = path.read_bytes(), random.Random(f"{kind}{backend}")
    memory, counts = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, Counter[str]()
    for _ in range(NUM_MUTANTS):
        path.write_bytes(damage(healthy, header, rng))
        counts[outcome(tmp_path if kind == "safetensors" else path, backend)] += 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1 << 20  # KiB, so 1 GiB
    assert counts.keys() <= {"refused", "error", "length", "stop"}
    assert min(counts["refused"], counts["error"], counts["length"] + counts["stop"]) > 0, counts
