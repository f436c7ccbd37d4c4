"""A worker's environment, and the size of the cache that follows from it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ByteSize

from services.common.settings import SettingsError, read
from services.worker import loading, sizing
from services.worker.engine.config import ModelConfig, RopeConfig
from services.worker.engine.kernels import library
from services.worker.settings import WorkerSettings
from services.worker.sizing import engine_config, fingerprint, shared_configs

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


def test_several_models_share_the_memory() -> None:
    each = WorkerSettings(model="/m/a.gguf=a, /m/b,", kv_memory=ByteSize(1001), swap_memory=ByteSize(40), level="int8").by_model()
    assert [(one.model_path, one.model_name) for one in each] == [(Path("/m/a.gguf"), "a"), (Path("/m/b"), "b")]
    assert [(one.kv_memory, one.swap_memory, one.level) for one in each] == [(500, 20, "int8")] * 2


def test_models_on_one_device_share_its_cache_and_keep_a_floor_each() -> None:
    wide = replace(SMALL, num_layers=6)
    settings = WorkerSettings(model="/m/a=a,/m/b=b", level="fp32", backend="torch", kv_memory=ByteSize(200 * 3 * BLOCK_BYTES))
    models = {one.model_name: (one, model) for one, model in zip(settings.by_model(), (SMALL, wide), strict=True)}
    shared = shared_configs(settings, models)
    assert (shared.configs["a"].block_size, shared.configs["b"].block_size) == (48, 16)  # a page is a block of either
    assert len(shared.pages) == shared.arena.pages.num_blocks == 200
    assert set(shared.arena.models) == {"a@fp32", "b@fp32"}
    for name, config in shared.configs.items():
        assert config.num_blocks == shared.pools[name].num_blocks == 200 - 12  # all but the other's floor


def test_several_models_need_some_pages_each() -> None:
    settings = WorkerSettings(model="/m/a=a,/m/b=b", level="fp32", backend="torch", kv_memory=ByteSize(3 * BLOCK_BYTES))
    with pytest.raises(SettingsError, match=rf"3 pages of {BLOCK_BYTES} bytes; these 2 models need 4 at least: set {4 * BLOCK_BYTES}"):
        shared_configs(settings, {one.model_name: (one, SMALL) for one in settings.by_model()})
    with pytest.raises(SettingsError, match="FOREBAY_NUM_BLOCKS is one model's"):
        shared_configs(settings.model_copy(update={"num_blocks": 8}), {one.model_name: (one, SMALL) for one in settings.by_model()})


@pytest.mark.parametrize("model", [",", "/m/a.gguf=a,/n/b.gguf=a"])
async def test_models_need_names_of_their_own(model: str) -> None:
    with pytest.raises(SettingsError, match="each by another name"):
        await loading.load(WorkerSettings(model=model), asyncio.Event())


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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"level": "int5"}, "FOREBAY_LEVEL=int5"),
        ({"kv_format": "int4"}, "FOREBAY_KV_FORMAT=int4"),
        ({"backend": "onnx"}, "FOREBAY_BACKEND=onnx"),
        ({"block_size": "257"}, "FOREBAY_BLOCK_SIZE=257"),
    ],
)
def test_an_unknown_level_format_or_backend_is_one_line(fields: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_MODEL", "m")
    for name, value in fields.items():
        monkeypatch.setenv(f"FOREBAY_{name.upper()}", value)
    with pytest.raises(SettingsError) as caught:
        read(WorkerSettings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_backend_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="backend native: its kernels run on the CPU, not on cuda"):
        engine_config(WorkerSettings(model="m", level="fp32", backend="native", device="cuda"), SMALL)
    monkeypatch.setattr(library, "find", lambda: None)
    for level in ("auto", "int4"):
        with pytest.raises(SettingsError, match="backend native: no compiled kernels fit this machine"):
            engine_config(WorkerSettings(model="m", level=level, backend="native"), SMALL)


@pytest.mark.parametrize("own", ["int4", "int8", "bf16"])
def test_auto_is_the_files_level_with_kernels_and_with_torch_floats(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device torch holds integers in fp32, so bf16 is half the memory and the faster product."""
    monkeypatch.setattr(sizing, "suggested_level", lambda _: own)

    def level(**fields: object) -> tuple[str, str]:
        config = engine_config(WorkerSettings(model="m", num_blocks=2, **fields), SMALL)  # type: ignore[arg-type]
        return config.level, config.cache_format

    assert level() == (own, "bf16")
    assert level(kv_format="fp8") == (own, "fp8")
    assert level(level="int8") == ("int8", "bf16")
    assert level(backend="torch") == ("fp32", "fp32")
    assert level(device="cuda") == level(device="cuda:1", backend="torch") == ("bf16", "bf16")
    assert level(device="cuda", level="int4") == ("int4", "bf16"), "who names a level gets it"
    assert level(backend="torch", level="int8", kv_format="int8") == ("int8", "int8")
    monkeypatch.setattr(library, "find", lambda: None)
    assert level() == ("fp32", "fp32")


def test_host_memory_is_counted_in_blocks_and_off_unless_asked_for() -> None:
    def host_blocks(**fields: object) -> int:
        settings = WorkerSettings(model="m", level="fp32", backend="torch", num_blocks=2, **fields)  # type: ignore[arg-type]
        return engine_config(settings, SMALL).host_blocks

    assert host_blocks() == 0
    assert host_blocks(host_memory=7 * BLOCK_BYTES + 5) == 7


def test_preempted_sequences_have_a_place_in_host_memory_by_default() -> None:
    def swap_blocks(**fields: object) -> int:
        settings = WorkerSettings(model="m", level="fp32", backend="torch", num_blocks=2, **fields)  # type: ignore[arg-type]
        return engine_config(settings, SMALL).swap_blocks

    assert swap_blocks() == 128_000_000 // BLOCK_BYTES
    assert swap_blocks(prefix_cache=False, swap_memory=3 * BLOCK_BYTES) == 3
    assert swap_blocks(swap_memory=BLOCK_BYTES - 1) == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"swap_memory": 1 << 60}, rf"FOREBAY_SWAP_MEMORY={1 << 60} is more than the \d+ bytes that this host has left"),
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


def test_a_lower_level_may_draft() -> None:
    def drafting(**fields: object) -> tuple[str | None, int]:
        config = engine_config(WorkerSettings(model="m", num_blocks=2, level="bf16", **fields), SMALL)  # type: ignore[arg-type]
        return config.draft_level, config.speculation

    assert drafting() == (None, 8)
    assert drafting(draft_level="int4") == ("int4", 8)
    with pytest.raises(SettingsError, match="FOREBAY_DRAFT_LEVEL=bf16 must have fewer bits than the weights, which are bf16"):
        drafting(draft_level="bf16")
    with pytest.raises(SettingsError, match="FOREBAY_DRAFT_LEVEL=int4 drafts, and FOREBAY_SPECULATION is 0"):
        drafting(draft_level="int4", speculation=0)
