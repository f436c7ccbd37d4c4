"""From settings to engines: reads the models on a thread, tells how far it is."""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.common import log
from services.common.process import announce
from services.common.settings import SettingsError, listed
from services.text import model_files
from services.text.compiler import Compiler
from services.text.gguf_metadata import ModelError
from services.worker.embed_lease import MAX_INPUTS
from services.worker.engine.config import EngineConfig, ModelConfig, ModelFileError
from services.worker.engine.encoder import Encoder
from services.worker.engine.encoder_file import is_encoder
from services.worker.engine.engine import Engine
from services.worker.engine.loader import read_config
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.models.decoder import Decoder
from services.worker.engine.models.moving import MovingWeights
from services.worker.engine.models.native import NativeDecoder
from services.worker.settings import WorkerSettings
from services.worker.sharing.arena import Arena, ModelPool
from services.worker.sharing.weights import FailedRunner, Movable, Weights
from services.worker.sizing import Budget, device_budget, engine_config, fingerprint, shared_configs, torch_runner
from services.worker.wire import Served

PROGRESS_SECONDS = 0.1
NO_CACHE_BLOCKS = 1 << 20
"""What an encoder says of cache blocks, each as large as its largest call: whatever other models hold, there is room for another."""

_logger = log.get(__name__)


@dataclass(frozen=True)
class Loaded:
    """Each model's engine, and what it serves. `arena`: where the blocks of several are; `weights`: that don't all fit at once.

    `budget`: of FOREBAY_DEVICE_MEMORY.
    """

    models: Sequence[tuple[Engine | Encoder, Served]]
    arena: Arena | None = None
    weights: Weights | None = None
    budget: Budget | None = None


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
    each = settings.by_model(has_cache=lambda path: not (path.exists() and is_encoder(path)))
    if not each or len({one.model_name for one in each}) < len(each):
        raise SettingsError(f"FOREBAY_MODEL={settings.model} must name one model at least, and each by another name: PATH=NAME,PATH=NAME")
    _check_device(settings.device)
    for one in each:
        if not one.model_path.exists():
            raise FileNotFoundError(f"FOREBAY_MODEL={one.model}: there is no file or folder {one.model_path}")
    encoders = [one for one in each if is_encoder(one.model_path)]
    models = {one.model_name: (one, read_config(one.model_path)) for one in each if one not in encoders}
    loaded = _load_generating(settings, models)
    return Loaded([*loaded.models, *map(_load_encoder, encoders)], loaded.arena, loaded.weights, loaded.budget)


def _load_generating(settings: WorkerSettings, models: Mapping[str, tuple[WorkerSettings, ModelConfig]]) -> Loaded:
    if not models:
        return Loaded([])
    if len(models) == 1:
        [(one, model)] = models.values()
        engine, served = _load(one, model, engine_config(one, model))
        if settings.device_memory is None:
            return Loaded([(engine, served)])
        budget = device_budget(settings, [(engine.config, model)])
        _check_alone(budget.weights, engine)
        return Loaded([(engine, served)], budget=budget)
    if settings.device_memory is not None and settings.draft_level != "none":
        raise SettingsError(
            "FOREBAY_DRAFT_LEVEL is a second copy of the weights, which FOREBAY_DEVICE_MEMORY doesn't move: leave one of them out"
        )
    shared = shared_configs(settings, models)
    loaded: list[tuple[Engine, Served]] = []
    decoders: dict[str, Movable] = {}
    for name in models:
        engine, served = _load_or_fail(*models[name], shared.configs[name], (shared.pools[name], shared.pages))
        loaded.append((engine, served))
        if settings.device_memory is not None and (decoder := decoder_of(engine)) is not None:
            decoders[served.model] = decoder
            decoder.move(None)  # the next one may need the room
    if settings.device_memory is None:
        return Loaded(loaded, shared.arena)
    budget = device_budget(settings, [(engine.config, model) for (engine, _), (_, model) in zip(loaded, models.values(), strict=True)])
    weights = _turns(settings, dict(zip(models, loaded, strict=True)), decoders, budget.weights)
    return Loaded(loaded, shared.arena, weights, budget)


def _check_alone(budget: int, engine: Engine) -> None:
    """A lone model's weights stay where they are; what torch holds isn't counted."""
    model = engine.runner.model if isinstance(engine.runner, ModelRunner) else None
    if isinstance(model, NativeDecoder) and (num_bytes := len(model.weights)) > budget:
        raise SettingsError(f"FOREBAY_DEVICE_MEMORY has {budget} bytes for the model's weights; its weights take {num_bytes}: raise it")


def _load_or_fail(
    settings: WorkerSettings, model: ModelConfig, config: EngineConfig, shared: tuple[ModelPool, Tensor]
) -> tuple[Engine, Served]:
    """A damaged file among several models fails its own requests, with the reason."""
    try:
        return _load(settings, model, config, shared)
    except ModelFileError as error:
        _logger.error("not_loaded", model=settings.model_name, why=str(error))
        failed = Engine(
            FailedRunner(settings.model_name, str(error)),
            config,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_model_len=min(config.max_model_len or model.max_position, model.max_position),
            pool=shared[0],
        )
        return failed, _served(settings, model, failed)


def decoder_of(engine: Engine) -> Movable | None:
    """The engine's weights, which can move from now on. None: it has none."""
    model = engine.runner.model if isinstance(engine.runner, ModelRunner) else None
    if isinstance(model, Decoder):
        return MovingWeights(model)
    return model if isinstance(model, NativeDecoder) else None


def _turns(settings: WorkerSettings, loaded: dict[str, tuple[Engine, Served]], decoders: dict[str, Movable], budget: int) -> Weights:
    """Weights in host memory, in turn on the device. SettingsError: pins of nobody, or none that fits."""
    if unknown := set(listed(settings.pinned_models)) - loaded.keys():
        raise SettingsError(f"FOREBAY_PINNED_MODELS names {min(unknown)}, which FOREBAY_MODEL doesn't: it has {', '.join(loaded)}")
    pinned = [loaded[name][1].model for name in listed(settings.pinned_models)]
    weights = Weights(budget, decoders, pinned, settings.device)
    engines = {served.model: engine for engine, served in loaded.values()}

    def fail(model: str, reason: str) -> None:
        _logger.error("not_loaded", model=model, why=reason)
        engines[model].runner = FailedRunner(model, reason)

    weights.on_failure = fail
    for model, reason in weights.failures.items():
        fail(model, reason)
    if len(weights.failures) == len(decoders):
        raise SettingsError(
            f"FOREBAY_DEVICE_MEMORY={int(settings.device_memory or 0)}: {next(iter(weights.failures.values()), 'no model')}"
        )
    return weights


def _load(
    settings: WorkerSettings, model: ModelConfig, config: EngineConfig, shared: tuple[ModelPool, Tensor] | None = None
) -> tuple[Engine, Served]:
    path = settings.model_path
    started = time.monotonic()
    engine = Engine.from_path(path, config, Progress(), shared)
    served = _served(settings, model, engine)
    _logger.info(
        "loaded", model=served.model, version=served.version, num_blocks=config.num_blocks, seconds=round(time.monotonic() - started, 2)
    )
    return engine, served


def _served(settings: WorkerSettings, model: ModelConfig, engine: Engine) -> Served:
    config = engine.config
    return Served(
        model=f"{settings.model_name}@{config.level}",
        version=engine.model_version,
        fingerprint=fingerprint(config, model),
        vocab_size=engine.vocab_size,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_model_len=min(engine.max_model_len, config.num_blocks * config.block_size),
        compiler=_compiler(settings.model_path, engine.vocab_size, model.eos_token_ids),
    )


def _load_encoder(settings: WorkerSettings) -> tuple[Encoder, Served]:
    """In fp32, whatever the level of the models beside it."""
    started = time.monotonic()
    encoder = Encoder.from_path(
        settings.model_path,
        device=settings.device,
        max_step_tokens=settings.max_step_tokens,
        num_threads=settings.num_threads,
        progress=Progress(),
    )
    shape = encoder.config
    served = Served(
        model=f"{settings.model_name}@fp32",
        version=encoder.model_version,
        fingerprint=f"fp32/{torch_runner(settings.device)}",
        vocab_size=shape.vocab_size,
        block_size=MAX_INPUTS * shape.max_input_len,
        num_blocks=NO_CACHE_BLOCKS,
        max_model_len=shape.max_input_len,
        dimensions=shape.hidden_size,
        max_call_tokens=MAX_INPUTS * shape.max_input_len,
    )
    _logger.info("loaded", model=served.model, version=served.version, seconds=round(time.monotonic() - started, 2))
    return encoder, served


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
