"""Servers refuse what is too large by name, answer health, and hand out free ports."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from forebay.v1 import worker_pb2, worker_pb2_grpc
from services.common import rpc

NAME = "forebay.v1.WorkerService"


@pytest.fixture
async def served():
    server = rpc.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker_pb2_grpc.WorkerServiceServicer(), server)
    health = rpc.add_standard_services(server, [NAME], internal=True)
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        yield server, health, channel, port
    await server.stop(None)


@pytest.mark.parametrize("serving", [False, True])
async def test_health_says_what_it_was_told(served, serving: bool) -> None:
    _, health, channel, _ = served
    stub = health_pb2_grpc.HealthStub(channel)
    await rpc.set_health(health, serving=serving, service_names=[NAME])
    expected = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ("", NAME):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == expected


async def test_a_message_over_the_limit_names_the_limit(served) -> None:
    """Case B41: a large message gets a typed error with the limit named."""
    _, _, channel, _ = served
    request = worker_pb2.WorkerServiceGenerateRequest(cache_salt=b"x" * (rpc.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _message in worker_pb2_grpc.WorkerServiceStub(channel).Generate(request):
            pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(rpc.MAX_MESSAGE_BYTES) in (caught.value.details() or "")


async def test_a_taken_port_is_named(served) -> None:
    *_, port = served
    with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
        rpc.bind(rpc.server(), f"127.0.0.1:{port}")


async def test_one_connection_too_many_is_closed_and_later_ones_are_taken() -> None:
    server = rpc.server(max_connections=1)
    rpc.add_standard_services(server, [NAME])
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()

    def own_channel() -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])

    request = health_pb2.HealthCheckRequest()
    async with own_channel() as second:
        async with own_channel() as first:
            await health_pb2_grpc.HealthStub(first).Check(request)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health_pb2_grpc.HealthStub(second).Check(request)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await health_pb2_grpc.HealthStub(first).Check(request)
        await health_pb2_grpc.HealthStub(second).Check(request, wait_for_ready=True, timeout=20)
    await server.stop(None)
