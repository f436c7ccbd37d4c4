"""OpenAI's objects of what is listed: models, and rows of use."""

from typing import Any

from forebay.v1 import admin_pb2
from services.gateway.metrics import CLASS_NAMES
from services.gateway.models import ServedModel


def model(model: ServedModel) -> dict[str, Any]:
    """A model."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "forebay",
        "max_model_len": model.max_model_len,
        "aliases": list(model.aliases),
        "version": model.version,
        "level": model.level,
        "ready": model.ready,
        "capabilities": [model.capability],
    }


def usage_row(row: admin_pb2.UsageRow) -> dict[str, Any]:
    """What an org used of one model in one class on one day."""
    return {
        "object": "usage",
        "org": row.org,
        "day": row.day,
        "model": row.model,
        "class": CLASS_NAMES[row.latency_class],
        "requests": row.num_requests,
        "failed": row.num_failed,
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": row.completion_tokens,
        "cached_tokens": row.cached_tokens,
    }
