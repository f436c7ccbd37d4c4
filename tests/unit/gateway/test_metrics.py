"""What the gateway counts: targets met, orgs, calls; and that no client's words become series."""

import asyncio
from contextlib import suppress

import grpc
import pytest
from prometheus_client import CollectorRegistry

from forebay.v1 import inference_pb2, scheduler_pb2, types_pb2
from services.common.errors import Code, StatusError, unavailable
from services.common.metrics import exposition
from services.gateway import metrics as gateway_metrics
from services.gateway.client import MeshCall
from services.gateway.mesh import Mesh
from services.gateway.metrics import GatewayMetrics, Observation
from tests.fakes import WorkerCall, play
from tests.unit.gateway.build import FAST, Stack, generation, letters, make_token, stack

LINE = {"model": "tiny", "latency_class": "standard"}


class Clock:
    """Monotonic seconds, set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(gateway_metrics, "time", clock)
    return clock


async def observed(
    clock: Clock, first: float, further: float, status: Code = Code.OK, *, tokens: int = 5, targets: bool = True
) -> tuple[float, float]:
    """(requests with targets, those that met them): .2 s for the first token, .05 s for each further one."""
    registry, mesh = CollectorRegistry(), Mesh(["127.0.0.1:1"], FAST)
    observation = Observation(GatewayMetrics(registry), "http", generation(), start=clock.now)
    if targets:
        observation.leased(scheduler_pb2.Lease(ttft_target_seconds=0.2, tpot_target_seconds=0.05))
    call = MeshCall(mesh, observation.generation)
    for index in range(tokens):
        clock.now += first if index == 0 else further
        observation.delta(inference_pb2.Delta(token_ids=[7]))
        call.choices[0].token_ids.append(7)
    observation.ended(call, None, status)
    await mesh.close()
    found = [registry.get_sample_value(f"forebay_slo_{name}_total", LINE) or 0.0 for name in ("requests", "met")]
    return found[0], found[1]


@pytest.mark.parametrize(
    ("first", "further", "met"), [(0.19, 0.049, 1), (0.21, 0.01, 0), (0.01, 0.051, 0)], ids=["both", "first too late", "further too slow"]
)
async def test_goodput_is_what_met_both_targets(clock: Clock, first: float, further: float, met: int) -> None:
    assert await observed(clock, first, further) == (1, met)


@pytest.mark.parametrize("status", [Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.INTERNAL])
async def test_what_failed_on_our_side_met_nothing(clock: Clock, status: Code) -> None:
    assert await observed(clock, 0.01, 0.01, status) == (1, 0)


@pytest.mark.parametrize("status", [Code.CANCELLED, Code.RESOURCE_EXHAUSTED, Code.INVALID_ARGUMENT])
async def test_what_the_client_ended_counts_for_nothing(clock: Clock, status: Code) -> None:
    assert await observed(clock, 0.01, 0.01, status) == (0, 0)


async def test_without_targets_there_is_nothing_to_meet(clock: Clock) -> None:
    assert await observed(clock, 9.0, 9.0, targets=False) == (0, 0)


async def test_a_single_token_has_no_further_ones(clock: Clock) -> None:
    assert await observed(clock, 0.1, 9.0, tokens=1) == (1, 1)


async def test_orgs_have_requests_tokens_and_errors_of_their_own() -> None:
    async with stack(play(letters("abc"))) as mesh:
        for org in ("acme", "acme", "globex"):
            body = {"prompt": "four", "max_tokens": 3}
            assert (await mesh.http.post("/v1/completions", json=body, headers={"authorization": make_token(org)})).status_code == 200
        assert mesh.metric("forebay_org_requests_total", org="acme") == 2
        assert mesh.metric("forebay_org_prompt_tokens_total", org="acme") == 8
        assert mesh.metric("forebay_org_output_tokens_total", org="acme") == 6
        assert mesh.metric("forebay_org_errors_total", org="acme") == 0
        assert mesh.metric("forebay_org_requests_total", org="globex") == 1


async def test_a_refused_quota_is_its_orgs_error() -> None:
    over = StatusError(Code.RESOURCE_EXHAUSTED, "too many", reason="QUOTA_EXCEEDED", retry_after_seconds=1)
    async with stack(play(letters("abc"))) as mesh:
        for error, status in ((over, 429), (unavailable("full", 1.0, "QUEUE_FULL"), 503)):
            mesh.scheduler.refusals.append(error)
            assert (await mesh.http.post("/v1/completions", json={"prompt": "a"})).status_code == status
        assert mesh.metric("forebay_org_errors_total", org="acme") == 2
        assert mesh.metric("forebay_org_quota_refused_total", org="acme") == 1


async def test_a_move_with_tokens_is_a_migration() -> None:
    async def dies(call: WorkerCall) -> None:
        await call.accept()
        await call.tokens(letters("ab"))
        await call.fail(grpc.StatusCode.UNAVAILABLE)

    async with stack(dies, play(letters("abcd"))) as mesh:
        for _ in range(2):
            answer = await mesh.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})
            assert answer.json()["choices"][0]["text"] == "abcd"
        assert mesh.metric("forebay_migrations_total") == mesh.metric("forebay_replacements_total") > 0


async def test_calls_of_both_faces_are_counted_by_method_and_status() -> None:
    async with stack(play(letters("a"))) as mesh:
        await mesh.http.post("/v1/completions", json={"prompt": "a"})
        await mesh.http.post("/v1/completions", json={"prompt": "a", "model": "nobody's"})
        await mesh.http.get("/v1/completions")
        await mesh.http.head("/v1/models")
        await mesh.http.get("/v1/models", headers={"authorization": "Bearer x"})
        await mesh.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=[("authorization", make_token())])
        with suppress(grpc.aio.AioRpcError):
            await mesh.inference.ListModels(inference_pb2.ListModelsRequest())

        def calls(face: str, method: str, status: str) -> float | None:
            return mesh.metric("forebay_calls_total", face=face, method=method, status=status)

        assert [calls("http", "completions", status) for status in ("200", "404", "405")] == [1, 1, 1]
        assert [calls("http", "models", status) for status in ("200", "401")] == [1, 1]
        assert [calls("grpc", "ListModels", status) for status in ("OK", "UNAUTHENTICATED")] == [1, 1]


def series(mesh: Stack) -> int:
    return sum(len(family.samples) for family in mesh.registry.collect())


async def test_junk_makes_no_series() -> None:
    """Models, paths, methods, classes and labels that nobody knows, over both faces."""
    async with stack(play(letters("a"))) as mesh:
        await mesh.http.post("/v1/completions", json={"prompt": "a"})
        before = series(mesh)
        for number in range(60):
            junk = f"junk-{number}"
            await asyncio.gather(
                mesh.http.post("/v1/completions", json={"prompt": "a", "model": junk}),
                mesh.http.post(f"/v1/{junk}", json={}),
                mesh.http.request(junk.upper().replace("-", ""), "/v1/models"),
                mesh.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-forebay-class": junk}),
                mesh.http.get(f"/v1/models/{junk}", headers={"x-request-id": junk}),
            )
            with suppress(grpc.aio.AioRpcError):
                await mesh.channel.unary_unary(f"/forebay.v1.InferenceService/{junk}")(b"")
            with suppress(grpc.aio.AioRpcError):
                request = inference_pb2.GenerateRequest(model=junk, text="a", latency_class=types_pb2.LATENCY_CLASS_BATCH)
                await mesh.inference.Generate(request, metadata=[("authorization", make_token())]).read()
        assert series(mesh) - before < 15


async def test_no_word_of_clients_is_in_a_metric() -> None:
    """Canaries in prompt, id, user, model, stop string, token and key."""
    token = make_token("acme", sub="canary-subject")
    async with stack(play(letters("canary-answer"))) as mesh:
        body = {"prompt": "canary-prompt", "user": "canary-user", "stop": ["canary-stop"], "max_tokens": 32}
        headers = {"authorization": token, "x-request-id": "canary-id"}
        assert (await mesh.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        await mesh.http.post("/v1/completions", json={**body, "model": "canary-model"}, headers=headers)
        await mesh.http.get("/v1/models", headers={"authorization": "Bearer fb_canary-key"})
        for accept in ("", "application/openmetrics-text"):
            text = exposition(mesh.registry, accept)[0].decode()
            assert "canary" not in text
            assert token.removeprefix("Bearer ") not in text
