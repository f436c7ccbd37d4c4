"""A worker's ties to the schedulers: attached to every one of them, for ever. Says what the worker has; hears what to drop."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import grpc

from forebay.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.common import log, rpc
from services.common.tls import Identity

_logger = log.get(__name__)

Revoke = Callable[[Iterable[scheduler_pb2.LeaseProgress]], None]


@dataclass(frozen=True)
class Beat:
    """Seconds between heartbeats and between attempts to attach."""

    heartbeat_seconds: float = 1.0
    least_seconds: float = 0.02
    """News come at once, but not more often than this."""
    first_retry_seconds: float = 0.1
    last_retry_seconds: float = 2.0


class Node:
    """Keeps one Attach stream to each scheduler."""

    def __init__(
        self,
        addresses: Iterable[str],
        register: scheduler_pb2.Register,
        heartbeat: Callable[[], scheduler_pb2.Heartbeat],
        revoke: Revoke,
        drain: Callable[[bool], None],
        *,
        act: Callable[[scheduler_pb2.ModelAct], None] = lambda _: None,
        pin: Callable[[Iterable[str]], None] = lambda _: None,
        beat: Beat | None = None,
        identity: Identity | None = None,
    ) -> None:
        """`heartbeat` describes the worker as it is now, all but the sequence number.

        `drain`, `act` and `pin` hear what operators want of it.
        """
        self._links = [_Link(self, address) for address in addresses]
        self._heartbeat = heartbeat
        self._num_heartbeats = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.register = register
        self.revoke = revoke
        self.drain = drain
        self.act = act
        self.pin = pin
        self.beat = beat or Beat()
        self.identity = identity

    def start(self) -> None:
        """Begins to attach to every scheduler."""
        self._tasks = [asyncio.create_task(link.run(), name=f"attach {link.address}") for link in self._links]

    async def stop(self) -> None:
        """Leaves every scheduler."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def nudge(self) -> None:
        """There is news, such as room: the next heartbeat goes at once."""
        for link in self._links:
            link.nudged.set()

    @property
    def num_attached(self) -> int:
        """Schedulers that have confirmed the registration."""
        return sum(link.attached for link in self._links)

    def next_heartbeat(self) -> scheduler_pb2.Heartbeat:
        """The worker as it is now, numbered."""
        heartbeat = self._heartbeat()
        self._num_heartbeats += 1
        heartbeat.sequence_number = self._num_heartbeats
        return heartbeat


class _Link:
    """The stream to one scheduler, made anew whenever it breaks."""

    def __init__(self, node: Node, address: str) -> None:
        self._node = node
        self.address = address
        self.attached = False
        self.nudged = asyncio.Event()
        self._troubles: set[str] = set()  # told of since it was last attached

    async def run(self) -> None:
        """Attaches, and attaches again, until cancelled."""
        beat = self._node.beat
        wait = beat.first_retry_seconds
        while True:
            # Made anew each time, for a channel goes on with the certificate that it was made with.
            async with rpc.channel(self.address, self._node.identity, "scheduler") as channel:
                was_attached = await self._attach(scheduler_pb2_grpc.SchedulerServiceStub(channel))
            if _is_cancelled():  # which gRPC forgets where a call fails in the same moment
                return
            wait = beat.first_retry_seconds if was_attached else min(wait * 2, beat.last_retry_seconds)
            # Jitter, so that a fleet doesn't come back to a restarted scheduler in one instant.
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311

    async def _attach(self, stub: "scheduler_pb2_grpc.SchedulerServiceAsyncStub") -> bool:
        """One stream from Register to its end; answers whether the scheduler took the worker."""
        was_attached = False
        call = stub.Attach(self._requests())
        try:
            async for response in call:
                if response.HasField("registered"):
                    self.attached = was_attached = True
                    _logger.info("attached", scheduler=self.address, scheduler_id=response.registered.scheduler_id)
                elif response.HasField("revoke"):
                    self._node.revoke(response.revoke.leases)
                elif response.HasField("drain"):
                    self._node.drain(response.drain.drain)
                elif response.HasField("model_act"):
                    self._node.act(response.model_act)
                elif response.HasField("pins"):
                    self._node.pin(response.pins.models)
        except grpc.aio.AioRpcError as error:
            event, details = "lost the scheduler" if was_attached else "no scheduler", str(error.details())
            if was_attached or details not in self._troubles:  # each once, however often it is tried
                self._troubles = {details} if was_attached else self._troubles | {details}
                _logger.warning(event, scheduler=self.address, code=error.code().name, details=details)
        except asyncio.CancelledError:
            # gRPC cancels a stream whose requests raise. Then, too, the worker attaches again; only a cancellation of ours ends it.
            if _is_cancelled():
                raise
        except Exception:  # a bug in here must not take the worker out of the fleet for good
            _logger.exception("attach failed", scheduler=self.address)
        finally:
            self.attached = False
            call.cancel()
        return was_attached

    async def _requests(self) -> AsyncIterator[scheduler_pb2.AttachRequest]:
        """Register, then a heartbeat each second and whenever there is news."""
        beat = self._node.beat
        yield scheduler_pb2.AttachRequest(register=self._node.register)
        while True:
            self.nudged.clear()
            yield scheduler_pb2.AttachRequest(heartbeat=self._next_heartbeat())
            await asyncio.sleep(beat.least_seconds)
            with suppress(TimeoutError):
                async with asyncio.timeout(beat.heartbeat_seconds - beat.least_seconds):
                    await self.nudged.wait()

    def _next_heartbeat(self) -> scheduler_pb2.Heartbeat:
        try:
            return self._node.next_heartbeat()
        except Exception:
            _logger.exception("no heartbeat", scheduler=self.address)  # gRPC would end the stream without a word
            raise


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
