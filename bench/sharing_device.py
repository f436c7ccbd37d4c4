"""Models of random weights on one device, and requests that come to it in real time. What they say doesn't matter; their bytes do."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from services.worker.engine.config import EngineConfig, ModelConfig, RopeConfig
from services.worker.engine.engine import Engine, EngineRequest, FinishReason, SamplingParams, TokenOutput
from services.worker.engine.kernels import library
from services.worker.engine.kernels.cache import NativeCache
from services.worker.engine.loader import expected_shapes
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.models.native import NativeDecoder
from services.worker.engine.quantization import Weights as ReadWeights
from services.worker.sharing import layout
from services.worker.sharing.arena import Arena
from services.worker.sharing.device import SharedDevice
from services.worker.sharing.weights import Weights

SMALL = ModelConfig(
    architecture="llama", num_layers=8, hidden_size=768, num_heads=12, num_kv_heads=4, head_dim=64, intermediate_size=2048, vocab_size=8192,
    max_position=2048, norm_epsilon=1e-5, rope=RopeConfig(), tied_embeddings=True, attention_bias=False, qk_norm=False, sliding_window=None,
    eos_token_ids=(),
)  # fmt: skip
LARGE = replace(SMALL, num_layers=22, hidden_size=1536, num_heads=16, head_dim=96, intermediate_size=4096, vocab_size=32000)
CONFIG = EngineConfig(level="bf16", backend="native", max_sequences=32, max_step_tokens=256)
PROMPT, OUTPUT = 64, 64  # tokens of a request


def random_decoder(model: ModelConfig, seed: int, num_threads: int, scale: float = 0.02) -> NativeDecoder:
    """A decoder at bf16. `scale` is its weights' deviation."""
    compiled = library.find()
    assert compiled is not None, "no compiled kernels: run make setup"
    return NativeDecoder(model, _random_weights(model, seed, scale), f"random-{seed}", "bf16", compiled, num_threads)


def _random_weights(model: ModelConfig, seed: int, scale: float) -> ReadWeights:
    shapes = expected_shapes(model)
    tile = torch.randn(1 << 21, generator=torch.Generator().manual_seed(seed)).mul_(scale).bfloat16()

    def read(name: str) -> torch.Tensor:
        count = torch.Size(shapes[name]).numel()
        if len(shapes[name]) == 1:
            return torch.ones(count, dtype=torch.bfloat16)
        return tile.repeat(-(-count // len(tile)))[:count].view(shapes[name])

    return read


@dataclass(frozen=True)
class Device:
    """Engines by name on one arena; `weights` None: all stay."""

    shared: SharedDevice
    engines: dict[str, Engine]
    weights: Weights | None
    weight_bytes: int  # of one model


def make(
    model: ModelConfig, names: Sequence[str], num_places: int | None, kv_bytes: int, num_threads: int, pinned: Sequence[str] = ()
) -> Device:
    """As many models of this shape as names, room for the weights of `num_places` of them; None: for all, without moving any."""
    page_bytes, configs = layout.sized(dict.fromkeys(names, (CONFIG, model)))
    num_pages = max(2 * len(names), kv_bytes // page_bytes)
    pages, arena = layout.allocate(num_pages, page_bytes, "cpu"), Arena(num_pages)
    parts = {name: arena.open(name, floor=1) for name in names}
    engines, decoders = {}, {}
    for seed, name in enumerate(names):
        decoders[name] = random_decoder(model, seed, num_threads)
        cache = NativeCache(model, num_pages, configs[name].block_size, configs[name].cache_format, pages)
        decoders[name].bind(cache)
        engines[name] = Engine(
            ModelRunner(decoders[name], cache),
            replace(configs[name], num_blocks=parts[name].num_blocks),
            vocab_size=model.vocab_size,
            max_model_len=model.max_position,
            model_version=decoders[name].version,
            pool=parts[name],
        )
    size = len(decoders[names[0]].weights)
    weights = None if num_places is None else Weights(num_places * (size + 4096), decoders, pinned)
    return Device(SharedDevice(engines, arena, engines, weights), engines, weights, size)


def request(name: str, model: str, vocab_size: int, rng: random.Random, output: int = OUTPUT, prompt: int = PROMPT) -> EngineRequest:
    """So many tokens to and fro."""
    sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    return EngineRequest(name, [rng.randrange(vocab_size) for _ in range(prompt)], sampling, model=model)


@dataclass
class Served:
    """What became of requests."""

    seconds: float = 0.0  # from the first's coming to the last's end
    cpu_seconds: float = 0.0  # of the process, all threads
    num_requests: int = 0
    num_answered: int = 0
    num_without_swap: int = 0  # their model was on the device when they came, and stayed until their first token
    num_tokens: int = 0
    latencies: list[float] = field(default_factory=list)


def serve(device: Device, arrivals: Sequence[tuple[float, EngineRequest]]) -> Served:
    """Steps until all have ended; each comes at its second, or when the step that then runs is over."""
    coming = sorted(arrivals, key=lambda arrival: arrival[0])
    due = {request.request_id: at for at, request in coming}
    loads: dict[str, int | None] = {}  # of a request's model until then, where it is on the device
    served = Served(num_requests=len(coming))
    started, cpu_started = time.perf_counter(), time.process_time()
    at = 0
    while at < len(coming) or device.shared.has_work:
        now = time.perf_counter() - started
        while at < len(coming) and coming[at][0] <= now:
            device.shared.add(coming[at][1])
            loads[coming[at][1].request_id] = num_loads(device, coming[at][1].model)
            at += 1
        if not device.shared.has_work:
            time.sleep(max(0.0, coming[at][0] - now))
            continue
        stepped = device.shared.step(now)
        ended = time.perf_counter() - started
        device.shared.took(stepped.model, ended - now)
        served.num_tokens += stepped.num_generated_tokens
        if not stepped.num_tokens and not stepped.outputs:
            time.sleep(0.002)
        for output in stepped.outputs:
            assert isinstance(output, TokenOutput)
            if output.first_position == 0:
                before = loads[output.request_id]
                served.num_without_swap += before is not None and before == num_loads(device, stepped.model)
            if output.finish_reason is not None:
                served.num_answered += output.finish_reason is FinishReason.LENGTH
                served.latencies.append(ended - due[output.request_id])
    served.seconds, served.cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return served


def num_loads(device: Device, model: str) -> int | None:
    """How often its weights have come; None while they aren't there."""
    if device.weights is None:
        return 0
    return device.weights.residency.residents[model].num_loads if model in device.weights.on_device([model]) else None
