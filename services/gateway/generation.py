"""A generation as both faces see it: Started, then Deltas of safe text, then Finished.

Turns the mesh's tokens into text, cuts at stop strings, names log-probabilities' tokens, and counts. Knows no face's format.
"""

import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing

from forebay.v1 import inference_pb2, scheduler_pb2, types_pb2, worker_pb2
from services.common import log
from services.common.errors import Code, StatusError
from services.gateway.client import MeshCall
from services.gateway.mesh import Mesh
from services.gateway.metrics import GatewayMetrics, Observation
from services.gateway.placing import Deadline, reserve
from services.gateway.request import Generation
from services.gateway.spans import end_generation, generation_span
from services.gateway.text.reply import CallPart, Reply
from services.gateway.text.stream import Piece, TextStream

_log = log.get(__name__)

Event = inference_pb2.Started | inference_pb2.Delta | inference_pb2.Finished
OnLease = Callable[[scheduler_pb2.Lease], None]


class Generations:
    """Runs generations of one face on the mesh, and measures them."""

    def __init__(self, mesh: Mesh, metrics: GatewayMetrics, face: str) -> None:
        self._mesh = mesh
        self._metrics = metrics
        self._face = face

    async def reserve(self, generations: Sequence[Generation]) -> None:
        """Takes the quota of all of one request's generations, or of none. Raises StatusError as their placing would."""
        deadline = Deadline(min(generation.deadline_seconds for generation in generations), self._mesh.clock)
        await reserve(self._mesh, generations, deadline)

    async def run(self, generation: Generation, on_lease: OnLease = lambda _: None) -> AsyncGenerator[Event]:
        """One Started, any number of Delta, one Finished; or a StatusError. Close it (aclosing) to cancel the work.

        `on_lease` hears of each lease, before Started or whatever else comes of it.

        Whatever goes wrong comes out as a StatusError: what is not the client's or the mesh's doing is our bug, logged and INTERNAL.
        """
        span = generation_span(generation)
        observation = Observation(self._metrics, self._face, generation, span.trace_id)
        status, failure = Code.CANCELLED, None
        self._metrics.running.labels(self._face).inc()

        def leased(lease: scheduler_pb2.Lease) -> None:
            observation.leased(lease)
            on_lease(lease)

        call = MeshCall(self._mesh, generation, leased, span)
        try:
            async with call, aclosing(_Run(generation, call).events()) as events:
                async for event in events:
                    if isinstance(event, inference_pb2.Delta):
                        observation.delta(event)
                    elif isinstance(event, inference_pb2.Finished):
                        observation.usage = event.usage
                        status = Code.OK
                    yield event
        except StatusError as error:
            status, failure = error.code, error
            raise
        except Exception as error:  # the last line before the client: it gets a typed end, we get the trace
            status = Code.INTERNAL
            _log.exception("generation_failed", request_id=generation.request_id)
            raise StatusError(
                Code.INTERNAL, "the gateway failed on this request: try again, and report its id if it fails again"
            ) from error
        finally:
            self._metrics.running.labels(self._face).dec()
            observation.ended(call, failure, status)
            end_generation(span, call, status)


class _Run:
    """One generation's text."""

    def __init__(self, generation: Generation, call: MeshCall) -> None:
        self._generation = generation
        self._call = call
        self._tokenizer = generation.model.tokenizer
        self._texts = [TextStream(self._tokenizer, generation.sampling.stop) for _ in range(generation.sampling.n)]
        self._replies = [Reply(generation.reply) for _ in self._texts]

    async def events(self) -> AsyncGenerator[Event]:
        async with aclosing(self._call.events()) as events:
            async for event in events:
                if isinstance(event, worker_pb2.Accepted):
                    yield self._started(event.fingerprint)
                    for index in range(self._generation.sampling.n if self._generation.echo else 0):
                        yield inference_pb2.Delta(choice_index=index, text=self._prompt_text())
                else:
                    for delta in self._deltas(event):
                        yield delta
        reasons = [_reason(choice.finish_reason, reply) for choice, reply in zip(self._call.choices, self._replies, strict=True)]
        yield inference_pb2.Finished(reasons=reasons, usage=self._call.usage())

    def _started(self, fingerprint: str) -> inference_pb2.Started:
        generation = self._call.request
        return inference_pb2.Started(
            request_id=generation.request_id,
            model=generation.model.full_name,
            system_fingerprint=fingerprint or generation.model.fingerprint,
            prompt_tokens=len(generation.prompt_token_ids),
            latency_class=generation.latency_class,
            seed=generation.sampling.seed,
            label=generation.label,
            lowered_from=generation.lowered_from,
        )

    def _prompt_text(self) -> str:
        text = self._generation.prompt_text
        return self._tokenizer.decode(self._generation.prompt_token_ids) if text is None else text

    def _deltas(self, news: worker_pb2.TokenDelta) -> Iterator[inference_pb2.Delta]:
        """The client's part of the worker's news."""
        piece = self._piece(news)
        if piece.stopped:
            self._call.end_choice(news.choice_index, news.first_position + len(piece.token_ids))
        reply = self._replies[news.choice_index]
        parts = reply.push(piece.text)
        if piece.stopped or news.finish_reason:
            parts += reply.finish()
        if parts or piece.token_ids or news.prompt_logprobs:
            yield inference_pb2.Delta(
                choice_index=news.choice_index,
                text="".join(part.content for part in parts),
                reasoning="".join(part.reasoning for part in parts),
                tool_calls=[self._call_delta(news.choice_index, part.call) for part in parts if part.call is not None],
                token_ids=piece.token_ids,
                first_position=news.first_position,
                logprobs=[self._named(entry) for entry in news.logprobs[: len(piece.token_ids)]],
                prompt_logprobs=[self._named(entry) for entry in news.prompt_logprobs],
            )

    def _piece(self, news: worker_pb2.TokenDelta) -> Piece:
        """The text of new tokens. The token that an engine stopped at is delivered and counted, but is no text."""
        stream = self._texts[news.choice_index]
        ids = list(news.token_ids)
        end = ids[-1:] if news.finish_reason == types_pb2.FINISH_REASON_STOP and not news.grammar_complete else []
        piece = stream.push(ids[: len(ids) - len(end)])
        if piece.stopped or news.finish_reason == types_pb2.FINISH_REASON_UNSPECIFIED:
            return piece
        return Piece(piece.text + stream.finish(), [*piece.token_ids, *end], stream.stopped)

    def _call_delta(self, choice_index: int, part: CallPart) -> inference_pb2.ToolCallDelta:
        """The call's id is the same in every try of the request."""
        place = f"{self._generation.request_id}:{choice_index}:{part.index}"
        call_id = f"call_{hashlib.sha256(place.encode()).hexdigest()[:24]}" if part.name else ""
        return inference_pb2.ToolCallDelta(index=part.index, id=call_id, name=part.name, arguments=part.arguments)

    def _named(self, entry: types_pb2.PositionLogprobs) -> types_pb2.PositionLogprobs:
        """The entry with its tokens' texts and bytes."""
        for token in (entry.chosen, *entry.top):
            token.text_bytes = self._tokenizer.token_bytes(token.token_id)
            token.text = self._tokenizer.token_text(token.token_id)
        return entry


def _reason(reason: types_pb2.FinishReason.ValueType, reply: Reply) -> types_pb2.FinishReason.ValueType:
    called = reason == types_pb2.FINISH_REASON_STOP and reply.num_calls > 0
    return types_pb2.FINISH_REASON_TOOL_CALLS if called else reason
