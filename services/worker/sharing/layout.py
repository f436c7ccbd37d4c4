"""How large a page is that can be a block of each of several models, and how many tokens of each it holds."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from services.worker.engine import backend
from services.worker.engine.config import EngineConfig, ModelConfig
from services.worker.engine.kernels import memory
from services.worker.engine.kv_cache import stride_bytes
from services.worker.engine.models.native import MAX_BLOCK_SIZE

UNIT = 16
"""Tokens of a block are a multiple of it: the kernels' vectors hold as many, and split sizes are one."""

Shape = tuple[EngineConfig, ModelConfig]


def page_bytes(shapes: Iterable[Shape], at_least: int = 0) -> int:
    """The least size of a page in which each model has a block. BackendError: a cache format that can't be shared."""
    shapes = list(shapes)
    for config, model in shapes:
        _check(config, model)
    wanted = max([at_least, *(backend.block_bytes(replace(config, block_size=UNIT), model) for config, model in shapes)])
    step = math.lcm(memory.ALIGNMENT, *(_step(config, model) for config, model in shapes))
    return wanted + -wanted % step


def block_size(page_bytes: int, config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of a block that is a page: as many as fit."""
    per_unit = backend.block_bytes(replace(config, block_size=UNIT), model)
    size = page_bytes // per_unit * UNIT
    assert size > 0, (page_bytes, per_unit)
    if _is_native(config, model):
        size = min(size, MAX_BLOCK_SIZE)
    while backend.block_bytes(replace(config, block_size=size), model) > page_bytes:  # sizes are rounded up, together or one by one
        size -= UNIT
    return size


def allocate(num_pages: int, page_bytes: int, device: str) -> Tensor:
    """uint8 [num_pages, page_bytes], zeros. OSError, or torch's error: there is no such memory."""
    if device == "cpu":
        return memory.large_pages(num_pages * page_bytes).view(num_pages, page_bytes)
    return torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=device)


def sized(shapes: Mapping[str, Shape], at_least: int = 0) -> tuple[int, dict[str, EngineConfig]]:
    """Bytes of a page, and each model's configuration with the block size that goes with it."""
    size = page_bytes(shapes.values(), at_least)
    return size, {name: replace(config, block_size=block_size(size, config, model)) for name, (config, model) in shapes.items()}


def _is_native(config: EngineConfig, model: ModelConfig) -> bool:
    return backend.kernels(replace(config, block_size=UNIT), model) is not None


def _step(config: EngineConfig, model: ModelConfig) -> int:
    """What the size of a page must be a multiple of."""
    return memory.ALIGNMENT if _is_native(config, model) else stride_bytes(config=model, kv_format=config.cache_format)


def _check(config: EngineConfig, model: ModelConfig) -> None:
    if config.cache_format in ("int8", "fp8") and not _is_native(config, model):
        raise backend.BackendError(
            f"kv_format {config.cache_format}: torch's 8-bit caches don't share memory with other models; choose bf16 or fp32, or serve "
            "one model per worker"
        )
