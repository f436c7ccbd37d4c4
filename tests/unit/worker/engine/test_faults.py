"""What goes wrong ends whom it concerns, and frees its blocks."""

import pytest

from services.worker.engine.batch import Batch
from services.worker.engine.config import EngineConfig
from services.worker.engine.request import (
    EngineRequest,
    FinishReason,
    SequenceError,
)
from tests.engine_harness import BIG, alone, cached_tokens, drain, endings, greedy, run
from tests.fake_runner import fake_engine


def test_b11_an_error_of_one_request_leaves_the_others_alone() -> None:
    steps = 0

    def fail_once(batch: Batch) -> None:
        nonlocal steps
        steps += 1
        if steps >= 10 and any(span.sequence.request_id == "r2" for span in batch.spans):
            raise SequenceError("r2", 0, "cosmic ray")

    requests = [EngineRequest(f"r{i}", [i], greedy(20), n=2) for i in range(6)]
    engine = fake_engine(BIG, before_execute=fail_once)
    whole = run(engine, requests)
    errors = {key: output.error for key, output in whole.items() if output.finish_reason is FinishReason.ERROR}
    assert errors == {("r2", 0): "cosmic ray", ("r2", 1): "cosmic ray"}
    others = [request for request in requests if request.request_id != "r2"]
    assert {key: ending for key, ending in endings(whole).items() if key[0] != "r2"} == alone(others)


def test_what_a_failed_request_computed_serves_no_one() -> None:
    prompt = list(range(16))

    def fail(batch: Batch) -> None:
        if batch.spans[0].sequence.num_output_tokens == 2 and batch.spans[0].sequence.request_id == "bad":
            raise SequenceError("bad", 0, "NaN")

    engine = fake_engine(BIG, before_execute=fail)
    engine.add(EngineRequest("bad", prompt, greedy(8)))
    drain(engine)
    assert cached_tokens(engine, EngineRequest("good", prompt, greedy(1))) == 0


def test_a_fault_of_the_runner_is_the_engines() -> None:
    def fault(batch: Batch) -> None:
        raise MemoryError("device lost")

    engine = fake_engine(BIG, before_execute=fault)
    engine.add(EngineRequest("r", [1], greedy(1)))
    with pytest.raises(MemoryError, match="device lost"):
        engine.step(0.0)


def test_abort_frees_blocks_at_once_in_every_state() -> None:
    engine = fake_engine(EngineConfig(num_blocks=16, block_size=4, max_step_tokens=8, max_sequences=2))
    engine.add(EngineRequest("decode", [1], greedy(20)))
    engine.step(0.0)
    engine.add(EngineRequest("prefill", list(range(30)), greedy(4)))
    engine.add(EngineRequest("queued", [3], greedy(4), latency_class=3))
    engine.step(0.0)
    assert [(s.request_id, s.num_computed_tokens) for s in engine.batcher.queue.running] == [("decode", 2), ("prefill", 7)]
    for request_id in ("queued", "prefill", "decode", "decode", "never there"):
        engine.abort(request_id)
        engine.check_integrity()
    assert engine.stats().num_used_blocks == 0
    assert not engine.has_work
    assert engine.step(0.0) == []
