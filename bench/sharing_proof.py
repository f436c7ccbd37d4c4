"""That models which share a device say what each says alone: `make prove-sharing`. Tiny random models on the CPU kernels.

Six models on room for the weights of two, a pool of pages far too small, host memory for a part of what is preempted; requests of three
orgs and classes whose prompts begin alike, some left half-way. Every answer is compared with the model's own in an engine by itself.
Prints JSON lines.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.figure import line, show
from bench.sharing_device import random_decoder
from bench.sharing_watch import Ledger, WatchedRunner, left_over
from services.worker.engine.config import EngineConfig, ModelConfig, RopeConfig
from services.worker.engine.engine import Engine, EngineRequest, FinishReason, SamplingParams, TokenOutput
from services.worker.engine.kernels.cache import NativeCache
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.models.native import NativeDecoder
from services.worker.sharing import layout
from services.worker.sharing.arena import Arena
from services.worker.sharing.device import SharedDevice
from services.worker.sharing.weights import Weights

TINY = ModelConfig(
    architecture="llama", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, vocab_size=211,
    max_position=512, norm_epsilon=1e-5, rope=RopeConfig(), tied_embeddings=True, attention_bias=False, qk_norm=False, sliding_window=None,
    eos_token_ids=(),
)  # fmt: skip
MODELS = {
    "m0": (TINY, "bf16"),
    "m1": (TINY, "bf16"),  # other weights in the same shape: what is taken for the other's shows in the tokens alone
    "m2": (replace(TINY, num_layers=3, num_kv_heads=4), "bf16"),
    "m3": (replace(TINY, hidden_size=96, head_dim=24, qk_norm=True, architecture="qwen3"), "fp32"),
    "m4": (replace(TINY, attention_bias=True, tied_embeddings=False, architecture="qwen2"), "int8"),
    "m5": (replace(TINY, sliding_window=37, architecture="mistral"), "fp8"),
}
"""By name: the shape, and the format of keys and values."""
ORGS = (b"org a", b"org b", b"org c")
BASE = EngineConfig(level="bf16", backend="native", max_sequences=6, max_step_tokens=64, num_threads=1, max_model_len=256)
NUM_PAGES = 48
STEP_SECONDS = 0.05  # of the clock that the device is told
SCALE = 0.3  # of the weights: large enough that a token depends on all before it
Key = tuple[str, int]  # request, choice


@dataclass
class Run:
    """What came of some requests."""

    answers: dict[Key, TokenOutput] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)  # ids of those that were aborted

    def collect(self, outputs: Sequence[object]) -> None:
        """Adds a step's outputs to each choice's whole one."""
        for output in outputs:
            assert isinstance(output, TokenOutput)
            key = output.request_id, output.choice_index
            known = self.answers.get(key)
            if known is None:
                self.answers[key] = replace(output, token_ids=[*output.token_ids])
                continue
            assert output.first_position == known.first_position + len(known.token_ids) or not output.token_ids, "a gap or a repeat"
            known.token_ids += output.token_ids
            known.finish_reason, known.error = output.finish_reason, output.error


def requests(count: int, seed: int) -> list[EngineRequest]:
    """Of all models, orgs and classes. Prompts begin alike within and across orgs, so that a wrong key would find something."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(TINY.vocab_size) for _ in range(rng.randint(20, 70))] for _ in range(4)]
    made = []
    for index in range(count):
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 28), temperature=rng.choice([0.0, 1.0]), seed=index, ignore_eos=True, speculation=index % 2 == 0
        )
        prompt = [*rng.choice(beginnings), *(rng.randrange(TINY.vocab_size) for _ in range(rng.randint(1, 24)))]
        made.append(
            EngineRequest(
                f"r{index}",
                prompt,
                sampling,
                n=rng.choice([1, 1, 1, 2]),
                latency_class=rng.randint(1, 3),
                cache_salt=rng.choice(ORGS),
                model=rng.choice(list(MODELS)),
            )
        )
    return made


class Mesh:
    """The six on one arena, each runner watched."""

    def __init__(self) -> None:
        shapes = {name: (replace(BASE, kv_format=kv_format), model) for name, (model, kv_format) in MODELS.items()}
        page_bytes, configs = layout.sized(shapes)
        pages, self.arena = layout.allocate(NUM_PAGES, page_bytes, "cpu"), Arena(NUM_PAGES, on_handover=self._handed_over)
        self.ledger = Ledger(pages)
        self.engines: dict[str, Engine] = {}
        self.decoders: dict[str, NativeDecoder] = {}
        for name, (model, _) in MODELS.items():
            pool = self.arena.open(name, floor=1)
            config = replace(configs[name], num_blocks=pool.num_blocks, swap_blocks=6, host_blocks=8, max_step_copies=4, speculation=3)
            decoder = self.decoders[name] = random_decoder(model, seed_of(name), 1, SCALE)
            cache = NativeCache(model, NUM_PAGES, config.block_size, config.cache_format, pages)
            decoder.bind(cache)
            runner = WatchedRunner(ModelRunner(decoder, cache, config.num_host_slots), name, config.block_size, self.arena, self.ledger)
            self.engines[name] = Engine(
                runner, config, vocab_size=model.vocab_size, max_model_len=256, model_version=decoder.version, pool=pool
            )
        largest = max(len(decoder.weights) for decoder in self.decoders.values())
        self.weights = Weights(int(2.5 * largest), self.decoders)
        self.device = SharedDevice(self.engines, self.arena, self.engines, self.weights)
        self.ledger.poison_free(self.arena)

    def _handed_over(self, page: int) -> None:
        self.ledger.handed_over(page)

    def serve(self, coming: Sequence[EngineRequest], seed: int, share_left: float = 0.05) -> Run:
        """All of them, some at a time, in any order; a share is aborted on the way."""
        rng, result, waiting, now = random.Random(seed), Run(), list(reversed(coming)), 0.0
        live: list[str] = []
        while waiting or self.device.has_work:
            while waiting and rng.random() < 0.4:
                request = waiting.pop()
                self.device.add(request)
                live.append(request.request_id)
            if live and rng.random() < share_left / 4:
                gone = live.pop(rng.randrange(len(live)))
                if not any(key[0] == gone and answer.finish_reason is not None for key, answer in result.answers.items()):
                    self.device.abort(gone)
                    result.left.add(gone)
            if self.device.has_work:
                stepped = self.device.step(now)
                self.device.took(stepped.model, STEP_SECONDS)
                result.collect(stepped.outputs)
            self.ledger.poison_free(self.arena)
            now += STEP_SECONDS
        self.weights.finish()
        return result

    def left_over(self) -> dict[str, int]:
        """What isn't as in a device that nothing was ever asked of: all 0."""
        self.device.check_integrity()
        self.arena.check_integrity([])
        self.weights.residency.check_integrity()
        promised = sum(engine.batcher.tables.host.num_swapped for engine in self.engines.values())
        live = sum(len(engine.batcher.queue.requests) for engine in self.engines.values())
        return {**left_over(self.arena), "promised": promised, "live": live, "progress": len(self.device.progress())}


def seed_of(model: str) -> int:
    """Of its weights."""
    return list(MODELS).index(model)


def alone(coming: Sequence[EngineRequest]) -> dict[Key, TokenOutput]:
    """REF: what each model says in an engine and a memory of its own, one sequence at a time, with neither cache nor drafts."""
    result = Run()
    for name, (model, kv_format) in MODELS.items():
        config = replace(BASE, kv_format=kv_format, num_blocks=64, max_sequences=1, prefix_cache=False)
        decoder = random_decoder(model, seed_of(name), 1, SCALE)
        cache = NativeCache(model, config.num_blocks, config.block_size, config.cache_format)
        decoder.bind(cache)
        engine = Engine(ModelRunner(decoder, cache), config, vocab_size=model.vocab_size, max_model_len=256, model_version=decoder.version)
        for request in coming:
            if request.model == name:
                engine.add(request)
        while engine.has_work:
            result.collect(engine.step(0.0))
    return result.answers


def num_unequal(run: Run, reference: dict[Key, TokenOutput]) -> int:
    """Choices that differ from REF; of one that was left, what had come of it must be how REF begins."""
    count = 0
    for key, expected in reference.items():
        got = run.answers.get(key)
        if key[0] in run.left:
            count += got is not None and got.token_ids != expected.token_ids[: len(got.token_ids)]
        else:
            count += got is None or (got.token_ids, got.finish_reason) != (expected.token_ids, expected.finish_reason)
    return count


def prove(count: int, seed: int) -> int:
    """Prints the figures; 0 if all hold."""
    coming = requests(count, seed)
    started = time.perf_counter()
    reference, mesh = alone(coming), Mesh()
    run = mesh.serve(coming, seed)
    answered = sum(answer.finish_reason is FinishReason.LENGTH for key, answer in run.answers.items() if key[0] not in run.left)
    expected = sum(key[0] not in run.left for key in reference)
    stats = [engine.stats() for engine in mesh.engines.values()]
    residents = mesh.weights.residency.residents.values()
    figures = [
        line("proof_requests", count, f"over {len(MODELS)} models, of which {len(run.left)} were left half-way"),
        line("proof_answered", answered / expected, "share of choices", 1.0),
        line("proof_unequal", num_unequal(run, reference), "choices that differ from each model alone", 0, at_most=True),
        line("proof_foreign_pages", len(mesh.ledger.foreign_reads), f"of {mesh.ledger.num_reads} reads of a page", 0, at_most=True),
        line("proof_poisoned", mesh.ledger.num_poisoned, "times that a page was overwritten as nobody's"),
        line("proof_left_over", sum(mesh.left_over().values()), "pages, claims, promises, requests of the idle device", 0, at_most=True),
        line("proof_preemptions", sum(s.num_preemptions for s in stats), f"of which {sum(s.num_swaps for s in stats)} were swapped"),
        line("proof_prefix_hits", sum(s.num_prefix_hit_tokens for s in stats), "tokens"),
        line("proof_host_hits", sum(s.num_host_hit_tokens for s in stats), "tokens"),
        line("proof_loads", sum(resident.num_loads for resident in residents), "times that a model's weights came"),
        line("proof_seconds", time.perf_counter() - started, "s"),
    ]
    for figure in figures:
        show(figure)
    return int(any(figure["holds"] is False for figure in figures))


def main() -> int:
    """1 where something doesn't hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    return prove(arguments.requests, arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
