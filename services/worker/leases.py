"""The leases that this worker works on: which epochs stand, how much room is left, and how each one ends. Knows no RPC."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping

from forebay.v1 import explain_pb2, scheduler_pb2, types_pb2, worker_pb2
from services.common import tracing
from services.common.errors import Code, StatusError, unavailable
from services.common.tracing import Span
from services.worker.embed_lease import EmbedLease, to_encoder
from services.worker.engine.grammar import Grammar
from services.worker.engine.request import EngineRequest, FinishReason, TokenOutput
from services.worker.engine.timeline import Snapshot
from services.worker.engine_loop import EngineLoop
from services.worker.metrics import Ended, Metrics
from services.worker.outbox import Outbox, Pace
from services.worker.spans import trace_request
from services.worker.vector_outbox import VectorOutbox
from services.worker.wire import Served, timeline, to_engine

MAX_WAITING = 2
"""Sequences that may wait beyond the slots; more wait better at the scheduler, which knows other workers."""

MAX_ENDED = 10_000
"""Ended leases that are remembered, so that a late call can't bring one back."""


class Lease:
    """One request here, under one epoch: the sink of its outputs, and its account."""

    def __init__(self, request_id: str, epoch: int, request: EngineRequest, outbox: Outbox, metrics: Metrics, served: Served) -> None:
        self.request_id = request_id
        self.epoch = epoch
        self.request = request
        self.outbox = outbox
        self.served = served
        self.num_sequences = request.n - len(request.finished_choices)
        self.num_new_tokens = 0
        self.num_cached_tokens = 0
        self.num_judged_tokens = 0
        self.num_accepted_tokens = 0
        self._num_preemptions: dict[int, int] = {}
        self.end_reason = "abort"
        self.arrived_at = time.monotonic()
        self.timeline: Snapshot | None = None  # the latest
        self.span = tracing.OFF  # of the call that brought it
        self.metrics = metrics
        self._token_at: dict[int, float] = {}  # choice -> when its last token came
        self._started_at: float | None = None
        self._first_token_at: float | None = None
        self._num_longest_tokens = 0  # of the choices that have ended

    @property
    def num_output_tokens(self) -> int:
        """Output tokens over all choices, those from before a move included."""
        return sum(map(len, self.request.delivered)) + self.num_new_tokens

    @property
    def num_preemptions(self) -> int:
        """Of all its choices."""
        return sum(self._num_preemptions.values())

    @property
    def num_wanted_blocks(self) -> int:
        """Cache blocks that it needs to start, or to go on."""
        num_prompt_blocks = -(-len(self.request.prompt_token_ids) // self.served.block_size)
        return num_prompt_blocks + self.num_output_tokens // self.served.block_size

    @property
    def usage(self) -> types_pb2.Usage:
        """As counted here."""
        return types_pb2.Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=self.num_output_tokens,
            cached_tokens=self.num_cached_tokens,
            preemptions=self.num_preemptions,
            drafted_tokens=self.num_judged_tokens,
            accepted_tokens=self.num_accepted_tokens,
        )

    @property
    def told_timeline(self) -> explain_pb2.Timeline:
        """What became of it so far; empty where the engine has said nothing yet."""
        return explain_pb2.Timeline() if self.timeline is None else timeline(self.timeline, self.arrived_at)

    def push(self, output: TokenOutput) -> None:
        """New tokens of one choice. A choice that the engine could not go on with fails the request."""
        self._account(output)
        self.timeline = output.timeline or self.timeline
        if output.finish_reason is FinishReason.ERROR:
            self.fail(_failure(output))
            return
        if output.finish_reason is not None:
            self.num_sequences -= 1
            self._num_longest_tokens = max(self._num_longest_tokens, self._num_new(output))
            self.end_reason = "length" if output.finish_reason is FinishReason.LENGTH else "stop"
        self.outbox.push(output)

    def fail(self, error: StatusError) -> None:
        """The request ends with this error."""
        if error.code is Code.INTERNAL:
            self.end_reason = "error"
        self.outbox.fail(error)

    def ended(self) -> Ended:
        """What became of it, for the metrics."""
        return Ended(
            reason=self.end_reason if self.num_sequences == 0 or self.end_reason == "error" else "abort",
            arrived_at=self.arrived_at,
            ended_at=time.monotonic(),
            n=self.request.n,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_output_tokens=self.num_new_tokens,
            num_longest_tokens=self.num_new_tokens if self.request.n == 1 else self._num_longest_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            started_at=self._started_at,
            first_token_at=self._first_token_at,
            last_token_at=max(self._token_at.values(), default=None),
            trace_id=self.span.trace_id,
        )

    def _num_new(self, output: TokenOutput) -> int:
        """Tokens of the output's choice so far, without those from before a move."""
        delivered = self.request.delivered[output.choice_index : output.choice_index + 1]
        return output.first_position + len(output.token_ids) - sum(map(len, delivered))

    def _account(self, output: TokenOutput) -> None:
        self._num_preemptions[output.choice_index] = output.num_preemptions
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if not output.token_ids:
            return
        now = time.monotonic()
        num_tokens = len(output.token_ids)
        if not self._token_at:
            self._started_at, self._first_token_at = output.start_time, now
            self.metrics.observe_first_token(now - self.arrived_at, self.span.trace_id)
        since = self._token_at.get(output.choice_index)
        if since is not None:
            observe, gap = self.metrics.inter_token_latency.observe, (now - since) / num_tokens
            for _ in output.token_ids:
                observe(gap)
        self._token_at[output.choice_index] = now
        self.num_new_tokens += num_tokens
        self.num_judged_tokens += output.num_judged
        self.num_accepted_tokens += output.num_accepted


class Leases:
    """Every live lease, at most one per request id."""

    def __init__(
        self,
        loop: EngineLoop,
        metrics: Mapping[str, Metrics],
        *,
        max_sequences: int,
        preemption: bool = True,
        pace: Pace | None = None,
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`metrics` by model. `preemption`: an engine takes room from lower classes. `on_room` is called whenever a lease ends."""
        self._loop = loop
        self._metrics = metrics
        self._max_sequences = max_sequences
        self._preemption = preemption
        self._pace = pace or Pace()
        self._live: dict[str, Lease | EmbedLease] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()  # request id -> highest epoch that is over
        self._idle = asyncio.Event()
        self.on_room = on_room
        self.draining = False

    def __len__(self) -> int:
        return len(self._live)

    def admit(self, message: worker_pb2.WorkerServiceGenerateRequest, served: Served, grammar: Grammar | None = None) -> Lease:
        """Hands a request and its compiled grammar to the engine. StatusError: stale epoch, bad value, too large, no room, draining."""
        self._check_open()
        request = to_engine(message, served, grammar)
        self._supersede(message.request_id, message.epoch)
        lease = Lease(
            message.request_id,
            message.epoch,
            request,
            Outbox(self._pace, num_choices=request.n - len(request.finished_choices), num_streams=self.__len__),
            self._metrics[served.model],
            served,
        )
        self._check_room(lease)
        self._live[lease.request_id] = lease
        lease.metrics.observe_request(n=request.n, max_tokens=message.sampling.max_tokens)
        self._loop.add(request, lease)
        return lease

    def admit_embedding(self, message: worker_pb2.WorkerServiceEmbedRequest, served: Served) -> EmbedLease:
        """As admit, of a request for vectors."""
        self._check_open()
        request = to_encoder(message, served)
        self._supersede(message.request_id, message.epoch)
        lease = EmbedLease(message.request_id, message.epoch, request, VectorOutbox(self._pace), self._metrics[served.model], served)
        self._check_room(lease)
        self._live[lease.request_id] = lease
        self._loop.add(request, lease)
        return lease

    def end(self, lease: Lease | EmbedLease) -> None:
        """Ends a lease in whatever state; its blocks are free after the engine's current step. Idempotent."""
        if self._live.get(lease.request_id) is not lease:
            return
        del self._live[lease.request_id]
        self._remember(lease.request_id, lease.epoch)
        self._loop.abort(lease.request.request_id)
        ended = lease.ended()
        lease.metrics.observe_end(ended)
        trace_request(lease.span, ended, lease.timeline)
        if not self._live:
            self._idle.set()
        self.on_room()

    def revoke(self, revoked: Iterable[scheduler_pb2.LeaseProgress]) -> None:
        """Ends these leases and all older ones of the same requests; one that is still on its way here will be refused."""
        for old in revoked:
            lease = self._live.get(old.request_id)
            if lease is not None and lease.epoch <= old.epoch:
                lease.fail(StatusError(Code.FAILED_PRECONDITION, f"epoch {lease.epoch} of this request was revoked", reason="REVOKED"))
                self.end(lease)
            self._remember(old.request_id, old.epoch)

    def fail_all(self, error: StatusError) -> None:
        """Ends every lease with this error."""
        for lease in list(self._live.values()):
            lease.fail(error)
            self.end(lease)

    def progress(self) -> list[scheduler_pb2.LeaseProgress]:
        """Every live lease with what it has and holds."""
        held = self._loop.last_turn.progress
        return [
            scheduler_pb2.LeaseProgress(
                request_id=lease.request_id,
                epoch=lease.epoch,
                num_output_tokens=lease.num_output_tokens,
                num_blocks=held.get(lease.request.request_id, (0, 0))[1],
            )
            for lease in self._live.values()
        ]

    def class_usage(self) -> list[scheduler_pb2.ClassUsage]:
        """What the leases of each class hold."""
        held, usage = self._loop.last_turn.progress, dict[int, scheduler_pb2.ClassUsage]()
        for lease in self._live.values():
            latency_class = types_pb2.LatencyClass.ValueType(lease.request.latency_class)
            entry = usage.setdefault(latency_class, scheduler_pb2.ClassUsage(latency_class=latency_class))
            entry.num_slots += lease.num_sequences
            entry.num_blocks += held.get(lease.request.request_id, (0, 0))[1]
        return [usage[latency_class] for latency_class in sorted(usage)]

    def spans(self, request_ids: Iterable[str]) -> Iterator[Span]:
        """The spans of live leases, by the engine's names of their requests."""
        for request_id in request_ids:
            lease = self._live.get(request_id.rpartition("#")[0])
            if lease is not None:
                yield lease.span

    def is_waiting(self, lease: Lease | EmbedLease) -> bool:
        """True while a lease has work left and holds no blocks."""
        return lease.num_sequences > 0 and self._loop.last_turn.progress.get(lease.request.request_id, (0, 0))[1] == 0

    async def idle(self, timeout_seconds: float) -> bool:
        """Waits until no lease is left; False if that took too long."""
        self._idle.clear()
        if not self._live:
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True

    def _check_open(self) -> None:
        """Refuses while nothing new is taken at all."""
        if self.draining:
            raise unavailable("this worker is draining; place again", reason="DRAINING")
        if not self._loop.healthy:
            raise unavailable("the engine of this worker hangs or has failed; place again", reason="ENGINE_HANGS")

    def _supersede(self, request_id: str, epoch: int) -> None:
        """A higher epoch ends the older one; an equal or lower one is refused."""
        live = self._live.get(request_id)
        newest = max(live.epoch if live else 0, self._ended.get(request_id, 0))
        if epoch <= newest:
            message = f"epoch {epoch} of this request is over; epoch {newest} was here already"
            raise StatusError(Code.FAILED_PRECONDITION, message, reason="STALE_EPOCH")
        if live is not None:
            live.fail(StatusError(Code.FAILED_PRECONDITION, f"epoch {epoch} has taken this request over", reason="STALE_EPOCH"))
            self.end(live)

    def _check_room(self, new: Lease | EmbedLease) -> None:
        """Refuses what would wait too long. Only leases of the same or a higher class count: the engine preempts the others for it."""
        lowest = new.request.latency_class if self._preemption else types_pb2.LATENCY_CLASS_BATCH
        fellows = [lease for lease in self._live.values() if lease.served is new.served]
        rivals = [lease for lease in fellows if lease.request.latency_class <= lowest]
        num_held = sum(lease.num_sequences for lease in rivals)
        # A request wider than the slots is let in when nothing else runs, else it never would be.
        if rivals and num_held + new.num_sequences > self._max_sequences + MAX_WAITING:
            self._refuse(new, f"{num_held} sequences of {self._max_sequences} slots and {MAX_WAITING} waiting places are here")
        num_below = self._num_blocks(lease for lease in fellows if lease.request.latency_class > lowest)
        stats = self._loop.last_turn.stats[new.served.model]
        num_available, num_starved = stats.num_blocks - stats.num_used_blocks + num_below, 0
        for lease in (*(lease for lease in rivals if self.is_waiting(lease)), new):
            if not num_starved and lease.num_wanted_blocks <= num_available:
                num_available -= lease.num_wanted_blocks
            elif lease is new and num_starved >= MAX_WAITING:
                self._refuse(new, f"{num_starved} sequences wait for cache blocks and {num_available} blocks are free")
            else:
                num_starved += lease.num_sequences

    def _num_blocks(self, leases: Iterable[Lease | EmbedLease]) -> int:
        """Blocks that they held after the last turn."""
        held = self._loop.last_turn.progress
        return sum(held.get(lease.request.request_id, (0, 0))[1] for lease in leases)

    def _refuse(self, lease: Lease | EmbedLease, why: str) -> None:
        lease.metrics.refused.inc()
        raise StatusError(Code.RESOURCE_EXHAUSTED, f"no room on this worker: {why}; place again", reason="NO_ROOM")

    def _remember(self, request_id: str, epoch: int) -> None:
        self._ended[request_id] = max(epoch, self._ended.pop(request_id, 0))
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)


def _failure(output: TokenOutput) -> StatusError:
    if output.unsatisfiable:
        return StatusError(Code.INVALID_ARGUMENT, output.error or "", reason="UNSATISFIABLE")
    return StatusError(Code.INTERNAL, f"the engine failed on this request: {output.error}", reason="SEQUENCE_FAILED")
