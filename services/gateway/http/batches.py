"""/v1/batches: jobs, as OpenAI has them."""

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from forebay.v1 import batch_pb2
from services.common.errors import invalid
from services.gateway.batches import Jobs
from services.gateway.field import shown
from services.gateway.gateway import Gateway
from services.gateway.http import openapi_batches
from services.gateway.http.body import read_json
from services.gateway.http.files import Authenticate, json_response, list_object, page

_FIELDS = frozenset(("input_file_id", "endpoint", "completion_window", "metadata"))
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled", "expires")


def add_routes(app: FastAPI, gateway: Gateway, authenticate: Authenticate) -> None:
    """Puts the endpoints into the application."""
    face = BatchesFace(gateway, authenticate)
    app.add_api_route("/v1/batches", face.create_batch, methods=["POST"], **openapi_batches.CREATE_BATCH)
    app.add_api_route("/v1/batches", face.list_batches, methods=["GET"], **openapi_batches.BATCHES)
    app.add_api_route("/v1/batches/{batch_id}", face.batch, methods=["GET"], **openapi_batches.BATCH)
    app.add_api_route("/v1/batches/{batch_id}/cancel", face.cancel_batch, methods=["POST"], **openapi_batches.CANCEL_BATCH)


class BatchesFace:
    """The endpoints."""

    def __init__(self, gateway: Gateway, authenticate: Authenticate) -> None:
        self._authenticate = authenticate
        self._gateway = gateway
        self._jobs = Jobs(gateway.mesh)

    async def create_batch(self, request: Request) -> Response:
        """POST /v1/batches."""
        caller = await self._authenticate(request)
        body = await read_json(request)
        for name, value in body.items():
            if name not in _FIELDS and value is not None:
                raise invalid(name[:64], f"{name[:64]!a} is not a field of a batch: there are {', '.join(sorted(_FIELDS))}")
        file_id = body.get("input_file_id")
        if not isinstance(file_id, str) or not 0 < len(file_id) <= 64:
            raise invalid("input_file_id", f"input_file_id is {shown(file_id)}: it must be the id of a file")
        batch = await self._jobs.create(
            caller.org,
            file_id,
            body.get("endpoint"),
            window=body.get("completion_window"),
            metadata=body.get("metadata"),
            key=request.headers.get("idempotency-key", ""),
        )
        self._gateway.wake_runner()
        return json_response(batch_object(batch))

    async def list_batches(self, request: Request) -> Response:
        """GET /v1/batches."""
        caller = await self._authenticate(request)
        listed = await self._jobs.batches(caller.org, *page(request))
        return json_response(list_object([batch_object(batch) for batch in listed.batches], more=listed.has_more))

    async def batch(self, request: Request) -> Response:
        """GET /v1/batches/{batch_id}."""
        caller = await self._authenticate(request)
        return json_response(batch_object(await self._jobs.batch(caller.org, request.path_params["batch_id"])))

    async def cancel_batch(self, request: Request) -> Response:
        """POST /v1/batches/{batch_id}/cancel."""
        caller = await self._authenticate(request)
        batch = await self._jobs.stop(caller.org, request.path_params["batch_id"])
        self._gateway.wake_runner()
        return json_response(batch_object(batch))


def batch_object(batch: batch_pb2.Batch) -> dict[str, Any]:
    """OpenAI's batch."""
    wrong = [{"code": e.code, "message": e.message, "param": e.param or None, "line": e.line or None} for e in batch.errors]
    told: dict[str, Any] = {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": wrong} if wrong else None,
        "input_file_id": batch.input_file_id,
        "completion_window": f"{batch.window_seconds // 3600}h",
        "status": status_word(batch.status),
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        "created_at": batch.created_at,
        **{f"{name}_at": getattr(batch, f"{name}_at") or None for name in _TIMES},
        "request_counts": {"total": batch.num_lines, "completed": batch.num_completed, "failed": batch.num_failed},
        "metadata": dict(batch.metadata) or None,
    }
    return told | {"waiting_for": batch.waiting_for} if batch.waiting_for else told


def status_word(status: batch_pb2.BatchStatus.ValueType) -> str:
    """OpenAI's word: validating, in_progress, ..."""
    return batch_pb2.BatchStatus.Name(status).removeprefix("BATCH_STATUS_").lower()
