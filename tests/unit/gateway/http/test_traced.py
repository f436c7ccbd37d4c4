"""The span of an HTTP call: named by its route, an error where the server is to blame, continued where the client has a trace."""

import httpx
import pytest
from opentelemetry.trace import SpanKind, StatusCode
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from services.common import semconv, tracing
from services.gateway.http.traced import Traced
from tests.spans import Recorded, recorded

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def _answer(request: Request) -> PlainTextResponse:
    if request.path_params.get("name") == "bad":
        raise ZeroDivisionError
    return PlainTextResponse(tracing.current().traceparent, int(request.query_params.get("status", "200")))


class _Routed(Route):
    """Tells its route as FastAPI does."""

    async def handle(self, scope, receive, send) -> None:
        scope["route"] = self
        await super().handle(scope, receive, send)


async def ask(path: str, method: str = "GET", headers: list[tuple[str, str]] | None = None) -> tuple[Recorded, httpx.Response]:
    with recorded() as spans:
        app = Traced(Starlette(routes=[_Routed("/v1/models/{name}", _answer), _Routed("/health", _answer)]))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            answer = await client.request(method, path, headers=headers)
    return spans, answer


async def test_a_call_is_named_by_its_route_and_not_by_its_path() -> None:
    spans, answer = await ask("/v1/models/canary")
    (span,) = spans.ended
    assert (span.name, span.kind, span.parent) == ("GET /v1/models/{name}", SpanKind.SERVER, None)
    assert span.attributes[semconv.HTTP_RESPONSE_STATUS_CODE] == 200
    assert answer.text.split("-")[2] == f"{span.context.span_id:016x}"
    assert "canary" not in str(span.to_json())


@pytest.mark.parametrize(("path", "status", "error"), [("/v1/models/a?status=404", 404, False), ("/v1/models/a?status=503", 503, True)])
async def test_what_the_client_did_wrong_is_no_error(path: str, status: int, error: bool) -> None:
    spans, _ = await ask(path)
    (span,) = spans.ended
    assert span.attributes[semconv.HTTP_RESPONSE_STATUS_CODE] == status
    assert (span.status.status_code is StatusCode.ERROR) is error


async def test_a_failure_is_an_error_of_its_type() -> None:
    spans, _ = await ask("/v1/models/bad")
    assert spans.ended[0].attributes[semconv.ERROR_TYPE] == "ZeroDivisionError"
    assert spans.ended[0].status.status_code is StatusCode.ERROR


async def test_an_unknown_path_and_an_unknown_method_leave_no_word_of_theirs() -> None:
    spans, _ = await ask("/canary", "CANARY")
    (span,) = spans.ended
    assert (span.name, span.attributes[semconv.HTTP_REQUEST_METHOD]) == ("_OTHER", "_OTHER")
    assert "canary" not in str(span.to_json()).lower()


async def test_a_clients_trace_goes_on_unless_it_names_two() -> None:
    parent = ("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01")
    spans, _ = await ask("/v1/models/a", headers=[parent])
    assert f"{spans.ended[0].context.trace_id:032x}" == TRACE
    spans, _ = await ask("/v1/models/a", headers=[parent, parent])
    assert spans.ended[0].parent is None


async def test_probes_have_no_span() -> None:
    spans, answer = await ask("/health")
    assert (spans.num_started, answer.text) == (0, "")
