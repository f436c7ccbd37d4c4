"""A request as everything behind the faces sees it, and how it comes to be: model, prompt, sampling, class, deadline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forebay.v1 import types_pb2
from services.gateway.auth import Caller
from services.gateway.models import ServedModel
from services.gateway.validator import Sampling

LatencyClass = types_pb2.LatencyClass.ValueType
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class Generation:
    """One prompt to continue, admitted: nothing in it can be refused any more but for want of room."""

    request_id: str  # ours, 32 hex digits
    org: str
    subject: str
    roles: frozenset[str]
    latency_class: LatencyClass  # never unspecified
    model: ServedModel
    prompt_token_ids: list[int]
    prompt_text: str | None  # None where token ids came
    sampling: Sampling
    echo: bool
    label: str
    deadline_seconds: float  # from admission


@dataclass(frozen=True)
class Envelope:
    """What a request says beside its prompt and sampling. `names` maps our field names to the client's, for errors."""

    caller: Caller
    model: ServedModel
    latency_class: LatencyClass = types_pb2.LATENCY_CLASS_UNSPECIFIED
    deadline_seconds: float | None = None  # None: the class's
    label: object = None  # the client's, unchecked
    echo: bool = False
    max_tokens_cap: int = 32_768
    names: Mapping[str, str] = field(default_factory=dict)


async def admit_completion(envelope: Envelope, prompt: object, fields: Mapping[str, object]) -> list[Generation]:
    """One generation per prompt. `prompt`: a text, a list of texts, of token ids, or of lists of token ids."""
    raise NotImplementedError


async def admit_chat(envelope: Envelope, messages: object, fields: Mapping[str, object]) -> Generation:
    """The generation that answers a conversation; `messages` as OpenAI's, unchecked."""
    raise NotImplementedError


async def count_tokens(
    model: ServedModel, *, text: object = None, messages: object = None, names: Mapping[str, str] = _NOTHING
) -> Sequence[int]:
    """The ids of a text, or of a conversation as the template renders it."""
    raise NotImplementedError


def latency_class(value: object, name: str = "class") -> LatencyClass:
    """A class from its words: realtime, standard, batch, or OpenAI's service tiers. Raises INVALID_ARGUMENT."""
    raise NotImplementedError
