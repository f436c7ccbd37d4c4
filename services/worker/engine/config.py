"""What a model is, its shape, and how an engine is sized. A shape that no decoder could have isn't made."""

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class ModelFileError(ValueError):
    """A model file or folder that can't be served: damaged, hostile, or of a kind that isn't known. One line for a person."""


# What no real model exceeds: a hostile file must not size anything.
_LIMITS = {
    "num_layers": 1024,
    "hidden_size": 1 << 17,
    "num_heads": 1024,
    "num_kv_heads": 1024,
    "head_dim": 1024,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 22,
    "max_position": 1 << 26,
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: the base and how its frequencies are stretched. `kind` is none, linear, llama3, yarn or factors."""

    theta: float = 10000.0
    kind: str = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: whole dimensions for the ramp
    factors: tuple[float, ...] = ()  # factors: one divisor per frequency, as GGUF stores llama3 scaling

    def __post_init__(self) -> None:
        _positive("rope theta", self.theta)
        _positive("rope scaling factor", self.factor)
        if self.kind in ("llama3", "yarn") and self.original_max_position < 1:
            raise ModelFileError(f"{self.kind} rope scaling needs the original context length; the configuration has none")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ModelFileError(
                f"llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor, not {self.low_freq_factor}, {self.high_freq_factor}"
            )
        for factor in (self.beta_fast, self.beta_slow, *self.factors):
            _positive("rope scaling parameter", factor)
        if self.attention_factor is not None:
            _positive("rope attention_factor", self.attention_factor)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. `architecture` is llama, mistral, qwen2 or qwen3."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    norm_epsilon: float
    rope: RopeConfig
    tied_embeddings: bool
    attention_bias: bool  # on q, k and v
    qk_norm: bool
    sliding_window: int | None  # a token sees this many positions, itself among them
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise ModelFileError(f"{name} is {value}; it must be from 1 to {limit}")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ModelFileError(f"head_dim ({self.head_dim}) must be even")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ModelFileError(f"sliding_window is {self.sliding_window}; it must be at least 1")
        if self.rope.factors and len(self.rope.factors) != self.head_dim // 2:
            raise ModelFileError(f"there are {len(self.rope.factors)} rope factors; head_dim {self.head_dim} needs {self.head_dim // 2}")
        _positive("norm_epsilon", self.norm_epsilon)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * element_size


class Verification(StrEnum):
    """What a draft must be to be accepted. Greedy tokens are the same by either rule."""

    GUMBEL = "gumbel"  # the very token that would come without it: a seed's tokens depend on no draft
    REJECTION = "rejection"  # likely enough: tokens are distributed as without it (Leviathan et al. 2023, Chen et al. 2023)


@dataclass(frozen=True)
class EngineConfig:
    """How much an engine may hold and do in one step."""

    block_size: int = 16  # tokens per KV block
    num_blocks: int = 1024
    max_sequences: int = 64
    max_step_tokens: int = 512
    max_model_len: int | None = None  # None: the model's own limit
    device: str = "cpu"
    level: str = "fp32"  # of the weights: one of quantization.LEVELS
    kv_format: str | None = None  # fp32, bf16, int8 or fp8; None: fp32 at level fp32, else bf16
    backend: str = "auto"  # native (the CPU kernels), torch, or auto: native where it can be
    num_threads: int | None = None  # None: torch's default
    prefix_cache: bool = True
    class_preemption: bool = True  # a more urgent class takes slots and blocks from those below
    speculation: int = 0  # most draft tokens per sequence and step; 0: off
    draft_level: str | None = None  # of a second copy of the weights, which drafts; None: lookups in a sequence's own past do
    verification: Verification = Verification.GUMBEL
    host_blocks: int = 0  # what the prefix cache evicts goes on in as many blocks of host memory
    swap_blocks: int = 0  # so many blocks of preempted sequences, at most, are kept in host memory, too, and are never given up
    packed_folder: Path | None = None  # where weights that the kernels read lie as they read them, for all workers of a host; None: nowhere
    max_packed_bytes: int = 0  # of that folder
    max_step_copies: int = 256  # blocks copied there in one step, and as many back: at 2 MiB over PCIe some 20 ms each way

    @property
    def num_host_slots(self) -> int:
        """Blocks of host memory, whatever they are for."""
        return self.host_blocks + self.swap_blocks

    @property
    def recomputes_exactly(self) -> bool:
        """Whether tokens computed again, in other company, come out with the same bits (ARCHITECTURE.md, decisions 13 and 19)."""
        return self.device == "cpu"

    @property
    def cache_format(self) -> str:
        """The format of keys and values."""
        return self.kv_format or ("fp32" if self.level == "fp32" else "bf16")


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ModelFileError(f"{name} is {value}; it must be positive and finite")
