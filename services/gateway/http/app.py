"""The OpenAI face's routes: authenticate, read, check, admit, and hand to the endpoint that renders."""

import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from forebay.v1 import admin_pb2, scheduler_pb2, types_pb2
from services.common import tracing
from services.common.errors import Code, StatusError, invalid
from services.gateway.auth import Caller
from services.gateway.embed_request import admit_embedding
from services.gateway.embeddings import Embeddings
from services.gateway.gateway import Gateway
from services.gateway.generation import Generations
from services.gateway.http import (
    batches,
    chat,
    completions,
    edge,
    embeddings,
    errors,
    fields,
    files,
    head,
    objects,
    openapi,
    ratelimit,
    sse,
)
from services.gateway.http.answer import Run, collected, merged
from services.gateway.http.body import read_json
from services.gateway.http.structured import grammar_of
from services.gateway.http.traced import Traced
from services.gateway.idempotency import HEADER, claimed, one_key
from services.gateway.models import Capability, ServedModel
from services.gateway.request import Admitted, Envelope, Generation, admit_chat, admit_completion, count_chat_tokens, count_tokens, lowered
from services.gateway.usage import usage
from services.gateway.validator import validate_label

MAX_USAGE_DAYS = 90
MAX_USAGE_ROWS = 1000


def create_app(gateway: Gateway) -> FastAPI:
    """The ASGI application."""
    app = FastAPI(
        title="Forebay",
        version="1",
        description="OpenAI-compatible face of the mesh.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would point to whatever the Host header says
    )
    app.add_exception_handler(StatusError, _status_error)
    app.add_exception_handler(HTTPException, _http_error)
    face = Face(gateway)
    app.add_api_route("/v1/chat/completions", face.chat, methods=["POST"], **openapi.CHAT)
    app.add_api_route("/v1/completions", face.completions, methods=["POST"], **openapi.COMPLETIONS)
    app.add_api_route("/v1/embeddings", face.embeddings, methods=["POST"], **openapi.EMBEDDINGS)
    app.add_api_route("/v1/models", face.models, methods=["GET"], **openapi.MODELS)
    app.add_api_route("/v1/models/{name:path}", face.model, methods=["GET"], **openapi.MODEL)
    app.add_api_route("/v1/usage", face.usage, methods=["GET"], **openapi.USAGE)
    app.add_api_route("/tokenize", face.tokenize, methods=["POST"], **openapi.TOKENIZE)
    files.add_routes(app, gateway, face._authenticate)
    batches.add_routes(app, gateway, face._authenticate)
    app.add_api_route("/health", face.health, methods=["GET"], **openapi.HEALTH)
    app.add_api_route("/ready", face.ready, methods=["GET"], **openapi.READY)
    app.add_middleware(edge.Edge, calls=gateway.calls, metrics=gateway.metrics, draining=lambda: gateway.draining)
    if tracing.is_on():
        app.add_middleware(Traced)
    app.openapi = lambda: openapi.document(app)  # type: ignore[method-assign]
    return app


class Face:
    """The endpoints of one gateway."""

    def __init__(self, gateway: Gateway, name: str = "http") -> None:
        """`name`: whom the metrics count its work for."""
        self._gateway = gateway
        self._generations = Generations(gateway.mesh, gateway.metrics, name)
        self._embeddings = Embeddings(gateway.mesh, gateway.metrics, name)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        caller = await self._authenticate(request)
        body = await self._body(request, fields.CHAT)
        streamed = fields.flag(body, "stream")
        include_usage = fields.include_usage(body, streamed=streamed)
        sampling, names = chat.sampling_fields(body)
        envelope = await self._envelope(request, body, caller, names=names)
        generation = await admit_chat(envelope, body.get("messages"), sampling, chat.options(body))
        (generation,) = await claimed(self._gateway.mesh, caller, envelope.idempotency_key, [generation])
        events = merged(self._announced(request, [generation]), [generation])
        if streamed:
            return sse.EventStream(chat.chunks(events, generation, include_usage=include_usage), self._gateway.slow_reader_seconds)
        answer = await sse.until_disconnect(request.receive, collected(events, [generation]))
        return _json(chat.whole(generation, answer))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        caller = await self._authenticate(request)
        body = await self._body(request, fields.COMPLETIONS)
        streamed, echo = fields.flag(body, "stream"), fields.flag(body, "echo")
        include_usage = fields.include_usage(body, streamed=streamed)
        sampling, names = completions.sampling_fields(body, echo=echo)
        envelope = await self._envelope(request, body, caller, echo=echo, names=names)
        generations = await admit_completion(envelope, body.get("prompt"), sampling)
        generations = await claimed(self._gateway.mesh, caller, envelope.idempotency_key, generations)
        events = merged(self._announced(request, generations), generations, self._generations.reserve)
        if streamed:
            return sse.EventStream(completions.chunks(events, generations, include_usage=include_usage), self._gateway.slow_reader_seconds)
        answer = await sse.until_disconnect(request.receive, collected(events, generations))
        return _json(completions.whole(generations, answer))

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        caller = await self._authenticate(request)
        body = await self._body(request, fields.EMBEDDINGS)
        base64_wanted = embeddings.in_base64(body)
        envelope = await self._envelope(request, body, caller, names={"inputs": "input"}, capability="embed")
        embedding = await admit_embedding(envelope, body.get("input"), body.get("dimensions"))
        (embedding,) = await claimed(self._gateway.mesh, caller, envelope.idempotency_key, [embedding])
        events = self._embeddings.run(embedding, self._announce(request, [embedding]))
        vectors = await sse.until_disconnect(request.receive, embeddings.collected(events, embedding))
        answer = await embeddings.whole(embedding, vectors, base64_wanted=base64_wanted)
        return Response(answer, media_type="application/json")

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        policy = await self._policy(await self._authenticate(request))
        return _json({"object": "list", "data": [objects.model(model) for model in self._gateway.catalogue.list(policy)]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        policy = await self._policy(await self._authenticate(request))
        return _json(objects.model(self._gateway.catalogue.describe(request.path_params["name"], policy)))

    async def usage(self, request: Request) -> Response:
        """GET /v1/usage: the caller's own org's use; for operators any org's, or all."""
        who = await self._caller(request)
        asked = admin_pb2.GetUsageRequest(
            org=request.query_params.get("org", ""),
            days=head.whole(request, "days", 1, MAX_USAGE_DAYS),
            page_size=head.whole(request, "page_size", MAX_USAGE_ROWS, MAX_USAGE_ROWS),
            page_token=request.query_params.get("page_token", ""),
        )
        used = await usage(self._gateway.mesh, who, asked)
        page = {"object": "list", "data": [objects.usage_row(row) for row in used.rows]}
        return _json(page | {"next_page_token": used.next_page_token} if used.next_page_token else page)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        caller = await self._authenticate(request)
        body = await self._body(request, fields.TOKENIZE)
        model = self._model(body, await self._policy(caller))
        text, messages = body.get("prompt"), body.get("messages")
        if (text is None) == (messages is None):
            raise invalid("prompt", "send either prompt or messages")
        if messages is None:
            fields.refuse_chat_fields(body)
            tokens = await count_tokens(model, text, name="prompt")
        else:
            grammar, names = grammar_of(body)
            tokens = await count_chat_tokens(model, messages, chat.options(body), grammar.get("grammar"), names=names)
        return _json({"count": len(tokens), "max_model_len": model.max_model_len, "tokens": list(tokens)})

    async def health(self) -> Response:
        """GET /health: the process answers."""
        return _json({"status": "ok"})

    async def ready(self) -> Response:
        """GET /ready: it takes work; 503 says why not."""
        reason = self._gateway.why_not_ready()
        return _json({"status": "ready"}) if reason is None else _json({"status": "not ready", "reason": reason}, 503)

    # -- what the endpoints share

    async def _authenticate(self, request: Request) -> Caller:
        caller = await self._caller(request)
        caller.require("user")
        return caller

    async def _caller(self, request: Request) -> Caller:
        known = request.scope.get(edge.CALLER)  # a job's line, which no socket brought
        if isinstance(known, Caller):
            return known
        given = request.headers.getlist("authorization")
        if len(given) > 1:
            raise StatusError(Code.UNAUTHENTICATED, f"authorization is given {len(given)} times: send one", reason="AMBIGUOUS_TOKEN")
        return await self._gateway.authenticator.authenticate(given[0] if given else None)

    async def _policy(self, caller: Caller) -> types_pb2.OrgPolicy:
        return await self._gateway.orgs.policy(caller.org)

    async def _body(self, request: Request, known: fields.Fields) -> dict[str, Any]:
        body = await read_json(request)
        unknown = fields.check(body, known, request)
        if unknown:
            edge.of(request)["x-forebay-ignored"] = fields.named(unknown)
        return body

    def _model(
        self, body: Mapping[str, Any], policy: types_pb2.OrgPolicy, sticky: str = "", capability: Capability | None = None
    ) -> ServedModel:
        name = body.get("model")
        if name is not None and not isinstance(name, str):
            raise invalid("model", "model must be a string: see /v1/models")
        return self._gateway.catalogue.resolve(name or "", policy, sticky, capability=capability)

    async def _envelope(
        self,
        request: Request,
        body: Mapping[str, Any],
        caller: Caller,
        *,
        echo: bool = False,
        names: Mapping[str, str] | None = None,
        capability: Capability = "generate",
    ) -> Envelope:
        user, label = validate_label(body.get("user"), name="user"), request.headers.get("x-request-id")
        key = one_key(request.headers.getlist(HEADER))
        policy = await self._policy(caller)
        return Envelope(
            caller=caller,
            # Of a canary's models, a user's conversations stay with one; so do the tries of a key.
            model=self._model(body, policy, sticky=user or key or label or uuid.uuid4().hex, capability=capability),
            policy=policy,
            latency_class=head.asked_class(request, body),
            deadline_seconds=head.asked_deadline(request),
            deadlines=self._gateway.deadlines,
            label=label,
            idempotency_key=key,
            echo=echo,
            max_tokens_cap=self._gateway.max_tokens_cap,
            received_at=request.state.received_at,
            check_queue=self._gateway.mesh.full_queues.check,
            names={"label": "x-request-id", **(names or {})},
        )

    def _announced(self, request: Request, generations: list[Generation]) -> Run:
        """What runs the generations."""
        return functools.partial(self._generations.run, on_lease=self._announce(request, generations))

    @staticmethod
    def _announce(request: Request, admitted: Sequence[Admitted]) -> Callable[[scheduler_pb2.Lease], None]:
        """The answer's headers name the requests; once there is a lease, which the result is to hear of, also where the quota stands."""
        headers, first = edge.of(request), admitted[0]
        headers["x-forebay-request-id"] = ",".join(one.request_id for one in admitted)
        headers.update(head.of_class(first))

        def leased(lease: scheduler_pb2.Lease) -> None:
            headers.update(head.of_class(lowered(first, lease)))
            headers.update(ratelimit.headers(lease.quota))

        return leased


def _json(value: Mapping[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _status_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, StatusError)
    return errors.response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: 404 and 405."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:128]
    if error.status_code == 404:
        return errors.response(errors.HttpError(404, f"there is nothing at {path!a}: see /openapi.json", "UNKNOWN_PATH"))
    assert error.status_code == 405, "the router knows no other"
    methods = set((error.headers or {}).get("Allow", "").split(", "))
    allowed = ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))  # the edge takes HEAD for GET
    words = f"{request.method[:16]} is not for {path!a}: use {allowed}"
    return errors.response(errors.HttpError(405, words, "METHOD_NOT_ALLOWED"), {"allow": allowed})
