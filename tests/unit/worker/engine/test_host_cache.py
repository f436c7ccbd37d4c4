"""Pages go to the host and come back bit for bit, whatever the cache's layout and format."""

import pytest
import torch

from services.worker.engine.batch import Copy
from services.worker.engine.config import ModelConfig, RopeConfig
from services.worker.engine.host_cache import HostCache
from services.worker.engine.kernels.cache import NativeCache
from services.worker.engine.kv_cache import KVCache

SMALL = ModelConfig(
    architecture="llama", num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=8, vocab_size=10,
    max_position=64, norm_epsilon=1e-5, rope=RopeConfig(), tied_embeddings=True, attention_bias=False, qk_norm=False, sliding_window=None,
    eos_token_ids=(2,),
)  # fmt: skip


def random_cache(kind: str, kv_format: str) -> KVCache | NativeCache:
    """Six blocks of random bits, among them NaNs of every kind."""
    kv = KVCache(SMALL, 6, 5, kv_format, "cpu") if kind == "torch" else NativeCache(SMALL, 6, 5, kv_format)
    generator = torch.Generator().manual_seed(1)
    for tensor in kv.tensors:
        tensor.view(torch.uint8).random_(0, 256, generator=generator)
    return kv


def bits(kv: KVCache | NativeCache, block: int) -> list[bytes]:
    return [tensor[block].view(torch.uint8).numpy().tobytes() for tensor in kv.tensors]


@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("kind", ["torch", "native"])
def test_every_bit_comes_back_and_no_other_block_changes(kind: str, kv_format: str) -> None:
    kv = random_cache(kind, kv_format)
    before = [bits(kv, block) for block in range(6)]
    assert len({page for pages in before for page in pages}) == 6 * len(kv.tensors)
    host = HostCache(kv.tensors, 3)
    host.copy([Copy(1, 2), Copy(4, 0)], [])
    assert [bits(kv, block) for block in range(6)] == before
    host.copy([Copy(5, 1)], [Copy(1, 0), Copy(0, 2)])
    assert [bits(kv, block) for block in range(6)] == [before[1], before[4], *before[2:]]


def test_copies_out_come_first() -> None:
    """A block goes out and takes another's page; one slot is written and read in the same step."""
    kv = random_cache("torch", "int8")
    before = [bits(kv, block) for block in range(6)]
    host = HostCache(kv.tensors, 2)
    host.copy([Copy(3, 0)], [])
    host.copy([Copy(2, 1)], [Copy(2, 0), Copy(5, 1)])
    assert [bits(kv, block) for block in range(6)] == [before[0], before[1], before[3], before[3], before[4], before[2]]


def test_a_cache_without_host_memory_copies_nothing() -> None:
    kv = random_cache("native", "bf16")
    before = [bits(kv, block) for block in range(6)]
    HostCache(kv.tensors, 0).copy([], [])
    assert [bits(kv, block) for block in range(6)] == before
