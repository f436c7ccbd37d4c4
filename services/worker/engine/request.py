"""What goes into the engine and what comes out: requests, sampling parameters, token outputs, errors. Plain data, no torch.

Field meanings and ranges are those of protos/forebay/v1/types.proto; `check` refuses what would break a step, not what is merely unwise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from services.worker.engine.grammar import Grammar
from services.worker.engine.timeline import Snapshot


class FinishReason(StrEnum):
    """Why a choice ended. After STOP the last token id is the one that ended it, and isn't part of the text."""

    STOP = "stop"
    COMPLETE = "complete"  # as STOP, by the grammar: the last token is text
    LENGTH = "length"
    ERROR = "error"
    CANCELLED = "cancelled"


class RequestTooLarge(ValueError):
    """The request can never run here: its prompt or its blocks exceed what this engine has."""


class InvalidRequest(ValueError):
    """A field of the request is out of range; the message names it, its value and the limit."""


LATENCY_CLASSES = (1, 2, 3)  # realtime, standard, batch
_LEAST_REPETITION_PENALTY = 1e-7  # below, logits overflow; a little under the public limit, which fp32 may round down


class SequenceError(Exception):
    """One choice can't go on (NaN logits, every token banned). Its request fails; the step goes on for the others."""

    def __init__(self, request_id: str, choice_index: int, message: str, *, unsatisfiable: bool = False) -> None:
        """`unsatisfiable`: the request's own parameters leave nothing to sample; else the model or the engine is to blame."""
        super().__init__(f"request {request_id}, choice {choice_index}: {message}")
        self.request_id = request_id
        self.choice_index = choice_index
        self.message = message
        self.unsatisfiable = unsatisfiable


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. max_tokens None: the room left in the context. seed None: the engine draws one."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # -100 bans
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculation: bool = True  # False: no drafts for this request


@dataclass(frozen=True)
class EngineRequest:
    """A prompt to continue n times.

    `delivered` holds, per choice, output that the client has already (after a move from another worker): it counts as output but isn't
    sent again, and prompt log-probabilities are taken as delivered too. `finished_choices` aren't run.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = SamplingParams()
    n: int = 1
    latency_class: int = 2  # 1 realtime, 2 standard, 3 batch
    cache_salt: bytes = b""
    delivered: tuple[tuple[int, ...], ...] = ()
    finished_choices: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    ttft_target_seconds: float = 0.0  # for the first token, from the gateway's first sight of the request; 0: none
    tpot_target_seconds: float = 0.0  # for each further token; 0: none
    waited_seconds: float = 0.0  # since that first sight
    suspect_tokens: int = 0  # a worker died while it ran: up to so many output tokens no step has another such request in it; 0: none did
    model: str = ""  # whose engine it is for, where a device has several; an engine doesn't look

    @property
    def num_open_choices(self) -> int:
        """How many will end."""
        return self.n - len(self.finished_choices)


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its natural log-probability under the raw logits at temperature 1."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class PositionLogprobs:
    """The token at one position and the likeliest ones there, best first. has_logprob is False at the first prompt position only."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()
    has_logprob: bool = True


@dataclass
class TokenOutput:
    """News of one choice. `logprobs` has one entry per token if asked for; `prompt_logprobs` is the next piece of the prompt's."""

    request_id: str
    choice_index: int
    first_position: int  # of token_ids[0] in the choice's output, delivered tokens included
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # prompt tokens of the request found in the prefix cache
    num_preemptions: int = 0  # of this choice so far
    num_judged: int = 0  # of token_ids, from the first: tokens for whose place there was a draft
    num_accepted: int = 0  # of those, from the first: tokens that were the draft
    start_time: float | None = None  # when the request was admitted, by step's clock; None while it never ran
    error: str | None = None  # set with FinishReason.ERROR
    unsatisfiable: bool = False  # the error is the request's own fault: see SequenceError
    timeline: Snapshot | None = field(default=None, compare=False)  # of the request, where more has happened than tokens

    @property
    def is_urgent(self) -> bool:
        """Whether somebody waits for it: a choice's first or last word."""
        return self.first_position == 0 or self.finish_reason is not None


def check(request: EngineRequest, vocab_size: int) -> None:
    """Raises InvalidRequest for what the engine can't compute with. The gateway's table is stricter; this is the last line."""
    if not request.prompt_token_ids:
        raise InvalidRequest("prompt_token_ids is empty; a prompt needs at least one token")
    if request.n < 1:
        raise InvalidRequest(f"n is {request.n}; it must be at least 1")
    if request.latency_class not in LATENCY_CLASSES:
        raise InvalidRequest(f"latency_class is {request.latency_class}; it must be one of {LATENCY_CLASSES}")
    for name in ("ttft_target_seconds", "tpot_target_seconds", "waited_seconds"):
        _check_range(name, getattr(request, name), 0, math.inf)
    if len(request.delivered) > request.n:
        raise InvalidRequest(f"delivered has {len(request.delivered)} choices; the request has n = {request.n}")
    _check_ids("prompt_token_ids", request.prompt_token_ids, vocab_size)
    for tokens in request.delivered:
        _check_ids("delivered", tokens, vocab_size)
    _check_sampling(request.sampling, vocab_size)


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    _check_ids("logit_bias", sampling.logit_bias, vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    for token_id, bias in sampling.logit_bias.items():
        _check_range(f"logit_bias[{token_id}]", bias, -100, 100)
    _check_range("temperature", sampling.temperature, 0, math.inf)
    _check_range("top_p", sampling.top_p, 0, 1)
    _check_range("top_k", sampling.top_k, -1, math.inf)
    _check_range("min_p", sampling.min_p, 0, 1)
    _check_range("presence_penalty", sampling.presence_penalty, -math.inf, math.inf)
    _check_range("frequency_penalty", sampling.frequency_penalty, -math.inf, math.inf)
    _check_range("repetition_penalty", sampling.repetition_penalty, _LEAST_REPETITION_PENALTY, math.inf)
    _check_range("min_tokens", sampling.min_tokens, 0, math.inf)
    for name in ("max_tokens", "logprobs", "prompt_logprobs"):
        if (value := getattr(sampling, name)) is not None:
            _check_range(name, value, 0, math.inf)
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(f"min_tokens is {sampling.min_tokens}; it must be at most max_tokens, {sampling.max_tokens}")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{name} is {value}; it must be a finite number from {low} to {high}")


def _check_ids(name: str, token_ids: Sequence[int] | Mapping[int, float], vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        raise InvalidRequest(f"{name} holds {min(token_ids)} .. {max(token_ids)}; token ids must be from 0 to {vocab_size - 1}")
