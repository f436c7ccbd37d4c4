"""Which tokens of which sequences the next step computes, and what becomes of the tokens it yields. Pure: ints, no torch, no clock.

There are no phases: a sequence's num_computed_tokens catches up with its num_tokens, one token behind (decoding) or many (a new
prompt, or a preempted sequence that starts over). Blocks for all present tokens are taken at admission, so no two sequences can
wait for each other's; a decoding sequence that grows into a new block may have to preempt the youngest of the lowest class.
"""

import bisect
import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter

from services.worker.engine.batch import Batch, Budget, Span, SpanResult
from services.worker.engine.block_pool import BlockPool, CacheIdentity, extend_keys
from services.worker.engine.config import EngineConfig
from services.worker.engine.costs import Costs
from services.worker.engine.grammar import Grammar, GrammarState
from services.worker.engine.host_pool import HostPool
from services.worker.engine.request import (
    EngineRequest,
    FinishReason,
    InvalidRequest,
    PositionLogprobs,
    RequestTooLarge,
    SequenceError,
    TokenLogprob,
    TokenOutput,
)
from services.worker.engine.sequence import RequestState, Sequence, SequenceState
from services.worker.engine.speculation.speculator import Speculator

MAX_PREEMPTIONS = 5  # after as many a sequence waits for all the blocks it can ever need, and is never a victim again
MAX_SCORED_ROWS = 256  # prompt positions scored in one step: bounds the logits in memory

_BY_ORDER = attrgetter("order")


@dataclass
class BatcherCounters:
    """Since the start; they only grow."""

    prefix_query_tokens: int = 0  # prompt tokens looked up
    prefix_hit_tokens: int = 0
    host_query_tokens: int = 0  # prompt tokens that the device's cache didn't have
    host_hit_tokens: int = 0
    copied_out_blocks: int = 0
    copied_in_blocks: int = 0
    computed_tokens: int = 0  # prompt and output, recomputation included
    generated_tokens: int = 0
    preemptions: int = 0


class Batcher:
    """Owns the sequences and their blocks. `max_model_len` bounds prompt plus output of a choice. `speculator` None: no drafts."""

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        eos_token_ids: Seq[int],
        model_version: str,
        kv_format: str,
        speculator: Speculator | None = None,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.counters = BatcherCounters()
        self.costs = Costs()  # the engine records what it measures
        self.host = HostPool(config.host_blocks)
        self.pool = BlockPool(config.num_blocks, keep_cached=config.prefix_cache, on_evict=self.host.keep)
        self.running: list[Sequence] = []  # both lists in order
        self.waiting: list[Sequence] = []
        self.requests: dict[str, RequestState] = {}
        self._eos_token_ids = frozenset(eos_token_ids)
        self._model_version = model_version
        self._kv_format = kv_format
        self._speculator = speculator
        self._arrivals = itertools.count()
        self._news: list[TokenOutput] = []  # ends that no step brings about, sent with the next one

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._news)

    # --- requests come and go

    def add(self, request: EngineRequest) -> None:
        """Queues the choices of a checked request. RequestTooLarge if one of them could never run, InvalidRequest if the id is live."""
        if request.request_id in self.requests:
            raise InvalidRequest(f"request_id {request.request_id} is live already")
        max_output_tokens = self._max_output_tokens(request)
        group = RequestState(request, next(self._arrivals), self._root_key(request), prompt_keys=[])
        extend_keys(group.prompt_keys, group.root_key, request.prompt_token_ids, self.config.block_size)
        self.requests[request.request_id] = group
        for index in range(request.n):
            if index not in request.finished_choices:
                self._add_choice(group, index, max_output_tokens)
        self._forget_if_ended(group)

    def _max_output_tokens(self, request: EngineRequest) -> int:
        prompt_tokens, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        room = self.max_model_len - prompt_tokens
        if room < 0 or (room == 0 and max_tokens != 0):
            raise RequestTooLarge(f"the prompt has {prompt_tokens} tokens; the context of {self.max_model_len} leaves no room for output")
        max_output_tokens = room if max_tokens is None else min(room, max_tokens)
        needed = self._num_blocks(prompt_tokens + max(max_output_tokens - 1, 0))
        if needed > self.config.num_blocks:
            raise RequestTooLarge(
                f"{prompt_tokens} prompt tokens and up to {max_output_tokens} output tokens need {needed} blocks of "
                f"{self.config.block_size}; there are {self.config.num_blocks}: ask for fewer tokens"
            )
        return max_output_tokens

    def _add_choice(self, group: RequestState, index: int, max_output_tokens: int) -> None:
        request = group.request
        delivered = request.delivered[index] if index < len(request.delivered) else ()
        first = not any(request.delivered) and not request.finished_choices and index == 0
        eos = frozenset() if request.sampling.ignore_eos else self._eos_token_ids
        sequence = Sequence(
            group=group,
            choice_index=index,
            tokens=[*request.prompt_token_ids, *delivered],
            num_prompt_tokens=len(request.prompt_token_ids),
            max_output_tokens=max_output_tokens,
            stop_ids=eos | frozenset(request.sampling.stop_token_ids),
            block_keys=list(group.prompt_keys),
            grammar=_grammar_behind(request.grammar, delivered),
            scores_prompt=first and request.sampling.prompt_logprobs is not None,
        )
        group.sequences.append(sequence)
        sequence.finish_reason = self._finish_reason(sequence)
        if sequence.finish_reason and not sequence.needs_scoring:
            self._finish(sequence)
            self._news.append(self._output(sequence))
            return
        bisect.insort(self.waiting, sequence, key=_BY_ORDER)

    def abort(self, request_id: str) -> None:
        """Ends a request without a word; its blocks are free at once. An unknown id is none of our business any more."""
        self._news = [output for output in self._news if output.request_id != request_id]
        if (group := self.requests.get(request_id)) is None:
            return
        for sequence in group.sequences:
            if sequence.state is not SequenceState.FINISHED:
                sequence.finish_reason = FinishReason.CANCELLED
                self._finish(sequence)
        self._forget_if_ended(group)

    def fail(self, error: SequenceError) -> None:
        """Ends every choice of the request with an error, sent with the next commit. What it computed serves no one else."""
        group = self.requests[error.request_id]
        for sequence in group.sequences:
            if sequence.state is SequenceState.FINISHED:
                continue
            self.pool.forget(sequence.block_table)
            self.host.forget(sequence.block_keys[: len(sequence.block_table)])
            sequence.finish_reason = FinishReason.ERROR
            self._finish(sequence)
            output = self._output(sequence)
            output.error, output.unsatisfiable = error.message, error.unsatisfiable
            self._news.append(output)
        self._forget_if_ended(group)

    # --- before a step

    def schedule(self, now: float) -> Batch:
        """The next step's spans: what runs comes before newcomers, and one-token spans before longer ones."""
        for sequence in list(self.running):
            if sequence.state is SequenceState.RUNNING:
                self._grow(sequence)
        budget = Budget(self.config.max_step_tokens, MAX_SCORED_ROWS)
        one_behind_first = sorted(self.running, key=lambda s: s.num_tokens - s.num_computed_tokens > 1)  # stable: in order otherwise
        spans = [budget.spend(sequence) for sequence in one_behind_first]
        spans += self._admit(budget, now)
        present = tuple(span for span in spans if span is not None)
        draft_counts = self._make_room_for_drafts(present, budget)  # which may evict blocks, too
        batch = Batch(present, tuple(self.host.copies_out), tuple(self.host.copies_in), draft_counts)
        assert batch.spans or not self.requests, "there is work, but nothing of it can run"
        return batch

    def _grow(self, sequence: Sequence) -> None:
        """Sees to it that the sequence has blocks for all its tokens, at the cost of others or of itself."""
        while (missing := self._num_blocks(sequence.num_tokens) - len(sequence.block_table)) > 0:
            if missing <= self.pool.num_available:
                sequence.block_table += self.pool.allocate(missing)
                return
            # Lower classes first, the youngest of a class first; never a higher class, nor one that is fully reserved.
            victim = max((s for s in self.running if not self._is_reserved(s)), key=_BY_ORDER)
            self._preempt(victim)
            if victim is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        """Back to its old place in the queue. Its full blocks stay cached while nobody needs them, so it may find them again."""
        self._release(sequence)
        self.running.remove(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.counters.preemptions += 1
        bisect.insort(self.waiting, sequence, key=_BY_ORDER)

    def _admit(self, budget: Budget, now: float) -> list[Span | None]:
        """Starts waiting sequences in order while there is room; nobody overtakes one that doesn't fit."""
        spans: list[Span | None] = []
        for sequence in list(self.waiting):
            if budget.tokens <= 0 or len(self.running) >= self.config.max_sequences:
                break
            if self._prompt_is_under_way(sequence):
                continue  # next step, more of the prompt is there to share
            if not self._take_blocks(sequence):
                break
            self.waiting.remove(sequence)
            sequence.state = SequenceState.RUNNING
            bisect.insort(self.running, sequence, key=_BY_ORDER)
            if sequence.group.start_time is None:
                sequence.group.start_time = now
            spans.append(budget.spend(sequence))
        return spans

    def _prompt_is_under_way(self, sequence: Sequence) -> bool:
        """True while another choice of the request computes full blocks of the prompt that this one is going to share."""
        shared = (sequence.num_prompt_tokens - 1) // self.config.block_size * self.config.block_size
        return any(s.state is SequenceState.RUNNING and s.num_computed_tokens < shared for s in sequence.group.sequences)

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Blocks for all present tokens, found ones first; False, and nothing taken, if there are too few."""
        keys = self._shareable_keys(sequence)
        hits = self.pool.lookup(keys)
        total = self._num_present_blocks(sequence)
        # A block for each that runs: otherwise the newcomer would be preempted as soon as they grow.
        headroom = 0 if self._is_reserved(sequence) else sum(not self._is_reserved(s) for s in self.running)
        if total - len(hits) + self.pool.num_unreferenced(hits) + headroom > self.pool.num_available:
            return False
        self.pool.touch(hits)
        # Taken before the device evicts: what comes back isn't overwritten by what goes.
        slots = self.host.take(keys[len(hits) :]) if self.costs.copying_pays(self.config.block_size) else []
        blocks = hits + self.pool.allocate(total - len(hits))
        num_found = len(hits) + len(slots)
        self.host.copy_in(slots, blocks[len(hits) : num_found])
        for block, key in zip(blocks[len(hits) : num_found], keys[len(hits) : num_found], strict=True):
            self.pool.register(block, key)  # whoever comes next in this step may share it: copies come before all spans
        self._count_hits(sequence, len(hits), len(slots))
        sequence.block_table = blocks
        sequence.num_computed_tokens = num_found * self.config.block_size
        return True

    def _shareable_keys(self, sequence: Sequence) -> list[bytes]:
        """Of blocks that may be found. One token at least must be computed, and so must those whose log-probabilities are still wanted."""
        extend_keys(sequence.block_keys, sequence.group.root_key, sequence.tokens, self.config.block_size)
        limit = max(0, sequence.num_scored_tokens - 1) if sequence.needs_scoring else sequence.num_tokens - 1
        return sequence.block_keys[: limit // self.config.block_size]

    def _count_hits(self, sequence: Sequence, num_hits: int, num_host_hits: int) -> None:
        """A request's hits are those of its first choice, once: later ones find what the first has computed."""
        if sequence.group.num_cached_tokens is not None:
            return
        prompt_tokens, size = sequence.num_prompt_tokens, self.config.block_size
        on_device = min(num_hits * size, prompt_tokens)
        sequence.group.num_cached_tokens = min((num_hits + num_host_hits) * size, prompt_tokens)
        self.counters.prefix_query_tokens += prompt_tokens
        self.counters.prefix_hit_tokens += on_device
        if self.host.num_slots:
            self.counters.host_query_tokens += prompt_tokens - on_device
            self.counters.host_hit_tokens += sequence.group.num_cached_tokens - on_device

    def _make_room_for_drafts(self, spans: Seq[Span], budget: Budget) -> tuple[int, ...]:
        """How many drafts each span may have, out of what is left over: tokens, slots, blocks. Nobody waits or gives way for a draft."""
        if self._speculator is None:
            return ()
        counts = self._speculator.plan(spans, self._draft_room, min(budget.tokens, budget.scored_rows))
        return tuple(self._reserve_slots(span.sequence, count) if count else 0 for span, count in zip(spans, counts, strict=True))

    def _draft_room(self, span: Span) -> int:
        """Most drafts that could be kept with the token that follows them, and have slots."""
        sequence = span.sequence
        slots = (len(sequence.block_table) + self._num_spare_blocks) * self.config.block_size - sequence.num_tokens
        return min(slots, sequence.max_computed_tokens - sequence.num_tokens)

    def _reserve_slots(self, sequence: Sequence, num_drafts: int) -> int:
        """Takes spare blocks until the next commit; how many drafts have slots then."""
        missing = self._num_blocks(sequence.num_tokens + num_drafts) - len(sequence.block_table)
        if missing > 0:
            sequence.block_table += self.pool.allocate(min(missing, self._num_spare_blocks))
        return min(num_drafts, len(sequence.block_table) * self.config.block_size - sequence.num_tokens)

    @property
    def _num_spare_blocks(self) -> int:
        """Blocks that nobody waits for and nobody may need in the next step."""
        return 0 if self.waiting else max(0, self.pool.num_available - len(self.running))

    # --- after a step

    def commit(self, batch: Batch, results: Seq[SpanResult]) -> list[TokenOutput]:
        """Appends what the step yielded, ends what is complete, frees its blocks. One output per choice that has news."""
        self.counters.copied_out_blocks += len(batch.copies_out)
        self.counters.copied_in_blocks += len(batch.copies_in)
        self.host.settle()
        outputs = []
        for span, result in zip(batch.spans, results, strict=True):
            if span.sequence.state is not SequenceState.RUNNING:
                continue  # another choice's error ended it
            if result.error is not None:
                self.fail(result.error)
                continue
            output = self._commit_span(span, result)
            if output.token_ids or output.prompt_logprobs or output.finish_reason:
                outputs.append(output)
            self._forget_if_ended(span.sequence.group)
        outputs, self._news = outputs + self._news, []
        return outputs

    def _commit_span(self, span: Span, result: SpanResult) -> TokenOutput:
        sequence = span.sequence
        output = self._output(sequence)
        if sequence.needs_scoring:
            output.prompt_logprobs = result.prompt_logprobs
            if sequence.num_scored_tokens == 0:  # nothing comes before the first token
                output.prompt_logprobs.insert(0, PositionLogprobs(TokenLogprob(sequence.tokens[0], 0.0), has_logprob=False))
            sequence.num_scored_tokens = max(sequence.num_scored_tokens, min(span.end + 1, sequence.num_prompt_tokens))
        self._append(sequence, result, output)
        # A draft that wasn't accepted is computed for nothing: the next step overwrites it.
        sequence.num_computed_tokens = sequence.num_tokens - 1 if span.samples else span.end
        self.counters.computed_tokens += span.length
        self.counters.generated_tokens += len(output.token_ids)
        self._register_blocks(sequence, span.start)
        if self._speculator is not None:
            output.num_accepted = self._speculator.judge(span, output.token_ids)
            output.num_judged = min(output.num_accepted + 1, len(span.draft.token_ids), len(output.token_ids))
            self._return_spare_blocks(sequence)
        if sequence.finish_reason and not sequence.needs_scoring:
            self._finish(sequence)
            output.finish_reason = sequence.finish_reason
        return output

    def _append(self, sequence: Sequence, result: SpanResult, output: TokenOutput) -> None:
        for index, token_id in enumerate(result.token_ids):
            sequence.tokens.append(token_id)
            if sequence.grammar is not None:
                sequence.grammar.advance(token_id)
            output.token_ids.append(token_id)
            output.logprobs += result.logprobs[index : index + 1]
            sequence.finish_reason = self._finish_reason(sequence)
            if sequence.finish_reason:
                return

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        enough = sequence.num_output_tokens > 0 and sequence.num_output_tokens >= sequence.sampling.min_tokens
        if enough and sequence.tokens[-1] in sequence.stop_ids:
            return FinishReason.STOP
        if sequence.grammar is not None and sequence.grammar.complete:
            return FinishReason.COMPLETE
        return FinishReason.LENGTH if sequence.num_output_tokens >= sequence.max_output_tokens else None

    def _register_blocks(self, sequence: Sequence, start: int) -> None:
        """Lets others find the blocks that became full since `start` tokens were computed."""
        size = self.config.block_size
        extend_keys(sequence.block_keys, sequence.group.root_key, sequence.tokens, size)
        for index in range(start // size, sequence.num_computed_tokens // size):
            self.pool.register(sequence.block_table[index], sequence.block_keys[index])

    def _return_spare_blocks(self, sequence: Sequence) -> None:
        """Gives back what was taken for drafts: to everybody else it is as if there had been none."""
        needed = self._num_present_blocks(sequence)
        self.pool.free(sequence.block_table[needed:])
        del sequence.block_table[needed:]

    def _finish(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)
        sequence.state = SequenceState.FINISHED
        if self._speculator is not None:
            self._speculator.forget(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_table)
        sequence.block_table = []

    def _forget_if_ended(self, group: RequestState) -> None:
        if all(sequence.state is SequenceState.FINISHED for sequence in group.sequences):
            self.requests.pop(group.request.request_id, None)

    # --- small facts

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

    def _is_reserved(self, sequence: Sequence) -> bool:
        return sequence.num_preemptions >= MAX_PREEMPTIONS

    def _num_present_blocks(self, sequence: Sequence) -> int:
        """Blocks for its tokens, or for all that it can ever have if it was preempted too often."""
        return self._num_blocks(sequence.max_computed_tokens if self._is_reserved(sequence) else sequence.num_tokens)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _root_key(self, request: EngineRequest) -> bytes:
        # Without a prefix cache the choices of one request still share: the id takes the salt's place.
        salt = request.cache_salt if self.config.prefix_cache else request.request_id.encode()
        return CacheIdentity(salt, self._model_version, self._kv_format).root_key()

    def check_integrity(self) -> None:
        """Asserts what must hold between steps; when idle, that no block is referenced."""
        self.pool.check_integrity([sequence.block_table for sequence in self.running])
        self.host.check_integrity()
        assert not self.host.copies_out, "a step's copies outlive it"
        assert not self.host.copies_in, "a step's copies outlive it"
        assert not any(sequence.block_table for sequence in self.waiting), "a waiting sequence holds blocks"
        assert self.running == sorted(self.running, key=_BY_ORDER), "running sequences out of order"
        assert self.waiting == sorted(self.waiting, key=_BY_ORDER), "waiting sequences out of order"
        live = [s for group in self.requests.values() for s in group.sequences if s.state is not SequenceState.FINISHED]
        assert sorted(live, key=_BY_ORDER) == sorted(self.running + self.waiting, key=_BY_ORDER), "a live sequence is in no list"


def _grammar_behind(grammar: Grammar | None, delivered: Seq[int]) -> GrammarState | None:
    """A choice's state in its grammar, behind the output that the client has already."""
    if grammar is None:
        return None
    state = grammar.start()
    for token_id in delivered:
        state.advance(token_id)
    return state
