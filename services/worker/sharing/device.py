"""The engines of one device, one for each model, which take turns step by step. One thread calls it; it knows no RPC."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from services.worker.engine.encoder import EncodeOutput, EncodeRequest, EncoderStats
from services.worker.engine.engine import EngineStats
from services.worker.engine.request import EngineRequest, TokenOutput
from services.worker.sharing import claims
from services.worker.sharing.arena import Arena
from services.worker.sharing.claims import Resting, Tenant
from services.worker.sharing.orders import Kind, Outcome, obey
from services.worker.sharing.timeslice import TimeSlice
from services.worker.sharing.weights import Weights

Progress = dict[str, tuple[int, int]]
"""Request id -> (output tokens, blocks)."""


Request = EngineRequest | EncodeRequest
Output = TokenOutput | EncodeOutput
Stats = EngineStats | EncoderStats

Asked = TypeVar("Asked", contravariant=True)
Told = TypeVar("Told", covariant=True)


class Member(Protocol[Asked, Told]):
    """What a device steps for one model; see Engine and Encoder."""

    is_delayed: bool

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

    def add(self, request: Asked) -> None:
        """InvalidRequest, RequestTooLarge: refused."""
        ...

    def abort(self, request_id: str) -> None:
        """An unknown id is nobody's business any more."""
        ...

    def step(self, now: float) -> Sequence[Told]:
        """One output per choice that has news."""
        ...

    def progress(self) -> list[tuple[str, int, int]]:
        """(request id, output tokens, blocks held) of every live request."""
        ...

    def stats(self) -> Stats:
        """Numbers for heartbeats and metrics."""
        ...

    def check_integrity(self) -> None:
        """Asserts what must hold between steps."""
        ...


@dataclass(frozen=True)
class Stepped:
    """What a step came to."""

    model: str
    outputs: Sequence[Output]
    num_tokens: int  # computed, the prompts' included
    num_generated_tokens: int


class SharedDevice:
    """`members` by the model's name, which requests bear. What one is asked about a member is kept until that one has changed.

    `arena` has the blocks of the `tenants` among them, where they share one. `weights` come and go where not all are there at once.
    """

    def __init__(
        self,
        members: Mapping[str, Member[Any, Output]],
        arena: Arena | None = None,
        tenants: Mapping[str, Tenant] | None = None,
        weights: Weights | None = None,
    ) -> None:
        self.members = dict(members)
        self._arena = arena
        self._tenants = tenants or {}
        self._weights = weights
        self._idle: set[str] = set()  # whose last step did nothing, as they wait for others' blocks
        self._turns = TimeSlice()
        self._stepping: str | None = None  # whose the last step was; None: nobody could
        self._stats: dict[str, Stats] = {}
        self._progress: dict[str, Progress] = {}
        self._changed = set(self.members)  # since they were looked at

    @property
    def has_work(self) -> bool:
        return any(member.has_work for member in self.members.values())

    def full_step_seconds(self) -> float:
        """Foretold, of the longest step that may come, whosever it is, and whether or not its weights must come first."""
        longest = max(member.full_step_seconds() for member in self.members.values())
        return longest if self._weights is None else longest + self._weights.load_seconds

    def add(self, request: Request) -> None:
        """To the engine of its model. InvalidRequest, RequestTooLarge: refused."""
        self._changed.add(request.model)
        self.members[request.model].add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request, whoever has it. Idempotent."""
        for model, member in self.members.items():
            member.abort(request_id)
            if request_id in self._progress.get(model, ()):
                self._changed.add(model)
        self._rest(0.0)

    def step(self, now: float) -> Stepped:
        """One step of the model whose turn it is; none while all weights that are wanted are elsewhere. `now` in seconds, any origin."""
        working = {model: member for model, member in self.members.items() if member.has_work}
        urgency = {model: member.most_urgent_class for model, member in working.items()}
        able = self._able(urgency, now)
        if self._arena is not None:
            tenants = {model: tenant for model, tenant in self._tenants.items() if tenant.has_work}
            claims.settle(self._arena, {m: tenant if m in able else Resting(tenant) for m, tenant in tenants.items()}, now)
        self._changed.update(working)
        self._stepping = None
        if not able:
            return Stepped(next(iter(working)), [], 0, 0)
        model = self._stepping = self._turns.choose({m: urgency[m] for m in able if m not in self._idle} or {m: urgency[m] for m in able})
        member = self.members[model]
        if self._weights is not None:
            member.is_delayed = not self._weights.is_there(model)
        computed, generated = member.num_tokens
        outputs = member.step(now)
        self._rest(now)
        stepped = Stepped(model, outputs, member.num_tokens[0] - computed, member.num_tokens[1] - generated)
        if outputs or stepped.num_tokens:
            self._idle.clear()
        else:
            self._idle.add(model)
        return stepped

    def _rest(self, now: float) -> None:
        """An idle device claims nothing."""
        if self._arena is not None and not self.has_work:
            claims.settle(self._arena, {}, now)

    def _able(self, urgency: Mapping[str, int], now: float) -> list[str]:
        """Whose weights are there, of those that have work."""
        if self._weights is None:
            return list(urgency)
        self._weights.advance(urgency, now)
        return self._weights.able(urgency)

    @property
    def is_moving(self) -> bool:
        """Whether weights come, or are to come, though nobody may have work."""
        return self._weights is not None and self._weights.residency.is_moving

    def move(self, now: float) -> None:
        """In the place of a step where there is no work: weights that are to come do."""
        if self._weights is not None:
            self._weights.advance({}, now)

    def obey(self, kind: Kind, model: str, now: float) -> Outcome:
        """An act of an operator or a scheduler, between steps."""
        if self._weights is None:
            return obey(None, kind, model, 0, now)
        return self._weights.obey(kind, model, len(self.members[model].progress()), now)

    def pin(self, models: Collection[str]) -> None:
        """These stay on the device, beside those of the worker's settings."""
        if self._weights is not None:
            self._weights.residency.pin(models)

    def took(self, model: str, seconds: float) -> None:
        """How long its step was, for whose turn is next. Nobody pays for one that there wasn't."""
        if model == self._stepping:
            self._turns.charge(model, seconds)

    def stats(self) -> dict[str, Stats]:
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
