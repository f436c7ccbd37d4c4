"""A running mesh as a client sees it: where it is, the token, and one line for whatever it refuses."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from services.cli.home import Home
from services.cli.options import shown, utf8
from services.cli.problem import Problem
from services.common import rpc
from services.common.address import split


@dataclass(frozen=True)
class Target:
    """host:port of a gateway's gRPC face, and a token for it."""

    address: str
    token: str

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """What every call carries."""
        return [("authorization", f"Bearer {self.token}")]

    def channel(self) -> grpc.aio.Channel:
        """A channel; the caller closes it."""
        return rpc.channel(self.address)


def find() -> Target:
    """FOREBAY_ADDRESS and FOREBAY_TOKEN, else the mesh that `forebay up` keeps running. Problem where there is none."""
    address, token = os.environ.get("FOREBAY_ADDRESS"), os.environ.get("FOREBAY_TOKEN")
    _check(address, token)
    if address and token:
        return Target(address, token)
    home = Home.from_environment()
    running = home.read()
    if address and running is not None:
        return Target(address, running.token)
    if address:
        raise Problem("FOREBAY_ADDRESS is set but FOREBAY_TOKEN isn't: set it to a token that the mesh accepts")
    if running is None:
        raise Problem(f"no mesh is up from {home.path}: start one with `forebay up`, or set FOREBAY_ADDRESS and FOREBAY_TOKEN")
    return Target(running.grpc_address, token or running.token)


def _check(address: str | None, token: str | None) -> None:
    """Problem for what can't be an address, or can't go into a call's metadata. Never shows a token."""
    try:
        if address:
            split(utf8(address, "FOREBAY_ADDRESS"))
    except ValueError as error:
        raise Problem(f"FOREBAY_ADDRESS is {shown(address)}: {error}") from error
    odd = re.search(r"[^ -~]", token or "")
    if odd:
        what = "a line break" if odd[0] in "\r\n" else f"the character {odd[0]!a}"
        raise Problem(f"FOREBAY_TOKEN has {what} at position {odd.start()}: a token is printable ASCII, such as `forebay keys` prints")


@contextmanager
def friendly_errors(target: Target) -> Iterator[None]:
    """Turns what a gateway answers into one line."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        words = error.details() or "no reason given"
        if error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in words.lower():
            raise Problem(f"nothing answers at {target.address}: is the mesh up?") from error
        raise Problem(f"{error.code().name}: {words}") from error
