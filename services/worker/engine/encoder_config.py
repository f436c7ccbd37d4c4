"""What an encoder is: its shape, and how the states of a text's tokens become one vector. A shape that no encoder could have isn't made."""

import math
from dataclasses import dataclass
from enum import StrEnum

from services.worker.engine.config import ModelFileError

# What no real encoder exceeds: a hostile file must not size anything.
_LIMITS = {
    "num_layers": 256,
    "hidden_size": 1 << 14,
    "num_heads": 256,
    "intermediate_size": 1 << 17,
    "vocab_size": 1 << 22,
    "max_position": 1 << 16,
    "num_token_types": 16,
}


class Pooling(StrEnum):
    """How one vector comes of the states of all tokens."""

    MEAN = "mean"
    CLS = "cls"  # the first token's
    MAX = "max"


class Activation(StrEnum):
    """Of the inner layer, by the names that config.json has for it."""

    GELU = "gelu"
    GELU_TANH = "gelu_new"
    RELU = "relu"


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of a BERT. `max_input_len`: tokens of one input at most, those around it included."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    num_token_types: int
    norm_epsilon: float
    activation: Activation
    pooling: Pooling
    normalize: bool  # vectors of length 1
    max_input_len: int

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise ModelFileError(f"{name} is {value}; it must be from 1 to {limit}")
        if self.hidden_size % self.num_heads:
            raise ModelFileError(f"hidden_size ({self.hidden_size}) must be a multiple of num_heads ({self.num_heads})")
        if not 1 <= self.max_input_len <= self.max_position:
            raise ModelFileError(
                f"max_seq_length is {self.max_input_len}; it must be from 1 to the {self.max_position} positions of the model"
            )
        if not 0 < self.norm_epsilon < math.inf:
            raise ModelFileError(f"norm_epsilon is {self.norm_epsilon}; it must be positive and finite")
