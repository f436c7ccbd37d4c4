"""What /openapi.json says of files and jobs."""

from typing import Any

from services.gateway.batch_lines import ENDPOINTS
from services.gateway.batches import MAX_PAGE
from services.gateway.http.openapi import HEADER_ID, Schema, get, post, query

_PAGE = [
    query("after", {"type": "string", "description": "The last id of the page before."}),
    query("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "description": "20 by default."}),
    query("order", {"enum": ["desc"], "description": "Newest first."}),
]
_FORM: Schema = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "JSON lines in UTF-8, of at most 1 MiB each."},
        "purpose": {"enum": ["batch"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 1, "description": "At most what the mesh keeps files for."},
    },
}
_BATCH: dict[str, Schema] = {
    "input_file_id": {"type": "string", "minLength": 1, "maxLength": 64},
    "endpoint": {"enum": list(ENDPOINTS)},
    "completion_window": {"type": ["string", "null"], "pattern": "^([1-9]|1[0-9]|2[0-4])h$", "description": "Default 24h."},
    "metadata": {"type": ["object", "null"], "maxProperties": 16, "additionalProperties": {"type": "string", "maxLength": 512}},
}


def _with(document: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {**document, "openapi_extra": {**document["openapi_extra"], **extra}}


def _paged(document: dict[str, Any], *more: Schema) -> dict[str, Any]:
    return _with(document, parameters=[HEADER_ID, *_PAGE, *more])


def _named(document: dict[str, Any], name: str) -> dict[str, Any]:
    named = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    return _with(document, parameters=[HEADER_ID, named])


CREATE_FILE = _with(
    get("Upload a file of lines", 401, 403, 408, 413, 415, 503),
    requestBody={"required": True, "content": {"multipart/form-data": {"schema": _FORM}}},
)
FILES = _paged(get("List the org's files", 401, 403, 503), query("purpose", {"enum": ["batch", "batch_output"]}))
FILE = _named(get("Describe a file", 401, 403, 404, 503), "file_id")
CONTENT = _named(get("Read a file", 401, 403, 404, 503), "file_id")
DELETE_FILE = _named(get("Delete a file that no open job needs", 401, 403, 404, 503), "file_id")
CREATE_BATCH = post("Begin a job", _BATCH, ["input_file_id", "endpoint"], [HEADER_ID], runs=False)
BATCHES = _paged(get("List the org's jobs", 401, 403, 503))
BATCH = _named(get("Describe a job", 401, 403, 404, 503), "batch_id")
CANCEL_BATCH = _named(get("Cancel a job: lines without a result get one that says so", 401, 403, 404, 503), "batch_id")
