"""A request for vectors as everything behind the faces sees it, and how it is admitted: what its form forbids is refused here."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from services.common.errors import invalid
from services.gateway.aside import aside
from services.gateway.field import Field
from services.gateway.latency import UNSPECIFIED, LatencyClass
from services.gateway.models import ServedModel
from services.gateway.prompts import Bounds, validate_prompts
from services.gateway.request import Envelope, admit_terms
from services.gateway.validator import Limits, whole

MAX_INPUTS = 2048
MAX_INPUT_BYTES = 4 << 20
"""Of all texts of a request: a face's largest message holds as much."""


@dataclass(frozen=True)
class Embedding:
    """Inputs to turn into vectors, admitted: nothing in it will be refused but for want of room."""

    request_id: str  # ours, 32 hex digits
    org: str
    latency_class: LatencyClass  # never unspecified
    model: ServedModel
    inputs: list[list[int]]
    dimensions: int  # of the vectors
    label: str
    deadline_seconds: float  # from admission
    lowered_from: LatencyClass = UNSPECIFIED  # what was asked for, where the org's ceiling lowered it
    received_at: float = 0.0  # by the process's monotonic clock: when the gateway saw it first; 0: nobody looked
    max_tokens: int = 0  # of output: there is none
    n: int = 1
    prefix: Sequence[int] = ()  # no cache has anything of it
    lost_epoch: int = 0  # what its first placement names as lost: see scheduler.proto's Claim

    @property
    def num_prompt_tokens(self) -> int:
        """Over all inputs."""
        return sum(map(len, self.inputs))

    def claimed(self, request_id: str, seed: int, lost_epoch: int, created: float) -> Self:  # noqa: ARG002  # nothing is drawn here
        """The same as the first try of its idempotency key had it."""
        return replace(self, request_id=request_id, lost_epoch=lost_epoch)


async def admit_embedding(envelope: Envelope, inputs: object, dimensions: object = None) -> Embedding:
    """`inputs`: a text, a list of texts, of token ids, or of lists of token ids; `dimensions`: a number, or None for all.

    Raises INVALID_ARGUMENT naming the client's field; UNAVAILABLE while no worker has shown the model; DEADLINE_EXCEEDED.
    """
    model, name = envelope.model, envelope.name("inputs")
    terms = admit_terms(envelope)
    limits = envelope.limits
    wanted = model.dimensions
    if dimensions is not None:
        wanted = whole(1, model.dimensions)(Field("dimensions", dimensions), limits)
    bounds = Bounds(MAX_INPUTS, MAX_INPUT_BYTES, _check_length)
    prompts = validate_prompts(inputs, limits=limits, name=name, bounds=bounds)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:  # then all are
        ids = await aside(lambda: model.tokenizer.encode_all(texts), sum(map(len, texts)))
        for index, tokens in enumerate(ids):
            _check_length(len(tokens), limits, name if isinstance(inputs, str) else f"{name}[{index}]")
    else:
        ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    return Embedding(
        request_id=uuid.uuid4().hex,
        org=envelope.caller.org,
        latency_class=terms.granted.latency_class,
        lowered_from=terms.granted.lowered_from,
        model=model,
        inputs=ids,
        dimensions=wanted,
        label=terms.label,
        deadline_seconds=terms.deadline_seconds,
        received_at=envelope.received_at,
    )


def _check_length(num_tokens: int, limits: Limits, name: str) -> None:
    if num_tokens < 1:
        raise invalid(name, f"{name} has no tokens: send at least one")
    if num_tokens > limits.max_model_len:
        raise invalid(
            name,
            f"{name} has {num_tokens} tokens: the model takes at most {limits.max_model_len} in one input, and none is cut in silence; "
            f"shorten it by {num_tokens - limits.max_model_len} tokens, or send it in parts",
        )
