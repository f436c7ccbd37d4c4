"""The server span of each HTTP call, by OpenTelemetry's HTTP conventions. Its task's calls to other services are below it."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common import semconv, tracing

_PROBES = ("/health", "/ready")
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")


class Traced:
    """Middleware. A client's traceparent makes its span the parent; where it comes twice, none counts. Probes have no span."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _PROBES:
            await self._app(scope, receive, send)
            return
        parents = Headers(scope=scope).getlist("traceparent")
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        attributes: dict[str, tracing.Value] = {semconv.HTTP_REQUEST_METHOD: method, semconv.URL_SCHEME: scope["scheme"]}
        span = tracing.start(method, tracing.remote(parents[0] if len(parents) == 1 else None), kind="server", attributes=attributes)
        tracing.enter(span)
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set({semconv.HTTP_RESPONSE_STATUS_CODE: status})
            await send(message)

        error = ""
        try:
            await self._app(scope, receive, watched)
            error = str(status) if status >= 500 else ""
        except BaseException as failure:
            error = type(failure).__name__
            raise
        finally:
            # Known once the router has looked; of a path that it doesn't know nothing is taken over.
            if route := getattr(scope.get("route"), "path", ""):
                span.rename(f"{method} {route}")
                span.set({semconv.HTTP_ROUTE: route})
            span.end(error)
