"""Several engines on one device: each request goes to its model's, steps alternate, what is told is of all."""

import pytest

from services.worker.engine.request import EngineRequest, SamplingParams
from services.worker.sharing.device import SharedDevice, Stepped
from tests.worker_harness import ToyRunner, continuation, toy


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


def test_a_request_of_no_model_here_is_our_bug() -> None:
    with pytest.raises(KeyError):
        made("a").add(request("b", "r"))
