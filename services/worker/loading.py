"""From settings to engines: reads the models on a thread, tells how far it is."""

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.common import log
from services.common.process import announce
from services.common.settings import SettingsError
from services.text import model_files
from services.text.compiler import Compiler
from services.text.gguf_metadata import ModelError
from services.worker.engine.config import EngineConfig, ModelConfig
from services.worker.engine.engine import Engine
from services.worker.engine.loader import read_config
from services.worker.settings import WorkerSettings
from services.worker.sharing.arena import Arena, ModelPool
from services.worker.sizing import engine_config, fingerprint, shared_configs
from services.worker.wire import Served

PROGRESS_SECONDS = 0.1

_logger = log.get(__name__)


@dataclass(frozen=True)
class Loaded:
    """Each model's engine, and what it serves. `arena`: where the blocks of several are."""

    models: list[tuple[Engine, Served]]
    arena: Arena | None = None


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


def _load_into(loaded: "Future[Loaded]", settings: WorkerSettings) -> None:
    try:
        loaded.set_result(_load_all(settings))
    except BaseException as error:  # whoever waits for the future decides what it means
        loaded.set_exception(error)


def _load_all(settings: WorkerSettings) -> Loaded:
    each = {one.model_name: one for one in settings.by_model()}
    if not each or len(each) < len(settings.by_model()):
        raise SettingsError(f"FOREBAY_MODEL={settings.model} must name one model at least, and each by another name: PATH=NAME,PATH=NAME")
    _check_device(settings.device)
    models = {name: (one, _read_config(one)) for name, one in each.items()}
    if len(models) == 1:
        [(one, model)] = models.values()
        return Loaded([_load(one, model, engine_config(one, model))])
    shared = shared_configs(settings, models)
    parts = {name: (shared.pools[name], shared.pages) for name in models}
    return Loaded([_load(*models[name], shared.configs[name], parts[name]) for name in models], shared.arena)


def _read_config(settings: WorkerSettings) -> ModelConfig:
    if not settings.model_path.exists():
        raise FileNotFoundError(f"FOREBAY_MODEL={settings.model}: there is no file or folder {settings.model_path}")
    return read_config(settings.model_path)


def _load(
    settings: WorkerSettings, model: ModelConfig, config: EngineConfig, shared: tuple[ModelPool, Tensor] | None = None
) -> tuple[Engine, Served]:
    path = settings.model_path
    started = time.monotonic()
    engine = Engine.from_path(path, config, Progress(), shared)
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
