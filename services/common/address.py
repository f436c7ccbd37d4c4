"""host:port, as settings, announcements and registrations write it. IPv6 hosts stand in brackets."""

import re

_HOST_PORT = re.compile(r"\[([0-9a-fA-F:.]+(?:%\w+)?)\]:(\d{1,5})|([^:\s\[\]/@]+):(\d{1,5})")
_EVERY_INTERFACE = ("0.0.0.0", "::")  # noqa: S104  # recognised, not listened on


def split(address: str) -> tuple[str, int]:
    """Host, without brackets, and port. ValueError for anything but host:port."""
    parts = _HOST_PORT.fullmatch(address)
    host, port = (parts[1] or parts[3], int(parts[2] or parts[4])) if parts else ("", 0)
    if not host or port > 65535:
        raise ValueError("not host:port, such as 127.0.0.1:50052 or [::1]:50052")
    return host, port


def join(host: str, port: int) -> str:
    """What `split` takes apart; a host may come with its brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def with_port(address: str, port: int) -> str:
    """`address` with the port that it got where it asked for any."""
    return join(split(address)[0], port)


def reachable(address: str, host: str) -> str:
    """`address`, by the name `host` where it listens on every interface."""
    listens, port = split(address)
    return join(host, port) if listens in _EVERY_INTERFACE else address
