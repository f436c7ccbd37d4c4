"""One connection of the OpenAI face: bounded in number and in the time that a request's head may take.

What can't be read as HTTP gets the same error object as everything else. Nothing here touches a request once its head is whole.
"""

import asyncio
import logging
import sys
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.common import log
from services.gateway.http import errors

_log = log.get(__name__)

_LINGER_SECONDS = 2.0  # closing at once would reset the connection where bytes are unread, and lose the refusal on its way


@dataclass(frozen=True)
class ConnectionLimits:
    """What a client may hold without asking for anything."""

    max_connections: int = 4096
    head_seconds: float = 10.0
    """From the first byte of a request's head (at first: from the connection itself) to its last."""
    idle_seconds: float = 75.0
    """Between requests, and for each step in which an answer that was written whole is taken."""


class Connection(H11Protocol):
    """uvicorn's own protocol, with limits."""

    def __init__(self, limits: ConnectionLimits, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        # uvicorn's warnings are about what strangers send: they would fill the log at will. Its errors stay.
        self.logger = self.logger.getChild("connection")
        self.logger.setLevel(logging.ERROR)
        self._limits = limits
        self._head_clock: asyncio.TimerHandle | None = None
        self._refused = False
        self._unsent: float = float("inf")
        self.timeout_keep_alive = limits.idle_seconds  # type: ignore[assignment]  # call_later takes fractions, too

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Refuses one connection too many, whatever it is about to ask."""
        super().connection_made(transport)
        most = self._limits.max_connections
        if len(self.connections) > most:
            self._refuse(503, f"this gateway has {most} connections open, the most that it takes: try again", "TOO_MANY_CONNECTIONS")
        else:
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leaves no clock behind."""
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads on, but nothing after a refusal."""
        if not self._refused:
            super().data_received(data)
            self._watch_head()

    def on_response_complete(self) -> None:
        """The next head may have begun already."""
        self._unsent = float("inf")
        super().on_response_complete()
        if self.conn.trailing_data[0]:
            self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when h11 can't go on, with h11's error still at hand."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            self._refuse(
                431, f"the request's head is larger than {self.config.h11_max_incomplete_event_size} bytes: send less", "HEAD_TOO_LARGE"
            )
            return
        plain = " without TLS" if self.scheme == "http" else ""
        why = str(error or msg).partition(": b")[0]  # without the bytes, which may hold a token
        self._refuse(status, f"the request can't be read ({why}): send HTTP/1.1{plain}; gRPC has its own address", "MALFORMED_HTTP")

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, unless its client still takes the last answer; drops it where the client has stopped."""
        left = self.transport.get_write_buffer_size()
        if not left:
            super().timeout_keep_alive_handler()
        elif left < self._unsent:
            self._unsent = left
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        else:
            _log.info("slow_reader_given_up", seconds=self.timeout_keep_alive)
            self.transport.abort()

    def _watch_head(self) -> None:
        """The clock runs while no request is being answered, and isn't set back by a byte more."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_clock()
        elif self._head_clock is None and not self.transport.is_closing():
            self._head_clock = self.loop.call_later(self._limits.head_seconds, self._head_too_slow)

    def _stop_clock(self) -> None:
        if self._head_clock is not None:
            self._head_clock.cancel()
            self._head_clock = None

    def _head_too_slow(self) -> None:
        self._head_clock = None
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            seconds = self._limits.head_seconds
            self._refuse(408, f"the request's head had not come whole after {seconds:g} s: send it faster", "HEAD_TOO_SLOW")
        else:  # nothing came, or the rest of a body that has its answer: there is nobody to tell
            self.timeout_keep_alive_handler()

    def _refuse(self, status: int, message: str, reason: str) -> None:
        """Answers, closes our half, and the other a little later. The app hears that the client is gone."""
        self._refused = True
        self.connections.discard(self)  # counted, those that are refused and try again would keep each other out
        self._stop_clock()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun, so no other can
            self.transport.close()
            return
        request_id = uuid4().hex
        _log.debug("connection_refused", reason=reason, request_id=request_id)
        answer = errors.response(errors.HttpError(status, message, reason), {"x-request-id": request_id})
        answer.headers["connection"] = "close"
        head = h11.Response(status_code=status, headers=answer.raw_headers, reason=HTTPStatus(status).phrase.encode())
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        if self.transport.can_write_eof():  # TLS can't
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)
