"""`run`, `ps` and `models` against a gateway in this process: what they send, what they print."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from forebay.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, scheduler_pb2, types_pb2
from services.cli.app import app
from services.cli.problem import Problem
from services.common import rpc


class Gateway(inference_pb2_grpc.InferenceServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Answers with fixed words and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[inference_pb2.ChatRequest] = []
        self.tokens: list[Any] = []

    async def Chat(self, request: inference_pb2.ChatRequest, context: Any) -> AsyncIterator[inference_pb2.ChatResponse]:  # type: ignore[override]
        self.asked.append(request)
        self.tokens.append(dict(context.invocation_metadata())["authorization"])
        if request.messages[-1].content == "refuse":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
        if request.model == "none":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no model is called none: see ListModels")
        yield inference_pb2.ChatResponse(started=inference_pb2.Started(request_id="r-1", model="tiny@fp32", seed=9, system_fingerprint="f"))
        for position, text in enumerate(("Par", "is")):
            yield inference_pb2.ChatResponse(delta=inference_pb2.Delta(text=text, token_ids=[position], first_position=position))
        usage = types_pb2.Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=1)
        finished = inference_pb2.Finished(reasons=[types_pb2.FINISH_REASON_STOP], usage=usage)
        yield inference_pb2.ChatResponse(finished=finished)

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:  # type: ignore[override]
        model = inference_pb2.Model(name="tiny", aliases=["chat"], level="fp32", max_model_len=2048, version="00ff", ready=True)
        return inference_pb2.ListModelsResponse(models=[model])

    async def GetFleet(self, request: Any, context: Any) -> admin_pb2.GetFleetResponse:  # type: ignore[override]
        registration = scheduler_pb2.Register(worker_id="worker-1", max_sequences=32)
        registration.models.add(model="tiny@fp32", num_blocks=100)
        beat = scheduler_pb2.Heartbeat(num_running=3, num_used_blocks=40, utilization=0.5)
        worker = admin_pb2.WorkerState(registration=registration, heartbeat=beat, ready=True)
        queue = admin_pb2.QueueDepth(model="tiny@fp32", latency_class=types_pb2.LATENCY_CLASS_BATCH, num_waiting=4, oldest_seconds=2)
        return admin_pb2.GetFleetResponse(workers=[worker], queues=[queue])


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """Serves from a thread of its own: the commands bring their own event loop."""
    gateway, started, loop = Gateway(), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()
    address = ""

    async def serve() -> None:
        nonlocal address
        server = rpc.server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(gateway, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(gateway, server)
        address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1:0')}"
        await server.start()
        started.set()
        await stop.wait()
        await server.stop(None)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait()
    monkeypatch.setenv("FOREBAY_ADDRESS", address)
    monkeypatch.setenv("FOREBAY_TOKEN", "secret")
    monkeypatch.setenv("COLUMNS", "200")
    yield gateway
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def _run(*arguments: str, text: str | None = None) -> str:
    result = CliRunner().invoke(app, list(arguments), input=text, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_run_sends_what_was_asked_and_nothing_else(gateway: Gateway) -> None:
    out = _run("run", "--system", "Be brief.", "--temperature", "0", "--seed", "3", "--class", "batch", "Capital of France?")
    assert out == "Paris\n"
    (request,) = gateway.asked
    assert [(message.role, message.content) for message in request.messages] == [("system", "Be brief."), ("user", "Capital of France?")]
    assert request.latency_class == types_pb2.LATENCY_CLASS_BATCH
    assert {field.name for field, _ in request.sampling.ListFields()} == {"temperature", "seed"}
    assert gateway.tokens == ["Bearer secret"]


def test_run_json(gateway: Gateway) -> None:
    answer = json.loads(_run("run", "--json", "-", text="Capital of France?"))
    assert answer["text"] == "Paris"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 1, "preemptions": 0}
    assert (answer["request_id"], answer["finish_reason"], answer["seed"]) == ("r-1", "stop", 9)


def test_a_chat_remembers_until_it_is_told_to_forget(gateway: Gateway) -> None:
    _run("run", "--system", "Be brief.", text="one\n\ntwo\n/clear\nthree\n")
    said = [[message.content for message in request.messages] for request in gateway.asked]
    assert said == [["Be brief.", "one"], ["Be brief.", "one", "Paris", "two"], ["Be brief.", "three"]]


def test_a_chat_goes_on_after_a_refusal(gateway: Gateway) -> None:
    result = CliRunner().invoke(app, ["run"], input="one\nrefuse\ntwo\n")
    assert (result.exit_code, result.stderr) == (0, "forebay: INVALID_ARGUMENT: no\n")
    assert [message.content for message in gateway.asked[-1].messages] == ["one", "Paris", "two"]


def test_a_refusal_is_a_problem(gateway: Gateway) -> None:
    with pytest.raises(Problem, match="NOT_FOUND: no model is called none"):
        _run("run", "--model", "none", "Hello")


def test_ps(gateway: Gateway) -> None:
    out = _run("ps")
    for cell in ("worker-1", "ready", "3/32", "40/100", "50%", "queue tiny@fp32 batch: 4 waiting, the oldest for 2.0 s"):
        assert cell in out
    (worker,) = json.loads(_run("ps", "--json"))["workers"]
    assert worker["heartbeat"]["num_running"] == 3


def test_models(gateway: Gateway) -> None:
    out = _run("models")
    for cell in ("tiny", "chat", "ready", "fp32", "2048", "00ff"):
        assert cell in out
    assert json.loads(_run("models", "--json"))["models"][0]["aliases"] == ["chat"]
