"""POST /v1/embeddings."""

import asyncio
import base64
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import orjson

from forebay.v1 import inference_pb2
from services.common.errors import invalid
from services.gateway.embed_call import FLOAT_BYTES, numbers
from services.gateway.embed_request import Embedding
from services.gateway.embeddings import EmbeddingEvent
from services.gateway.field import shown

_MANY_BYTES = 256 << 10  # of vectors: to write more would hold up the event loop's streams


def in_base64(body: Mapping[str, Any]) -> bool:
    """Whether the field encoding_format asks for base64 of little-endian float32, not for lists of numbers."""
    value = body.get("encoding_format")
    if value not in (None, "float", "base64"):
        raise invalid("encoding_format", f"encoding_format is {shown(value)}: it must be float or base64")
    return value == "base64"


async def collected(events: AsyncGenerator[EmbeddingEvent], embedding: Embedding) -> list[bytes]:
    """Each input's vector, in the inputs' order."""
    vectors = [b""] * len(embedding.inputs)
    async with aclosing(events):
        async for event in events:
            if not isinstance(event, inference_pb2.Started | inference_pb2.Finished):
                for index, values in event:
                    vectors[index] = values
    return vectors


async def whole(embedding: Embedding, vectors: Sequence[bytes], *, base64_wanted: bool) -> bytes:
    """The answer's body."""

    def render() -> bytes:
        data = [
            {"object": "embedding", "index": index, "embedding": _text(values) if base64_wanted else numbers(values)}
            for index, values in enumerate(vectors)
        ]
        num_tokens = embedding.num_prompt_tokens
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return orjson.dumps({"object": "list", "data": data, "model": embedding.model.name, "usage": usage})

    is_small = len(vectors) * embedding.dimensions * FLOAT_BYTES < _MANY_BYTES
    return render() if is_small else await asyncio.to_thread(render)


def _text(values: bytes) -> str:
    return base64.b64encode(values).decode()
