"""Between the wire and the engine. What comes in is checked again in full: internal callers aren't trusted, a bad value could end
the engine for all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from forebay.v1 import explain_pb2, scheduler_pb2, types_pb2, worker_pb2
from services.common.errors import Code, StatusError, invalid
from services.text.compiler import Compiler
from services.worker.engine.grammar import Grammar
from services.worker.engine.request import EngineRequest, FinishReason, SamplingParams, TokenLogprob, TokenOutput
from services.worker.engine.timeline import Phase, Snapshot
from services.worker.flight_record import InFlight

_NO_DRAFT, _REFUSED, _ACCEPTED = 0, 1, 2  # verdicts, as worker.proto says
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 300
MAX_STOP_TOKENS = 16
MAX_ID_LENGTH = 128
SALT_BYTES = 32
MAX_SECONDS = 30 * 86_400.0  # of targets and waiting
SUSPECT_TOKENS = 32  # behind what was delivered a worker may have been so far when it died: news wait for a tenth of a second

FINISH_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.COMPLETE: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: types_pb2.FINISH_REASON_ERROR,
}

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Served:
    """A model of this worker, as requests see it."""

    model: str  # "name@level"
    version: str
    fingerprint: str
    vocab_size: int
    block_size: int
    num_blocks: int
    max_model_len: int
    compiler: Compiler | None = None  # None: the model's files have no tokenizer that grammars could be compiled for
    dimensions: int = 0  # of the vectors that it makes of inputs; 0: it generates
    max_call_tokens: int = 0  # of all inputs of a call, where it has several; 0: max_model_len


def target(
    request: worker_pb2.WorkerServiceGenerateRequest | worker_pb2.WorkerServiceEmbedRequest, models: Mapping[str, Served], incarnation: str
) -> Served:
    """The model that is meant. StatusError for another worker, model or version, or a model that does something else."""
    if request.incarnation != incarnation:
        raise StatusError(
            Code.FAILED_PRECONDITION, "the lease is for an earlier start of this worker; place again", reason="STALE_INCARNATION"
        )
    if (served := models.get(request.model)) is None:
        here = ", ".join(map(repr, models))
        raise StatusError(Code.NOT_FOUND, f"model {request.model!r} isn't here; this worker serves {here}", reason="MODEL_NOT_FOUND")
    if request.model_version != served.version:
        message = f"version {request.model_version!r} of {served.model!r} isn't here; this worker has {served.version!r}"
        raise StatusError(Code.FAILED_PRECONDITION, message, reason="MODEL_VERSION")
    if isinstance(request, worker_pb2.WorkerServiceEmbedRequest) != bool(served.dimensions):
        raise invalid("model", f"{served.model!r} {'makes vectors: use Embed' if served.dimensions else 'generates tokens: use Generate'}")
    return served


def to_engine(request: worker_pb2.WorkerServiceGenerateRequest, served: Served, grammar: Grammar | None = None) -> EngineRequest:
    """The engine's request, every bound checked. StatusError INVALID_ARGUMENT names field, value and limit."""
    if not 0 < len(request.request_id) <= MAX_ID_LENGTH:
        raise invalid("request_id", f"request_id must have 1 to {MAX_ID_LENGTH} characters, not {len(request.request_id)}")
    _within("epoch", request.epoch, 1, 2**63 - 1)
    if request.latency_class not in (1, 2, 3):
        raise invalid("latency_class", f"latency_class {request.latency_class} isn't realtime (1), standard (2) or batch (3)")
    if len(request.cache_salt) != SALT_BYTES:
        raise invalid("cache_salt", f"cache_salt must have {SALT_BYTES} bytes, not {len(request.cache_salt)}")
    prompt = list(request.prompt_token_ids)
    _within("prompt_token_ids", len(prompt), 1, served.max_model_len, what="length")
    _tokens("prompt_token_ids", prompt, served)
    n = request.sampling.n if request.sampling.HasField("n") else 1
    _within("sampling.n", n, 1, MAX_CHOICES)
    sampling = _sampling(request.sampling, len(prompt), served)
    delivered, finished = _replay(request, n, request.sampling.max_tokens, served)
    return EngineRequest(
        request_id=engine_id(request.request_id, request.epoch),
        prompt_token_ids=prompt,
        sampling=sampling,
        n=n,
        latency_class=request.latency_class,
        cache_salt=request.cache_salt,
        delivered=delivered,
        finished_choices=finished,
        grammar=grammar,
        ttft_target_seconds=_within("ttft_target_seconds", request.ttft_target_seconds, 0, MAX_SECONDS),
        tpot_target_seconds=_within("tpot_target_seconds", request.tpot_target_seconds, 0, MAX_SECONDS),
        waited_seconds=_within("waited_seconds", request.waited_seconds, 0, MAX_SECONDS),
        suspect_tokens=max(map(len, delivered), default=0) + SUSPECT_TOKENS if request.suspect else 0,
        model=served.model,
    )


def engine_id(request_id: str, epoch: int) -> str:
    """The engine's name of a lease."""
    return f"{request_id}#{epoch}"


def in_flight(entry: InFlight) -> scheduler_pb2.InFlight:
    """For the wire."""
    return scheduler_pb2.InFlight(request_id=entry.request_id, epoch=entry.epoch, num_output_tokens=entry.num_output_tokens)


def append(delta: worker_pb2.TokenDelta, output: TokenOutput) -> None:
    """Adds an output of the same choice behind what a delta holds."""
    if output.num_judged:
        verdicts = bytes([_ACCEPTED]) * output.num_accepted + bytes([_REFUSED]) * (output.num_judged - output.num_accepted)
        delta.verdicts = delta.verdicts.ljust(len(delta.token_ids), bytes([_NO_DRAFT])) + verdicts
    delta.token_ids.extend(output.token_ids)
    for positions, target in ((output.logprobs, delta.logprobs), (output.prompt_logprobs, delta.prompt_logprobs)):
        for position in positions:
            target.add(
                chosen=_token_logprob(position.chosen),
                top=[_token_logprob(token) for token in position.top],
                has_logprob=position.has_logprob,
            )
    if output.finish_reason is not None:
        delta.finish_reason = FINISH_REASONS[output.finish_reason]
        delta.grammar_complete = output.finish_reason is FinishReason.COMPLETE


def step_time_model(line: tuple[float, float, float, float]) -> scheduler_pb2.StepTimeModel:
    """For heartbeats; see StepTime.line."""
    fixed, per_token, per_row, per_key = line
    return scheduler_pb2.StepTimeModel(fixed_seconds=fixed, token_seconds=per_token, row_seconds=per_row, key_seconds=per_key)


def size(output: TokenOutput) -> int:
    """About the bytes of an output on the wire."""
    num_bytes = 16 + 4 * len(output.token_ids)
    for position in (*output.logprobs, *output.prompt_logprobs):
        num_bytes += 16 + 12 * (1 + len(position.top))
    return num_bytes


def timeline(snapshot: Snapshot, received_at: float) -> explain_pb2.Timeline:
    """For the wire. `received_at`, by the engine's clock: what comes before the engine looked is waiting, too."""
    seconds = snapshot.seconds
    return explain_pb2.Timeline(
        events=[
            explain_pb2.TimelineEvent(
                kind=explain_pb2.TimelineEventKind.ValueType(event.kind),
                at_seconds=event.at - received_at,
                choice_index=event.choice_index,
                num_tokens=event.num_tokens,
                num_cached_tokens=event.num_cached_tokens,
                num_chunks=event.num_chunks,
            )
            for event in snapshot.events
        ],
        waiting_seconds=max(0.0, snapshot.began - received_at) + seconds[Phase.WAITING],
        prefill_seconds=seconds[Phase.PREFILL],
        decode_seconds=seconds[Phase.DECODE],
        preempted_seconds=seconds[Phase.PREEMPTED],
        num_dropped_events=snapshot.num_dropped_events,
    )


def _token_logprob(token: TokenLogprob) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob)


def _sampling(sampling: types_pb2.SamplingParams, num_prompt_tokens: int, served: Served) -> SamplingParams:
    """Absent fields take the defaults of types.proto; stop strings are the gateway's (it cuts and cancels)."""
    for name in ("max_tokens", "seed"):
        if not sampling.HasField(name):
            raise invalid(f"sampling.{name}", f"sampling.{name} is missing; the gateway fills it in")
    max_tokens = _within("sampling.max_tokens", sampling.max_tokens, 0, served.max_model_len - num_prompt_tokens)
    biases = dict(sampling.logit_bias)
    _within("sampling.logit_bias", len(biases), 0, MAX_LOGIT_BIASES, what="size")
    _tokens("sampling.logit_bias", biases, served)
    for bias in biases.values():
        _within("sampling.logit_bias", bias, -100, 100)
    _within("sampling.stop_token_ids", len(sampling.stop_token_ids), 0, MAX_STOP_TOKENS, what="length")
    _tokens("sampling.stop_token_ids", sampling.stop_token_ids, served)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_within("sampling.min_tokens", sampling.min_tokens, 0, max_tokens),
        temperature=_optional(sampling, "temperature", 1.0, 0, 100),
        top_p=_optional(sampling, "top_p", 1.0, 0, 1, above=True),
        top_k=int(_optional(sampling, "top_k", 0, -1, 2**31 - 1)),
        min_p=_optional(sampling, "min_p", 0.0, 0, 1),
        presence_penalty=_optional(sampling, "presence_penalty", 0.0, -2, 2),
        frequency_penalty=_optional(sampling, "frequency_penalty", 0.0, -2, 2),
        repetition_penalty=_optional(sampling, "repetition_penalty", 1.0, 0, 100, above=True),
        logit_bias=biases,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        logprobs=_logprobs(sampling, "logprobs"),
        prompt_logprobs=_logprobs(sampling, "prompt_logprobs"),
        speculation=sampling.speculation if sampling.HasField("speculation") else True,
    )


def _replay(
    request: worker_pb2.WorkerServiceGenerateRequest, n: int, max_tokens: int, served: Served
) -> tuple[tuple[tuple[int, ...], ...], frozenset[int]]:
    """What the client has already: output by choice, and the choices that have ended."""
    finished = frozenset(request.finished_choices)
    for index in finished:
        _within("finished_choices", index, 0, n - 1)
    if len(finished) == n:
        raise invalid("finished_choices", f"all {n} choices have ended; there is nothing to run")
    _within("delivered", len(request.delivered), 0, n, what="length")
    for index, output in enumerate(request.delivered):
        most = max_tokens if index in finished else max(0, max_tokens - 1)
        _within(f"delivered[{index}]", len(output.ids), 0, most, what="length")
        _tokens(f"delivered[{index}]", output.ids, served)
    return tuple(tuple(output.ids) for output in request.delivered), finished


def _logprobs(sampling: types_pb2.SamplingParams, name: str) -> int | None:
    if not sampling.HasField(name):  # type: ignore[arg-type]  # the stub lists the names
        return None
    return int(_within(f"sampling.{name}", getattr(sampling, name), 0, MAX_LOGPROBS))


def _optional(sampling: types_pb2.SamplingParams, name: str, default: float, low: float, high: float, *, above: bool = False) -> float:
    """A field's value, checked; `above`: `low` itself is refused."""
    if not sampling.HasField(name):  # type: ignore[arg-type]  # the stub lists the names
        return default
    value: float = getattr(sampling, name)
    if above and value <= low:
        raise invalid(f"sampling.{name}", f"sampling.{name} is {value}; it must be above {low}")
    return _within(f"sampling.{name}", value, low, high)


def _within(field: str, value: Number, low: float, high: float, *, what: str = "value") -> Number:
    if not low <= value <= high:  # written so that NaN is refused, too
        raise invalid(field, f"{field}: {what} {value} is outside {low} .. {high}")
    return value


def _tokens(field: str, ids: Iterable[int], served: Served) -> None:
    worst = next((token for token in ids if not 0 <= token < served.vocab_size), None)
    if worst is not None:
        raise invalid(field, f"{field}: token {worst} is outside the vocabulary, 0 .. {served.vocab_size - 1}")
