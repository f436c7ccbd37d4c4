"""The span of one generation, by OpenTelemetry's GenAI conventions. Never a prompt, a text or a token."""

from forebay.v1 import types_pb2
from services.common import semconv, tracing
from services.common.errors import Code
from services.common.tracing import Span
from services.gateway.client import MeshCall
from services.gateway.metrics import CLASS_NAMES
from services.gateway.request import Generation


def generation_span(generation: Generation) -> Span:
    """Begins it, below the task's own span."""
    parent = tracing.current()
    if not parent:
        return tracing.OFF
    sampling = generation.sampling
    attributes: dict[str, tracing.Value] = {
        semconv.GEN_AI_OPERATION_NAME: generation.operation,
        semconv.GEN_AI_PROVIDER_NAME: semconv.FOREBAY,
        semconv.GEN_AI_REQUEST_MODEL: generation.model.full_name,
        semconv.GEN_AI_REQUEST_MAX_TOKENS: sampling.max_tokens,
        semconv.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        semconv.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        semconv.GEN_AI_RESPONSE_ID: generation.request_id,
        semconv.FOREBAY_CLASS: CLASS_NAMES[generation.latency_class],
        semconv.FOREBAY_ORG: generation.org,
    }
    if sampling.top_k:
        attributes[semconv.GEN_AI_REQUEST_TOP_K] = sampling.top_k
    if sampling.n > 1:
        attributes[semconv.GEN_AI_REQUEST_CHOICE_COUNT] = sampling.n
    return tracing.start(f"{generation.operation} {generation.model.name}", parent, attributes=attributes)


def end_generation(span: Span, call: MeshCall, status: Code) -> None:
    """Ends it with what was delivered."""
    if not span:
        return
    usage = call.usage()
    span.set(
        {
            semconv.GEN_AI_RESPONSE_FINISH_REASONS: [reason_name(choice.finish_reason) for choice in call.choices if choice.finished],
            semconv.GEN_AI_USAGE_INPUT_TOKENS: usage.prompt_tokens,
            semconv.GEN_AI_USAGE_OUTPUT_TOKENS: usage.completion_tokens,
            semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: usage.cached_tokens,
            semconv.FOREBAY_NUM_PREEMPTIONS: usage.preemptions,
            semconv.FOREBAY_NUM_REPLACEMENTS: call.num_replacements,
        }
    )
    if call.first_token_seconds:
        span.set({semconv.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: call.first_token_seconds})
    span.end("" if status is Code.OK else status.name)


def reason_name(reason: types_pb2.FinishReason.ValueType) -> str:
    """FINISH_REASON_STOP -> stop."""
    return types_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
