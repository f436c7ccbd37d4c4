"""Which of the mesh's roles may call which methods of a server: told by the certificate, never by what a caller says of itself."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc

from services.common import log
from services.common.errors import Code, StatusError, abort
from services.common.tls import role_name

_log = log.get(__name__)

Handler = Any
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Callers(grpc.aio.ServerInterceptor):
    """Refuses calls of other roles. Methods that no entry covers (health, reflection) are for every certificate of the mesh."""

    def __init__(self, rights: Mapping[str, str]) -> None:
        """Role by the beginning of a method's path; the first that fits decides."""
        self._rights = rights
        self._guarded: dict[str, Handler] = {}
        self._told: set[tuple[str, str]] = set()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        """The method's handler behind its guard."""
        handler, method = await continuation(details), details.method
        role = next((role for start, role in self._rights.items() if method.startswith(start)), None)
        if handler is None or role is None:
            return handler
        if method not in self._guarded:
            self._guarded[method] = self._guard(handler, method, role)
        return self._guarded[method]

    def _guard(self, handler: Handler, method: str, role: str) -> Handler:
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        serve = getattr(handler, kind)
        assert not inspect.isasyncgenfunction(serve), f"{method} is a generator; the guard takes coroutines"
        name = role_name(role)

        async def guarded(request: Any, context: Any) -> Any:
            names = [name.decode(errors="replace") for name in context.auth_context().get("x509_subject_alternative_name", ())]
            if name in names:
                return await serve(request, context)
            return await self._refuse(context, method, role, ", ".join(names))

        return handler._replace(**{kind: guarded})

    async def _refuse(self, context: Any, method: str, role: str, shown: str) -> None:
        if (method, shown) not in self._told:  # once: a peer that keeps trying must not fill the log
            self._told.add((method, shown))
            _log.warning("caller_refused", method=method, role=role, certificate=shown)
        words = f"{method} is for the role {role}; the certificate says {shown or 'nothing'}"
        await abort(context, StatusError(Code.PERMISSION_DENIED, words))
