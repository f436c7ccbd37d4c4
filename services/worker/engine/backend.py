"""Which decoder computes a model: C++ kernels on the CPU where they are compiled and fit, else torch. Loads it with its cache."""

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from services.worker.engine import loader, packed_file, quantization
from services.worker.engine.batch import Runner
from services.worker.engine.config import EngineConfig, ModelConfig
from services.worker.engine.kernels import library, packing
from services.worker.engine.kernels.cache import NativeCache
from services.worker.engine.kernels.cache import page_bytes as native_page_bytes
from services.worker.engine.kv_cache import KVCache, page_bytes
from services.worker.engine.loader import build
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.models import native
from services.worker.engine.models.decoder import Decoder
from services.worker.engine.models.native import NativeDecoder, unsupported
from services.worker.engine.packed_file import Packed
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


def load(path: Path, config: EngineConfig, progress: Progress | None = None, pages: Tensor | None = None) -> Loaded:
    """Reads the model at the config's level. ModelFileError for a bad file, BackendError, OSError where threads can't be had.

    `pages`, uint8 [num_pages, bytes], are the blocks of its cache, in which others may have theirs; None: they are its own.
    """
    if config.draft_level is None:
        return _load(path, config, RULES[config.verification], pages, progress)
    loaded = _load(path, config, RULES[config.verification], pages, _part(progress, 0))
    assert isinstance(loaded.runner, ModelRunner)
    lower = replace(config, level=config.draft_level, kv_format=config.cache_format, host_blocks=0, swap_blocks=0)
    drafting = _load(path, lower, DRAFTING_RULES[config.verification], loaded.runner.kv, _part(progress, 1))
    return replace(loaded, drafting=drafting.runner)


def _part(progress: Progress | None, part: int) -> Progress | None:
    """Of a file that is read twice."""
    return progress and (lambda done, total: progress(part * total + done, 2 * total))


def _load(
    path: Path, config: EngineConfig, rule: type[Rule], memory: NativeCache | KVCache | Tensor | None, progress: Progress | None
) -> Loaded:
    """`memory` is a cache to use instead of one of its own, or pages for it."""

    def make(model: ModelConfig, weights: Weights, version: str) -> Loaded:
        compiled = kernels(config, model)
        if compiled is None:
            decoder = Decoder(model, weights, version)
            assert not isinstance(memory, NativeCache)
            kv = memory if isinstance(memory, KVCache) else _torch_cache(model, config, decoder.device, memory)
            return Loaded(ModelRunner(decoder, kv, config.num_host_slots, rule), model, version)
        num_threads = config.num_threads or torch.get_num_threads()
        decoder_in_c = _native(model, weights, version, config, compiled, num_threads)
        assert not isinstance(memory, KVCache)
        cache = memory if isinstance(memory, NativeCache) else _native_cache(model, config, memory)
        decoder_in_c.bind(cache)
        return Loaded(ModelRunner(decoder_in_c, cache, config.num_host_slots, rule), model, version)

    return build(path, make, level=config.level, device=config.device, progress=progress)


def _native(
    model: ModelConfig, weights: Weights, version: str, config: EngineConfig, compiled: library.Library, num_threads: int
) -> NativeDecoder:
    """From a file of packed weights, where there is a folder for such. It is written where it isn't there, and can be."""

    def made(source: Weights | Packed) -> NativeDecoder:
        return NativeDecoder(model, source, version, config.level, compiled, num_threads)

    if config.packed_folder is None:
        return made(weights)
    path = packed_file.file_of(config.packed_folder, version, config.level, repr(model), compiled.name, _packing_code())
    if (found := packed_file.find(path)) is not None:
        return made(found)
    decoder = made(weights)
    with contextlib.suppress(OSError):  # without a file the weights are this process's own
        packed_file.write(path, decoder.structures(), decoder.ends, decoder.weights, config.max_packed_bytes)
        if (found := packed_file.find(path)) is not None:
            return made(found)
    return decoder


@lru_cache
def _packing_code() -> str:
    """Names the code that decides how weights lie."""
    files = [Path(module.__file__ or "") for module in (packed_file, packing, quantization, native, loader)]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _torch_cache(model: ModelConfig, config: EngineConfig, device: torch.device, pages: Tensor | None) -> KVCache:
    num_blocks = config.num_blocks if pages is None else len(pages)
    return KVCache(model, num_blocks, config.block_size, config.cache_format, device, pages)


def _native_cache(model: ModelConfig, config: EngineConfig, pages: Tensor | None) -> NativeCache:
    num_blocks = config.num_blocks if pages is None else len(pages)
    return NativeCache(model, num_blocks, config.block_size, config.cache_format, pages)


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
