"""One trace through the whole mesh: gateway, Place, the queue in Redis, the choice of a worker, Generate, and what the engine did."""

import json
import re
import threading
import time
from dataclasses import dataclass, field

import pytest

from services.common import semconv
from services.scheduler.policy.routing import SECONDS
from tests.e2e.mesh import Mesh, wait_until
from tests.spans import Exported, Receiver


@pytest.fixture(scope="module")
def mesh(traced: Mesh) -> Mesh:
    return traced


@dataclass
class Chat:
    """A streamed chat of its own thread, as its client sees it."""

    mesh: Mesh
    max_tokens: int
    latency_class: str
    request_id: str = ""
    seconds: float = 0.0
    first: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """`first` is set at the first word."""
        client = self.mesh.openai(timeout=60)
        began = time.monotonic()
        stream = client.chat.completions.create(
            model=self.mesh.model,
            messages=[{"role": "user", "content": "Count from one to a thousand."}],
            max_tokens=self.max_tokens,
            temperature=0,
            stream=True,
            extra_headers={"x-forebay-class": self.latency_class},
            extra_body={"ignore_eos": True},
        )
        for chunk in stream:
            self.request_id = chunk.id.removeprefix("chatcmpl-")
            if chunk.choices and chunk.choices[0].delta.content:
                self.first.set()
        self.seconds = time.monotonic() - began


@pytest.fixture(scope="module")
def preempted(mesh: Mesh) -> Chat:
    """A batch chat that waited in the queue and was preempted when it ran."""
    ahead, batch, realtime = Chat(mesh, 150, "batch"), Chat(mesh, 400, "batch"), Chat(mesh, 4, "realtime")
    threads = [threading.Thread(target=chat.run) for chat in (ahead, batch, realtime)]
    for chat, thread in zip((None, ahead, batch), threads, strict=True):
        assert chat is None or chat.first.wait(60)
        thread.start()
    for thread in threads:
        thread.join()
    return batch


def test_one_trace_tells_a_request_from_the_call_to_its_tokens(mesh: Mesh, receiver: Receiver, preempted: Chat) -> None:
    def trace_of(spans: list[Exported]) -> list[Exported]:
        chats = [span for span in spans if span.attributes.get(semconv.GEN_AI_RESPONSE_ID) == preempted.request_id]
        return [span for span in spans if chats and span.trace_id == chats[0].trace_id]

    parents = {
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
    # What is learned of the org and kept for a while is asked within the first request that needs it.
    asked_once = {"forebay.v1.SchedulerService/GetOrg client", "forebay.v1.SchedulerService/GetOrg server"}
    spans = trace_of(receiver.wait_for(lambda spans: {_label(span) for span in trace_of(spans)} >= parents.keys()))
    labels = {span.span_id: _label(span) for span in spans}
    for span in spans:
        assert not span.parent_id or span.parent_id in labels, f"{span.name} is an orphan"
        assert not span.error, span.name
        if _label(span) not in asked_once:
            assert labels.get(span.parent_id, "") == parents[_label(span)], span.name
        if span.name.startswith("forebay.v1."):
            assert span.attributes[semconv.RPC_RESPONSE_STATUS_CODE] == "OK", span.name
    assert sorted(label for label in labels.values() if label not in asked_once) == sorted(parents), "each once"
    assert {span.service for span in spans} == {"forebay-gateway", "forebay-scheduler", "forebay-worker"}

    trace = {_label(span): span for span in spans}
    call, chat, pick = trace["POST /v1/chat/completions server"], trace[f"chat {mesh.model} internal"], trace["pick internal"]
    request = trace["llm_request internal"]
    assert call.attributes[semconv.HTTP_RESPONSE_STATUS_CODE] == 200
    assert call.attributes[semconv.HTTP_ROUTE] == "/v1/chat/completions"
    assert chat.attributes[semconv.GEN_AI_OPERATION_NAME] == "chat"
    assert chat.attributes[semconv.GEN_AI_REQUEST_MAX_TOKENS] == chat.attributes[semconv.GEN_AI_USAGE_OUTPUT_TOKENS] == 400
    assert chat.attributes[semconv.GEN_AI_RESPONSE_FINISH_REASONS] == ["length"]
    assert chat.attributes[semconv.FOREBAY_NUM_PREEMPTIONS] == request.attributes[semconv.FOREBAY_NUM_PREEMPTIONS] == 1
    assert pick.attributes[semconv.FOREBAY_CANDIDATES] == [pick.attributes[semconv.FOREBAY_WORKER]]
    assert [len(pick.attributes[f"{semconv.FOREBAY_COST}.{term}"]) for term in SECONDS.terms] == [1] * len(SECONDS.terms)
    assert trace["queue internal"].links == [chat.span_id]
    assert 0 < trace["queue internal"].seconds < call.seconds
    order = ["admitted", "prefill", "first_token", "preempted_by_class", "swapped", "resumed", "prefill", "ended"]
    assert [event for event in request.events if event in order] == order


def _label(span: Exported) -> str:
    return f"{span.name} {span.kind}"


def test_explain_adds_up_to_what_the_client_waited(mesh: Mesh, preempted: Chat) -> None:
    wait_until(lambda: mesh.forebay("explain", preempted.request_id).returncode == 0, "the record is there")
    record = json.loads(mesh.forebay("explain", "--json", preempted.request_id).stdout)
    (attempt,) = record["attempts"]
    parts = {part["phase"].removeprefix("PHASE_").lower(): part["seconds"] for part in attempt["parts"]}
    assert min(parts[phase] for phase in ("queue", "prefill", "decode", "preempted")) > 0
    assert record["admit_seconds"] + sum(parts.values()) == pytest.approx(record["total_seconds"], abs=1e-3)
    # The client's own clock, which includes its connection and its parsing.
    assert record["total_seconds"] == pytest.approx(preempted.seconds, rel=0.05, abs=0.1)
    kinds = [event["kind"].removeprefix("TIMELINE_EVENT_KIND_").lower() for event in attempt["timeline"]["events"]]
    assert [kind for kind in kinds if kind in ("admitted", "first_token", "resumed", "ended")] == [
        "admitted",
        "first_token",
        "resumed",
        "ended",
    ]
    assert (attempt["decision"]["candidates"][0]["chosen"], record["usage"]["preemptions"]) == (True, 1)
    assert "preempted" in mesh.forebay("explain", preempted.request_id).stdout


def test_steps_are_sampled_and_linked_to_their_requests(preempted: Chat, receiver: Receiver) -> None:
    spans = receiver.wait_for(lambda spans: any(span.name == semconv.SPAN_ENGINE_STEP for span in spans))
    step = next(span for span in spans if span.name == semconv.SPAN_ENGINE_STEP)
    assert (step.parent_id, step.service) == ("", "forebay-worker")
    assert len([span for span in spans if span.name == semconv.SPAN_ENGINE_STEP]) < 60
    generate = {span.span_id for span in spans if span.name == "forebay.v1.WorkerService/Generate" and span.kind == "server"}
    assert step.links
    assert set(step.links) <= generate


def test_nothing_that_merely_keeps_the_mesh_going_is_a_trace(mesh: Mesh, receiver: Receiver) -> None:
    spans = receiver.wait_for(lambda spans: bool(spans))
    roots = {(span.service, span.name) for span in spans if not span.parent_id and span.name != semconv.SPAN_ENGINE_STEP}
    assert roots
    asked_by_people = re.compile(r"(GET|POST|DELETE)( |$)|forebay\.v1\.(Inference|Admin)Service/")
    assert [root for root in roots if root[0] != "forebay-gateway" or not asked_by_people.match(root[1])] == []


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
