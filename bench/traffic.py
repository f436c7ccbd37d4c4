"""A little of everything that a mesh sees: both faces, all classes, several orgs, prefixes that come again, refusals."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import grpc

from bench.mesh import Mesh, org_token
from forebay.v1 import inference_pb2, inference_pb2_grpc, types_pb2

CLASSES = (types_pb2.LATENCY_CLASS_REALTIME, types_pb2.LATENCY_CLASS_STANDARD, types_pb2.LATENCY_CLASS_BATCH)
TIERS = ("priority", "default", "flex")
NUM_PREFIXES, PREFIX_TOKENS = 4, 48


@dataclass
class Traffic:
    """Closed-loop clients, each at its next request as soon as its last has ended, however it ended."""

    mesh: Mesh
    orgs: Sequence[str]
    seed: str = "traffic"
    num_answered: int = 0
    num_refused: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._tokens = [org_token(self.mesh, org) for org in self.orgs]
        self._prefixes = [self._ids(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]

    async def run(self, clients: int, seconds: float) -> None:
        """`clients` at once for so long; what runs then goes on to its end."""
        until = time.monotonic() + seconds
        async with grpc.aio.insecure_channel(self.mesh.grpc_address) as channel, aiohttp.ClientSession() as http:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)

            async def client() -> None:
                while time.monotonic() < until:
                    answered = await (self._over_http(http) if self._rng.random() < 0.25 else self._over_grpc(stub))
                    self.num_answered += answered
                    self.num_refused += not answered

            await asyncio.gather(*(client() for _ in range(clients)))

    async def _over_grpc(self, stub: "inference_pb2_grpc.InferenceServiceAsyncStub") -> bool:
        request = inference_pb2.GenerateRequest(
            tokens=types_pb2.TokenIds(ids=self._prompt()),
            sampling=types_pb2.SamplingParams(max_tokens=self._rng.randint(8, 48), temperature=0.0, ignore_eos=True),
            latency_class=self._rng.choice(CLASSES),
        )
        try:
            async for _ in stub.Generate(request, metadata=(("authorization", f"Bearer {self._rng.choice(self._tokens)}"),)):
                pass
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.05)
            return False
        return True

    async def _over_http(self, http: aiohttp.ClientSession) -> bool:
        body = {"prompt": self._prompt(), "max_tokens": 16, "temperature": 0, "service_tier": self._rng.choice(TIERS)}
        headers = {"authorization": f"Bearer {self._rng.choice(self._tokens)}"}
        async with http.post(f"{self.mesh.http_url}/completions", json=body, headers=headers) as answer:
            await answer.read()
            return answer.status == 200

    def _prompt(self) -> list[int]:
        return [*self._rng.choice(self._prefixes), *self._ids(self._rng.randint(4, 40))]

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(100, self.mesh.vocab_size - 100) for _ in range(count)]
