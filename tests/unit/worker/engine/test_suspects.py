"""Requests that a worker may have died of: one of them in a step, until they are past the place; and their tokens are the same."""

from collections import Counter

from services.worker.engine.batch import Batch
from services.worker.engine.config import EngineConfig
from services.worker.engine.request import EngineRequest
from tests.engine_harness import alone, drain, endings, greedy
from tests.fake_runner import fake_engine

CONFIG = EngineConfig(num_blocks=128, block_size=4, max_step_tokens=64, max_sequences=16)


def test_no_step_has_two_suspects_until_they_are_past_the_place() -> None:
    batches: list[dict[str, int]] = []

    def look(batch: Batch) -> None:
        batches.append({span.sequence.request_id: span.sequence.num_output_tokens for span in batch.spans})

    engine = fake_engine(CONFIG, before_execute=look)
    suspects = [EngineRequest(f"s{i}", [i, 5], greedy(12), delivered=((1, 2),), suspect_tokens=6) for i in range(4)]
    others = [EngineRequest(f"o{i}", [i, 9], greedy(12)) for i in range(3)]
    for request in (*suspects, *others):
        engine.add(request)
    outputs = drain(engine)
    for batch in batches:
        assert sum(tokens < 6 for name, tokens in batch.items() if name.startswith("s")) <= 1
    assert any(sum(name.startswith("s") for name in batch) == 4 for batch in batches), "past the place they run together"
    assert all(sum(name.startswith("o") for name in batch) == 3 for batch in batches[:12]), "the others wait for nobody"
    assert endings(outputs) == alone([*suspects, *others])


def test_suspects_take_turns() -> None:
    turns = Counter[str]()

    def look(batch: Batch) -> None:
        for span in batch.spans:
            turns[span.sequence.request_id] += 1
        assert max(turns.values()) - min(turns.get(f"s{i}", 0) for i in range(3)) <= 1

    engine = fake_engine(CONFIG, before_execute=look)
    for i in range(3):
        engine.add(EngineRequest(f"s{i}", [i], greedy(8), suspect_tokens=100))
    drain(engine)
    assert set(turns.values()) == {8}


def test_the_choices_of_one_suspect_run_together() -> None:
    sizes = []
    engine = fake_engine(CONFIG, before_execute=lambda batch: sizes.append(len(batch.spans)))
    engine.add(EngineRequest("s", [1, 2], greedy(4), n=3, suspect_tokens=100))
    drain(engine)
    assert max(sizes) == 3
