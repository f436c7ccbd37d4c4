"""What a model is (its shape, read from GGUF metadata or a Hugging Face config.json) and how an engine is sized.

Every architecture or feature that the decoder can't compute is refused here by name, before a weight is read.
"""

from dataclasses import dataclass


class ModelFileError(ValueError):
    """A model file or folder that can't be served: damaged, hostile, or of a kind that isn't known. One line for a person."""


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

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * element_size


@dataclass(frozen=True)
class EngineConfig:
    """How much an engine may hold and do in one step."""

    block_size: int = 16  # tokens per KV block
    num_blocks: int = 1024
    max_sequences: int = 64
    max_step_tokens: int = 512
    max_model_len: int | None = None  # None: the model's own limit
    device: str = "cpu"
    dtype: str = "fp32"  # fp32 or bf16
    num_threads: int | None = None  # None: torch's default
    prefix_cache: bool = True
