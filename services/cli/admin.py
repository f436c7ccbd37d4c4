"""Calls of AdminService, as the operator that FOREBAY_TOKEN or the mesh started here makes one."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from forebay.v1 import admin_pb2_grpc
from services.cli import client

_TIMEOUT_SECONDS = 10
Answer = TypeVar("Answer", bound=Message)


def ask(method: Callable[[Any], Callable[..., Any]], request: Message, answer: type[Answer]) -> Answer:
    """What the mesh says to one call. Problem, in one line, where it refuses."""
    target = client.find()

    async def call() -> Any:
        async with target.channel() as channel:
            return await method(admin_pb2_grpc.AdminServiceStub(channel))(request, metadata=target.metadata, timeout=_TIMEOUT_SECONDS)

    with client.friendly_errors(target):
        said = asyncio.run(call())
    assert isinstance(said, answer)
    return said
