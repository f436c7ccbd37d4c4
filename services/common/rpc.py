"""gRPC channels and servers with the mesh's limits: message size, keepalive, health, reflection, channelz."""

import socket
from collections.abc import Iterable

import grpc
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common import traced_rpc
from services.common.address import split
from services.common.tls import Identity, role_name

MAX_MESSAGE_BYTES = 8 << 20
"""A 1 MiB prompt as token ids is under 4 MiB; what is larger is refused by gRPC with RESOURCE_EXHAUSTED and this number."""

_SHARED_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
# A half-open connection is noticed after keepalive time + timeout.
_CHANNEL_OPTIONS = [
    *_SHARED_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # A stream that is not being read holds so many bytes here; left to itself, gRPC lets the window grow to many megabytes.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 256 << 10),
]
# Clients may ping every 5 s; the default of 5 minutes ends long silent streams with GOAWAY too_many_pings.
_SERVER_OPTIONS = [
    *_SHARED_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 10_000),  # a connection that doesn't speak HTTP/2 by then is closed
]


def channel(address: str, identity: Identity | None = None, role: str = "") -> grpc.aio.Channel:
    """A channel to host:port that reconnects within .4 s of its peer's return: less than a gateway waits for a scheduler.

    With an identity: mutual TLS, with a peer whose certificate is of that role.
    """
    backoff = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 300)]
    options: list[tuple[str, int | str]] = [*_CHANNEL_OPTIONS, *backoff]
    if identity is None:
        return traced_rpc.traced(grpc.aio.insecure_channel(address, options=options))
    options.append(("grpc.ssl_target_name_override", role_name(role)))
    return traced_rpc.traced(grpc.aio.secure_channel(address, identity.channel_credentials(), options=options))


def server(
    interceptors: Iterable[grpc.aio.ServerInterceptor] = (),
    *,
    max_connections: int | None = None,
    edge: bool = False,
    share_port: bool = False,
) -> grpc.aio.Server:
    """A server with the mesh's limits; add services, then `add_standard_services`, then a port.

    Connections beyond `max_connections` are closed at once, which clients see as UNAVAILABLE. An `edge` is where traces begin.
    `share_port`: other processes may listen on its port, too.
    """
    bound = [] if max_connections is None else [("grpc.max_allowed_incoming_connections", max_connections)]
    traced = traced_rpc.server_interceptors(edge=edge)
    return grpc.aio.server(
        interceptors=[*traced, *interceptors], options=[*_SERVER_OPTIONS, *bound, ("grpc.so_reuseport", int(share_port))]
    )


def add_standard_services(server: grpc.aio.Server, service_names: Iterable[str], *, internal: bool = False) -> health.aio.HealthServicer:
    """Adds grpc.health.v1 and reflection, and channelz on internal servers.

    Health says SERVING at once: call `set_health(serving=False)` before the server starts where that is not yet true.
    """
    names = list(service_names)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names += [health.SERVICE_NAME, reflection.SERVICE_NAME]
    if internal:
        channelz.add_channelz_servicer(server)
    reflection.enable_server_reflection(names, server)
    return servicer


async def set_health(servicer: health.aio.HealthServicer, *, serving: bool, service_names: Iterable[str] = ()) -> None:
    """Tells health checks whether this server takes work."""
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ["", *service_names]:
        await servicer.set(name, status)


def bind(server: grpc.aio.Server, address: str, identity: Identity | None = None, *, share_port: bool = False) -> int:
    """Binds host:port (port 0: any) and returns the port. OSError names the address where it is taken. `share_port` as the server's."""
    try:
        _try_to_bind(address, share_port=share_port)
        return server.add_insecure_port(address) if identity is None else server.add_secure_port(address, identity.server_credentials())
    except (RuntimeError, OSError) as error:
        raise OSError(f"cannot listen on {address}: choose another port or stop what uses it") from error


def _try_to_bind(address: str, *, share_port: bool) -> None:
    """Fails as gRPC would, but without the line that gRPC's core writes to standard error then."""
    host, port = split(address)
    for family, kind, protocol, _, name in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[:1]:
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(share_port))
            listener.bind(name)
