"""Engines driven to their end: every step's outputs held to the contract, the invariants checked behind it, all free at last."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import hypothesis.strategies as st

from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.request import EngineRequest, FinishReason, SamplingParams, TokenOutput
from services.worker.engine.speculation.drafter import Drafter
from services.worker.engine.speculation.model_drafter import ModelDrafter
from services.worker.engine.verification import DRAFTING_RULES, RULES
from tests.drafters import Guesser, always, often_right
from tests.fake_runner import fake_engine
from tests.tiny_models import AnyDecoder, make_cache

Key = tuple[str, int]  # request id, choice
Ending = tuple[list[int], FinishReason | None]
BIG = EngineConfig(num_blocks=512, block_size=4, max_step_tokens=64, max_sequences=32)
REFERENCE = EngineConfig(num_blocks=512, block_size=4, max_step_tokens=4096, max_sequences=1, prefix_cache=False)


def greedy(max_tokens: int | None = 8, **fields: object) -> SamplingParams:
    """So many tokens, whatever they are, unless the fields say otherwise."""
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields})  # type: ignore[arg-type]


@st.composite
def some_requests(draw: st.DrawFn, max_size: int = 8) -> list[EngineRequest]:
    """Requests whose prompts share prefixes, with all that may differ between rows of a batch."""
    requests = []
    for index in range(draw(st.integers(1, max_size))):
        shared = draw(st.integers(0, 20))
        prompt = [100 + i for i in range(shared)] + draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
        sampling = SamplingParams(
            max_tokens=draw(st.integers(0, 14)),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 3)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=tuple(range(200, 200 + draw(st.sampled_from([0, 100])))),
        )
        requests.append(
            EngineRequest(
                f"r{index}",
                prompt,
                sampling,
                n=draw(st.integers(1, 3)),
                latency_class=draw(st.integers(1, 3)),
                cache_salt=draw(st.sampled_from([b"", b"a"])),
                suspect_tokens=draw(st.sampled_from([0, 0, 0, 3, 40])),
            )
        )
    return requests


def engine_on(
    decoder: AnyDecoder,
    draft: AnyDecoder | None = None,
    max_drafts: int = 0,
    *,
    eos_token_ids: Sequence[int] | None = None,
    **fields: object,
) -> Engine:
    """A real decoder with as many drafts as there is room for, by a draft model or by lookups. Slots that nobody wrote hold NaN.

    `eos_token_ids` None: the model's own. No time passes: copies from the host always pay.
    """
    config = EngineConfig(**{"num_blocks": 128, "block_size": 16, "max_step_tokens": 64, **fields})  # type: ignore[arg-type]
    kv = make_cache(decoder, config.num_blocks, config.block_size, config.kv_format)
    drafter: Drafter | None = None
    if draft is not None:
        drafter = ModelDrafter(ModelRunner(draft, kv, rule=DRAFTING_RULES[config.verification]), clock=lambda: 0.0)
    return Engine(
        ModelRunner(decoder, kv, config.num_host_slots, RULES[config.verification]),
        config,
        vocab_size=decoder.config.vocab_size,
        eos_token_ids=decoder.config.eos_token_ids if eos_token_ids is None else eos_token_ids,
        max_model_len=decoder.config.max_position,
        model_version=decoder.version,
        speculator=always(max_drafts, drafter) if max_drafts else None,
        clock=lambda: 0.0,
    )


def collect(outputs: Iterable[TokenOutput], into: dict[Key, TokenOutput]) -> None:
    """Adds outputs to each choice's whole one. No gap, no repeat, nothing behind the end."""
    for output in outputs:
        key = output.request_id, output.choice_index
        known = into.get(key)
        if known is None:
            into[key] = replace(
                output, token_ids=[*output.token_ids], logprobs=[*output.logprobs], prompt_logprobs=[*output.prompt_logprobs]
            )
            continue
        assert known.finish_reason is None, "news behind the end"
        assert output.first_position == known.first_position + len(known.token_ids) or not output.token_ids
        known.token_ids += output.token_ids
        known.logprobs += output.logprobs
        known.prompt_logprobs += output.prompt_logprobs
        known.finish_reason, known.error = output.finish_reason, output.error
        known.num_preemptions = output.num_preemptions


def drain(engine: Engine, into: dict[Key, TokenOutput] | None = None, max_steps: int = 5000) -> dict[Key, TokenOutput]:
    """Each choice's whole output, once there is no work; added to what is known of it."""
    whole = {} if into is None else into
    for _ in range(max_steps):
        if not engine.has_work:
            break
        collect(engine.step(0.0), whole)
        engine.check_integrity()
    assert not engine.has_work, "it never ends"
    stats = engine.stats()
    assert stats.num_used_blocks == stats.num_running == stats.num_waiting == 0
    assert stats.num_cached_blocks + stats.num_free_blocks == stats.num_blocks
    assert engine.batcher.tables.host.num_swapped == 0
    return whole


def run(engine: Engine, requests: Iterable[EngineRequest]) -> dict[Key, TokenOutput]:
    """Each choice's whole output, of these requests and of those under way."""
    for request in requests:
        engine.add(request)
    return drain(engine)


def tokens_of(whole: dict[Key, TokenOutput]) -> dict[Key, list[int]]:
    return {key: output.token_ids for key, output in whole.items()}


def endings(whole: dict[Key, TokenOutput]) -> dict[Key, Ending]:
    return {key: (output.token_ids, output.finish_reason) for key, output in whole.items()}


def alone(requests: Iterable[EngineRequest]) -> dict[Key, Ending]:
    """What a fake engine says to each of them with batching, prefix cache and preemption off."""
    return {key: ending for request in requests for key, ending in endings(run(fake_engine(REFERENCE), [request])).items()}


def endings_of(requests: list[EngineRequest], config: EngineConfig = BIG, max_drafts: int = 0) -> dict[Key, Ending]:
    """With `max_drafts`, drafts that are wrong by turns: nothing that they do may show."""
    return endings(run(fake_engine(config, speculator=always(max_drafts, Guesser(often_right)) if max_drafts else None), requests))


def cached_tokens(engine: Engine, request: EngineRequest) -> int:
    """How many tokens of its prompt a request finds; it is run to its end."""
    engine.add(request)
    cached = None
    while engine.has_work:
        for output in engine.step(0.0):
            cached = output.num_cached_tokens
    assert cached is not None
    return cached
