"""POST /v1/chat/completions over a real socket, against a scripted mesh."""

import asyncio
from typing import Any

import orjson
import pytest

from forebay.v1 import types_pb2
from services.common.errors import Code, StatusError, unavailable
from services.gateway.http import body
from tests.fakes import LENGTH, STOP, WorkerCall, play, stall
from tests.unit.gateway.build import EOS, events_of, letters, make_token, stack

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index
    )  # fmt: skip


def reasons_of(chunks: list[Any]) -> list[tuple[int, str]]:
    return [(c["index"], c["finish_reason"]) for chunk in chunks[:-1] for c in chunk["choices"] if c["finish_reason"]]


async def test_a_whole_answer() -> None:
    async with stack(play([*letters("Paris"), EOS], reason=STOP, cached_tokens=3)) as mesh:
        answer = await mesh.http.post("/v1/chat/completions", json=CHAT | {"seed": 1})
        body = answer.json()
    assert answer.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["system_fingerprint"] == "fp32-test"
    assert body["service_tier"] == "default"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Paris", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    usage = body["usage"]
    assert usage["completion_tokens"] == 6  # the end token was delivered, too
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert body["id"] == f"chatcmpl-{answer.headers['x-forebay-request-id']}"
    assert answer.headers["x-forebay-class"] == "standard"


async def test_b10_a_stream_has_one_reason_per_choice_then_usage_then_done_once() -> None:
    async with stack(play(letters("hello"), reason=LENGTH)) as mesh:
        chunks = await events_of(mesh, "/v1/chat/completions", CHAT | {"n": 2, "stream_options": {"include_usage": True}})
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [{"role": "assistant", "content": "", "refusal": None}] * 2
    assert text_of(chunks, 0) == text_of(chunks, 1) == "hello"
    assert sorted(reasons_of(chunks)) == [(0, "length"), (1, "length")]
    assert chunks[-1] == "[DONE]"
    assert chunks.count("[DONE]") == 1
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["completion_tokens"] == 10
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1


async def test_b10_content_and_end_in_one_message() -> None:
    async with stack(play(letters("hello"), per_message=99)) as mesh:
        chunks = await events_of(mesh, "/v1/chat/completions", CHAT)
    assert text_of(chunks) == "hello"
    assert reasons_of(chunks) == [(0, "length")]
    assert "usage" not in chunks[0]


@pytest.mark.parametrize("per_message", [1, 3, 50])
async def test_b04_no_part_of_a_stop_is_sent_and_stream_equals_whole(per_message: int) -> None:
    script = play(letters("ABCDEFGHIJKLMNOP"), per_message=per_message)
    async with stack(script) as mesh:
        request = CHAT | {"stop": "DEFGHIJ"}
        chunks = await events_of(mesh, "/v1/chat/completions", request | {"stream_options": {"include_usage": True}})
        whole = (await mesh.http.post("/v1/chat/completions", json=request)).json()
        await mesh.scheduler.finishes.until_length(2)
    assert text_of(chunks) == "ABC" == whole["choices"][0]["message"]["content"]
    assert reasons_of(chunks) == [(0, "stop")]
    assert whole["choices"][0]["finish_reason"] == "stop"
    # Cut at the token that completes the stop, and billed so.
    assert chunks[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 10
    assert {finish.usage.completion_tokens for finish in mesh.scheduler.finishes} == {10}


async def test_b04_half_a_stop_is_flushed_at_the_end() -> None:
    async with stack(play(letters("ABCDEF"))) as mesh:
        chunks = await events_of(mesh, "/v1/chat/completions", CHAT | {"stop": ["DEFGHIJ", "zz"]})
    assert text_of(chunks) == "ABCDEF"
    assert reasons_of(chunks) == [(0, "length")]


async def test_a_stop_ends_the_worker_s_call_when_all_choices_are_done() -> None:
    async def endless(call: WorkerCall) -> None:
        await call.accept()
        for choice in (0, 1):
            await call.tokens(letters("ab."), choice)
        await asyncio.Event().wait()

    async with stack(endless) as mesh:
        answer = await mesh.http.post("/v1/chat/completions", json=CHAT | {"n": 2, "stop": "."})
        await mesh.workers[0].cancelled.until_length(1)
    assert [choice["message"]["content"] for choice in answer.json()["choices"]] == ["ab", "ab"]


async def test_b05_a_character_in_parts_is_one_chunk() -> None:
    async with stack(play(list("a😀b".encode()))) as mesh:
        chunks = await events_of(mesh, "/v1/chat/completions", CHAT)
    assert text_of(chunks) == "a😀b"
    assert not any("\ufffd" in orjson.dumps(chunk).decode() for chunk in chunks)


async def test_logprobs_have_as_many_entries_as_usage_has_tokens() -> None:
    async with stack(play(letters("AB."))) as mesh:
        request = CHAT | {"logprobs": True, "top_logprobs": 2, "stop": "."}
        body = (await mesh.http.post("/v1/chat/completions", json=request)).json()
        chunks = await events_of(mesh, "/v1/chat/completions", request)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["A", "B", "."]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    assert content[0]["top_logprobs"][1] == {"token": "B", "logprob": -1.5, "bytes": [66]}
    assert len(content) == body["usage"]["completion_tokens"]
    streamed = [e for chunk in chunks[:-1] for c in chunk["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == content


async def test_b11_an_engine_error_in_a_stream_is_one_error_event_and_no_end() -> None:
    async def breaks(call: WorkerCall) -> None:
        if call.request.sampling.max_tokens == 7:
            await call.accept()
            await call.tokens(letters("ab"))
            await call.fail(Code.INTERNAL)
        await play(letters("fine"))(call)

    async with stack(breaks) as mesh:
        streams = [events_of(mesh, "/v1/chat/completions", CHAT | {"max_tokens": 7 if number == 2 else 8}) for number in range(6)]
        answers = await asyncio.gather(*streams)
    broken = answers.pop(2)
    assert broken[-1]["error"]["type"] == "server_error"
    assert [item for item in broken if item == "[DONE]" or "error" in item] == broken[-1:]
    assert not any(c["finish_reason"] for chunk in broken[:-1] for c in chunk["choices"])
    assert all(answer[-1] == "[DONE]" and text_of(answer) == "fine" for answer in answers)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (unavailable("the queue is full: try again", 6.2), 503, "overloaded_error"),
        (StatusError(Code.RESOURCE_EXHAUSTED, "over the quota", retry_after_seconds=3), 429, "rate_limit_error"),
        (StatusError(Code.DEADLINE_EXCEEDED, "too late"), 504, "timeout_error"),
    ],
)
async def test_what_fails_before_the_first_token_is_a_plain_error(refusal: StatusError, status: int, kind: str, streamed: bool) -> None:
    async with stack(play(letters("x"))) as mesh:
        mesh.scheduler.refusals.append(refusal)
        answer = await mesh.http.post("/v1/chat/completions", json=CHAT | {"stream": streamed}, headers={"x-request-id": "mine"})
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == kind
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers.get("retry-after") == {503: "7", 429: "3", 504: None}[status]
    assert answer.headers.get("x-should-retry") == ("false" if status == 504 else None)


async def test_a_deadline_from_the_header_passes_as_504() -> None:
    async with stack(play([])) as mesh:
        mesh.scheduler.gate.clear()
        answer = await mesh.http.post("/v1/chat/completions", json=CHAT, headers={"x-forebay-deadline": "0.2"})
        assert answer.status_code == 504
        await mesh.scheduler.withdrawn.until_length(1)
        for wrong in ("0", "-1", "nan", "soon", "1e9"):
            answer = await mesh.http.post("/v1/chat/completions", json=CHAT, headers={"x-forebay-deadline": wrong})
            assert answer.json()["error"]["param"] == "x-forebay-deadline"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
async def test_b40_a_dropped_connection_ends_the_work_in_every_state(where: str, streamed: bool) -> None:
    async with stack(stall(letters("ab") if where == "decode" else ())) as mesh:
        if where == "queue":
            mesh.scheduler.gate.clear()
        task = asyncio.create_task(mesh.http.post("/v1/chat/completions", json=CHAT | {"stream": streamed}))
        await (mesh.scheduler.places if where == "queue" else mesh.workers[0].calls).until_length(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if where == "queue":
            await mesh.scheduler.withdrawn.until_length(1)
        else:
            await mesh.workers[0].cancelled.until_length(1)
            (finish,) = await mesh.scheduler.finishes.until_length(1)
            assert finish.finish_reason == types_pb2.FINISH_REASON_CANCELLED
    assert mesh.metric("forebay_requests_in_flight", face="http") == 0


async def test_a_failover_is_invisible() -> None:
    text = "the quick brown fox"

    async def dies(call: WorkerCall) -> None:
        await call.accept()
        await call.tokens(letters(text[:7]))
        await call.fail(Code.UNAVAILABLE)

    async with stack(dies, play(letters(text))) as mesh:
        chunks = await events_of(mesh, "/v1/chat/completions", CHAT | {"stop": "k b"})
    assert text_of(chunks) == "the quic"
    assert reasons_of(chunks) == [(0, "stop")]


async def test_max_completion_tokens_is_honoured() -> None:
    async with stack(play(letters("a" * 50))) as mesh:
        body = (await mesh.http.post("/v1/chat/completions", json=CHAT | {"max_completion_tokens": 4})).json()
        assert body["usage"]["completion_tokens"] == 4
        assert body["choices"][0]["finish_reason"] == "length"
        both = await mesh.http.post("/v1/chat/completions", json=CHAT | {"max_completion_tokens": 4, "max_tokens": 5})
        assert both.status_code == 400
        wrong = await mesh.http.post("/v1/chat/completions", json=CHAT | {"max_completion_tokens": "4"})
        assert wrong.json()["error"]["param"] == "max_completion_tokens"


@pytest.mark.parametrize(
    ("body", "headers", "name"),
    [
        ({}, {}, "standard"),
        ({"service_tier": "auto"}, {}, "standard"),
        ({"service_tier": "priority"}, {}, "realtime"),
        ({"service_tier": "flex"}, {}, "batch"),
        ({"service_tier": "auto"}, {"x-forebay-class": "batch"}, "batch"),
        ({"service_tier": "priority"}, {"x-forebay-class": "realtime"}, "realtime"),
    ],
)
async def test_the_class_comes_from_tier_or_header(body: dict[str, str], headers: dict[str, str], name: str) -> None:
    async with stack(play(letters("x"))) as mesh:
        answer = await mesh.http.post("/v1/chat/completions", json=CHAT | body, headers=headers)
        assert answer.headers["x-forebay-class"] == name
        assert mesh.scheduler.places[0].ticket.latency_class == types_pb2.LatencyClass.Value(f"LATENCY_CLASS_{name.upper()}")
        contradicting = await mesh.http.post(
            "/v1/chat/completions", json=CHAT | {"service_tier": "flex"}, headers={"x-forebay-class": "realtime"}
        )
        assert contradicting.status_code == 400
        unknown = await mesh.http.post("/v1/chat/completions", json=CHAT | {"service_tier": "gold"})
        assert unknown.json()["error"]["param"] == "service_tier"


async def test_unknown_fields_of_messages_are_named_and_strict_refuses_them() -> None:
    odd = {"messages": [{"role": "user", "content": "x", "mood": "sour"}]}
    async with stack(play(letters("x"))) as mesh:
        lax = await mesh.http.post("/v1/chat/completions", json=CHAT | odd)
        strict = await mesh.http.post("/v1/chat/completions", json=CHAT | odd | {"strict": True})
    assert lax.headers["x-forebay-ignored"] == "messages[0].mood"
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, "messages[0].mood")


async def test_unknown_fields_are_named_and_strict_refuses_them() -> None:
    async with stack(play(letters("x"))) as mesh:
        lax = await mesh.http.post("/v1/chat/completions", json=CHAT | {"topp": 1, "n_predict": 5})
        strict = await mesh.http.post("/v1/chat/completions", json=CHAT | {"topp": 1, "strict": True})
        tools = await mesh.http.post("/v1/chat/completions", json=CHAT | {"tools": [{"type": "function"}]})
    assert lax.status_code == 200
    assert lax.headers["x-forebay-ignored"] == "topp,n_predict"
    assert strict.status_code == tools.status_code == 400
    assert strict.json()["error"]["param"] == "topp"
    assert tools.json()["error"]["param"] == "tools[0]"


async def test_b35_one_client_id_on_several_requests_mixes_nothing() -> None:
    async def echoes(call: WorkerCall) -> None:
        await play(letters(f"seed {call.request.sampling.seed}"))(call)

    async with stack(echoes) as mesh:
        headers = {"x-request-id": "same"}
        answers = await asyncio.gather(
            *(mesh.http.post("/v1/chat/completions", json=CHAT | {"seed": seed}, headers=headers) for seed in range(8)),
            mesh.http.post("/v1/chat/completions", json=CHAT | {"seed": 8}, headers=headers | {"authorization": mesh.token("other-org")}),
        )
        assert len({place.ticket.request_id for place in mesh.scheduler.places}) == 9
        assert "same" not in {place.ticket.request_id for place in mesh.scheduler.places}
        assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == [f"seed {seed}" for seed in range(9)]
        assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
        for wrong in ("x" * 129, "x" * 60_000, "a\tb"):
            refused = await mesh.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": wrong})
            assert refused.status_code in (400, 431)
        twice = await mesh.http.post("/v1/chat/completions", json=CHAT, headers=[("x-request-id", "a"), ("x-request-id", "b")])
        assert twice.json()["error"]["param"] == "x-request-id"


async def test_b34_the_template_s_refusal_is_the_client_s_to_read() -> None:
    async with stack(play(letters("x"))) as mesh:
        two_users = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
        answer = await mesh.http.post("/v1/chat/completions", json={"model": "tiny", "messages": two_users})
        assert not mesh.scheduler.places
    assert answer.status_code == 400
    assert "roles must alternate" in answer.json()["error"]["message"]


async def test_many_streams_end_and_leave_nothing() -> None:
    async def by_seed(call: WorkerCall) -> None:
        await play(letters(f"answer number {call.request.sampling.seed}"), per_message=2)(call)

    async with stack(by_seed) as mesh:
        streams = [events_of(mesh, "/v1/chat/completions", CHAT | {"seed": seed}) for seed in range(64)]
        answers = await asyncio.gather(*streams)
        await mesh.scheduler.finishes.until_length(64)
        assert [text_of(answer) for answer in answers] == [f"answer number {seed}" for seed in range(64)]
        assert mesh.workers[0].num_open == 0
        assert mesh.metric("forebay_requests_in_flight", face="http") == 0
        assert mesh.metric("forebay_requests_total", face="http", model="tiny", latency_class="standard", status="OK") == 64


async def test_an_upload_that_never_ends_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.05)
    async with stack(play(letters("x"))) as mesh:
        reader, writer = await asyncio.open_connection(*mesh.http_address.split(":"))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: {make_token()}\r\ncontent-length: 100\r\n\r\n{{"
        writer.write(head.encode())
        answer = await asyncio.wait_for(reader.read(), 10)  # to the end: the server closes
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"body_too_slow" in answer


async def test_a_request_that_leaves_no_token_is_the_client_s_mistake() -> None:
    async def refuses(call: WorkerCall) -> None:
        await call.accept()
        await call.fail(Code.INVALID_ARGUMENT, "every token is banned")

    async with stack(refuses) as mesh:
        answer = await mesh.http.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "every token is banned")


@pytest.mark.parametrize("stop", [None, "c"])
async def test_b42i_counts_of_drafts_never_exceed_the_tokens(stop: str | None) -> None:
    """Also where a stop string ends the answer inside a run of drafts."""

    async def drafts(call: WorkerCall) -> None:
        await call.accept()
        await call.tokens(letters("abcdef"), verdicts=bytes([0, 2, 2, 2, 2, 1]))
        await call.tokens([EOS], reason=STOP, verdicts=bytes([1]))
        await call.complete()

    async with stack(drafts) as mesh:
        body = (await mesh.http.post("/v1/chat/completions", json=CHAT | {"stop": stop, "speculation": True})).json()
        refused = await mesh.http.post("/v1/chat/completions", json=CHAT | {"speculation": 4})
        assert mesh.workers[0].calls[0].request.sampling.speculation
    usage = body["usage"]
    details = usage["completion_tokens_details"]
    expected = (7, 4, 2) if stop is None else (3, 2, 0)
    assert (usage["completion_tokens"], details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == expected
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "speculation"
