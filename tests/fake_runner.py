"""A runner without a model: keys and values are the token ids themselves, and the next token is a hash of what is *read back*.

It sees only what a model would see: the blocks that a block table names. So a block that was handed to two, freed too early, found by
a wrong key or never written shows in the tokens (or raises), as it would in a model's output.
"""

import hashlib
from array import array
from collections.abc import Callable

from services.worker.engine.batch import Batch, Span, SpanResult
from services.worker.engine.block_pool import SharedPool
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.engine.request import PositionLogprobs, TokenLogprob
from services.worker.engine.sampler import Sample
from services.worker.engine.sequence import Sequence
from services.worker.engine.speculation.speculator import Speculator
from services.worker.engine.verification import take_run

VOCAB_SIZE = 1000
EOS = 7
_UNWRITTEN = -1
_TAG = 1 << 20  # what a slot of shared memory holds besides the token: times the number of its writer


class FakePages:
    """Pages that runners of several models share, `page_slots` tokens each; every slot knows who wrote it."""

    def __init__(self, num_pages: int, page_slots: int) -> None:
        self.page_slots = page_slots
        self.slots = array("i", [_UNWRITTEN]) * (num_pages * page_slots)

    def clear(self, page: int) -> None:
        """Nobody has written it."""
        self.slots[page * self.page_slots : (page + 1) * self.page_slots] = array("i", [_UNWRITTEN]) * self.page_slots


class FakeRunner:
    """Implements Runner. `before_execute` is called with each batch: a place to look, to wait, or to raise."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        host_blocks: int = 0,
        vocab_size: int = VOCAB_SIZE,
        model: str = "",
        before_execute: Callable[[Batch], None] = lambda batch: None,
        pages: FakePages | None = None,
        number: int = 0,
    ) -> None:
        """`pages`: not its own; `number` tells whose of theirs it writes."""
        pages = pages or FakePages(num_blocks, block_size)
        assert pages.page_slots >= block_size
        self.stride, self.tag = pages.page_slots, number * _TAG
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.model = model  # another name answers otherwise
        self.slots = pages.slots
        self.host_slots = array("i", [_UNWRITTEN]) * (host_blocks * block_size)
        self.before_execute = before_execute

    def copy(self, batch: Batch) -> None:
        size, stride = self.block_size, self.stride
        for block, slot in batch.copies_out:
            self.host_slots[slot * size : (slot + 1) * size] = self.slots[block * stride : block * stride + size]
        for block, slot in batch.copies_in:
            self.slots[block * stride : block * stride + size] = self.host_slots[slot * size : (slot + 1) * size]

    def execute(self, batch: Batch) -> list[SpanResult]:
        self.before_execute(batch)
        for span in batch.spans:
            self._write(span)
        return [self._answer(span) for span in batch.spans]

    def _write(self, span: Span) -> None:
        for position, token in zip(range(span.start, span.end), span.token_ids, strict=True):
            block, offset = divmod(position, self.block_size)
            self.slots[span.sequence.block_table[block] * self.stride + offset] = self.tag + token

    def _answer(self, span: Span) -> SpanResult:
        result = SpanResult()
        sequence = span.sequence
        for position in span.scored:
            self._next(sequence, position + 1)  # reads, as a model would
            result.prompt_logprobs.append(PositionLogprobs(TokenLogprob(sequence.tokens[position + 1], -1.0)))
        if span.samples:
            take_run(span, [self._sample(sequence, position + 1) for position in span.sampled], result)
        return result

    def _sample(self, sequence: Sequence, num_tokens: int) -> Sample:
        token = self._next(sequence, num_tokens)
        if token is None:
            return Sample(-1, error="every token is banned", unsatisfiable=True)
        return Sample(token, PositionLogprobs(TokenLogprob(token, -1.0)) if sequence.sampling.logprobs is not None else None)

    def _next(self, sequence: Sequence, num_tokens: int) -> int | None:
        """The token behind the first `num_tokens`, by what the blocks say about them."""
        size = self.block_size
        read = array("i")
        for block in sequence.block_table[: -(-num_tokens // size)]:
            read += self.slots[block * self.stride : block * self.stride + size]
        read = read[:num_tokens]
        assert _UNWRITTEN not in read, f"{sequence.request_id} reads a slot that nobody has written"
        if self.tag:
            assert {token // _TAG * _TAG for token in read} == {self.tag}, f"{sequence.request_id} reads what another model has written"
            read = array("i", [token - self.tag for token in read])
        return next_token(read, sequence, self.vocab_size, self.model, num_drafts=max(0, num_tokens - sequence.num_tokens))


def next_token(context: "array[int]", sequence: Sequence, vocab_size: int, model: str = "", *, num_drafts: int = 0) -> int | None:
    """None where none is allowed; else a hash of the context and, where the request samples, of seed and choice."""
    sampling = sequence.sampling
    salt = f"{model}/{sampling.seed}/{sequence.choice_index}" if sampling.temperature > 0 else model
    digest = hashlib.blake2b(context.tobytes(), key=salt.encode(), digest_size=8).digest()
    token = int.from_bytes(digest, "little") % vocab_size
    allowed = None if sequence.grammar is None else sequence.grammar.masks(list(context)[sequence.num_tokens :])[-1]
    for _ in range(vocab_size):
        banned = token in sequence.banned_ids(num_drafts) or sampling.logit_bias.get(token, 0) <= -100
        if not banned and (allowed is None or allowed[token // 8] >> token % 8 & 1):
            return token
        token = (token + 1) % vocab_size
    return None


def fake_engine(
    config: EngineConfig | None = None,
    *,
    vocab_size: int = VOCAB_SIZE,
    eos_token_ids: tuple[int, ...] = (EOS,),
    model: str = "",
    before_execute: Callable[[Batch], None] = lambda batch: None,
    speculator: Speculator | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    pool: SharedPool | None = None,
    pages: FakePages | None = None,
    number: int = 0,
) -> Engine:
    """An engine on a FakeRunner. By the default clock no time passes: copies always pay. `pool` and `pages` are part of an arena."""
    config = config or EngineConfig()
    runner = FakeRunner(
        config.num_blocks,
        config.block_size,
        host_blocks=config.num_host_slots,
        vocab_size=vocab_size,
        model=model,
        before_execute=before_execute,
        pages=pages,
        number=number,
    )
    return Engine(
        runner,
        config,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        model_version=model,
        speculator=speculator,
        clock=clock,
        pool=pool,
    )
