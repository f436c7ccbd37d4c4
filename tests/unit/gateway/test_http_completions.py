"""POST /v1/completions, /tokenize, /v1/models, /health and /ready over a real socket."""

import asyncio
import re
from typing import Any

import httpx
import pytest

from services.common.errors import Code, StatusError, unavailable
from services.gateway import fleet
from tests.fakes import LENGTH, STOP, WorkerCall, play
from tests.unit.gateway.build import EOS, MAX_MODEL_LEN, events_of, letters, stack

URL = "/v1/completions"


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(choice["text"] for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index)


async def repeats(call: WorkerCall) -> None:
    """Answers a prompt with itself, capitalised."""
    await play(letters(bytes(call.request.prompt_token_ids).decode().upper()))(call)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["AB"]),
        (["ab", "c"], ["AB", "C"]),
        (letters("ab"), ["AB"]),
        ([letters("ab"), letters("c")], ["AB", "C"]),
    ],
)
async def test_a_prompt_is_text_or_ids_or_lists_of_them(prompt: Any, texts: list[str]) -> None:
    async with stack(repeats) as mesh:
        body = (await mesh.http.post(URL, json={"model": "tiny", "prompt": prompt})).json()
        chunks = await events_of(mesh, URL, {"prompt": prompt, "stream_options": {"include_usage": True}})
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
    assert [text_of(chunks, index) for index in range(len(texts))] == texts
    assert body["usage"]["prompt_tokens"] == body["usage"]["completion_tokens"] == sum(map(len, texts))
    assert chunks[-2]["usage"] == body["usage"]
    assert chunks.count("[DONE]") == 1
    reasons = sorted((c["index"], c["finish_reason"]) for chunk in chunks[:-1] for c in chunk["choices"] if c["finish_reason"])
    assert reasons == [(index, "length") for index in range(len(texts))]


async def test_n_choices_are_numbered_through_over_the_prompts() -> None:
    async with stack(repeats) as mesh:
        body = (await mesh.http.post(URL, json={"prompt": ["a", "b"], "n": 2})).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "A"), (1, "A"), (2, "B"), (3, "B")]


async def test_one_failing_prompt_fails_the_request_and_ends_the_others() -> None:
    async def script(call: WorkerCall) -> None:
        await call.accept()
        await call.tokens(letters("x"))
        if list(call.request.prompt_token_ids) == letters("bad"):
            await call.fail(Code.INTERNAL)
        await asyncio.Event().wait()

    async with stack(script) as mesh:
        answer = await mesh.http.post(URL, json={"prompt": ["good", "bad"]})
        assert answer.status_code == 500
        await mesh.scheduler.finishes.until_length(2)
        assert {finish.status_code for finish in mesh.scheduler.finishes} == {Code.INTERNAL.value[0]}, (
            "the other is charged for nothing either"
        )
        assert mesh.metric("forebay_requests_in_flight", face="http") == 0


async def test_prompts_are_reserved_together_before_any_is_placed() -> None:
    async with stack(repeats) as mesh:
        assert (await mesh.http.post(URL, json={"prompt": ["a", "b"]})).status_code == 200
        (asked,) = mesh.scheduler.reserved
        assert [ticket.request_id for ticket in asked.tickets] == [place.ticket.request_id for place in mesh.scheduler.places]
        assert (await mesh.http.post(URL, json={"prompt": "a"})).status_code == 200
        assert len(mesh.scheduler.reserved) == 1
        mesh.scheduler.refusals.append(StatusError(Code.RESOURCE_EXHAUSTED, "over", reason="QUOTA_EXCEEDED", retry_after_seconds=3))
        answer = await mesh.http.post(URL, json={"prompt": ["a", "b"]})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
        assert len(mesh.scheduler.places) == 3


async def test_a_class_that_a_lease_has_lowered_is_told() -> None:
    async with stack(repeats) as mesh:
        mesh.scheduler.terms["latency_class"] = 3
        for body in ({"prompt": "a"}, {"prompt": ["a", "b"]}):
            answer = await mesh.http.post(URL, json={**body, "service_tier": "priority"})
            assert (answer.headers["x-forebay-class"], answer.headers["x-forebay-class-lowered-from"]) == ("batch", "realtime")
            assert answer.json()["service_tier"] == "flex"
        assert {call.request.latency_class for call in mesh.workers[0].calls} == {3}
        await mesh.scheduler.finishes.until_length(3)
        assert [end.explanation.lowered_from for end in mesh.scheduler.finishes] == [1, 1, 1]


async def test_echo_with_logprobs_covers_prompt_and_output() -> None:
    async with stack(play(letters("cd"))) as mesh:
        request = {"prompt": "ab", "echo": True, "logprobs": 1}
        body = (await mesh.http.post(URL, json=request)).json()
        chunks = await events_of(mesh, URL, request)
    (choice,) = body["choices"]
    assert choice["text"] == "abcd"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "d"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"] == [None, {"b": -0.5}, {"c": -0.5}, {"d": -0.5}]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    pieces = [c["logprobs"] for chunk in chunks[:-1] for c in chunk["choices"] if c["logprobs"]]
    assert text_of(chunks) == "abcd"
    for name, values in logprobs.items():
        assert [value for piece in pieces for value in piece[name]] == values


async def test_b28_wrong_max_tokens_are_refused() -> None:
    async with stack(play(letters("x"))) as mesh:
        for max_tokens in (-1, 2**31, 2**70, 1.5, "5", [], MAX_MODEL_LEN):
            for extra in ({}, {"echo": True}, {"logprobs": 1}, {"echo": True, "logprobs": 1}):
                answer = await mesh.http.post(URL, json={"prompt": "ab", "max_tokens": max_tokens, **extra})
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == "max_tokens"
        assert not mesh.scheduler.places


async def test_b28_no_output_is_scoring_with_echo_and_else_refused() -> None:
    async def scores(call: WorkerCall) -> None:
        assert call.request.sampling.max_tokens == 0
        await call.accept()
        await call.prompt_logprobs()
        await call.tokens([], reason=LENGTH)
        await call.complete()

    async with stack(scores) as mesh:
        for extra in ({"logprobs": 2}, {}):
            body = (await mesh.http.post(URL, json={"prompt": "ab", "max_tokens": 0, "echo": True, **extra})).json()
            assert body["choices"][0]["text"] == "ab"
            assert body["choices"][0]["finish_reason"] == "length"
            assert body["usage"]["completion_tokens"] == 0
        refused = await mesh.http.post(URL, json={"prompt": "ab", "max_tokens": 0})
        assert refused.status_code == 400
    async with stack(play(letters("cd"))) as mesh:
        null = await mesh.http.post(URL, json={"prompt": "ab", "max_tokens": None, "echo": True, "stop": None, "seed": None})
        assert null.json()["choices"][0]["text"] == "abcd"


async def test_b12_fields_of_chat_are_refused_with_the_way_out() -> None:
    async with stack(play(letters("x"))) as mesh:
        for name, value, hint in [("max_completion_tokens", 5, "max_tokens"), ("messages", [], "prompt"), ("top_logprobs", 2, "logprobs")]:
            error = (await mesh.http.post(URL, json={"prompt": "a", name: value})).json()["error"]
            assert error["param"] == name
            assert hint in error["message"]
        ignored = await mesh.http.post(URL, json={"prompt": "a", "max_token": 5})
        assert ignored.headers["x-forebay-ignored"] == "max_token"
        assert (await mesh.http.post(URL, json={"prompt": "a", "best_of": 3})).json()["error"]["param"] == "best_of"


async def test_b27_empty_prompts_have_a_defined_answer_and_harm_nobody() -> None:
    async with stack(play([*letters("ok"), EOS], reason=STOP)) as mesh:
        for prompt in ("", [""], [], [[]], None, [None], [1.5], ["a", 1], {}, [[[]]]):
            answer = await mesh.http.post(URL, json={"prompt": prompt})
            assert answer.status_code == 400, prompt
            assert answer.json()["error"]["param"].startswith("prompt")
        for prompt in (" ", "\n\t ", [EOS]):
            answer = await mesh.http.post(URL, json={"prompt": prompt})
            assert answer.json()["choices"][0]["text"] == "ok"


async def test_tokenize_counts_text_and_conversations() -> None:
    async with stack() as mesh:
        text = (await mesh.http.post("/tokenize", json={"model": "small", "prompt": "hé"})).json()
        messages = [{"role": "user", "content": "hi"}]
        chat = (await mesh.http.post("/tokenize", json={"messages": messages})).json()
        neither = await mesh.http.post("/tokenize", json={"model": "tiny"})
        wrong = await mesh.http.post("/tokenize", json={"prompt": 5})
    assert text == {"count": 3, "max_model_len": MAX_MODEL_LEN, "tokens": letters("hé")}
    assert bytes(chat["tokens"]).decode() == "[user]hi\n[assistant]"
    assert neither.status_code == wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "prompt"


async def test_models_are_listed_with_their_length() -> None:
    async with stack(play([])) as mesh:
        listed = (await mesh.http.get("/v1/models")).json()
        assert [(model["id"], model["max_model_len"], model["ready"]) for model in listed["data"]] == [("tiny", MAX_MODEL_LEN, True)]
        assert (await mesh.http.get("/v1/models/small")).json() == listed["data"][0]
        missing = await mesh.http.get("/v1/models/nobody/none")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"
        answer = await mesh.http.post(URL, json={"model": "none", "prompt": "a"})
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"


async def test_ready_means_a_scheduler_answers_and_a_model_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack(play([])) as mesh:
        bare = httpx.AsyncClient(base_url=f"http://{mesh.http_address}", trust_env=False)
        assert (await bare.get("/health")).status_code == 200
        assert (await bare.get("/ready")).status_code == 200
        mesh.workers[0].ready = False
        await mesh.gateway.fleet.look()
        answer = await bare.get("/ready")
        assert answer.status_code == 503
        assert "no worker" in answer.json()["reason"]
        mesh.workers[0].ready = True
        await mesh.gateway.fleet.look()
        assert (await bare.get("/ready")).status_code == 200
        mesh.scheduler.fleet_error = unavailable("down")
        await mesh.gateway.fleet.look()
        assert (await bare.get("/ready")).status_code == 200  # one missed look is no outage
        monkeypatch.setattr(fleet, "STALE_SECONDS", -1.0)
        assert (await bare.get("/ready")).status_code == 503
        mesh.gateway.draining = True
        assert (await bare.get("/ready")).json()["reason"] == "draining"
        await bare.aclose()


async def test_bodies_of_the_wrong_kind_or_size() -> None:
    async with stack(play(letters("x"))) as mesh:
        big = b'{"prompt": "' + b"x" * (8 << 20) + b'"}'
        json_type = {"content-type": "application/json"}

        async def chunked() -> Any:
            for start in range(0, len(big), 1 << 20):
                yield big[start : start + (1 << 20)]

        assert (await mesh.http.post(URL, content=big, headers=json_type)).status_code == 413
        answer = await mesh.http.post(URL, content=chunked(), headers=json_type)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        form = await mesh.http.post(URL, data={"prompt": "x"})
        assert (form.status_code, form.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert (await mesh.http.post(URL, content=b'{"prompt": "x"}')).status_code == 200  # no content type: it is JSON
        over = {"prompt": "x" * ((1 << 20) + 1)}
        assert (await mesh.http.post(URL, json=over)).json()["error"]["param"] == "prompt"


async def test_the_router_s_refusals_have_the_same_shape() -> None:
    async with stack() as mesh:
        for method, path, status, allow in [
            ("GET", "/v2/nothing", 404, None),
            ("POST", URL + "/", 404, None),
            ("HEAD", "/v2/nothing", 404, None),
            ("GET", URL, 405, "POST"),
            ("HEAD", URL, 405, "POST"),
            ("DELETE", "/v1/models/tiny", 405, "GET, HEAD"),
            ("OPTIONS", "/health", 405, "GET, HEAD"),
            ("PUT", "/openapi.json", 405, "GET, HEAD"),
        ]:
            answer = await mesh.http.request(method, path)
            assert (answer.status_code, answer.headers.get("allow")) == (status, allow), (method, path)
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-request-id"]
            if method != "HEAD":
                error = answer.json()["error"]
                assert (set(error), error["code"]) == (
                    {"message", "type", "param", "code"},
                    "unknown_path" if status == 404 else "method_not_allowed",
                )


async def test_head_is_get_without_its_body() -> None:
    async with stack(play([])) as mesh:
        paths = ["/health", "/ready", "/v1/models", "/v1/models/tiny", "/v1/models/none", "/v1/usage", "/openapi.json"]
        paths += ["/v1/files", "/v1/files/tiny", "/v1/files/tiny/content", "/v1/batches", "/v1/batches/tiny"]
        for path in paths:
            got, head = await mesh.http.get(path), await mesh.http.head(path)
            assert head.content == b""
            assert head.status_code == got.status_code
            for answer in (got, head):
                for changing in ("date", "x-request-id"):
                    assert answer.headers.pop(changing)
            assert head.headers == got.headers
        document = (await mesh.http.get("/openapi.json")).json()
        routes = [path for path, methods in document["paths"].items() if "get" in methods]
        assert {re.sub(r"{\w+}", "tiny", path) for path in routes} < set(paths)
        del mesh.http.headers["authorization"]
        assert (await mesh.http.head("/v1/models")).status_code == 401


async def test_the_openapi_document_names_every_route() -> None:
    async with stack() as mesh:
        document = (await mesh.http.get("/openapi.json")).json()
    assert set(document["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/usage",
        "/v1/files",
        "/v1/files/{file_id}",
        "/v1/files/{file_id}/content",
        "/v1/batches",
        "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/cancel",
        "/tokenize",
        "/health",
        "/ready",
    }
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["prompt"]
    assert "temperature" in body["properties"]
    headers = {parameter["name"] for parameter in document["paths"]["/v1/completions"]["post"]["parameters"]}
    assert headers == {"x-request-id", "x-forebay-strict", "x-forebay-class", "x-forebay-deadline", "idempotency-key"}


async def test_the_openapi_document_has_the_bounds_that_are_kept() -> None:
    async with stack(play(letters("x"))) as mesh:
        document = (await mesh.http.get("/openapi.json")).json()
        schemas = document["paths"][URL]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        checked = 0
        for name, schema in schemas.items():
            least, most = schema.get("minimum"), schema.get("maximum")
            step = 1 if "integer" in schema.get("type", ()) else 1e-7
            cases = [] if least is None else [(least, True), (least - step, False)]
            cases += [] if most is None else [(most, True), (most * 1.01 + step, False)]
            cases += [(word, True) for word in schema.get("enum", ())] + ([("other", False)] if "enum" in schema else [])
            for value, good in cases:
                best_of = {"best_of": value} if name == "n" else {"n": value} if name == "best_of" and good else {}
                echo = {"echo": True} if name == "max_tokens" else {}
                answer = await mesh.http.post(URL, json={"prompt": "a", name: value, **best_of, **echo})
                assert answer.status_code == (200 if good else 400), (name, value, answer.text)
                checked += 1
    assert checked > 25


async def test_f15_a_reader_that_stops_is_given_up_alone() -> None:
    async def floods(call: WorkerCall) -> None:
        await call.accept()
        while True:
            await call.tokens(letters("x" * 2000))

    async with stack(floods, slow_reader_seconds=0.5) as mesh:
        host, port = mesh.http_address.split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = b'{"prompt": "a", "stream": true, "max_tokens": 2000, "logprobs": 20}'
        lines = [f"POST {URL} HTTP/1.1", "host: x", f"authorization: {mesh.token()}", f"content-length: {len(body)}", "", ""]
        head = "\r\n".join(lines)
        writer.write(head.encode() + body)
        await mesh.workers[0].cancelled.until_length(1)
        (finish,) = await mesh.scheduler.finishes.until_length(1)
        assert finish.finish_reason
        writer.close()
