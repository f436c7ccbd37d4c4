"""One decoder for Llama, Mistral, Qwen2 and Qwen3: what differs between them is flags in ModelConfig.

Knows no file format: it takes weights by their Hugging Face names. A row's bits don't depend on the rest of the step.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.engine.attention.metadata import AttentionMetadata
from services.worker.engine.attention.paged import PagedAttention, Plan
from services.worker.engine.config import ModelConfig
from services.worker.engine.kv_cache import KVCache
from services.worker.engine.linear import Linear, padding
from services.worker.engine.models.rotary import Rotary, rotate
from services.worker.engine.models.step import Step
from services.worker.engine.quantization import Quantized, Weights, stack, tensor


class RMSNorm:
    """x / rms(x) * weight over the last dimension, in fp32."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self.weight = weight
        self.epsilon = epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class MLP:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self.gate_up = Linear(stack([weights(f"{prefix}.gate_proj.weight"), weights(f"{prefix}.up_proj.weight")]))
        self.down = Linear(weights(f"{prefix}.down_proj.weight"))

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        # silu by hand: the fused kernel has another exp for the elements that don't fill a vector, so bits would depend on the batch.
        return self.down((up * gate).div_(gate.neg().exp_().add_(1)))


class Attention:
    """Attention with q, k and v in one product; Qwen2 biases them, Qwen3 normalises q and k per head."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, layer: int, attend: PagedAttention) -> None:
        self.layer = layer
        self.attend = attend
        self.heads = (config.num_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        names = [f"{prefix}.{side}_proj" for side in "qkv"]
        bias = torch.cat([tensor(weights(f"{name}.bias")) for name in names]) if config.attention_bias else None
        self.qkv = Linear(stack([weights(f"{name}.weight") for name in names]), bias)
        self.out = Linear(weights(f"{prefix}.o_proj.weight"))
        self.q_norm = RMSNorm(tensor(weights(f"{prefix}.q_norm.weight")), config.norm_epsilon) if config.qk_norm else None
        self.k_norm = RMSNorm(tensor(weights(f"{prefix}.k_norm.weight")), config.norm_epsilon) if config.qk_norm else None

    def __call__(self, x: Tensor, turns: tuple[Tensor, Tensor], kv: KVCache, plan: Plan) -> Tensor:
        num_tokens = len(turns[0])
        qk, v = self.qkv(x)[:num_tokens].view(num_tokens, -1, self.head_dim).split_with_sizes((sum(self.heads), self.heads[1]), 1)
        if self.q_norm and self.k_norm:
            q, k = qk.split_with_sizes(self.heads, 1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 1)
        q, k = rotate(qk, *turns).split_with_sizes(self.heads, 1)
        attended = self.attend(self.layer, q, k, v, kv, plan).flatten(1)
        return self.out(F.pad(attended, (0, 0, 0, len(x) - num_tokens)) if len(x) > num_tokens else attended)


class Layer:
    """Attention, then the MLP, each on a normalised copy and added to the stream."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, attend: PagedAttention) -> None:
        prefix = f"model.layers.{layer}"
        self.attention_norm = RMSNorm(tensor(weights(f"{prefix}.input_layernorm.weight")), config.norm_epsilon)
        self.attention = Attention(config, weights, f"{prefix}.self_attn", layer, attend)
        self.mlp_norm = RMSNorm(tensor(weights(f"{prefix}.post_attention_layernorm.weight")), config.norm_epsilon)
        self.mlp = MLP(weights, f"{prefix}.mlp")

    def __call__(self, x: Tensor, turns: tuple[Tensor, Tensor], kv: KVCache, plan: Plan) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns, kv, plan)
        return x.add_(self.mlp(self.mlp_norm(x)))

    def row_sizes(self) -> tuple[int, ...]:
        """Piece sizes that are safe for every product of the layer."""
        sizes = [set(linear.row_sizes) for linear in (self.attention.qkv, self.attention.out, self.mlp.gate_up, self.mlp.down)]
        return tuple(sorted(set.intersection(*sizes), reverse=True))


class Decoder:
    """A whole model. `config` is its shape, `version` names the weights (loader.version)."""

    def __init__(self, config: ModelConfig, weights: Weights, version: str = "") -> None:
        self.config = config
        self.version = version
        quantized = weights("model.embed_tokens.weight")
        embedding = quantized.dequantize() if isinstance(quantized, Quantized) else quantized  # [vocab, hidden]
        self.dtype, self.device = embedding.dtype, embedding.device
        self.attend = PagedAttention(config, self.device)
        self.layers = [Layer(config, weights, layer, self.attend) for layer in range(config.num_layers)]
        self.norm = RMSNorm(tensor(weights("model.norm.weight")), config.norm_epsilon)
        self.head = Linear(quantized if config.tied_embeddings else weights("lm_head.weight"))
        # Tied: one tensor serves both ways, in the head's [hidden, vocab] layout.
        self.embedding = self.head.weight.t() if config.tied_embeddings else embedding
        self.rotary = Rotary(config, self.dtype, self.device)
        self.row_sizes = self.layers[0].row_sizes()
        self.await_part: Callable[[int], None] = _all_there  # returns when so many parts of the weights are there, see moving

    @torch.inference_mode()
    def forward(self, step: Step, kv: KVCache) -> Tensor:
        """Logits [num_logit_rows, vocab] fp32. Writes the tokens' keys and values into `kv`."""
        attention = AttentionMetadata.build(step.query_lengths, step.context_lengths, step.block_tables, kv.block_size, self.device)
        plan = self.attend.plan(attention, kv)
        tokens, positions, logit_rows = (
            torch.tensor(values, dtype=torch.int64, device=self.device) for values in (step.tokens, step.positions(), step.logit_rows)
        )
        turns = self.rotary.at(positions, max(attention.context_lengths))
        self.await_part(1)
        x = self.embedding.index_select(0, tokens)
        if missing := padding(len(x), self.row_sizes):
            x = F.pad(x, (0, 0, 0, missing))  # once here, not at each product
        for number, layer in enumerate(self.layers, 2):
            self.await_part(number)
            x = layer(x, turns, kv, plan)
        self.await_part(len(self.layers) + 2)
        return self.head(self.norm(x.index_select(0, logit_rows))).float()


def _all_there(count: int) -> None:
    """Of weights that don't move."""
