"""BERT's encoder on inputs that lie one behind another: no padding in its products, padded by sequence in attention alone.

Knows no file format: it takes weights by their Hugging Face names. fp32; a row's last bits may depend on the rest of the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.engine.encoder_config import Activation, EncoderConfig, Pooling

Weights = Callable[[str], Tensor]

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.RELU: F.relu,
}


@dataclass(frozen=True)
class Packed:
    """Inputs one behind another. Rows of `places` are the inputs, padded with their first token's place."""

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens], in its own input
    places: Tensor  # [num_inputs, longest] -> token
    is_there: Tensor  # [num_inputs, longest]: no padding

    @property
    def lengths(self) -> Tensor:
        """[num_inputs]"""
        return self.is_there.sum(1)


def pack(inputs: Sequence[Sequence[int]], device: torch.device) -> Packed:
    """Puts inputs, each of at least one token, behind one another."""
    lengths = torch.tensor([len(ids) for ids in inputs])
    starts = lengths.cumsum(0) - lengths
    columns = torch.arange(int(lengths.max()))
    is_there = columns < lengths[:, None]
    return Packed(
        token_ids=torch.tensor([token_id for ids in inputs for token_id in ids]).to(device),
        positions=columns.expand(len(inputs), -1)[is_there].to(device),
        places=torch.where(is_there, starts[:, None] + columns, starts[:, None]).to(device),
        is_there=is_there.to(device),
    )


@dataclass(frozen=True)
class Affine:
    """x @ weight.T + bias."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class LayerNorm:
    """Over the last dimension."""

    weight: Tensor
    bias: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class Layer:
    """Attention over the whole input, then the inner layer; each is added to the stream, which is normalised behind it."""

    def __init__(self, config: EncoderConfig, weights: Weights, prefix: str) -> None:
        sides = [f"{prefix}.attention.self.{side}" for side in ("query", "key", "value")]
        self.num_heads = config.num_heads
        self.qkv = Affine(torch.cat([weights(f"{side}.weight") for side in sides]), torch.cat([weights(f"{side}.bias") for side in sides]))
        self.out = _affine(weights, f"{prefix}.attention.output.dense")
        self.attention_norm = _norm(config, weights, f"{prefix}.attention.output.LayerNorm")
        self.inner = _affine(weights, f"{prefix}.intermediate.dense")
        self.activation = _ACTIVATIONS[config.activation]
        self.outer = _affine(weights, f"{prefix}.output.dense")
        self.norm = _norm(config, weights, f"{prefix}.output.LayerNorm")

    def __call__(self, x: Tensor, packed: Packed) -> Tensor:
        x = self.attention_norm(x + self.out(self._attend(self.qkv(x), packed)))
        return self.norm(x + self.outer(self.activation(self.inner(x))))

    def _attend(self, qkv: Tensor, packed: Packed) -> Tensor:
        """[num_tokens, 3 * hidden] -> [num_tokens, hidden]"""
        num_inputs, longest = packed.places.shape
        padded = qkv[packed.places].view(num_inputs, longest, 3, self.num_heads, -1)
        q, k, v = padded.permute(2, 0, 3, 1, 4)  # each [num_inputs, num_heads, longest, head_dim]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=packed.is_there[:, None, None, :])
        return mixed.transpose(1, 2).flatten(2)[packed.is_there]


class Bert:
    """An encoder with what makes vectors of its states."""

    def __init__(self, config: EncoderConfig, weights: Weights) -> None:
        self.config = config
        self.words = weights("embeddings.word_embeddings.weight")
        # Every text is of the first type, so that type's row goes into the positions once and for all.
        self.places = weights("embeddings.position_embeddings.weight") + weights("embeddings.token_type_embeddings.weight")[0]
        self.norm = _norm(config, weights, "embeddings.LayerNorm")
        self.layers = [Layer(config, weights, f"encoder.layer.{index}") for index in range(config.num_layers)]

    @torch.inference_mode()
    def __call__(self, inputs: Sequence[Sequence[int]]) -> Tensor:
        """The vector of each input, of 1 to max_input_len tokens. [num_inputs, hidden], fp32, on the CPU."""
        packed = pack(inputs, self.words.device)
        x = self.norm(self.words[packed.token_ids] + self.places[packed.positions])
        for layer in self.layers:
            x = layer(x, packed)
        vectors = self._pool(x, packed)
        return (F.normalize(vectors, dim=-1) if self.config.normalize else vectors).cpu()

    def _pool(self, x: Tensor, packed: Packed) -> Tensor:
        """[num_tokens, hidden] -> [num_inputs, hidden]"""
        if self.config.pooling is Pooling.CLS:
            return x[packed.places[:, 0]]
        states = x[packed.places]  # [num_inputs, longest, hidden]
        padding = ~packed.is_there[:, :, None]
        if self.config.pooling is Pooling.MAX:
            return states.masked_fill(padding, -torch.inf).amax(1)
        return states.masked_fill(padding, 0).sum(1) / packed.lengths[:, None]


def _affine(weights: Weights, name: str) -> Affine:
    return Affine(weights(f"{name}.weight"), weights(f"{name}.bias"))


def _norm(config: EncoderConfig, weights: Weights, name: str) -> LayerNorm:
    return LayerNorm(weights(f"{name}.weight"), weights(f"{name}.bias"), config.norm_epsilon)
