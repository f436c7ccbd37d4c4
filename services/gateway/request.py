"""A request as everything behind the faces sees it, and how it is admitted: model, prompt, sampling, class, deadline, seed.

What can be refused for its form is refused here, cheap checks before the tokenizer; room and quota are the scheduler's.
"""

import math
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, Self, TypeVar

from forebay.v1 import scheduler_pb2, types_pb2
from services.common.errors import Code, StatusError, invalid, unavailable
from services.gateway.aside import aside
from services.gateway.auth import Caller
from services.gateway.conversation import ChatOptions, check_chat
from services.gateway.field import shown
from services.gateway.latency import DEADLINE_SECONDS, UNSPECIFIED, Granted, LatencyClass, grant
from services.gateway.models import ServedModel
from services.gateway.prompts import Prompt, check_prompt_length, validate_prompts
from services.gateway.text.reply import PLAIN, ReplyForm
from services.gateway.validator import Limits, Sampling, validate_label, validate_sampling
from services.text.compiler import CompilerBusy, GrammarError
from services.text.grammar import Grammar

_MAX_DEADLINE_SECONDS = 7 * 86_400.0  # as inference.proto says
SEED_BITS = 53  # of those drawn here: to most readers of JSON a number is a double, and a seed must come back whole
MAX_PROMPT_SCORES = 200_000
"""Log-probabilities of prompt positions in one answer: about a second of the event loop to write."""
_NOTHING: Mapping[str, str] = {}


class Admitted(Protocol):
    """What placing and explaining need of a request, be it for text or for vectors."""

    @property
    def request_id(self) -> str:
        """Ours, 32 hex digits."""

    @property
    def org(self) -> str:
        """Of the verified token."""

    @property
    def latency_class(self) -> LatencyClass:
        """Never unspecified."""

    @property
    def lowered_from(self) -> LatencyClass:
        """What was asked for, where the org's ceiling lowered it."""

    @property
    def model(self) -> ServedModel:
        """As it was admitted with."""

    @property
    def deadline_seconds(self) -> float:
        """From admission."""

    @property
    def received_at(self) -> float:
        """By the process's monotonic clock: when the gateway saw it first; 0: nobody looked."""

    @property
    def num_prompt_tokens(self) -> int:
        """All that it brings."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of output, of one choice."""

    @property
    def n(self) -> int:
        """Choices."""

    @property
    def prefix(self) -> Sequence[int]:
        """Tokens whose keys and values some worker may have; empty where there are none."""

    @property
    def lost_epoch(self) -> int:
        """What its first placement names as lost; 0 unless it has an idempotency key."""


Some = TypeVar("Some", bound=Admitted)


def lowered(request: Some, lease: scheduler_pb2.Lease) -> Some:
    """The request in the class that its lease has: the org's ceiling may have come down since admission."""
    if lease.latency_class in (UNSPECIFIED, request.latency_class):
        return request
    before = request.lowered_from or request.latency_class
    return replace(request, latency_class=lease.latency_class, lowered_from=before)  # type: ignore[type-var]  # both are dataclasses


class Siblings:
    """The prompts of one request: they end together. `failure`: of the first that failed, which is the others' end, too."""

    def __init__(self) -> None:
        self.failure: StatusError | None = None


@dataclass(frozen=True)
class Generation:
    """One prompt to continue, admitted: nothing in it will be refused but for want of room."""

    request_id: str  # ours, 32 hex digits
    org: str
    latency_class: LatencyClass  # never unspecified
    model: ServedModel
    prompt_token_ids: list[int]
    prompt_text: str | None  # None where token ids came
    sampling: Sampling
    echo: bool
    label: str
    deadline_seconds: float  # from admission
    lowered_from: LatencyClass = UNSPECIFIED  # what was asked for, where the org's ceiling lowered it
    reply: ReplyForm = PLAIN  # what is taken out of the text
    received_at: float = 0.0  # by the process's monotonic clock: when the gateway saw it first; 0: nobody looked
    operation: Literal["chat", "text_completion"] = "text_completion"
    siblings: Siblings = field(default_factory=Siblings, compare=False)
    seed_is_drawn: bool = False
    lost_epoch: int = 0  # what its first placement names as lost: see scheduler.proto's Claim
    created: float = field(default_factory=time.time)  # seconds since 1970: when its first try came

    @property
    def num_prompt_tokens(self) -> int:
        """All that it brings."""
        return len(self.prompt_token_ids)

    @property
    def max_tokens(self) -> int:
        """Most tokens of output, of one choice."""
        return self.sampling.max_tokens

    @property
    def n(self) -> int:
        """Choices."""
        return self.sampling.n

    @property
    def prefix(self) -> Sequence[int]:
        """Tokens whose keys and values some worker may have."""
        return self.prompt_token_ids

    def claimed(self, request_id: str, seed: int, lost_epoch: int, created: float) -> Self:
        """The same as the first try of its idempotency key had it."""
        sampling = replace(self.sampling, seed=seed % (1 << SEED_BITS)) if self.seed_is_drawn else self.sampling
        return replace(self, request_id=request_id, sampling=sampling, lost_epoch=lost_epoch, created=created)


@dataclass(frozen=True)
class Envelope:
    """What a request says beside its prompt and sampling. `names` maps our field names to the client's, for errors."""

    caller: Caller
    model: ServedModel
    policy: types_pb2.OrgPolicy = field(default_factory=types_pb2.OrgPolicy)  # the caller's org's
    latency_class: LatencyClass = UNSPECIFIED
    deadline_seconds: float | None = None  # None: the class's
    deadlines: Mapping[LatencyClass, float] = field(default_factory=lambda: DEADLINE_SECONDS)  # by class, where there is none
    label: object = None  # the client's, unchecked
    idempotency_key: str = ""
    echo: bool = False
    max_tokens_cap: int = 32_768
    received_at: float = 0.0
    names: Mapping[str, str] = field(default_factory=dict)
    check_queue: Callable[[str, int], None] = lambda _model, _class: None  # refuses at once what a queue has no place for

    def name(self, ours: str) -> str:
        """What the client calls a field."""
        return self.names.get(ours, ours)

    @property
    def limits(self) -> Limits:
        """What bounds the fields while the prompt isn't tokenised."""
        return Limits(
            self.model.vocab_size,
            self.model.max_model_len,
            self.max_tokens_cap,
            allow_no_output=self.echo,
            most_reserved=self.policy.tokens_burst,
            most_held=self.model.most_held(self.policy.kv_share),
        )


async def admit_completion(envelope: Envelope, prompt: object, fields: Mapping[str, object]) -> list[Generation]:
    """One generation per prompt. `prompt`: a text, a list of texts, of token ids, or of lists of token ids; `fields`: FIELDS's values.

    Raises INVALID_ARGUMENT naming the client's field; UNAVAILABLE while no worker has shown the model; DEADLINE_EXCEEDED.
    """
    head = await _admit_head(envelope, fields)
    prompts = validate_prompts(prompt, limits=envelope.limits, name=envelope.name("prompt"))
    tokenizer = envelope.model.tokenizer

    def tokenised() -> list[list[int]]:
        return [tokenizer.encode(item) if isinstance(item, str) else item for item in prompts]

    ids = await aside(tokenised, sum(len(item) for item in prompts if isinstance(item, str)))
    names = [envelope.name("prompt")] if len(prompts) == 1 else [f"{envelope.name('prompt')}[{index}]" for index in range(len(prompts))]
    generations = [head.generation(item, prompt_ids, name) for item, prompt_ids, name in zip(prompts, ids, names, strict=True)]
    _check_scores(generations[0].sampling, sum(map(len, ids)), envelope.name("prompt"))
    return generations


def _check_scores(sampling: Sampling, num_prompt_tokens: int, name: str) -> None:
    """Bounds the log-probabilities of prompts, which come all at once: they are written on the loop that serves every stream."""
    if sampling.prompt_logprobs is None:
        return
    num_scores = num_prompt_tokens * sampling.n * (1 + sampling.prompt_logprobs)
    if num_scores > MAX_PROMPT_SCORES:
        raise invalid(
            name,
            f"{num_prompt_tokens} prompt tokens x n {sampling.n} x {1 + sampling.prompt_logprobs} log-probabilities is {num_scores}; "
            f"one request may ask for at most {MAX_PROMPT_SCORES}: send fewer prompts, or lower n or logprobs",
        )


async def admit_chat(envelope: Envelope, messages: object, fields: Mapping[str, object], options: ChatOptions | None = None) -> Generation:
    """The generation that answers a conversation: `messages` as OpenAI's, unchecked. Raises as admit_completion."""
    chat = check_chat(envelope.model, options or ChatOptions(), fields.get("grammar"), envelope.names)
    head = await _admit_head(envelope, {**fields, "grammar": chat.grammar}, with_tools=chat.use is not None)
    name = envelope.name("messages")
    text, ids = await chat.render(messages, name)
    return replace(head.generation(text, ids, name), reply=chat.reply_form(text), operation="chat")


async def count_chat_tokens(
    model: ServedModel, messages: object, options: ChatOptions, grammar: object = None, *, names: Mapping[str, str] = _NOTHING
) -> Sequence[int]:
    """The ids of a conversation, as a generation with the same options and grammar would have them for its prompt."""
    chat = check_chat(model, options, grammar, names)
    _, ids = await chat.render(messages, names.get("messages", "messages"))
    return ids


async def count_tokens(model: ServedModel, text: object, *, name: str = "text") -> Sequence[int]:
    """The ids of a text, which may be empty."""
    if text == "":
        return model.tokenizer.encode("")
    if not isinstance(text, str):
        raise invalid(name, f"{name} is {shown(text)}: it must be a text")
    validate_prompts(text, limits=Limits(model.vocab_size, model.max_model_len), name=name)
    return await aside(lambda: model.tokenizer.encode(text), len(text))


@dataclass(frozen=True)
class _Head:
    """What all prompts of a request share."""

    envelope: Envelope
    fields: Mapping[str, object]
    granted: Granted
    deadline_seconds: float
    label: str
    siblings: Siblings = field(default_factory=Siblings)

    def generation(self, prompt: Prompt, token_ids: list[int], name: str) -> Generation:
        """`prompt` as it came, `name` as the client calls it."""
        envelope = self.envelope
        check_prompt_length(len(token_ids), limits=envelope.limits, name=name)
        limits = replace(envelope.limits, num_prompt_tokens=len(token_ids))
        sampling = validate_sampling(self.fields, limits=limits, names=envelope.names)
        seed_is_drawn = self.fields.get("seed") is None
        if seed_is_drawn:
            sampling = replace(sampling, seed=secrets.randbits(SEED_BITS))
        return Generation(
            request_id=uuid.uuid4().hex,
            org=envelope.caller.org,
            latency_class=self.granted.latency_class,
            lowered_from=self.granted.lowered_from,
            model=envelope.model,
            prompt_token_ids=token_ids,
            prompt_text=prompt if isinstance(prompt, str) else None,
            sampling=sampling,
            echo=envelope.echo,
            label=self.label,
            siblings=self.siblings,
            deadline_seconds=self.deadline_seconds,
            received_at=envelope.received_at,
            seed_is_drawn=seed_is_drawn,
        )


async def _admit_head(envelope: Envelope, fields: Mapping[str, object], *, with_tools: bool = False) -> _Head:
    """All that can be refused before the prompt is looked at."""
    sampling = validate_sampling(fields, limits=envelope.limits, names=envelope.names)
    terms = admit_terms(envelope, with_tools=with_tools)
    if sampling.grammar is not None:
        await _check_grammar(envelope, sampling.grammar)
        fields = {**fields, "grammar": sampling.grammar}
    return _Head(envelope, fields, *terms)


class Terms(NamedTuple):
    """How a request runs, whatever it asks for."""

    granted: Granted
    deadline_seconds: float
    label: str


def admit_terms(envelope: Envelope, *, with_tools: bool = False) -> Terms:
    """Class, deadline and label. Raises INVALID_ARGUMENT, DEADLINE_EXCEEDED; UNAVAILABLE while no worker has shown the model."""
    label = validate_label(envelope.label, name=envelope.name("label"))
    if envelope.latency_class not in (UNSPECIFIED, *DEADLINE_SECONDS):
        name = envelope.name("latency_class")
        raise invalid(name, f"{name} is {envelope.latency_class}: it must be realtime (1), standard (2) or batch (3)")
    granted = grant(envelope.latency_class, envelope.policy, with_tools=with_tools)
    deadline = _deadline(envelope.deadline_seconds, envelope.deadlines[granted.latency_class])
    if not envelope.model.version:
        raise unavailable(f"no worker has loaded {envelope.model.name} yet: try again", reason="NO_WORKER")
    envelope.check_queue(envelope.model.full_name, granted.latency_class)
    return Terms(granted, deadline, label)


async def _check_grammar(envelope: Envelope, grammar: Grammar) -> None:
    """Compiles it, as the worker will: what it refuses is refused before anything is placed."""
    name = envelope.name("grammar")
    assert envelope.model.compiler is not None, "names of models that generate nothing resolve to none here"
    try:
        await envelope.model.compiler.compile(grammar)
    except GrammarError as error:
        raise invalid(name, f"{name} can't be enforced: {error}") from None
    except CompilerBusy as error:
        raise unavailable(f"{error}: try again", reason="TOO_MANY_GRAMMARS") from None


def _deadline(seconds: float | None, otherwise: float) -> float:
    if seconds is None:
        return otherwise
    if math.isnan(seconds) or seconds <= 0:
        raise StatusError(Code.DEADLINE_EXCEEDED, "the deadline had passed when the request came: allow more time")
    return min(seconds, _MAX_DEADLINE_SECONDS)
