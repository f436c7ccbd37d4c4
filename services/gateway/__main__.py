"""`python -m services.gateway`: both faces on one event loop, until SIGTERM."""

import asyncio
import functools
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry

from services.common import log, process, rpc, tls, tracing
from services.common.address import with_port
from services.common.handover import DEAF_SECONDS, turn_deaf
from services.common.pem import PemFiles
from services.common.process import HttpServer, InternalHttp, announce
from services.common.settings import SettingsError, read
from services.common.tls import Identity
from services.gateway.api_keys import ApiKeys
from services.gateway.auth import Authenticator
from services.gateway.batch_runner import BatchRunner
from services.gateway.batches import Jobs
from services.gateway.catalogue import Catalogue
from services.gateway.fleet import FleetWatch
from services.gateway.gateway import Gateway, OpenCalls
from services.gateway.http.app import create_app
from services.gateway.http.connection import Connection, ConnectionLimits
from services.gateway.http.line import LineFace
from services.gateway.keys import FileKeys, KeySource, UrlKeys
from services.gateway.mesh import Mesh
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import Models
from services.gateway.oidc import OidcKeys
from services.gateway.org_labels import OrgLabels
from services.gateway.orgs import Orgs
from services.gateway.server import SERVICE_NAMES, make_server
from services.gateway.settings import GatewaySettings
from services.policy.watched import PolicyFile

_FAREWELL_SECONDS = 1.0
"""Answers close their connections for so long before idle ones are closed, which a request may just be on its way to."""


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """A gateway's life: listen, serve, and on `stop` take nothing new, let open streams end, close."""
    registry, public = CollectorRegistry(), public_identity(settings)
    gateway = build(settings, registry)
    # Whatever fails on the way, what is open by then is closed.
    async with AsyncExitStack() as parts:
        parts.push_async_callback(gateway.mesh.close)
        await gateway.fleet.look()
        watch = asyncio.create_task(gateway.fleet.run(), name="watch the fleet")
        parts.push_async_callback(_cancel, watch)
        internal = InternalHttp(settings.internal_address, registry, gateway.why_not_ready)
        parts.push_async_callback(internal.stop)
        grpc_server, health = make_server(gateway, settings.max_connections, share_port=settings.share_ports)
        parts.push_async_callback(grpc_server.stop, None)
        http_server = HttpServer(
            create_app(gateway),
            settings.http_address,
            drain_seconds=round(settings.drain_seconds),
            protocol=functools.partial(Connection, ConnectionLimits(settings.max_connections)),
            tls=public.server_context() if public else None,
            share_port=settings.share_ports,
        )
        parts.push_async_callback(http_server.stop)
        grpc_port = rpc.bind(grpc_server, settings.grpc_address, public, share_port=settings.share_ports)
        http_port, internal_port = await http_server.start(), await internal.start()
        await grpc_server.start()
        runner = asyncio.create_task(_runner(gateway, settings.batch_lines).run(), name="run jobs")
        parts.push_async_callback(_cancel, runner)
        announce(
            "listening",
            service="gateway",
            grpc_address=with_port(settings.grpc_address, grpc_port),
            http_address=with_port(settings.http_address, http_port),
            internal_address=with_port(settings.internal_address, internal_port),
        )
        await process.until(stop, watch, runner)
        gateway.draining = True
        await _cancel(runner)  # its lines are for others now
        await rpc.set_health(health, serving=False, service_names=SERVICE_NAMES)
        if settings.share_ports:
            await _hand_over(grpc_port, http_port)
        await asyncio.gather(grpc_server.stop(settings.drain_seconds), http_server.stop())


async def _hand_over(*ports: int) -> None:
    """Those who keep a connection of HTTP are told to open another, which the other gateways will have; then nobody new is heard."""
    await asyncio.sleep(_FAREWELL_SECONDS)
    turn_deaf(*ports)
    await asyncio.sleep(DEAF_SECONDS)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


def _runner(gateway: Gateway, most: int) -> BatchRunner:
    """What runs jobs' lines here."""
    runner = BatchRunner(Jobs(gateway.mesh), LineFace(gateway).answer, gateway.metrics, most=most)
    gateway.wake_runner = runner.wake
    return runner


def build(settings: GatewaySettings, registry: CollectorRegistry) -> Gateway:
    """The gateway's parts, from its settings."""
    models = Models.from_entries(settings.models)
    policy = PolicyFile(settings.policy_file)
    mesh = Mesh(settings.scheduler_addresses, identity=tls.mutual(settings, "gateway"), region=settings.region)
    orgs = Orgs(mesh)
    return Gateway(
        authenticator=_authenticator(settings, ApiKeys(mesh)),
        catalogue=Catalogue(models, lambda: policy.policy.models),
        mesh=mesh,
        orgs=orgs,
        fleet=FleetWatch(mesh, models, orgs),
        metrics=GatewayMetrics(registry, OrgLabels(settings.metrics_orgs, lambda: policy.policy.orgs)),
        calls=OpenCalls(settings.max_open_calls),
        max_tokens_cap=settings.max_tokens_cap,
        policy=policy,
    )


def public_identity(settings: GatewaySettings) -> Identity | None:
    """What clients are shown; None: the faces are plain. SettingsError for files that can't be used."""
    files = tls.given(settings, "public_tls_cert_file", "public_tls_key_file")
    return Identity(PemFiles(*files)) if files else None


def _authenticator(settings: GatewaySettings, api_keys: ApiKeys) -> Authenticator:
    keys, issuer = _keys(settings), settings.jwt_issuer or settings.oidc_issuer
    if settings.oidc_issuer and issuer != settings.oidc_issuer:
        raise SettingsError("FOREBAY_JWT_ISSUER and FOREBAY_OIDC_ISSUER differ: leave FOREBAY_JWT_ISSUER out, its tokens carry the other")
    return Authenticator(keys, issuer=issuer, audience=settings.jwt_audience, api_key_owner=api_keys.caller)


def _keys(settings: GatewaySettings) -> KeySource:
    if [bool(place) for place in (settings.jwks_file, settings.jwks_url, settings.oidc_issuer)].count(True) != 1:
        raise SettingsError("set one of FOREBAY_JWKS_FILE, FOREBAY_JWKS_URL and FOREBAY_OIDC_ISSUER: it says whose tokens are trusted")
    if settings.jwks_file:
        return FileKeys(Path(settings.jwks_file))
    return UrlKeys(settings.jwks_url) if settings.jwks_url else OidcKeys(settings.oidc_issuer)


def main() -> int:
    """0 after a stop by signal; 1, and one line on stderr, for a setting or address that can't be used."""
    try:
        settings = read(GatewaySettings)
        log.setup("gateway", settings.log_level)
        tracing.setup("gateway")
        process.run(functools.partial(serve, settings))
    except (SettingsError, OSError, ValueError) as error:  # ValueError: what a model's files are blamed for
        print(f"forebay gateway: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
