"""What levels and cache formats cost: perplexity, KL divergence and top-1 agreement against fp32, token by token on the same text.

The text is the language reference that CPython carries (pydoc_data.topics). Models: the default one, whose file has 4-bit weights, so
that only activations and the cache differ; and a small one in floats that is trained here for a minute on the text's first half, where
rounding the weights shows, too. Prints JSON lines {"figure", "value", "unit", "target", "holds"}.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.figure import line, show
from services.cli.models import default
from services.gateway.models import load_model
from services.worker.engine.config import ModelConfig
from services.worker.engine.kernels import library
from services.worker.engine.kernels.cache import NativeCache
from services.worker.engine.loader import build
from services.worker.engine.models.native import NativeDecoder
from services.worker.engine.models.step import Step
from services.worker.engine.quantization import Weights

BLOCK_SIZE = 16
CHUNK = 512  # tokens of a step
LONG = 8192
# (level, cache): the first is what all are compared with.
FORMATS = (
    ("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "int8"), ("bf16", "fp8"),
    ("int8", "bf16"), ("int4", "bf16"), ("int4", "int8"), ("int4", "fp8"),
)  # fmt: skip


@dataclass
class Measure:
    """Sums over tokens."""

    num_tokens: int = 0
    nll: float = 0.0
    divergence: float = 0.0
    agreements: int = 0

    def add(self, logprobs: Tensor, reference: Tensor, targets: Tensor) -> None:
        """[num_tokens, vocab] log-probabilities of two models, and the tokens that really come next."""
        self.num_tokens += len(targets)
        self.nll -= float(logprobs.gather(1, targets[:, None]).sum())
        self.divergence += float((reference.exp() * (reference - logprobs)).sum())
        self.agreements += int((logprobs.argmax(-1) == reference.argmax(-1)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.num_tokens)

    @property
    def kl(self) -> float:
        return self.divergence / self.num_tokens

    @property
    def top1(self) -> float:
        return self.agreements / self.num_tokens


def text() -> str:
    """About 700,000 characters, the same in every copy of one Python version."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def load(path: Path, level: str, num_threads: int) -> NativeDecoder:
    compiled = library.find()
    assert compiled is not None

    def make(config: ModelConfig, weights: Weights, version: str) -> NativeDecoder:
        return NativeDecoder(config, weights, version, level, compiled, num_threads)

    return build(path, make, level=level)


def logprobs_of(decoder: NativeDecoder, tokens: Sequence[int], kv_format: str, skip: int = 0) -> Iterator[Tensor]:
    """Log-probabilities [n, vocab] of what follows each token from `skip` on, but the last, in pieces."""
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    cache = NativeCache(decoder.config, num_blocks, BLOCK_SIZE, kv_format)
    for start in range(0, len(tokens), CHUNK):
        end = min(start + CHUNK, len(tokens))
        rows = range(max(skip - start, 0), min(end, len(tokens) - 1) - start)
        step = Step(tokens[start:end], [end - start], [end], [range(num_blocks)], list(rows))
        logits = decoder.forward(step, cache)
        if len(rows):
            yield torch.log_softmax(logits, -1)


def measure(
    path: Path, texts: Sequence[Sequence[int]], num_threads: int, skip: int = 0, formats: Sequence[tuple[str, str]] = FORMATS
) -> dict[tuple[str, str], Measure]:
    """Every format on every text against the first format."""
    decoders = {level: load(path, level, num_threads) for level in dict.fromkeys(level for level, _ in formats)}
    measures = {kind: Measure() for kind in formats}
    for number, tokens in enumerate(texts):
        progress(f"text {number + 1} of {len(texts)}")
        streams = [logprobs_of(decoders[level], tokens, kv, skip) for level, kv in formats]
        place = skip
        for reference, *others in zip(*streams, strict=True):
            targets = torch.tensor(tokens[place + 1 : place + 1 + len(reference)])
            place += len(reference)
            for kind, logprobs in zip(formats, (reference, *others), strict=True):
                measures[kind].add(logprobs, reference, targets)
    return measures


def train(path: Path, data: bytes, seconds: float) -> None:
    """A small Llama over bytes, saved to `path` as a hub's folder."""
    from transformers import LlamaConfig, LlamaForCausalLM  # a development dependency

    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    stream = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    started = time.monotonic()
    step = 0
    while (elapsed := time.monotonic() - started) < seconds:
        starts = torch.randint(len(stream) - 257, (8,))
        batch = torch.stack([stream[s : s + 257] for s in starts.tolist()])
        loss = F.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20) * (1 - elapsed / seconds)
        optimizer.step()
        step += 1
        progress(f"training, step {step}: loss {loss.item():.2f}")
    model.save_pretrained(path)


def progress(message: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{message}      ", end="", file=sys.stderr, flush=True)


def report_all(prefix: str, measures: dict[tuple[str, str], Measure]) -> None:
    for (level, kv), m in measures.items():
        name = f"{prefix}{level}_kv_{kv}"
        show(line(f"ppl_{name}", m.perplexity, "perplexity"))
        show(line(f"kl_{name}", m.kl, "nats"))
        show(line(f"top1_{name}", m.top1, "of tokens"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--texts", type=int, default=24, help="of 512 tokens each")
    parser.add_argument("--train-seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    if library.find() is None:
        print("no compiled kernels fit this machine: run make setup", file=sys.stderr)
        return 1
    whole = text()
    path = default().path
    tokens = list(load_model(path, "m").tokenizer.encode(whole[: 40 * 512 * arguments.texts]))
    spread = range(0, len(tokens) - CHUNK, max(CHUNK, (len(tokens) - CHUNK) // arguments.texts))
    measures = measure(path, [tokens[i : i + CHUNK] for i in spread][: arguments.texts], arguments.threads)
    report_all("", measures)
    base = measures["int4", "bf16"]
    show(line("kl_int4", base.kl, "nats", 0.005, at_most=True))
    show(line("kl_int8kv", measures["int4", "int8"].kl - base.kl, "nats over its base", 0.003, at_most=True))
    show(line("ppl_fp8kv", measures["bf16", "fp8"].perplexity / measures["bf16", "bf16"].perplexity, "of its base", 1.01, at_most=True))
    long = measure(path, [tokens[:LONG]], arguments.threads, skip=LONG // 2, formats=[FORMATS[0], *FORMATS[5:]])
    report_all("4k_to_8k_", long)
    with tempfile.TemporaryDirectory() as folder:
        data = whole.encode()
        train(Path(folder), data[: len(data) // 2], arguments.train_seconds)
        rest = list(data[len(data) // 2 :])
        report_all(
            "floats_", measure(Path(folder), [rest[i : i + CHUNK] for i in range(0, CHUNK * arguments.texts, CHUNK)], arguments.threads)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
