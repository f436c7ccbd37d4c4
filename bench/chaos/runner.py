"""A runner without a model: it writes token ids into cache blocks, and the next token follows from what it reads back from them.

It finds them by the block table alone. So a block that was handed to two, freed too early or never written shows in the tokens. Harness
and worker share `next_token` alone.
"""

import hashlib
import os
import signal
import threading
import time
from array import array
from collections.abc import Sequence

from services.worker.engine.batch import Batch, Span, SpanResult
from services.worker.engine.sampler import Sample
from services.worker.engine.verification import take_run

VOCAB_SIZE = 256
EOS = 0  # never the next token
UNWRITTEN = -1
STEP_SECONDS = 0.01
KILLS, RAISES, HANGS = 250, 251, 252
"""A prompt that begins with one of these does so to its worker where it has as many output tokens as the prompt's second token says."""


def next_token(context: Sequence[int], seed: int, choice_index: int) -> int:
    """The token behind the context; `seed` 0: greedy."""
    salt = f"{seed}/{choice_index}" if seed else ""
    digest = hashlib.blake2b(array("i", context).tobytes(), key=salt.encode(), digest_size=4).digest()
    return 1 + int.from_bytes(digest, "little") % (VOCAB_SIZE - 1)


def continuation(prompt: Sequence[int], num_tokens: int, seed: int = 0, choice_index: int = 0) -> list[int]:
    """What an undisturbed worker answers."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed, choice_index))
    return tokens[len(prompt) :]


class BlockRunner:
    """Implements Runner. `hang` makes the next step the last."""

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0) -> None:
        self._block_size = block_size
        self._slots = array("i", [UNWRITTEN]) * (num_blocks * block_size)
        self._host_slots = array("i", [UNWRITTEN]) * (host_blocks * block_size)
        self.hang = threading.Event()
        self.fail = threading.Event()

    def copy(self, batch: Batch) -> None:
        """See Runner."""
        size = self._block_size
        for block, slot in batch.copies_out:
            self._host_slots[slot * size : (slot + 1) * size] = self._slots[block * size : (block + 1) * size]
        for block, slot in batch.copies_in:
            self._slots[block * size : (block + 1) * size] = self._host_slots[slot * size : (slot + 1) * size]

    def execute(self, batch: Batch) -> list[SpanResult]:
        """See Runner."""
        time.sleep(STEP_SECONDS)
        for span in batch.spans:
            self._obey(span)
            self._write(span)
        if self.hang.is_set():
            threading.Event().wait()
        if self.fail.is_set():
            raise RuntimeError("the device is gone, as was asked for")
        return [self._answer(span) for span in batch.spans]

    def _obey(self, span: Span) -> None:
        """What the prompt does to its worker."""
        act, position = span.sequence.tokens[:2]
        if act not in (KILLS, RAISES, HANGS) or span.sequence.num_output_tokens != position:
            return
        if act == KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        if act == HANGS:
            self.hang.set()
        else:
            self.fail.set()

    def _write(self, span: Span) -> None:
        for position, token in zip(range(span.start, span.end), span.token_ids, strict=True):
            block, offset = divmod(position, self._block_size)
            self._slots[span.sequence.block_table[block] * self._block_size + offset] = token

    def _answer(self, span: Span) -> SpanResult:
        result = SpanResult()
        if span.samples:
            take_run(span, [self._sample(span, position + 1) for position in span.sampled], result)
        return result

    def _sample(self, span: Span, num_tokens: int) -> Sample:
        size, sequence = self._block_size, span.sequence
        read = array("i")
        for block in sequence.block_table[: -(-num_tokens // size)]:
            read += self._slots[block * size : (block + 1) * size]
        read = read[:num_tokens]
        assert UNWRITTEN not in read, f"{sequence.request_id} reads a slot that nobody has written"
        sampling = sequence.sampling
        return Sample(next_token(read, sampling.seed or 0 if sampling.temperature > 0 else 0, sequence.choice_index))
