"""How large each engine is: levels, cache formats, and the memory of its blocks, by itself or in an arena with other models'."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor

from services.common.settings import SettingsError
from services.worker.engine import backend
from services.worker.engine.config import EngineConfig, ModelConfig, Verification
from services.worker.engine.loader import suggested_level
from services.worker.engine.quantization import LEVELS
from services.worker.settings import WorkerSettings
from services.worker.sharing import layout
from services.worker.sharing.arena import Arena, ModelPool

CPU_DRAFTS = 8
"""Most draft tokens on a CPU, where a row's numbers are the same in any batch. Elsewhere they may not be, and greedy tokens with them."""

FLOOR_PART = 8
"""Of its equal part of the pages, one in so many is kept for a model though it rests: it can begin at once."""


RESERVE_PART = 20
"""One part of so many of device_memory stays free."""


@dataclass(frozen=True)
class Shared:
    """What several models have in common: the arena and its memory; and what each has of it."""

    arena: Arena
    pages: Tensor  # uint8 [num_pages, bytes of a page]
    configs: Mapping[str, EngineConfig]
    pools: Mapping[str, ModelPool]


def engine_config(settings: WorkerSettings, model: ModelConfig) -> EngineConfig:
    """The engine's size: FOREBAY_NUM_BLOCKS, or what fits into FOREBAY_KV_MEMORY. SettingsError: too little, or more than there is."""
    config = _resolved(settings, model)
    block_bytes = backend.block_bytes(config, model)
    num_blocks = settings.num_blocks or int(settings.kv_memory) // block_bytes
    if num_blocks < 2:
        raise SettingsError(
            f"FOREBAY_KV_MEMORY={int(settings.kv_memory)} holds {num_blocks} cache blocks of {block_bytes} bytes; "
            f"this model needs 2 at least: set {2 * block_bytes} or more"
        )
    _check_fits(settings, config, num_blocks * block_bytes)
    left = psutil.virtual_memory().available - (num_blocks * block_bytes if config.device == "cpu" else 0)
    return _with_host(settings, replace(config, num_blocks=num_blocks), block_bytes, left)


def shared_configs(settings: WorkerSettings, models: Mapping[str, tuple[WorkerSettings, ModelConfig]]) -> Shared:
    """The engines of several models, whose blocks are pages of FOREBAY_KV_MEMORY. `models` by name, each with its own settings.

    SettingsError: too little memory, or more than there is.
    """
    if settings.num_blocks is not None:
        raise SettingsError("FOREBAY_NUM_BLOCKS is one model's: where several share a device, set FOREBAY_KV_MEMORY")
    shapes = {name: (_resolved(one, model), model) for name, (one, model) in models.items()}
    try:
        page_bytes, configs = layout.sized(shapes)
    except backend.BackendError as error:
        raise SettingsError(str(error)) from error
    if settings.device_memory is not None:  # weights that are only copied from may lie in a file; those that are read lie on large pages
        folder, most = settings.weights_cache, int(settings.weights_cache_size)
        configs = {name: replace(config, packed_folder=folder, max_packed_bytes=most) for name, config in configs.items()}
    num_pages = int(settings.kv_memory) // page_bytes
    if num_pages < 2 * len(models):
        raise SettingsError(
            f"FOREBAY_KV_MEMORY={int(settings.kv_memory)} holds {num_pages} pages of {page_bytes} bytes; "
            f"these {len(models)} models need {2 * len(models)} at least: set {2 * len(models) * page_bytes} or more"
        )
    _check_fits(settings, next(iter(configs.values())), num_pages * page_bytes)
    arena = Arena(num_pages, keep_cached=settings.prefix_cache)
    floor = max(1, num_pages // len(models) // FLOOR_PART)
    pools = {name: arena.open(f"{name}@{config.level}", floor=floor) for name, config in configs.items()}
    pages = layout.allocate(num_pages, page_bytes, settings.device)
    left = psutil.virtual_memory().available - (num_pages * page_bytes if settings.device == "cpu" else 0)
    sized = {
        name: _with_host(models[name][0], replace(config, num_blocks=pools[name].num_blocks), page_bytes, left // len(models))
        for name, config in configs.items()
    }
    return Shared(arena, pages, sized, pools)


@dataclass(frozen=True)
class Budget:
    """Bytes of a device's memory, by what they are for."""

    weights: int
    kv: int
    workspace: int
    reserve: int


def device_budget(settings: WorkerSettings, shapes: Sequence[tuple[EngineConfig, ModelConfig]]) -> Budget:
    """FOREBAY_DEVICE_MEMORY: what cache, workspaces and a reserve leave is for weights. SettingsError: nothing, or too much."""
    total, cache = int(settings.device_memory or 0), int(settings.kv_memory)
    workspace, reserve = sum(workspace_bytes(*shape) for shape in shapes), total // RESERVE_PART
    budget = total - cache - workspace - reserve
    if budget <= 0:
        raise SettingsError(
            f"FOREBAY_DEVICE_MEMORY={total} leaves nothing for weights: FOREBAY_KV_MEMORY takes {cache} bytes, workspaces {workspace}, "
            f"the reserve {reserve}"
        )
    available = psutil.virtual_memory().available
    if settings.device == "cpu" and budget > available:
        raise SettingsError(f"FOREBAY_DEVICE_MEMORY={total} has {budget} bytes for weights; this host has {available} left: lower it")
    return Budget(budget, cache, workspace, reserve)


def workspace_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """About what a step's activations and logits take at most."""
    queries, heads = model.num_heads * model.head_dim, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    per_token = 4 * (3 * model.hidden_size + heads + 2 * queries + model.intermediate_size)
    return config.max_step_tokens * per_token * 3 // 2 + config.max_sequences * 4 * (model.vocab_size + model.hidden_size)


def _check_fits(settings: WorkerSettings, config: EngineConfig, num_bytes: int) -> None:
    available = psutil.virtual_memory().available
    if config.device == "cpu" and num_bytes > available:
        variable = "FOREBAY_NUM_BLOCKS" if settings.num_blocks else "FOREBAY_KV_MEMORY"
        raise SettingsError(f"a cache of {num_bytes} bytes is more than this host's {available} free ones: lower {variable}")


def _with_host(settings: WorkerSettings, config: EngineConfig, block_bytes: int, left: int) -> EngineConfig:
    """And with blocks of host memory, for what is evicted and what is swapped, in the `left` bytes."""
    host_blocks = _host_blocks(settings, block_bytes, left)
    swap_blocks = int(settings.swap_memory) // block_bytes
    if swap_blocks * block_bytes > left - host_blocks * block_bytes:
        raise SettingsError(
            f"FOREBAY_SWAP_MEMORY={int(settings.swap_memory)} is more than the {left - host_blocks * block_bytes} bytes that this host has "
            "left: lower it"
        )
    return replace(config, host_blocks=host_blocks, swap_blocks=swap_blocks)


def _resolved(settings: WorkerSettings, model: ModelConfig) -> EngineConfig:
    """All but the number of blocks. SettingsError: what can't be had."""
    config = EngineConfig(
        block_size=settings.block_size,
        max_sequences=settings.max_sequences,
        max_step_tokens=settings.max_step_tokens,
        max_model_len=settings.max_model_len,
        device=settings.device,
        level=settings.level,
        kv_format=None if settings.kv_format == "auto" else settings.kv_format,
        backend=settings.backend,
        num_threads=settings.num_threads,
        prefix_cache=settings.prefix_cache,
        class_preemption=settings.preemption,
        speculation=settings.speculation if settings.speculation is not None else CPU_DRAFTS * (settings.device == "cpu"),
        verification=settings.verification,
    )
    try:
        if config.level == "auto":
            config = replace(config, level=_level(config, settings.model_path, model))
        config = replace(config, draft_level=_draft_level(settings, config))
        backend.block_bytes(config, model)
    except backend.BackendError as error:
        raise SettingsError(str(error)) from error
    return config


def _host_blocks(settings: WorkerSettings, block_bytes: int, available: int) -> int:
    """What fits into FOREBAY_HOST_MEMORY. SettingsError where it could hold nothing, or is more than the `available` bytes."""
    wanted = int(settings.host_memory)
    if wanted == 0:
        return 0
    if not settings.prefix_cache:
        raise SettingsError(
            f"FOREBAY_HOST_MEMORY={wanted} keeps what the prefix cache evicts, and FOREBAY_PREFIX_CACHE is off: set one of them otherwise"
        )
    if wanted < block_bytes:
        raise SettingsError(f"FOREBAY_HOST_MEMORY={wanted} is less than a cache block of {block_bytes} bytes: set more, or 0")
    if wanted > available:
        raise SettingsError(f"FOREBAY_HOST_MEMORY={wanted} is more than the {available} bytes that this host has left: lower it")
    return wanted // block_bytes


def fingerprint(config: EngineConfig, model: ModelConfig) -> str:
    """Names what equal token ids depend on besides the weights' version: level, cache format, runner."""
    runner = compiled.name if (compiled := backend.kernels(config, model)) else torch_runner(config.device)
    # Under the rejection rule the drafts decide, too.
    rule = f"/{config.verification}" if config.speculation and config.verification is Verification.REJECTION else ""
    return f"{config.level}/kv-{config.cache_format}/{runner}{rule}"


def torch_runner(device: str) -> str:
    """Names what computes on a device by torch."""
    name = "cpu-" + torch.backends.cpu.get_cpu_capability().lower() if device == "cpu" else torch.cuda.get_device_name(device)
    return f"torch-{torch.__version__.partition('+')[0]}-{name}".replace(" ", "-")


def _level(config: EngineConfig, path: Path, model: ModelConfig) -> str:
    """What `auto` means: the file's own level with kernels. torch has none for integers, and would hold them in fp32 and round each row."""
    if backend.kernels(replace(config, level="fp32"), model) is not None:
        return suggested_level(path)
    return "fp32" if config.device == "cpu" else "bf16"


def _draft_level(settings: WorkerSettings, config: EngineConfig) -> str | None:
    """None: no second copy. SettingsError where it would be of no use."""
    if settings.draft_level == "none":
        return None
    if config.speculation == 0:
        raise SettingsError(f"FOREBAY_DRAFT_LEVEL={settings.draft_level} drafts, and FOREBAY_SPECULATION is 0: set one of them otherwise")
    if LEVELS.index(settings.draft_level) <= LEVELS.index(config.level):
        raise SettingsError(f"FOREBAY_DRAFT_LEVEL={settings.draft_level} must have fewer bits than the weights, which are {config.level}")
    return settings.draft_level
