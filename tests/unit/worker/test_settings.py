"""A worker's environment, and the size of the cache that follows from it."""

from pathlib import Path

import pytest

from services.common.settings import SettingsError
from services.worker.engine.config import ModelConfig, RopeConfig
from services.worker.loading import engine_config, fingerprint
from services.worker.settings import WorkerSettings

SMALL = ModelConfig(
    architecture="llama", num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=8, vocab_size=10,
    max_position=64, norm_epsilon=1e-5, rope=RopeConfig(), tied_embeddings=True, attention_bias=False, qk_norm=False, sliding_window=None,
    eos_token_ids=(2,),
)  # fmt: skip
BLOCK_BYTES = 2 * 2 * 1 * 4 * 4 * 16  # layers, k and v, heads, dim, bytes, tokens


@pytest.mark.parametrize(
    ("model", "path", "name"),
    [
        ("/models/SmolLM2.Q4_1.gguf", "/models/SmolLM2.Q4_1.gguf", "smollm2.q4_1"),
        ("/models/a.gguf=chat", "/models/a.gguf", "chat"),
        ("/models/a=b.gguf=chat", "/models/a=b.gguf", "chat"),
        ("/models/Qwen3-0.6B", "/models/Qwen3-0.6B", "qwen3-0.6b"),
    ],
)
def test_a_model_is_a_path_and_perhaps_a_name(model: str, path: str, name: str) -> None:
    settings = WorkerSettings(model=model)
    assert (settings.model_path, settings.model_name) == (Path(path), name)


def test_schedulers_are_a_list_without_doubles() -> None:
    assert WorkerSettings(model="m", schedulers="a:1, b:2,,a:1").scheduler_addresses == ["a:1", "b:2"]
    assert WorkerSettings(model="m").scheduler_addresses == []


@pytest.mark.parametrize(("memory", "num_bytes"), [("512MB", 512_000_000), ("2GiB", 2 << 30), ("4096", 4096)])
def test_memory_is_given_with_a_unit(monkeypatch: pytest.MonkeyPatch, memory: str, num_bytes: int) -> None:
    monkeypatch.setenv("FOREBAY_KV_MEMORY", memory)
    assert WorkerSettings(model="m").kv_memory == num_bytes


def test_the_cache_is_as_large_as_its_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_KV_MEMORY", str(10 * BLOCK_BYTES + 5))
    assert engine_config(WorkerSettings(model="m", level="fp32", backend="torch"), SMALL).num_blocks == 10
    assert engine_config(WorkerSettings(model="m", level="fp32", backend="torch", num_blocks=7), SMALL).num_blocks == 7


def test_too_little_memory_is_refused_with_the_least_that_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_KV_MEMORY", str(BLOCK_BYTES))
    with pytest.raises(SettingsError, match=rf"FOREBAY_KV_MEMORY={BLOCK_BYTES} .* set {2 * BLOCK_BYTES} or more"):
        engine_config(WorkerSettings(model="m", level="fp32", backend="torch"), SMALL)


def test_a_cache_beyond_the_hosts_memory_is_refused() -> None:
    with pytest.raises(SettingsError, match="lower FOREBAY_NUM_BLOCKS"):
        engine_config(WorkerSettings(model="m", level="fp32", backend="torch", num_blocks=1 << 50), SMALL)


def test_host_memory_is_counted_in_blocks_and_off_unless_asked_for() -> None:
    def host_blocks(**fields: object) -> int:
        settings = WorkerSettings(model="m", level="fp32", backend="torch", num_blocks=2, **fields)  # type: ignore[arg-type]
        return engine_config(settings, SMALL).host_blocks

    assert host_blocks() == 0
    assert host_blocks(host_memory=7 * BLOCK_BYTES + 5) == 7


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"host_memory": BLOCK_BYTES - 1}, rf"FOREBAY_HOST_MEMORY={BLOCK_BYTES - 1} is less than a cache block of {BLOCK_BYTES} bytes"),
        ({"host_memory": 1 << 60}, rf"FOREBAY_HOST_MEMORY={1 << 60} is more than the \d+ bytes that this host has left"),
        ({"host_memory": 1 << 20, "prefix_cache": False}, "FOREBAY_PREFIX_CACHE is off"),
    ],
)
def test_host_memory_that_could_hold_nothing_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        engine_config(
            WorkerSettings(model="m", level="fp32", backend="torch", num_blocks=2, **fields),  # type: ignore[arg-type]
            SMALL,
        )


def test_the_fingerprint_names_level_cache_and_runner() -> None:
    config = engine_config(WorkerSettings(model="m", level="fp32", backend="torch", num_blocks=2), SMALL)
    level, cache, runner = fingerprint(config, SMALL).split("/")
    assert (level, cache) == ("fp32", "kv-fp32")
    assert runner.startswith("torch-")
    assert "cpu-" in runner


def test_drafts_are_made_on_a_cpu_unless_told_otherwise_and_elsewhere_only_if_told() -> None:
    def drafts(**fields: object) -> int:
        return engine_config(WorkerSettings(model="m", level="fp32", num_blocks=2, **fields), SMALL).speculation  # type: ignore[arg-type]

    assert (drafts(), drafts(speculation=0), drafts(speculation=3)) == (8, 0, 3)
    assert (drafts(device="cuda:0"), drafts(device="cuda:0", speculation=4)) == (0, 4)


def test_the_fingerprint_names_a_rule_that_lets_drafts_decide() -> None:
    def name(**fields: object) -> str:
        return fingerprint(engine_config(WorkerSettings(model="m", level="fp32", num_blocks=2, **fields), SMALL), SMALL)  # type: ignore[arg-type]

    assert name() == name(speculation=0) == name(speculation=0, verification="rejection")
    assert name(verification="rejection") == name() + "/rejection"
