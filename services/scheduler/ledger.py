"""Each script of lua/ as a Python call: what the mesh knows of tickets, leases and room. Decides nothing."""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.policy.classes import BATCH, REALTIME
from services.policy.org import OrgPolicy
from services.scheduler import keys
from services.scheduler.policy import decision
from services.scheduler.policy.fleet import Worker, share_blocks
from services.scheduler.policy.order import Fifo, Ticket, expected_output
from services.scheduler.policy.pick import Placement
from services.scheduler.policy.rules import Rules
from services.scheduler.quota import UNKNOWN, Over, QuotaState, as_argument, tokens_to_reserve
from services.scheduler.spec import read_spec, write_spec
from services.scheduler.store import Call, Store


@dataclass(frozen=True)
class Timing:
    """Seconds until a ticket or lease that nobody speaks for is over.

    Without a sweep for longer than `pause`, all terms start anew; so it must be shorter than they are, by a second to speak in.
    """

    stream_gone: float = 5.0
    start: float = 3.5
    lease: float = 10.0
    pause: float = 2.0


@dataclass(frozen=True)
class Lease:
    """The right to run one request on one worker."""

    request_id: str
    epoch: int
    worker_id: str
    incarnation: str
    address: str
    queued_seconds: float
    quota: QuotaState = field(default=UNKNOWN, compare=False)
    """Where the org stood when this was asked for; unknown, and left empty, where it was not."""
    decision: str = field(default="", compare=False)
    """Why it goes there, as policy/decision.py writes it; empty where that isn't known."""

    @classmethod
    def parse(cls, reply: Sequence[Any]) -> "Lease":
        """From a script's flat list."""
        request_id, epoch, worker_id, incarnation, address, queued_ms, why = reply
        return cls(str(request_id), int(epoch), str(worker_id), str(incarnation), str(address), float(queued_ms) / 1000, decision=str(why))


@dataclass(frozen=True)
class Queued:
    """The ticket waits, at this place in the order of arrival."""

    order: int
    waited_seconds: float
    left_seconds: float
    quota: QuotaState = UNKNOWN


@dataclass(frozen=True)
class Full:
    """So many wait for the model that this one may not: none of them is less urgent. `shed`: it did wait, and a more urgent one came."""

    num_waiting: int
    shed: bool = False


@dataclass(frozen=True)
class Finished:
    """The request has ended; ids are unique for ever."""


@dataclass(frozen=True)
class Superseded:
    """A newer try under the request's idempotency key has the ticket."""


@dataclass(frozen=True)
class Quarantined:
    """Workers have died of the request."""


@dataclass(frozen=True)
class Expired:
    """The request's deadline has passed, counted from its first call."""


@dataclass(frozen=True)
class View:
    """What the policy decides on. `recent`: model -> tokens placed of it lately, by class 0 .. 3."""

    workers: list[Worker]
    fifos: list[Fifo]
    recent: dict[str, list[float]]


@dataclass(frozen=True)
class Settlement:
    """What a request has used, as its gateway says. `free`: nothing is charged for it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    failed: bool = False
    free: bool = False


@dataclass(frozen=True)
class News:
    """What a waiting stream doesn't know yet: its lease, or that its ticket is missing or has a newer stream."""

    request_id: str
    kind: str
    lease: Lease | None = None


@dataclass(frozen=True)
class Ended:
    """A ticket or lease that the sweep has ended: deadline, dropped, not started or expired."""

    request_id: str
    reason: str
    line: str
    epoch: int
    worker_id: str
    num_output_tokens: int


@dataclass(frozen=True)
class Held:
    """A lease as its worker lists it."""

    request_id: str
    epoch: int
    num_output_tokens: int
    num_blocks: int


@dataclass(frozen=True)
class Survey:
    """How things stand. `queues`: name -> (tickets, seconds that the oldest has waited); `serving`: (model, version) -> seconds since."""

    queues: dict[str, tuple[int, float]]
    serving: dict[tuple[str, str], float]
    num_leases: int


class Ledger:
    """One scheduler's hand on the shared state."""

    def __init__(self, store: Store, instance: str, *, max_queued: int = 4096, timing: Timing | None = None) -> None:
        self._store = store
        self._id = instance
        self._max_queued = max_queued
        self._timing = timing or Timing()

    async def enqueue(
        self, ticket: Ticket, holder: str, org: OrgPolicy, *, deadline_seconds: float, lost_epoch: int = 0
    ) -> Queued | Lease | Full | Finished | Expired | Quarantined | Superseded | Over:
        """Queues a ticket and reserves its org's quota, or says where it stands. `ticket.order` is 0 unless it is known from before."""
        line = keys.line_name(ticket.model, ticket.latency_class)
        queue = keys.queue_name(ticket.model, ticket.latency_class, ticket.org)
        args: list[str | int] = [ticket.request_id, write_spec(ticket), queue, line, ticket.latency_class]
        args += [round(deadline_seconds * 1000), holder, json.dumps(sorted(ticket.excluded_workers)), lost_epoch]
        args += [ticket.num_delivered_tokens, ticket.order, self._max_queued, self._id, as_argument(org, [ticket])]
        args += [json.dumps(ticket.awaited)]
        args += [keys.line_name(ticket.model, latency_class) for latency_class in range(BATCH, REALTIME - 1, -1)]
        kind, *rest = await self._store.run(Call("enqueue", [keys.ticket(ticket.request_id)], args))
        match kind:
            case "queued":
                return Queued(int(rest[1]), rest[2] / 1000, rest[3] / 1000, QuotaState.parse(rest[0]))
            case "placed":
                return replace(Lease.parse(rest[1:]), quota=QuotaState.parse(rest[0]))
            case "over":
                return Over(tuple(rest[1]), rest[2] / 1000, QuotaState.parse(rest[0]))
            case "full" | "shed":
                return Full(int(rest[0]), shed=kind == "shed")
            case "expired":
                return Expired()
            case "quarantined":
                return Quarantined()
            case "superseded":
                return Superseded()
        return Finished()

    async def reserve(self, tickets: Sequence[Ticket], org: OrgPolicy) -> QuotaState | Over:
        """Takes the quota of all these tickets of one org, or of none. Each is to be queued before a ticket without a stream is dropped."""
        args: list[str | int] = [org.org, as_argument(org, tickets)]
        for ticket in tickets:
            queue = keys.queue_name(ticket.model, ticket.latency_class, ticket.org)
            args += [ticket.request_id, queue, tokens_to_reserve(ticket)]
        kind, state, *rest = await self._store.run(Call("reserve", (), args))
        return QuotaState.parse(state) if kind == "reserved" else Over(tuple(rest[0]), rest[1] / 1000, QuotaState.parse(state))

    async def view(self, workers: Sequence[Worker], max_heads: int, *, preemptible: bool) -> View:
        """The workers that may be used, with their room in use, and the first tickets of every queue of a class that has room at all."""
        args = [max_heads, int(preemptible), *(w.max_slots for w in workers)]
        rows, queues, recent = await self._store.run(Call("view", [keys.WAITING, *(keys.worker(w.worker_id) for w in workers)], args))
        usable = [
            replace(w, used_slots=tuple(row[2:6]), used_blocks=tuple(row[6:10]), org_blocks=dict(zip(row[10::2], row[11::2], strict=True)))
            for w, row in zip(workers, rows, strict=True)
            if row[0] == w.incarnation and row[1]
        ]
        fifos = [Fifo([read_spec(*head) for head in heads], float(served), bool(cut)) for served, cut, *heads in json.loads(queues)]
        return View(usable, fifos, {model: [0.0, *map(float, tokens)] for model, *tokens in json.loads(recent)})

    async def commit(self, placements: Sequence[Placement], rules: Rules) -> list[Lease | str]:
        """A lease for each placement that still holds; why not, for the others."""
        if not placements:
            return []
        replies = await self._store.run_many([self._commit_call(p, rules) for p in placements])
        return [Lease.parse(rest) if kind == "placed" else str(rest[0]) for kind, *rest in replies]

    def _commit_call(self, p: Placement, rules: Rules) -> Call:
        w, ticket, org = p.worker, p.ticket, rules.org(p.ticket.org)
        key_names = [keys.ticket(ticket.request_id), keys.worker(w.worker_id), keys.leases(w.worker_id), keys.recent(ticket.model)]
        counted = ticket.latency_class if rules.preemptible else BATCH
        args: list[str | int | float] = [ticket.request_id, w.worker_id, w.incarnation, w.address, p.num_slots, p.num_blocks]
        args += [w.max_slots, p.max_blocks, counted, self._id, share_blocks(p.max_blocks, org)]
        args += [ticket.num_prompt_tokens, expected_output(ticket, rules.output_estimate), org.weight]
        args.append("" if p.decision is None else decision.dumps(p.decision, self._id.rpartition("/")[0] or self._id))
        return Call("commit", key_names, args)

    async def finish(self, request_id: str, epoch: int, used: Settlement, record: Call | None = None) -> tuple[bool, str]:
        """(whether this call ended the lease, the name of its line). `record`: what is to be written down with it."""
        args: list[str | int] = [
            request_id,
            epoch,
            used.prompt_tokens,
            used.completion_tokens,
            used.cached_tokens,
            int(used.failed),
            int(used.free),
        ]
        calls = [Call("finish", [keys.ticket(request_id)], [*args, self._id]), *([record] if record else [])]
        (ended, line), *_ = await self._store.run_many(calls)
        return bool(ended), line

    async def withdraw(self, request_id: str, holder: str, reason: str) -> bool:
        """Ends a ticket that has no lease yet, or one that its stream never heard of."""
        return bool(await self._store.run(Call("withdraw", [keys.ticket(request_id)], [request_id, holder, reason, self._id])))

    async def touch(self, holders: Sequence[tuple[str, str]]) -> list[News]:
        """Keeps the tickets of (request id, holder), and says what those don't know yet."""
        if not holders:
            return []
        rows = await self._store.run(Call("touch", (), [part for holder in holders for part in holder]))
        return [News(rest[0], kind, Lease.parse(rest) if kind == "placed" else None) for kind, *rest in rows]

    async def register(self, worker_id: str, incarnation: str) -> int:
        """Makes this incarnation the worker; the number of leases that ended with the last one."""
        return int(await self._store.run(Call("register", [keys.worker(worker_id), keys.leases(worker_id)], [worker_id, incarnation])))

    async def died(self, in_flight: Iterable[tuple[str, int, int]]) -> list[tuple[str, str]]:
        """A worker has died in a step with (request id, epoch, output tokens) of these. (request id, line) of what is quarantined now."""
        rows = await self._store.run(Call("died", (), [part for entry in in_flight for part in entry]))
        return [(str(request_id), str(line)) for request_id, line in rows]

    async def down(self, worker_id: str, incarnation: str) -> bool:
        """Marks a worker as gone, for all schedulers, until its next heartbeat."""
        return bool(await self._store.run(Call("down", [keys.worker(worker_id)], [incarnation])))

    async def heartbeat(self, worker: Worker, num_used_blocks: int, leases: Iterable[Held]) -> list[tuple[str, int]] | None:
        """(request id, epoch) of the leases to revoke. None: another incarnation is the worker now."""
        served = [json.dumps([name, model.version]) for name, model in worker.models.items()]
        args: list[str | int] = [worker.worker_id, worker.incarnation, worker.address, num_used_blocks, len(served), *served]
        for lease in leases:
            args += [lease.request_id, lease.epoch, lease.num_output_tokens, lease.num_blocks]
        status, *revoked = await self._store.run(Call("heartbeat", [keys.worker(worker.worker_id), keys.leases(worker.worker_id)], args))
        if status != "ok":
            return None
        return [(str(revoked[i]), int(revoked[i + 1])) for i in range(0, len(revoked), 2)]

    async def sweep(self, most: int = 500) -> list[Ended]:
        """Ends what nobody has spoken for."""
        t = self._timing
        args = [round(seconds * 1000) for seconds in (t.stream_gone, t.start, t.lease, t.pause)]
        rows = await self._store.run(Call("sweep", [keys.HELD, keys.STARTING, keys.RUNNING, keys.SWEPT, keys.DEADLINES], [*args, most]))
        return [Ended(*row) for row in rows]

    async def survey(self) -> Survey:
        """How things stand."""
        queues, serving, num_leases = await self._store.run(Call("survey", [keys.QUEUES, keys.SERVING, keys.STARTING, keys.RUNNING]))
        seen = {}
        for name, ms in serving:
            model, version = json.loads(name)
            seen[model, version] = ms / 1000
        return Survey({name: (num, ms / 1000) for name, num, ms in queues}, seen, num_leases)

    async def queued(self, lines: Collection[str]) -> dict[str, tuple[float, list[tuple[str, int]]]]:
        """Queue's name -> (tokens served, (request id, order) of every ticket in it, in order), for the queues of these lines."""
        replies = await self._store.commands(*(_whole(keys.turns(line)) for line in lines))
        served = {reply[i]: float(reply[i + 1]) for reply in replies for i in range(0, len(reply), 2)}
        if not served:
            return {}
        replies = await self._store.commands(*(_whole(keys.fifo(queue)) for queue in served))
        return {q: (served[q], [(r[i], int(r[i + 1])) for i in range(0, len(r), 2)]) for q, r in zip(served, replies, strict=True)}


def _whole(key: str) -> list[str | int | float]:
    return ["ZRANGE", key, 0, -1, "WITHSCORES"]
