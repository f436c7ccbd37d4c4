"""One trace through the whole mesh: gateway, Place, the queue in Redis, the choice of a worker, Generate, and what the engine did."""

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.cli.home import Home
from services.common import semconv
from services.scheduler.policy.decision import TERMS
from tests.e2e.mesh import Mesh, running, sdk
from tests.spans import Exported, Receiver

# One sequence at a time: the second request waits in the queue, and a realtime one preempts it.
SETTINGS = {"FOREBAY_MAX_SEQUENCES": "1", "OTEL_BSP_SCHEDULE_DELAY": "200", "FOREBAY_LOG_LEVEL": "debug"}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def mesh(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    home: Path = tmp_path_factory.mktemp("traces")
    with running(home, settings={**SETTINGS, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}) as mesh:
        yield mesh


def ask(mesh: Mesh, max_tokens: int, latency_class: str, first: threading.Event, ids: dict[str, str], name: str) -> None:
    """A streamed chat; `first` is set at its first word."""
    headers = {"x-forebay-class": latency_class}
    stream = mesh.openai(timeout=60).chat.completions.create(
        model=mesh.model,
        messages=[{"role": "user", "content": "Count from one to a thousand."}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_headers=headers,
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        ids[name] = chunk.id
        if chunk.choices and chunk.choices[0].delta.content:
            first.set()


def preempted(mesh: Mesh) -> str:
    """The id of a batch chat that waited in the queue and was preempted when it ran."""
    ids: dict[str, str] = {}
    started = {name: threading.Event() for name in ("ahead", "batch", "realtime")}
    asked = {
        "ahead": threading.Thread(target=ask, args=(mesh, 150, "batch", started["ahead"], ids, "ahead")),
        "batch": threading.Thread(target=ask, args=(mesh, 400, "batch", started["batch"], ids, "batch")),
        "realtime": threading.Thread(target=ask, args=(mesh, 4, "realtime", started["realtime"], ids, "realtime")),
    }
    for name, before in (("ahead", None), ("batch", "ahead"), ("realtime", "batch")):
        if before is not None:
            assert started[before].wait(60)
        asked[name].start()
    for thread in asked.values():
        thread.join()
    return ids["batch"]


def test_one_trace_tells_a_request_from_the_call_to_its_tokens(mesh: Mesh, receiver: Receiver) -> None:
    request_id = preempted(mesh).removeprefix("chatcmpl-")

    def trace_of(spans: list[Exported]) -> dict[str, Exported]:
        chats = [span for span in spans if span.attributes.get(semconv.GEN_AI_RESPONSE_ID) == request_id]
        return {f"{span.name} {span.kind}": span for span in spans if chats and span.trace_id == chats[0].trace_id}

    names = {
        "POST /v1/chat/completions server": "",
        f"chat {mesh.model} internal": "POST /v1/chat/completions server",
        "forebay.v1.SchedulerService/Place client": f"chat {mesh.model} internal",
        "forebay.v1.SchedulerService/Place server": "forebay.v1.SchedulerService/Place client",
        "queue internal": f"chat {mesh.model} internal",
        "pick internal": "queue internal",
        "forebay.v1.WorkerService/Generate client": f"chat {mesh.model} internal",
        "forebay.v1.WorkerService/Generate server": "forebay.v1.WorkerService/Generate client",
        "llm_request internal": "forebay.v1.WorkerService/Generate server",
        "prefill internal": "llm_request internal",
        "decode internal": "llm_request internal",
        "forebay.v1.SchedulerService/Finish client": f"chat {mesh.model} internal",
        "forebay.v1.SchedulerService/Finish server": "forebay.v1.SchedulerService/Finish client",
    }
    trace = trace_of(receiver.wait_for(lambda spans: trace_of(spans).keys() >= names.keys()))
    parents = {span.span_id: name for name, span in trace.items()}
    for name, parent in names.items():
        assert parents.get(trace[name].parent_id, "") == parent, name
        assert not trace[name].error, name
    assert not [name for name, span in trace.items() if span.parent_id and span.parent_id not in parents], "no orphan"

    call, chat, pick, request = (trace[name] for name in [*list(names)[:2], "pick internal", "llm_request internal"])
    assert call.attributes[semconv.HTTP_RESPONSE_STATUS_CODE] == 200
    assert call.attributes[semconv.HTTP_ROUTE] == "/v1/chat/completions"
    assert chat.attributes[semconv.GEN_AI_OPERATION_NAME] == "chat"
    assert chat.attributes[semconv.GEN_AI_REQUEST_MAX_TOKENS] == chat.attributes[semconv.GEN_AI_USAGE_OUTPUT_TOKENS] == 400
    assert chat.attributes[semconv.GEN_AI_RESPONSE_FINISH_REASONS] == ["length"]
    assert chat.attributes[semconv.FOREBAY_NUM_PREEMPTIONS] == request.attributes[semconv.FOREBAY_NUM_PREEMPTIONS] == 1
    assert pick.attributes[semconv.FOREBAY_CANDIDATES] == [pick.attributes[semconv.FOREBAY_WORKER]]
    assert [len(pick.attributes[f"{semconv.FOREBAY_COST}.{term}"]) for term in TERMS] == [1] * len(TERMS)
    assert trace["queue internal"].links == [chat.span_id]
    assert 0 < trace["queue internal"].seconds < call.seconds
    order = ["admitted", "prefill", "first_token", "preempted_by_class", "swapped", "resumed", "prefill", "ended"]
    assert [event for event in request.events if event in order] == order
    assert {span.service for span in trace.values()} == {"forebay-gateway", "forebay-scheduler", "forebay-worker"}
    for name in names:
        if "/" in name and "POST" not in name:
            assert trace[name].attributes[semconv.RPC_RESPONSE_STATUS_CODE] == "OK", name


def test_steps_are_sampled_and_linked_to_their_requests(mesh: Mesh, receiver: Receiver) -> None:
    spans = receiver.wait_for(lambda spans: any(span.name == semconv.SPAN_ENGINE_STEP for span in spans))
    step = next(span for span in spans if span.name == semconv.SPAN_ENGINE_STEP)
    assert (step.parent_id, step.service) == ("", "forebay-worker")
    assert len([span for span in spans if span.name == semconv.SPAN_ENGINE_STEP]) < 60
    generate = {span.span_id for span in spans if span.name == "forebay.v1.WorkerService/Generate" and span.kind == "server"}
    assert step.links
    assert set(step.links) <= generate


def test_nothing_that_merely_keeps_the_mesh_going_is_a_trace(mesh: Mesh, receiver: Receiver) -> None:
    spans = receiver.wait_for(lambda spans: bool(spans))
    roots = {span.name for span in spans if not span.parent_id}
    asked_by_people = {"POST /v1/chat/completions", "forebay.v1.InferenceService/ListModels", "forebay.v1.AdminService/GetFleet"}
    assert roots <= {*asked_by_people, semconv.SPAN_ENGINE_STEP}


def test_a_cancelled_stream_says_so(mesh: Mesh, receiver: Receiver) -> None:
    client = mesh.openai(timeout=60)
    stream = client.chat.completions.create(
        model=mesh.model, messages=[{"role": "user", "content": "Count."}], max_tokens=800, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(iter(stream))
    stream.close()
    request_id = first.id.removeprefix("chatcmpl-")

    def chat(spans: list[Exported]) -> list[Exported]:
        return [span for span in spans if span.attributes.get(semconv.GEN_AI_RESPONSE_ID) == request_id]

    (span,) = chat(receiver.wait_for(lambda spans: bool(chat(spans))))
    assert span.error
    assert span.attributes[semconv.ERROR_TYPE] == "CANCELLED"
    assert span.attributes[semconv.GEN_AI_USAGE_OUTPUT_TOKENS] < 800


def test_canaries_are_in_no_log_span_metric_or_error(mesh: Mesh, receiver: Receiver) -> None:
    made = json.loads(mesh.forebay("keys", "create", "--org", "dev", "--name", "audit", "--json").stdout)
    client = sdk(mesh, made["key"])
    tool: Any = {"type": "function", "function": {"name": "canary_tool_5521", "parameters": {"type": "object"}}}
    chat = client.chat.completions.create(
        model=mesh.model,
        messages=[{"role": "system", "content": "canary-system-1187"}, {"role": "user", "content": "Say canary-prompt-7319"}],
        max_tokens=24,
        stop=["canary-stop-2203"],
        tools=[tool],
        tool_choice="none",
    )
    text = client.completions.create(model=mesh.model, prompt="canary-text-6640", max_tokens=24)
    with pytest.raises(openai.AuthenticationError) as refused:
        sdk(mesh, "fb-canary-key-9034").models.list()
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=mesh.model, prompt="canary-refused-4417", max_tokens=-1)
    with pytest.raises(openai.NotFoundError) as other:
        sdk(mesh, mesh.token).chat.completions.create(model="not-served", messages=[{"role": "user", "content": "canary-lost-3391"}])
    receiver.wait_for(lambda spans: any(span.attributes.get(semconv.GEN_AI_RESPONSE_ID) == text.id.removeprefix("cmpl-") for span in spans))
    told = {
        "logs": "".join(path.read_text(errors="replace") for path in (mesh.home / "logs").glob("*.log")),
        "spans": b"".join(receiver.raw).decode("latin-1"),
        "metrics": "".join(httpx.get(f"http://{address}/metrics").text for address in internal_addresses(mesh)),
        "errors": f"{refused.value.body}{other.value.body}",
    }
    answers = [answer for answer in (chat.choices[0].message.content, text.choices[0].text) if answer and len(answer.strip()) > 12]
    for place, said in told.items():
        assert len(said) > 100, place
        for secret in ("canary-", "canary_tool", made["key"], mesh.token, mesh.token.rpartition(".")[2], *answers):
            assert secret not in said, (place, secret)


def internal_addresses(mesh: Mesh) -> Iterable[str]:
    running = Home(mesh.home).read()
    assert running is not None
    return running.internal_addresses.values()
