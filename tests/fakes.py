"""In-process stand-ins for a scheduler and a worker, on real gRPC and ephemeral ports, driven by a test's script."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from forebay.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    batch_pb2_grpc,
    explain_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from services.common import rpc
from services.common.errors import StatusError, abort, unavailable
from services.common.tls import Identity
from services.worker.subscriptions import Subscriptions

Item = TypeVar("Item")
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


class Journal(list[Item]):
    """A list that a test can wait on."""

    def __init__(self) -> None:
        super().__init__()
        self._news = asyncio.Event()

    def append(self, item: Item) -> None:
        super().append(item)
        self._news.set()

    async def until(self, condition: Callable[["Journal[Item]"], bool]) -> "Journal[Item]":
        """Waits until the condition holds of the list; the test's own timeout bounds it."""
        while not condition(self):
            self._news.clear()
            await self._news.wait()
        return self

    async def until_length(self, length: int) -> "Journal[Item]":
        """Waits until it has at least so many items."""
        return await self.until(lambda items: len(items) >= length)


class _Served:
    """A gRPC server on an ephemeral port of the loopback interface."""

    address = ""
    identity: Identity | None = None
    _server: grpc.aio.Server

    def register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self._server = rpc.server()
        self.register(self._server)
        self.address = f"127.0.0.1:{rpc.bind(self._server, address, self.identity)}"
        await self._server.start()
        return self.address

    async def stop(self) -> None:
        """As a crash: open calls end with UNAVAILABLE or CANCELLED on the client's side."""
        await self._server.stop(None)


@dataclass
class WorkerCall:
    """One Generate call as a script drives it: accept, tokens, finish."""

    request: worker_pb2.WorkerServiceGenerateRequest
    context: Any
    num_sent: dict[int, int] = field(default_factory=dict)
    num_cached_tokens: int = 0
    carried: Any = None  # its stream in a subscription

    def __post_init__(self) -> None:
        for index, delivered in enumerate(self.request.delivered):
            self.num_sent[index] = len(delivered.ids)

    async def _send(self, **event: Any) -> None:
        await (self.carried or self.context).write(worker_pb2.WorkerServiceGenerateResponse(**event))

    async def accept(self) -> None:
        await self._send(accepted=worker_pb2.Accepted(fingerprint="fp32-test"))

    async def work(self, seconds: float) -> None:
        """The engine computes for so long."""
        await asyncio.sleep(seconds)

    async def ping(self) -> None:
        await self._send(ping=worker_pb2.Ping())

    async def tokens(self, ids: Sequence[int], choice: int = 0, reason: types_pb2.FinishReason.ValueType = 0, **fields: Any) -> None:  # type: ignore[assignment]
        """New tokens of one choice; log-probabilities are made up where the request asks for them."""
        first = fields.pop("first_position", self.num_sent.get(choice, 0))
        sampling = self.request.sampling
        if sampling.HasField("logprobs") and "logprobs" not in fields:
            fields["logprobs"] = [position_logprobs(token, sampling.logprobs) for token in ids]
        delta = worker_pb2.TokenDelta(choice_index=choice, first_position=first, token_ids=ids, finish_reason=reason, **fields)
        self.num_sent[choice] = first + len(ids)
        await self._send(deltas=worker_pb2.TokenDeltas(deltas=[delta], num_cached_tokens=self.num_cached_tokens))

    async def prompt_logprobs(self, piece: int = 4) -> None:
        """The prompt's log-probabilities in pieces, where the request asks for them."""
        sampling = self.request.sampling
        if not sampling.HasField("prompt_logprobs"):
            return
        entries = [position_logprobs(token, sampling.prompt_logprobs) for token in self.request.prompt_token_ids]
        if entries:
            entries[0] = types_pb2.PositionLogprobs(chosen=types_pb2.TokenLogprob(token_id=self.request.prompt_token_ids[0]))
        for start in range(0, len(entries), piece):
            delta = worker_pb2.TokenDelta(prompt_logprobs=entries[start : start + piece])
            await self._send(deltas=worker_pb2.TokenDeltas(deltas=[delta]))

    async def complete(self, preemptions: int = 0) -> None:
        usage = types_pb2.Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=sum(self.num_sent.values()),
            cached_tokens=self.num_cached_tokens,
            preemptions=preemptions,
        )
        await self._send(completed=worker_pb2.Completed(usage=usage))

    async def fail(self, code: grpc.StatusCode, message: str = "scripted") -> None:
        if self.carried is not None:
            await self.carried.flush()
        await self.context.abort(code, message)


def position_logprobs(token: int, num_top: int) -> types_pb2.PositionLogprobs:
    """-0.5 for the token that stands there, then its neighbours, each a little less likely."""
    top = [types_pb2.TokenLogprob(token_id=token + step, logprob=-0.5 - step) for step in range(num_top)]
    return types_pb2.PositionLogprobs(chosen=types_pb2.TokenLogprob(token_id=token, logprob=-0.5), top=top, has_logprob=True)


Script = Callable[[WorkerCall], Awaitable[None]]


def play(ids: Sequence[int], *, reason: types_pb2.FinishReason.ValueType = LENGTH, per_message: int = 1, cached_tokens: int = 0) -> Script:
    """Every choice gets these tokens, at most max_tokens of them, going on behind what was delivered; then `reason`."""

    async def script(call: WorkerCall) -> None:
        call.num_cached_tokens = cached_tokens
        await call.accept()
        await call.prompt_logprobs()
        output = list(ids)[: call.request.sampling.max_tokens]
        end = reason if len(output) == len(ids) else LENGTH
        open_choices = [index for index in range(call.request.sampling.n) if index not in call.request.finished_choices]
        rest = {choice: output[call.num_sent.get(choice, 0) :] for choice in open_choices}
        while rest:
            for choice, left in list(rest.items()):
                piece, left = left[:per_message], left[per_message:]
                await call.tokens(piece, choice, types_pb2.FINISH_REASON_UNSPECIFIED if left else end)
                if left:
                    rest[choice] = left
                else:
                    del rest[choice]
        await call.complete()

    return script


def stall(ids: Sequence[int] = ()) -> Script:
    """Says these tokens, if any, and then nothing until it is cut off."""

    async def script(call: WorkerCall) -> None:
        await call.accept()
        if ids:
            await call.tokens(ids)
        await asyncio.Event().wait()

    return script


class FakeWorker(_Served, worker_pb2_grpc.WorkerServiceServicer):
    """A worker whose engine is the test's script. `calls` lists the calls it got, `cancelled` the ids of those cut off."""

    def __init__(self, script: Script, worker_id: str = "w1", models: Sequence[str] = ("tiny@fp32",), max_model_len: int = 2048) -> None:
        self.script = script
        self.worker_id = worker_id
        self.models = models
        self.max_model_len = max_model_len
        self.ready = True
        self.calls: Journal[WorkerCall] = Journal()
        self.cancelled: Journal[str] = Journal()
        self.num_open = 0
        self.knows_subscriptions = True
        self.subscription_error: grpc.StatusCode | None = None  # how they end
        self.subscriptions = Subscriptions()

    def register(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def Embed(self, request: worker_pb2.WorkerServiceEmbedRequest, context: Any) -> None:
        raise NotImplementedError  # see fake_embedder.py

    async def Subscribe(self, requests: Any, context: Any) -> None:
        if not self.knows_subscriptions:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        await self.subscriptions.serve(requests, context)
        if self.subscription_error is not None:
            await context.abort(self.subscription_error, "Internal error from Core")

    async def Generate(self, request: worker_pb2.WorkerServiceGenerateRequest, context: Any) -> None:
        subscription = self.subscriptions.of(request.delivery)
        with subscription.stream(request.delivery.stream) if subscription else nullcontext() as carried:
            await self._generate(WorkerCall(request, context, carried=carried))

    async def _generate(self, call: WorkerCall) -> None:
        request = call.request
        self.calls.append(call)
        self.num_open += 1
        try:
            await self.script(call)
            if call.carried is not None:
                await call.carried.flush()
        except (asyncio.CancelledError, grpc.aio.InternalError):  # the latter where the end meets a write
            self.cancelled.append(request.request_id)
            raise asyncio.CancelledError from None
        finally:
            self.num_open -= 1

    def state(self) -> admin_pb2.WorkerState:
        models = [
            scheduler_pb2.WorkerModel(
                model=model, version="0123456789abcdef", block_size=16, num_blocks=1000,
                max_model_len=self.max_model_len, loaded=True, fingerprint="fp32-test",
            )
            for model in self.models
        ]  # fmt: skip
        registration = scheduler_pb2.Register(worker_id=self.worker_id, incarnation="1", address=self.address, models=models)
        return admin_pb2.WorkerState(registration=registration, heartbeat=scheduler_pb2.Heartbeat(healthy=True), ready=self.ready)


class FakeScheduler(_Served, scheduler_pb2_grpc.SchedulerServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Places on its workers in turn, leaving out excluded ones. `refusals` are answered first; `gate` keeps tickets queued while clear."""

    def __init__(self, workers: Sequence[FakeWorker]) -> None:
        self.workers = list(workers)
        self.gate = asyncio.Event()
        self.gate.set()
        self.hold = asyncio.Event()  # while clear, Place says nothing
        self.hold.set()
        self.refusals: deque[StatusError] = deque()
        self.places: Journal[scheduler_pb2.PlaceRequest] = Journal()
        self.reserved: Journal[scheduler_pb2.ReserveRequest] = Journal()
        self.denied: Journal[tuple[str, str]] = Journal()  # (actor, act)
        self.policies_digest = ""
        self.finishes: Journal[scheduler_pb2.FinishRequest] = Journal()
        self.withdrawn: Journal[str] = Journal()
        self.fleet_error: StatusError | None = None
        self.looks: Journal[str] = Journal()  # one entry per GetFleet
        self.terms: dict[str, Any] = {}  # fields of each lease beside those that say where
        self.policies: dict[str, types_pb2.OrgPolicy] = {}
        self.key_owners: dict[bytes, scheduler_pb2.AuthenticateResponse] = {}  # by hash
        self.away: StatusError | None = None  # how GetOrg and Authenticate fail
        self.org_questions: Journal[str] = Journal()
        self.key_questions: Journal[bytes] = Journal()
        self.acts: Journal[Any] = Journal()  # requests of operators, but for GetFleet
        self.batches: batch_pb2_grpc.BatchServiceServicer | None = None  # what answers BatchService
        self.claims: Journal[scheduler_pb2.ClaimRequest] = Journal()
        self.claim_refusals: deque[StatusError] = deque()  # answered first
        self._claimed: dict[bytes, tuple[scheduler_pb2.ClaimRequest, int]] = {}
        self._leases: dict[str, scheduler_pb2.Lease] = {}
        self._turn = 0

    def register(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, server)
        if self.batches is not None:
            batch_pb2_grpc.add_BatchServiceServicer_to_server(self.batches, server)

    async def Place(self, request: scheduler_pb2.PlaceRequest, context: Any) -> None:
        self.places.append(request)
        try:
            if self.refusals:
                await abort(context, self.refusals.popleft())
            await self.hold.wait()
            await context.write(scheduler_pb2.PlaceResponse(queued=scheduler_pb2.Queued(position=0, eta_seconds=-1)))
            await self.gate.wait()
        except asyncio.CancelledError:
            self.withdrawn.append(request.ticket.request_id)
            raise
        lease = self._lease(request)
        if lease is None:
            await abort(context, unavailable(f"no worker serves {request.ticket.model}: start one", 0.01, reason="NO_WORKER"))
        await context.write(scheduler_pb2.PlaceResponse(placed=lease))

    def _lease(self, request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.Lease | None:
        held = self._leases.get(request.ticket.request_id)
        if held is not None and held.epoch > request.lost_epoch:
            return held
        able = [worker for worker in self.workers if worker.ready and worker.worker_id not in request.excluded_workers]
        if not able:
            return None
        worker = able[self._turn % len(able)]
        self._turn += 1
        lease = scheduler_pb2.Lease(
            request_id=request.ticket.request_id,
            epoch=request.lost_epoch + 1,
            worker_id=worker.worker_id,
            incarnation="1",
            address=worker.address,
            **self.terms,
        )
        self._leases[request.ticket.request_id] = lease
        return lease

    async def Reserve(self, request: scheduler_pb2.ReserveRequest, context: Any) -> scheduler_pb2.ReserveResponse:
        self.reserved.append(request)
        if self.refusals:
            await abort(context, self.refusals.popleft())
        return scheduler_pb2.ReserveResponse()

    async def NoteRefusal(self, request: scheduler_pb2.NoteRefusalRequest, context: Any) -> scheduler_pb2.NoteRefusalResponse:
        self.denied.append((request.actor, request.act))
        return scheduler_pb2.NoteRefusalResponse()

    async def Claim(self, request: scheduler_pb2.ClaimRequest, context: Any) -> scheduler_pb2.ClaimResponse:
        self.claims.append(request)
        if self.claim_refusals:
            await abort(context, self.claim_refusals.popleft())
        first, tries = self._claimed.get(request.key_hash, (request, 0))
        if first.digest != request.digest:
            await abort(context, StatusError(grpc.StatusCode.INVALID_ARGUMENT, "another request's", reason="IDEMPOTENCY_KEY_REUSED"))
        self._claimed[request.key_hash] = first, tries + 1
        return scheduler_pb2.ClaimResponse(
            request_id=first.request_id,
            seed=first.seed,
            model=first.model,
            model_version=first.model_version,
            lost_epoch=(tries + 1) << 16,
            created_unix_seconds=1_700_000_000.0,
        )

    async def Finish(self, request: scheduler_pb2.FinishRequest, context: Any) -> scheduler_pb2.FinishResponse:
        self.finishes.append(request)
        return scheduler_pb2.FinishResponse(ended=True)

    async def GetFleet(self, request: admin_pb2.GetFleetRequest, context: Any) -> admin_pb2.GetFleetResponse:
        self.looks.append(context.peer())
        if self.fleet_error is not None:
            await abort(context, self.fleet_error)
        states = [worker.state() for worker in self.workers]
        return admin_pb2.GetFleetResponse(workers=states, scheduler_id="s1", policies=self.policies_digest)

    async def GetOrg(self, request: scheduler_pb2.GetOrgRequest, context: Any) -> scheduler_pb2.GetOrgResponse:
        self.org_questions.append(request.org)
        if self.away is not None:
            await abort(context, self.away)
        return scheduler_pb2.GetOrgResponse(policy=self.policies.get(request.org, types_pb2.OrgPolicy(org=request.org)))

    async def Authenticate(self, request: scheduler_pb2.AuthenticateRequest, context: Any) -> scheduler_pb2.AuthenticateResponse:
        self.key_questions.append(request.key_hash)
        if self.away is not None:
            await abort(context, self.away)
        if request.key_hash not in self.key_owners:
            await abort(context, StatusError(grpc.StatusCode.UNAUTHENTICATED, "nobody's"))
        return self.key_owners[request.key_hash]

    async def _act(self, request: Any, answer: Any, context: Any) -> Any:
        self.acts.append(request)
        if self.refusals:
            await abort(context, self.refusals.popleft())
        return answer

    async def Drain(self, request: Any, context: Any) -> Any:
        return await self._act(request, admin_pb2.DrainResponse(worker_ids=[request.name]), context)

    async def SetModel(self, request: Any, context: Any) -> Any:
        return await self._act(request, admin_pb2.SetModelResponse(), context)

    async def ListOrgs(self, request: Any, context: Any) -> Any:
        return await self._act(request, admin_pb2.ListOrgsResponse(orgs=self.policies.values()), context)

    async def SetOrg(self, request: Any, context: Any) -> Any:
        return await self._act(request, admin_pb2.SetOrgResponse(policy=request.policy), context)

    async def ResetOrg(self, request: Any, context: Any) -> Any:
        return await self._act(request, admin_pb2.ResetOrgResponse(policy=types_pb2.OrgPolicy(org=request.org)), context)

    async def CreateKey(self, request: Any, context: Any) -> Any:
        info = admin_pb2.ApiKey(key_id="k-1", org=request.org, name=request.name, roles=request.roles)
        return await self._act(request, admin_pb2.CreateKeyResponse(key="fb_new", info=info), context)

    async def ListKeys(self, request: Any, context: Any) -> Any:
        return await self._act(request, admin_pb2.ListKeysResponse(), context)

    async def RevokeKey(self, request: Any, context: Any) -> Any:
        return await self._act(request, admin_pb2.RevokeKeyResponse(), context)

    async def GetUsage(self, request: Any, context: Any) -> Any:
        answer = admin_pb2.GetUsageResponse(rows=[admin_pb2.UsageRow(org=request.org)], next_page_token="next")
        return await self._act(request, answer, context)

    async def Explain(self, request: Any, context: Any) -> Any:
        explanation = explain_pb2.Explanation(request_id=request.request_id, org=request.org)
        return await self._act(request, admin_pb2.ExplainResponse(explanation=explanation), context)

    async def ListAudit(self, request: Any, context: Any) -> Any:
        return await self._act(request, admin_pb2.ListAuditResponse(), context)


@asynccontextmanager
async def serving(*servers: _Served) -> AsyncIterator[None]:
    """Starts the fakes, and stops them behind the test."""
    for server in servers:
        await server.start()
    try:
        yield
    finally:
        for server in servers:
            await server.stop()
