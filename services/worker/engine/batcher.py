"""Which tokens of which sequences the next step computes, and what becomes of the tokens it yields. Pure: ints, no torch, no clock.

There are no phases: a sequence's num_computed_tokens catches up with its num_tokens, one token behind (decoding) or many (a new
prompt, or a preempted sequence that starts over). Blocks for all present tokens are taken at admission, so no two sequences can
wait for each other's.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from services.worker.engine import deadlines
from services.worker.engine.admission import Admission
from services.worker.engine.batch import Batch, Span, SpanResult
from services.worker.engine.block_pool import Pool
from services.worker.engine.block_tables import BlockTables
from services.worker.engine.budget import Budget
from services.worker.engine.config import EngineConfig
from services.worker.engine.costs import Costs
from services.worker.engine.intake import Intake
from services.worker.engine.request import (
    EngineRequest,
    FinishReason,
    InvalidRequest,
    PositionLogprobs,
    SequenceError,
    TokenLogprob,
    TokenOutput,
)
from services.worker.engine.sequence import Sequence, SequenceState
from services.worker.engine.sequence_queue import SequenceQueue
from services.worker.engine.speculation.speculator import Speculator
from services.worker.engine.step_time import StepTime, load_of
from services.worker.engine.timeline import Kind, Phase

LEARNT_PLAIN_STEPS, STRIDE = 16, 4  # after so many steps of decoding alone, each fourth is learnt from: it takes time for every sequence
MAX_SCORED_ROWS = 256  # prompt positions scored in one step: bounds the logits in memory


@dataclass
class BatcherCounters:
    """Since the start; they only grow."""

    computed_tokens: int = 0  # prompt and output, recomputation included
    generated_tokens: int = 0


class Batcher:
    """Owns the sequences and their blocks. `max_model_len` bounds prompt plus output of a choice. `speculator` None: no drafts.

    `pool` None: the blocks are its own.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        eos_token_ids: Seq[int],
        model_version: str,
        kv_format: str,
        speculator: Speculator | None = None,
        pool: Pool | None = None,
    ) -> None:
        self.config = config
        self.counters = BatcherCounters()
        self.costs = Costs()  # the engine records what it measures
        self.queue = SequenceQueue()
        self.tables = BlockTables(config, self.costs, model_version, kv_format, pool)
        self.admission = Admission(config, self.queue, self.tables)
        self.speculator = speculator
        self.step_time = StepTime() if speculator is None else speculator.step_time
        self._intake = Intake(config, max_model_len, eos_token_ids, self.tables)
        self._newcomers = deadlines.Newcomers()
        self._step_seconds = 0.0  # of the last one
        self._num_plain_steps = 0  # one token each, one after another
        self._news: list[TokenOutput] = []  # ends that no step brings about, sent with the next one

    @property
    def has_work(self) -> bool:
        return bool(self.queue.requests or self._news)

    @property
    def num_prefill_tokens(self) -> int:
        """To be computed before those that don't decode yield their next token; what waits may still find some of them cached."""
        lacking = (sequence.num_lacking_tokens for group in (self.queue.running, self.queue.waiting) for sequence in group)
        return sum(num_tokens for num_tokens in lacking if num_tokens > 1)

    # --- requests come and go

    def add(self, request: EngineRequest) -> None:
        """Queues the choices of a checked request. RequestTooLarge if one of them could never run, InvalidRequest if the id is live."""
        if request.request_id in self.queue.requests:
            raise InvalidRequest(f"request_id {request.request_id} is live already")
        group = self._intake.take(request)
        self.queue.add(group)
        self._news += [self._output(sequence) for sequence in group.sequences if sequence.state is SequenceState.FINISHED]

    def abort(self, request_id: str) -> None:
        """Ends a request without a word; its blocks are free at once. An unknown id is none of our business any more."""
        self._news = [output for output in self._news if output.request_id != request_id]
        if (group := self.queue.requests.get(request_id)) is None:
            return
        for sequence in group.live_sequences:
            sequence.finish_reason = FinishReason.CANCELLED
            self._finish(sequence)

    def fail(self, error: SequenceError) -> None:
        """Ends every choice of the request with an error, sent with the next commit. What it computed serves no one else."""
        for sequence in self.queue.requests[error.request_id].live_sequences:
            self.tables.distrust(sequence)
            sequence.finish_reason = FinishReason.ERROR
            self._finish(sequence)
            output = self._output(sequence)
            output.error, output.unsatisfiable = error.message, error.unsatisfiable
            self._news.append(output)

    # --- before a step

    def schedule(self, now: float) -> Batch:
        """The next step's spans: as many tokens as deadlines allow, to whom they are most urgent. None while others hold all blocks."""
        for group in self.queue.greet(now):
            self._newcomers.note(group.request, now)
        self.admission.grow(now)
        self.admission.admit(self.config.max_step_tokens, now)
        budget = Budget(self.config.max_step_tokens, MAX_SCORED_ROWS, self.step_time)
        present = self._spans(budget, now)
        draft_counts = self._make_room_for_drafts(present, budget)  # which may evict blocks, too
        host = self.tables.host
        batch = Batch(present, tuple(host.copies_out), tuple(host.copies_in), draft_counts)
        runs = batch.spans or batch.copies_in or not self.queue.requests
        assert runs or self.tables.pool.is_shared, "there is work, but nothing of it can run"
        return batch

    def _spans(self, budget: Budget, now: float) -> tuple[Span, ...]:
        """None for a sequence where nothing is left to spend, or the host will bring back in the next step what it would be spent on."""
        running = self.queue.running
        limits = deadlines.limits(running, self._newcomers, self.config.max_step_tokens, self.step_time, now)
        order = deadlines.in_order(running, self._step_seconds, now)
        kept_back = deadlines.kept_back(order)
        suspect: str | None = None  # the one request of its kind in this step
        spans: list[Span] = []
        for sequence in _suspects_in_turn(order):
            if sequence.is_suspect and suspect not in (None, sequence.request_id):
                sequence.num_skips += 1
                continue
            if self.tables.bring_back(sequence):
                continue
            must = not spans or sequence.num_skips >= deadlines.MAX_SKIPS
            span = budget.spend(sequence, kept_back.get(sequence, 0.0), limits.seconds(sequence), must=must)
            sequence.num_skips = sequence.num_skips + 1 if span is None else 0
            if span is not None:
                spans.append(span)
                suspect = sequence.request_id if sequence.is_suspect else suspect
        return tuple(spans)

    def _make_room_for_drafts(self, spans: Seq[Span], budget: Budget) -> tuple[int, ...]:
        """How many drafts each span may have, out of what is left over: tokens, slots, blocks. Nobody waits or gives way for a draft."""
        if self.speculator is None:
            return ()
        counts = self.speculator.plan(spans, self._draft_room, min(budget.tokens, budget.scored_rows))
        return tuple(
            self.tables.lend(span.sequence, count, self._num_spare_blocks) if count else 0
            for span, count in zip(spans, counts, strict=True)
        )

    def _draft_room(self, span: Span) -> int:
        """Most drafts that could be kept with the token that follows them, and have slots."""
        sequence = span.sequence
        slots = (len(sequence.block_table) + self._num_spare_blocks) * self.config.block_size - sequence.num_tokens
        return min(slots, sequence.max_computed_tokens - sequence.num_tokens)

    @property
    def _num_spare_blocks(self) -> int:
        """Blocks that nobody waits for and nobody may need in the next step."""
        return 0 if self.queue.waiting else max(0, self.tables.pool.num_available - len(self.queue.running))

    # --- after a step

    def commit(self, batch: Batch, results: Seq[SpanResult], now: float) -> list[TokenOutput]:
        """Appends what the step yielded, ends what is complete, frees its blocks. One output per choice that has news."""
        self.tables.settle()
        outputs = []
        for span, result in zip(batch.spans, results, strict=True):
            if span.sequence.state is not SequenceState.RUNNING:
                continue  # another choice's error ended it
            if result.error is not None:
                self.fail(result.error)
                continue
            output = self._commit_span(span, result, now)
            if output.token_ids or output.prompt_logprobs or output.finish_reason:
                outputs.append(output)
        outputs, self._news = outputs + self._news, []
        return outputs

    def _commit_span(self, span: Span, result: SpanResult, now: float) -> TokenOutput:
        sequence = span.sequence
        output = self._output(sequence)
        if sequence.needs_scoring:
            _take_scores(span, result, output)
        _append(sequence, result, output)
        # A draft that wasn't accepted is computed for nothing: the next step overwrites it.
        sequence.num_computed_tokens = sequence.num_tokens - 1 if span.samples else span.end
        self.counters.computed_tokens += span.length
        self.counters.generated_tokens += len(output.token_ids)
        if sequence.phase is not Phase.DECODE:
            _tell_chunk(span, output, now)
        self.tables.share(sequence, span.start)
        if self.speculator is not None:
            output.num_accepted = self.speculator.judge(span, output.token_ids)
            output.num_judged = min(output.num_accepted + 1, len(span.draft.token_ids), len(output.token_ids))
            self.tables.take_back(sequence)
        if sequence.finish_reason and not sequence.needs_scoring:
            self._finish(sequence)
            output.finish_reason = sequence.finish_reason
            sequence.note(Kind.ENDED, now, sequence.num_output_tokens)
            sequence.group.timeline.move(sequence.phase, None, now)
            output.timeline = sequence.group.timeline.snapshot(now)
        return output

    def observe(self, spans: Seq[Span], seconds: float) -> None:
        """How long the step with these spans took, without its copies and the making of drafts. Plain decoding teaches little news."""
        self._num_plain_steps = self._num_plain_steps + 1 if all(span.length == 1 for span in spans) else 0
        if self._num_plain_steps < LEARNT_PLAIN_STEPS or self._num_plain_steps % STRIDE == 0:
            self.step_time.record(load_of(spans), seconds)
        self._step_seconds = seconds

    def _finish(self, sequence: Sequence) -> None:
        self.tables.release(sequence)
        self.tables.forget_swap(sequence)
        self.queue.finish(sequence)
        if self.speculator is not None:
            self.speculator.forget(sequence)

    def _output(self, sequence: Sequence) -> TokenOutput:
        return TokenOutput(
            request_id=sequence.request_id,
            choice_index=sequence.choice_index,
            first_position=sequence.num_output_tokens,
            finish_reason=sequence.finish_reason if sequence.state is SequenceState.FINISHED else None,
            num_cached_tokens=sequence.group.num_cached_tokens or 0,
            num_preemptions=sequence.num_preemptions,
            start_time=sequence.group.start_time,
        )

    def check_integrity(self) -> None:
        """Asserts what must hold between steps; when idle, that no block is referenced."""
        self.queue.check_integrity()
        self.tables.check_integrity([*self.queue.running, *self.queue.waiting])


def _suspects_in_turn(order: list[Sequence]) -> list[Sequence]:
    """The same order, but for those that a worker may have died of: they go by how long they were left out, as there is one in a step."""
    turns = iter(sorted((sequence for sequence in order if sequence.is_suspect), key=lambda sequence: -sequence.num_skips))
    return [next(turns) if sequence.is_suspect else sequence for sequence in order]


def _tell_chunk(span: Span, output: TokenOutput, now: float) -> None:
    """A step of a sequence that doesn't decode, or didn't until now: the tokens that were computed, and whether there is one of its own."""
    sequence = span.sequence
    sequence.note(Kind.PREFILL, now, span.length, chunks=1)
    if not output.token_ids:
        return
    if not sequence.has_yielded:
        sequence.has_yielded = True
        sequence.note(Kind.FIRST_TOKEN, now)
    sequence.enter(Phase.DECODE, now)
    output.timeline = sequence.group.timeline.snapshot(now)


def _take_scores(span: Span, result: SpanResult, output: TokenOutput) -> None:
    """The next piece of the prompt's log-probabilities."""
    sequence = span.sequence
    output.prompt_logprobs = result.prompt_logprobs
    if sequence.num_scored_tokens == 0:  # nothing comes before the first token
        output.prompt_logprobs.insert(0, PositionLogprobs(TokenLogprob(sequence.tokens[0], 0.0), has_logprob=False))
    sequence.num_scored_tokens = max(sequence.num_scored_tokens, min(span.end + 1, sequence.num_prompt_tokens))


def _append(sequence: Sequence, result: SpanResult, output: TokenOutput) -> None:
    """The step's tokens, up to one that ends the sequence."""
    for index, token_id in enumerate(result.token_ids):
        sequence.tokens.append(token_id)
        if sequence.grammar is not None:
            sequence.grammar.advance(token_id)
        output.token_ids.append(token_id)
        output.logprobs += result.logprobs[index : index + 1]
        sequence.finish_reason = sequence.ending
        if sequence.finish_reason:
            return
