"""What watching costs: seconds of a scrape after load, and how many series junk of strangers makes. On a mesh of its own.

Prints JSON lines {"figure", "value", "unit", "target", "holds"}.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp
import grpc

from bench.figure import line, show
from bench.mesh import Mesh, internal_addresses, started
from bench.traffic import Traffic
from forebay.v1 import inference_pb2, inference_pb2_grpc

SCRAPE_TARGET_MS, JUNK_TARGET = 200.0, 49.0  # under 50
SCRAPES = 20
OPENMETRICS = {"accept": "application/openmetrics-text;version=1.0.0"}
_AT_ONCE = 32


async def scrape(http: aiohttp.ClientSession, address: str) -> tuple[float, int]:
    """(milliseconds, series) of one answer."""
    start = time.perf_counter()
    async with http.get(f"http://{address}/metrics", headers=OPENMETRICS) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    milliseconds = 1e3 * (time.perf_counter() - start)
    return milliseconds, sum(not row.startswith("#") for row in text.splitlines())


async def series(http: aiohttp.ClientSession, addresses: Mapping[str, str]) -> int:
    """Of all processes together."""
    return sum([(await scrape(http, address))[1] for address in addresses.values()])


class Stranger:
    """Sends what makes no sense: models, paths, methods, classes, ids."""

    def __init__(self, mesh: Mesh, http: aiohttp.ClientSession, channel: grpc.aio.Channel) -> None:
        self._mesh = mesh
        self._http = http
        self._channel = channel
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._headers = {"authorization": f"Bearer {mesh.token}"}

    async def send(self, number: int) -> None:
        """The number-th piece of junk."""
        junk = f"junk-{number}"
        match number % 6:
            case 0:
                await self._ask("POST", "/v1/completions", json={"model": junk, "prompt": "a"})
            case 1:
                await self._ask("POST", f"/{junk}/{junk}", json={})
            case 2:
                await self._ask(f"JUNK{number}", "/v1/models")
            case 3:
                await self._ask("GET", f"/v1/models/{junk}", headers={"x-request-id": junk, "x-forebay-class": junk})
            case 4:
                method: Any = self._channel.unary_unary(f"/forebay.v1.{junk}/{junk}")
                with suppress(grpc.aio.AioRpcError):
                    await method(b"", metadata=self._mesh.metadata)
            case _:
                with suppress(grpc.aio.AioRpcError):
                    request = inference_pb2.GenerateRequest(model=junk, text="a", label=junk)
                    await self._stub.Generate(request, metadata=self._mesh.metadata).read()

    async def _ask(self, method: str, path: str, headers: Mapping[str, str] | None = None, json: object = None) -> None:
        url = self._mesh.http_url.removesuffix("/v1") + path
        async with self._http.request(method, url, json=json, headers={**self._headers, **(headers or {})}) as answer:
            await answer.read()
            assert answer.status >= 400, (method, path, answer.status)


async def junk_series(mesh: Mesh, http: aiohttp.ClientSession, addresses: Mapping[str, str], count: int) -> int:
    """Series that so many pieces of junk have made."""
    before = await series(http, addresses)
    left = iter(range(count))
    async with grpc.aio.insecure_channel(mesh.grpc_address) as channel:
        stranger = Stranger(mesh, http, channel)

        async def sender() -> None:
            for number in left:
                await stranger.send(number)

        await asyncio.gather(*(sender() for _ in range(_AT_ONCE)))
    return await series(http, addresses) - before


async def run(mesh: Mesh, seconds: float, count: int) -> None:
    """Load, scrapes, junk, in this order."""
    addresses = internal_addresses(mesh)
    orgs = [f"org-{number}" for number in range(60)]  # more than have series of their own
    await Traffic(mesh, orgs).run(clients=16, seconds=seconds)
    async with aiohttp.ClientSession() as http:
        worst = 0.0
        for name, address in addresses.items():
            seen = [await scrape(http, address) for _ in range(SCRAPES)]
            slowest = max(milliseconds for milliseconds, _ in seen)
            worst = max(worst, slowest)
            show(line(f"scrape_p50_ms_{name}", statistics.median(milliseconds for milliseconds, _ in seen), "ms"))
            show(line(f"scrape_max_ms_{name}", slowest, "ms", SCRAPE_TARGET_MS, at_most=True))
            show(line(f"series_{name}", seen[-1][1], "series"))
        show(line("scrape_ms", worst, "ms", SCRAPE_TARGET_MS, at_most=True))
        show(line("junk_series", await junk_series(mesh, http, addresses, count), "series", JUNK_TARGET, at_most=True))


def main() -> None:
    """Starts a mesh and runs."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.metrics", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of load before the scrapes")
    parser.add_argument("--junk", type=int, default=5000, help="pieces of junk")
    arguments = parser.parse_args()
    with started(["--workers", "2"]) as mesh:
        asyncio.run(run(mesh, arguments.seconds, arguments.junk))


if __name__ == "__main__":
    main()
