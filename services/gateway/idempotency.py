"""Requests with an idempotency key: a key's tries are one request, with one id, one seed and one bill.

What a key stands for is kept by schedulers, as hashes and numbers; the answer isn't kept, it is made again.
"""

import hashlib
import hmac
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from forebay.v1 import scheduler_pb2
from services.common.errors import Code, StatusError, invalid
from services.gateway.auth import Caller
from services.gateway.embed_request import Embedding
from services.gateway.mesh import Mesh
from services.gateway.request import Generation
from services.gateway.wire import cache_salt, engine_sampling

HEADER = "idempotency-key"
MAX_KEY_CHARS = 255
_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}")
_TAG = b"forebay idempotency v1\0"

Request = TypeVar("Request", Generation, Embedding)


def one_key(given: Sequence[str]) -> str:
    """The key among the header's values; empty where there is none. INVALID_ARGUMENT."""
    if not given:
        return ""
    if len(given) > 1:
        raise invalid(HEADER, f"{HEADER} is given {len(given)} times: send one")
    if not _KEY.fullmatch(given[0]):
        words = f"it must have 1 to {MAX_KEY_CHARS} visible characters of ASCII, such as a UUID"
        raise invalid(HEADER, f"{HEADER} is {given[0][:40]!a} ({len(given[0])} characters): {words}")
    return given[0]


async def claimed(mesh: Mesh, caller: Caller, key: str, requests: Sequence[Request]) -> list[Request]:
    """The requests (one per prompt) as the key's first try had them; as they are where there is no key.

    Raises INVALID_ARGUMENT for another request's key, FAILED_PRECONDITION where the model has changed since, UNAVAILABLE.
    """
    if not key:
        return list(requests)
    first = requests[0]
    own = scheduler_pb2.ClaimRequest(
        org=caller.org,
        key_hash=hashlib.sha256(_TAG + caller.actor.encode() + b"\0" + key.encode()).digest(),
        digest=_digest(caller.org, requests),
        request_id=first.request_id[:-2] + "00",
        seed=first.sampling.seed if isinstance(first, Generation) else 0,
        model=first.model.full_name,
        model_version=first.model.version,
        deadline_seconds=first.deadline_seconds,
    )
    # Asked twice, it is two tries: the second counts.
    claim = await mesh.ask_patiently(lambda scheduler: scheduler.stub.Claim(own, timeout=mesh.limits.scheduler_answer))
    if (claim.model, claim.model_version) != (own.model, own.model_version):
        words = f"this idempotency key's answer was made by {claim.model} with other weights: it can't be made again, use a new key"
        raise StatusError(Code.FAILED_PRECONDITION, words, reason="IDEMPOTENCY_MODEL_CHANGED")
    stem, created = claim.request_id[:-2], claim.created_unix_seconds
    return [
        request.claimed(f"{stem}{number:02x}", claim.seed + number, claim.lost_epoch, created) for number, request in enumerate(requests)
    ]


def _digest(org: str, requests: Sequence[Generation] | Sequence[Embedding]) -> bytes:
    """Of all that decides on the answer: equal on every gateway. Form (streamed or whole), class and deadline aren't in it."""
    digest = hmac.new(cache_salt(org), _TAG, hashlib.sha256)
    for request in requests:
        for part in _parts(request):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def _parts(request: Generation | Embedding) -> Iterator[bytes]:
    yield request.model.full_name.encode()
    if isinstance(request, Embedding):
        yield f"embeddings {request.dimensions}".encode()
        for ids in request.inputs:
            yield array("i", ids).tobytes()
        return
    sampling = replace(request.sampling, seed=0) if request.seed_is_drawn else request.sampling
    yield f"{request.operation} {request.echo} {request.seed_is_drawn} {request.reply} {request.sampling.stop}".encode()
    yield engine_sampling(sampling).SerializeToString(deterministic=True)
    yield array("i", request.prompt_token_ids).tobytes()
