"""Several engines on one device: each request goes to its model's, steps alternate, what is told is of all."""

import pytest

from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.request import EngineRequest, SamplingParams
from services.worker.sharing.arena import Arena
from services.worker.sharing.device import SharedDevice, Stepped
from tests.worker_harness import VOCAB_SIZE, ToyRunner, continuation, toy


def made(*models: str) -> SharedDevice:
    return SharedDevice({model: toy(ToyRunner())[0] for model in models})


def request(model: str, name: str, latency_class: int = 2, max_tokens: int = 6) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, seed=1)
    return EngineRequest(name, (1, 2, 3), sampling, latency_class=latency_class, model=model)


def step(device: SharedDevice, now: float = 0.0) -> Stepped:
    stepped = device.step(now)
    device.took(stepped.model, 1.0)
    return stepped


def run(device: SharedDevice) -> list[Stepped]:
    steps = []
    while device.has_work:
        steps.append(step(device, float(len(steps))))
    return steps


def tokens(steps: list[Stepped], name: str) -> list[int]:
    return [token for step in steps for output in step.outputs if output.request_id == name for token in output.token_ids]


def test_models_interleave_at_every_token_and_each_gets_its_own() -> None:
    device = made("a", "b", "c")
    for model in device.members:
        device.add(request(model, f"r-{model}"))
    steps = run(device)
    assert all(len({step.model for step in steps[i : i + 3]}) == 3 for i in range(0, len(steps), 3)), [step.model for step in steps]
    for model in device.members:
        assert tokens(steps, f"r-{model}") == continuation([1, 2, 3], 6)
    device.check_integrity()


def test_a_realtime_request_of_one_model_is_served_before_the_batch_of_another() -> None:
    device = made("bulk", "chat")
    device.add(request("bulk", "b", latency_class=3, max_tokens=60))
    step(device)
    device.add(request("chat", "c", latency_class=1))
    models = [step.model for step in run(device)]
    assert models[:6] == ["chat"] * 6


def test_what_is_told_is_of_all_models() -> None:
    device = made("a", "b")
    device.add(request("a", "r1"))
    device.add(request("b", "r2"))
    for now in (0.0, 1.0):
        step(device, now)
    assert {request_id: num_tokens for request_id, (num_tokens, _) in device.progress().items()} == {"r1": 1, "r2": 1}
    assert {model: stats.num_running for model, stats in device.stats().items()} == {"a": 1, "b": 1}


def test_an_abort_reaches_whoever_has_the_request() -> None:
    device = made("a", "b")
    device.add(request("b", "r"))
    device.step(0.0)
    device.abort("r")
    device.abort("r")
    device.abort("nobody's")
    assert not device.has_work
    assert device.progress() == {}
    assert device.stats()["b"].num_used_blocks == 0


def test_a_step_counts_its_own_models_tokens() -> None:
    device = made("a", "b")
    device.add(request("a", "r1"))
    first = device.step(0.0)
    assert (first.model, first.num_tokens, first.num_generated_tokens) == ("a", 3, 1)


def on_one_arena(num_pages: int, *models: str) -> SharedDevice:
    """With a token's room in the arena for each model."""
    arena = Arena(num_pages)
    pools = {model: arena.open(model, floor=1) for model in models}
    engines = {
        model: Engine(ToyRunner(), EngineConfig(block_size=4, num_blocks=pool.num_blocks), vocab_size=VOCAB_SIZE, pool=pool)
        for model, pool in pools.items()
    }
    return SharedDevice(engines, arena, engines)


def test_who_waits_for_anothers_pages_does_not_keep_it_from_its_steps() -> None:
    device = on_one_arena(6, "a", "b")
    device.add(request("a", "r-a", max_tokens=16))  # all pages but one in the end
    for now in range(9):
        step(device, float(now))
    device.add(request("b", "r-b", max_tokens=12))
    steps = run(device)
    idle = [stepped for stepped in steps if not stepped.num_tokens and not stepped.outputs]
    assert len(idle) <= len(steps) // 2, "an idle step follows each other's step at most"
    assert tokens(steps, "r-b") == continuation([1, 2, 3], 12)


def test_a_realtime_request_takes_the_pages_of_another_models_batch() -> None:
    device = on_one_arena(12, "bulk", "chat")
    for name in ("b1", "b2"):
        device.add(request("bulk", name, latency_class=3, max_tokens=20))
    before = [step(device, float(now)) for now in range(10)]
    prompt = tuple(range(1, 20))  # five pages, and four are left
    device.add(EngineRequest("c", prompt, SamplingParams(max_tokens=6, temperature=0, seed=1), latency_class=1, model="chat"))
    steps = run(device)
    assert steps[0].model == "chat"
    assert steps[0].num_tokens == len(prompt)
    assert device.stats()["bulk"].num_class_preemptions == 1
    assert tokens(steps, "c") == continuation(list(prompt), 6)
    assert [tokens([*before, *steps], name) for name in ("b1", "b2")] == [continuation([1, 2, 3], 20)] * 2


def test_a_request_of_no_model_here_is_our_bug() -> None:
    with pytest.raises(KeyError):
        made("a").add(request("b", "r"))
