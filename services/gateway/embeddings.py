"""A request for vectors as both faces see it: Started, then vectors as they come, then Finished. Measured and traced; knows no format."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from forebay.v1 import inference_pb2, scheduler_pb2
from services.common import log, semconv, tracing
from services.common.errors import Code, StatusError
from services.common.metrics import exemplar
from services.common.tracing import Span
from services.gateway.embed_call import EmbedCall, Vector
from services.gateway.embed_request import Embedding
from services.gateway.mesh import Mesh
from services.gateway.metrics import CLASS_NAMES, GatewayMetrics

_log = log.get(__name__)

EmbeddingEvent = inference_pb2.Started | list[Vector] | inference_pb2.Finished
OnLease = Callable[[scheduler_pb2.Lease], None]


class Embeddings:
    """Runs one face's requests for vectors on the mesh."""

    def __init__(self, mesh: Mesh, metrics: GatewayMetrics, face: str) -> None:
        self._mesh = mesh
        self._metrics = metrics
        self._face = face

    async def run(self, embedding: Embedding, on_lease: OnLease = lambda _: None) -> AsyncGenerator[EmbeddingEvent]:
        """One Started, the vectors in some order, one Finished; or a StatusError. Close it (aclosing) to cancel the work.

        `on_lease` hears of each lease. What is neither the client's nor the mesh's doing is our bug, logged and INTERNAL.
        """
        span, start = _begin_span(embedding), time.monotonic()
        status, failure = Code.CANCELLED, None
        self._metrics.running.labels(self._face).inc()
        call = EmbedCall(self._mesh, embedding, on_lease, span)
        try:
            async with call, aclosing(call.events()) as events:
                async for event in events:
                    yield event if isinstance(event, list) else _started(call.request, event.fingerprint)
                status = Code.OK
                yield inference_pb2.Finished(usage=call.usage())
        except StatusError as error:
            status, failure = error.code, error
            raise
        except Exception as error:  # the last line before the client: it gets a typed end, we get the trace
            status = Code.INTERNAL
            _log.exception("embedding_failed", request_id=embedding.request_id)
            words = "the gateway failed on this request: try again, and report its id if it fails again"
            raise StatusError(Code.INTERNAL, words) from error
        finally:
            self._metrics.running.labels(self._face).dec()
            self._measure(embedding, call, status, failure, time.monotonic() - start, span.trace_id)
            _end_span(span, call, status)

    def _measure(
        self, embedding: Embedding, call: EmbedCall, status: Code, failure: StatusError | None, seconds: float, trace_id: str | None
    ) -> None:
        metrics, tokens = self._metrics, call.usage().prompt_tokens if status is Code.OK else 0
        labels = (self._face, embedding.model.name, CLASS_NAMES[embedding.latency_class])
        line = metrics.line(*labels)
        metrics.requests.labels(*labels, status.name).inc()
        line.duration.observe(seconds, exemplar(trace_id))
        line.prompt_tokens.inc(tokens)
        metrics.embedded_inputs.labels(*labels).inc(call.num_delivered)
        metrics.replacements.inc(call.num_replacements)
        metrics.charge(embedding.org, failure, status, prompt_tokens=tokens, output_tokens=0)


def _started(embedding: Embedding, fingerprint: str) -> inference_pb2.Started:
    return inference_pb2.Started(
        request_id=embedding.request_id,
        model=embedding.model.full_name,
        system_fingerprint=fingerprint or embedding.model.fingerprint,
        prompt_tokens=embedding.num_prompt_tokens,
        latency_class=embedding.latency_class,
        label=embedding.label,
        lowered_from=embedding.lowered_from,
    )


def _begin_span(embedding: Embedding) -> Span:
    """By OpenTelemetry's GenAI conventions, below the task's own span. Never a text or a token."""
    parent = tracing.current()
    if not parent:
        return tracing.OFF
    attributes: dict[str, tracing.Value] = {
        semconv.GEN_AI_OPERATION_NAME: "embeddings",
        semconv.GEN_AI_PROVIDER_NAME: semconv.FOREBAY,
        semconv.GEN_AI_REQUEST_MODEL: embedding.model.full_name,
        semconv.GEN_AI_RESPONSE_ID: embedding.request_id,
        semconv.GEN_AI_EMBEDDINGS_DIMENSION_COUNT: embedding.dimensions,
        semconv.FOREBAY_CLASS: CLASS_NAMES[embedding.latency_class],
        semconv.FOREBAY_ORG: embedding.org,
    }
    return tracing.start(f"embeddings {embedding.model.name}", parent, attributes=attributes)


def _end_span(span: Span, call: EmbedCall, status: Code) -> None:
    if not span:
        return
    span.set(
        {
            semconv.GEN_AI_USAGE_INPUT_TOKENS: call.usage().prompt_tokens,
            semconv.FOREBAY_NUM_INPUTS: call.num_delivered,
            semconv.FOREBAY_NUM_REPLACEMENTS: call.num_replacements,
        }
    )
    span.end("" if status is Code.OK else status.name)
