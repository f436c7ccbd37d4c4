"""Which decoder computes a model: C++ kernels on the CPU where they are compiled and fit, else torch. Loads it with its cache."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.worker.engine.batch import Runner
from services.worker.engine.config import EngineConfig, ModelConfig
from services.worker.engine.kernels import library
from services.worker.engine.kernels.cache import NativeCache
from services.worker.engine.kernels.cache import page_bytes as native_page_bytes
from services.worker.engine.kv_cache import KVCache, page_bytes
from services.worker.engine.loader import build
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.models.decoder import Decoder
from services.worker.engine.models.native import NativeDecoder, unsupported
from services.worker.engine.quantization import Weights
from services.worker.engine.verification import DRAFTING_RULES, RULES, Rule

BACKENDS = ("auto", "native", "torch")


class BackendError(ValueError):
    """The backend, level or cache format asked for can't be had here; one line that says why."""


@dataclass(frozen=True)
class Loaded:
    """A model ready to run; `drafting` is the same at config.draft_level, on the same cache."""

    runner: Runner
    config: ModelConfig
    version: str
    drafting: Runner | None = None


Progress = Callable[[int, int], None]


def load(path: Path, config: EngineConfig, progress: Progress | None = None) -> Loaded:
    """Reads the model at the config's level. ModelFileError for a bad file, BackendError, OSError where threads can't be had."""
    if config.draft_level is None:
        return _load(path, config, RULES[config.verification], None, progress)
    loaded = _load(path, config, RULES[config.verification], None, _part(progress, 0))
    assert isinstance(loaded.runner, ModelRunner)
    lower = replace(config, level=config.draft_level, kv_format=config.cache_format, host_blocks=0, swap_blocks=0)
    drafting = _load(path, lower, DRAFTING_RULES[config.verification], loaded.runner.kv, _part(progress, 1))
    return replace(loaded, drafting=drafting.runner)


def _part(progress: Progress | None, part: int) -> Progress | None:
    """Of a file that is read twice."""
    return progress and (lambda done, total: progress(part * total + done, 2 * total))


def _load(path: Path, config: EngineConfig, rule: type[Rule], shared: NativeCache | KVCache | None, progress: Progress | None) -> Loaded:
    """`shared` is a cache to use instead of one of its own."""

    def make(model: ModelConfig, weights: Weights, version: str) -> Loaded:
        compiled = kernels(config, model)
        if compiled is None:
            decoder = Decoder(model, weights, version)
            assert not isinstance(shared, NativeCache)
            kv = shared or KVCache(model, config.num_blocks, config.block_size, config.cache_format, decoder.device)
            return Loaded(ModelRunner(decoder, kv, config.num_host_slots, rule), model, version)
        num_threads = config.num_threads or torch.get_num_threads()
        native = NativeDecoder(model, weights, version, config.level, compiled, num_threads)
        assert not isinstance(shared, KVCache)
        cache = shared or NativeCache(model, config.num_blocks, config.block_size, config.cache_format)
        native.bind(cache)
        return Loaded(ModelRunner(native, cache, config.num_host_slots, rule), model, version)

    return build(path, make, level=config.level, device=config.device, progress=progress)


def kernels(config: EngineConfig, model: ModelConfig) -> library.Library | None:
    """The compiled library that will compute, or None: torch will."""
    reason = _obstacle(config, model)
    if config.backend == "torch" or (reason and config.backend == "auto"):
        return None
    if reason:
        raise BackendError(f"backend native: {reason}")
    return library.find()


def _obstacle(config: EngineConfig, model: ModelConfig) -> str | None:
    if config.device != "cpu":
        return f"its kernels run on the CPU, not on {config.device}"
    if library.find() is None:
        return "no compiled kernels fit this machine: run make setup, which needs g++"
    return unsupported(model, config.block_size)


def block_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes that one block of the cache takes over all layers."""
    size = page_bytes if kernels(config, model) is None else native_page_bytes
    return size(model, config.block_size, config.cache_format)
