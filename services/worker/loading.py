"""From settings to engines: sizes each cache, reads the models on a thread, tells how far it is."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from services.common import log
from services.common.process import announce
from services.common.settings import SettingsError
from services.text import model_files
from services.text.compiler import Compiler
from services.text.gguf_metadata import ModelError
from services.worker.engine import backend
from services.worker.engine.config import EngineConfig, ModelConfig, Verification
from services.worker.engine.engine import Engine
from services.worker.engine.loader import read_config, suggested_level
from services.worker.engine.quantization import LEVELS
from services.worker.settings import WorkerSettings
from services.worker.wire import Served

CPU_DRAFTS = 8
"""Most draft tokens on a CPU, where a row's numbers are the same in any batch. Elsewhere they may not be, and greedy tokens with them."""
PROGRESS_SECONDS = 0.1

_logger = log.get(__name__)


Loaded = list[tuple[Engine, Served]]
"""Each model's engine, and what it serves."""


async def load(settings: WorkerSettings, stop: asyncio.Event) -> Loaded | None:
    """All models. ModelFileError, SettingsError: a bad file, or no fitting cache. None: `stop` came first."""
    loaded: Future[Loaded] = Future()
    # A thread of its own, and a daemon: a process that is told to stop doesn't wait for gigabytes.
    threading.Thread(target=_load_into, args=(loaded, settings), name="load", daemon=True).start()
    stopped = asyncio.create_task(stop.wait())
    result = asyncio.wrap_future(loaded)
    either: set[asyncio.Future[Any]] = {result, stopped}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return result.result() if result.done() else None


def engine_config(settings: WorkerSettings, model: ModelConfig) -> EngineConfig:
    """The engine's size: FOREBAY_NUM_BLOCKS, or what fits into FOREBAY_KV_MEMORY. SettingsError: too little, or more than there is."""
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
        block_bytes = backend.block_bytes(config, model)
    except backend.BackendError as error:
        raise SettingsError(str(error)) from error
    num_blocks = settings.num_blocks or int(settings.kv_memory) // block_bytes
    if num_blocks < 2:
        raise SettingsError(
            f"FOREBAY_KV_MEMORY={int(settings.kv_memory)} holds {num_blocks} cache blocks of {block_bytes} bytes; "
            f"this model needs 2 at least: set {2 * block_bytes} or more"
        )
    available = psutil.virtual_memory().available
    if config.device == "cpu" and num_blocks * block_bytes > available:
        variable = "FOREBAY_NUM_BLOCKS" if settings.num_blocks else "FOREBAY_KV_MEMORY"
        raise SettingsError(f"a cache of {num_blocks * block_bytes} bytes is more than this host's {available} free ones: lower {variable}")
    left = available - (num_blocks * block_bytes if config.device == "cpu" else 0)
    host_blocks = _host_blocks(settings, block_bytes, left)
    swap_blocks = int(settings.swap_memory) // block_bytes
    if swap_blocks * block_bytes > left - host_blocks * block_bytes:
        raise SettingsError(
            f"FOREBAY_SWAP_MEMORY={int(settings.swap_memory)} is more than the {left - host_blocks * block_bytes} bytes that this host has "
            "left: lower it"
        )
    return replace(config, num_blocks=num_blocks, host_blocks=host_blocks, swap_blocks=swap_blocks)


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
    if compiled := backend.kernels(config, model):
        runner = compiled.name
    else:
        on_cpu = config.device == "cpu"
        device = "cpu-" + torch.backends.cpu.get_cpu_capability().lower() if on_cpu else torch.cuda.get_device_name(config.device)
        runner = f"torch-{torch.__version__.partition('+')[0]}-{device}".replace(" ", "-")
    # Under the rejection rule the drafts decide, too.
    rule = f"/{config.verification}" if config.speculation and config.verification is Verification.REJECTION else ""
    return f"{config.level}/kv-{config.cache_format}/{runner}{rule}"


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


def _load_into(loaded: "Future[Loaded]", settings: WorkerSettings) -> None:
    try:
        loaded.set_result(_load_all(settings))
    except BaseException as error:  # whoever waits for the future decides what it means
        loaded.set_exception(error)


def _load_all(settings: WorkerSettings) -> Loaded:
    each = settings.by_model()
    names = Counter(one.model_name for one in each)
    if not each or max(names.values()) > 1:
        raise SettingsError(f"FOREBAY_MODEL={settings.model} must name one model at least, and each by another name: PATH=NAME,PATH=NAME")
    return [_load(one) for one in each]


def _load(settings: WorkerSettings) -> tuple[Engine, Served]:
    path = settings.model_path
    if not path.exists():
        raise FileNotFoundError(f"FOREBAY_MODEL={settings.model}: there is no file or folder {path}")
    _check_device(settings.device)
    model = read_config(path)
    config = engine_config(settings, model)
    started = time.monotonic()
    engine = Engine.from_path(path, config, progress=Progress())
    served = Served(
        model=f"{settings.model_name}@{config.level}",
        version=engine.model_version,
        fingerprint=fingerprint(config, model),
        vocab_size=engine.vocab_size,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_model_len=min(engine.max_model_len, config.num_blocks * config.block_size),
        compiler=_compiler(path, engine.vocab_size, model.eos_token_ids),
    )
    _logger.info(
        "loaded", model=served.model, version=served.version, num_blocks=config.num_blocks, seconds=round(time.monotonic() - started, 2)
    )
    return engine, served


def _compiler(path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Compiler | None:
    """None, and a warning, where the tokenizer can't be read: the model still serves token ids."""
    try:
        tokenizer = model_files.read(path).tokenizer
    except ModelError as error:
        _logger.warning("no_grammars", why=str(error))
        return None
    return Compiler(tokenizer, vocab_size, [token_id for token_id in eos_token_ids if token_id < vocab_size])


def _check_device(device: str) -> None:
    kind, _, number = device.partition(":")
    if kind == "cuda" and int(number or 0) >= (num_devices := torch.cuda.device_count()):
        raise SettingsError(f"FOREBAY_DEVICE={device}: torch {torch.__version__} finds {num_devices} CUDA devices; choose another or cpu")


class Progress:
    """Prints how much is read, a few times a second and at the end."""

    def __init__(self) -> None:
        self._told_at = 0.0

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` bytes."""
        now = time.monotonic()
        if done >= total or now - self._told_at >= PROGRESS_SECONDS:
            self._told_at = now
            announce("loading", done=done, total=total)
