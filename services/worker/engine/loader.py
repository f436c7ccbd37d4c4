"""Reads a model from a GGUF file or a Hugging Face folder. (First the interface; the readers follow.)"""

from collections.abc import Callable
from pathlib import Path

import torch

from services.worker.engine.config import ModelConfig
from services.worker.engine.models.decoder import Decoder

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


def load(
    path: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", progress: Progress | None = None
) -> Decoder:
    """Read the whole model. Raises ModelFileError for anything wrong with the file."""
    raise NotImplementedError


def read_config(path: Path) -> ModelConfig:
    """The model's shape, without its weights."""
    raise NotImplementedError


def version(path: Path) -> str:
    """16 hex characters that name these weights."""
    raise NotImplementedError
