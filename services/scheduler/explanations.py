"""Why ended requests took as long as they did, kept for an hour and bounded in number and bytes. Written with Finish, read by Explain."""

import base64
from dataclasses import dataclass

from forebay.v1 import explain_pb2
from services.common.errors import Code, StatusError
from services.scheduler import keys
from services.scheduler.store import Call, Store


@dataclass(frozen=True)
class Bounds:
    """How long records are kept, how many, and how large one and all may be."""

    seconds: int = 3600
    record_bytes: int = 64 << 10
    records: int = 100_000
    bytes: int = 64 << 20


class Explanations:
    """The records of the last hour."""

    def __init__(self, store: Store, bounds: Bounds | None = None) -> None:
        self._store = store
        self._bounds = bounds or Bounds()

    def keep(self, request_id: str, explanation: explain_pb2.Explanation) -> Call | None:
        """What writes a request's record down; of a large one its times alone, without what happened in them. None: it is no record."""
        bounds = self._bounds
        record = explanation.SerializeToString()
        if len(record) > bounds.record_bytes:
            record = _without_details(explanation).SerializeToString()
        if explanation.request_id != request_id or len(record) > bounds.record_bytes:
            return None
        key_names = [keys.explanation(request_id), keys.EXPLAINED, keys.EXPLAINED_BYTES]
        text = base64.b64encode(record).decode()  # the store's connections speak text
        return Call("explain", key_names, [request_id, text, bounds.seconds, bounds.records, bounds.bytes])

    async def get(self, request_id: str, org: str = "") -> explain_pb2.Explanation:
        """The record; NOT_FOUND where there is none, or it isn't `org`'s, in the same words. An empty org may see all."""
        (text,) = await self._store.commands(["GET", keys.explanation(request_id)])
        if text is not None:
            explanation = explain_pb2.Explanation.FromString(base64.b64decode(text))
            if org in ("", explanation.org):
                return explanation
        words = f"there is no record of request {request_id[:64]!a}: it must have ended, at most {self._bounds.seconds // 60} minutes ago"
        raise StatusError(Code.NOT_FOUND, words, reason="NOT_EXPLAINED")


def _without_details(explanation: explain_pb2.Explanation) -> explain_pb2.Explanation:
    short = explain_pb2.Explanation()
    short.CopyFrom(explanation)
    for attempt in short.attempts:
        attempt.ClearField("decision")
        attempt.ClearField("timeline")
    return short
