"""A request for vectors on this worker: what comes in is checked again in full, and one lease keeps its account. Knows no RPC."""

import time

from forebay.v1 import explain_pb2, types_pb2, worker_pb2
from services.common import tracing
from services.common.errors import Code, StatusError, invalid
from services.worker.engine.encoder import EncodeOutput, EncodeRequest
from services.worker.engine.request import FinishReason
from services.worker.metrics import Ended, Metrics
from services.worker.vector_outbox import VectorOutbox
from services.worker.wire import MAX_ID_LENGTH, Served, engine_id

MAX_INPUTS = 2048  # as worker.proto says


class EmbedLease:
    """One request here, under one epoch: the sink of its vectors, and its account. It holds a slot, and no cache."""

    num_wanted_blocks = 0
    num_output_tokens = 0
    timeline = None

    def __init__(self, request_id: str, epoch: int, request: EncodeRequest, outbox: VectorOutbox, metrics: Metrics, served: Served) -> None:
        self.request_id = request_id
        self.epoch = epoch
        self.request = request
        self.outbox = outbox
        self.metrics = metrics
        self.served = served
        self.span = tracing.OFF  # of the call that brought it
        self.num_sequences = 1  # 0 when it has ended
        self._arrived_at = time.monotonic()
        self._first_at: float | None = None  # when its first vectors came
        self._last_at: float | None = None  # its last ones
        self._num_tokens = 0  # of the inputs that have their vectors
        self._reason = "abort"

    @property
    def is_waiting(self) -> bool:
        """Whether nothing of it was computed yet."""
        return self._first_at is None

    @property
    def usage(self) -> types_pb2.Usage:
        """As counted here."""
        return types_pb2.Usage(prompt_tokens=self._num_tokens)

    @property
    def told_timeline(self) -> explain_pb2.Timeline:
        """Its time until the first vectors came, and from there to the last, which is all prefill: there is nothing to decode."""
        first, last = self._first_at or self._arrived_at, self._last_at or self._arrived_at
        return explain_pb2.Timeline(waiting_seconds=first - self._arrived_at, prefill_seconds=last - first)

    def push(self, output: EncodeOutput) -> None:
        """New vectors. One that is no number fails the request."""
        if output.finish_reason is FinishReason.ERROR:
            words = f"the engine failed on this request: {output.error}"
            self.fail(StatusError(Code.INTERNAL, words, reason="SEQUENCE_FAILED"))
            return
        self._last_at = time.monotonic()
        self._first_at = self._first_at or self._last_at
        self._num_tokens += output.num_tokens
        if output.finish_reason is not None:
            self.num_sequences, self._reason = 0, "stop"
        self.outbox.push(output)

    def fail(self, error: StatusError) -> None:
        """The request ends with this error."""
        if error.code is Code.INTERNAL:
            self._reason = "error"
        self.outbox.fail(error)

    def ended(self) -> Ended:
        """What became of it, for the metrics."""
        return Ended(
            reason=self._reason,
            arrived_at=self._arrived_at,
            ended_at=time.monotonic(),
            n=1,
            num_prompt_tokens=sum(map(len, self.request.inputs)),
            num_output_tokens=0,
            num_longest_tokens=0,
            trace_id=self.span.trace_id,
        )


def to_encoder(message: worker_pb2.WorkerServiceEmbedRequest, served: Served) -> EncodeRequest:
    """The engine's request, every bound checked. StatusError INVALID_ARGUMENT names field, value and limit."""
    if not 0 < len(message.request_id) <= MAX_ID_LENGTH:
        raise invalid("request_id", f"request_id must have 1 to {MAX_ID_LENGTH} characters, not {len(message.request_id)}")
    if message.epoch < 1:
        raise invalid("epoch", f"epoch {message.epoch} must be at least 1")
    if message.latency_class not in (1, 2, 3):
        raise invalid("latency_class", f"latency_class {message.latency_class} isn't realtime (1), standard (2) or batch (3)")
    if not 0 <= message.dimensions <= served.dimensions:
        raise invalid("dimensions", f"dimensions {message.dimensions} must be from 0 to {served.dimensions}")
    if not 1 <= len(message.inputs) <= MAX_INPUTS:
        raise invalid("inputs", f"inputs has {len(message.inputs)} entries; it must have 1 to {MAX_INPUTS}")
    inputs = [list(entry.ids) for entry in message.inputs]
    for index, ids in enumerate(inputs):
        if not 1 <= len(ids) <= served.max_model_len:
            raise invalid(f"inputs[{index}]", f"inputs[{index}] has {len(ids)} tokens; it must have 1 to {served.max_model_len}")
        if min(ids) < 0 or max(ids) >= served.vocab_size:
            raise invalid(
                f"inputs[{index}]", f"inputs[{index}] holds {min(ids)} .. {max(ids)}; ids must be from 0 to {served.vocab_size - 1}"
            )
    return EncodeRequest(
        request_id=engine_id(message.request_id, message.epoch),
        inputs=inputs,
        latency_class=message.latency_class,
        dimensions=message.dimensions or None,
        model=served.model,
    )
