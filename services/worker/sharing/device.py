"""The engines of one device, one for each model, which take turns step by step. One thread calls it; it knows no RPC."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from services.worker.engine.engine import EngineStats
from services.worker.engine.request import EngineRequest, TokenOutput
from services.worker.sharing import claims
from services.worker.sharing.arena import Arena
from services.worker.sharing.claims import Tenant
from services.worker.sharing.timeslice import TimeSlice

Progress = dict[str, tuple[int, int]]
"""Request id -> (output tokens, blocks)."""


class Member(Protocol):
    """What a device steps for one model; see Engine."""

    @property
    def has_work(self) -> bool:
        """True while a step would do or say something."""
        ...

    @property
    def most_urgent_class(self) -> int:
        """Of what it has to do, 1 .. 3."""
        ...

    @property
    def num_tokens(self) -> tuple[int, int]:
        """(computed, generated) since the start."""
        ...

    def full_step_seconds(self) -> float:
        """Foretold, of the longest step that may come; 0 while nothing is known."""
        ...

    def add(self, request: EngineRequest) -> None:
        """InvalidRequest, RequestTooLarge: refused."""
        ...

    def abort(self, request_id: str) -> None:
        """An unknown id is nobody's business any more."""
        ...

    def step(self, now: float) -> list[TokenOutput]:
        """One output per choice that has news."""
        ...

    def progress(self) -> list[tuple[str, int, int]]:
        """(request id, output tokens, blocks held) of every live request."""
        ...

    def stats(self) -> EngineStats:
        """Numbers for heartbeats and metrics."""
        ...

    def check_integrity(self) -> None:
        """Asserts what must hold between steps."""
        ...


@dataclass(frozen=True)
class Stepped:
    """What a step came to."""

    model: str
    outputs: list[TokenOutput]
    num_tokens: int  # computed, the prompts' included
    num_generated_tokens: int


class SharedDevice:
    """`members` by the model's name, which requests bear. What one is asked about a member is kept until that one has changed.

    `arena` has the blocks of the `tenants` among them, where they share one.
    """

    def __init__(self, members: Mapping[str, Member], arena: Arena | None = None, tenants: Mapping[str, Tenant] | None = None) -> None:
        self.members = dict(members)
        self._arena = arena
        self._tenants = tenants or {}
        self._idle: set[str] = set()  # whose last step did nothing, as they wait for others' blocks
        self._turns = TimeSlice()
        self._stats: dict[str, EngineStats] = {}
        self._progress: dict[str, Progress] = {}
        self._changed = set(self.members)  # since they were looked at

    @property
    def has_work(self) -> bool:
        return any(member.has_work for member in self.members.values())

    def full_step_seconds(self) -> float:
        """Foretold, of the longest step that may come, whosever it is."""
        return max(member.full_step_seconds() for member in self.members.values())

    def add(self, request: EngineRequest) -> None:
        """To the engine of its model. InvalidRequest, RequestTooLarge: refused."""
        self._changed.add(request.model)
        self.members[request.model].add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request, whoever has it. Idempotent."""
        for model, member in self.members.items():
            member.abort(request_id)
            if request_id in self._progress.get(model, ()):
                self._changed.add(model)

    def step(self, now: float) -> Stepped:
        """One step of the model whose turn it is. `now` in seconds, any origin."""
        working = {model: member for model, member in self.members.items() if member.has_work}
        if self._arena is not None:
            claims.settle(self._arena, {model: tenant for model, tenant in self._tenants.items() if tenant.has_work}, now)
        able = {model: member.most_urgent_class for model, member in working.items() if model not in self._idle}
        model = self._turns.choose(able or {model: member.most_urgent_class for model, member in working.items()})
        member = self.members[model]
        computed, generated = member.num_tokens
        outputs = member.step(now)
        stepped = Stepped(model, outputs, member.num_tokens[0] - computed, member.num_tokens[1] - generated)
        if outputs or stepped.num_tokens:
            self._idle.clear()
        else:
            self._idle.add(model)
        self._changed.update(working)
        return stepped

    def took(self, model: str, seconds: float) -> None:
        """How long its step was, for whose turn is next."""
        self._turns.charge(model, seconds)

    def stats(self) -> dict[str, EngineStats]:
        """By model."""
        self._look()
        return dict(self._stats)

    def progress(self) -> Progress:
        """Of every live request, whosever it is."""
        self._look()
        return {request_id: held for progress in self._progress.values() for request_id, held in progress.items()}

    def check_integrity(self) -> None:
        """Asserts what must hold between steps, of each by itself."""
        for member in self.members.values():
            member.check_integrity()

    def _look(self) -> None:
        for model in self._changed:
            member = self.members[model]
            self._stats[model] = member.stats()
            self._progress[model] = {request_id: (num_tokens, num_blocks) for request_id, num_tokens, num_blocks in member.progress()}
        self._changed.clear()
