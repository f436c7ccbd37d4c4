"""From a checked request to the sequences of its choices, or why it could never run. Pure: ints only."""

from collections.abc import Sequence as Seq

from services.worker.engine.block_tables import BlockTables
from services.worker.engine.config import EngineConfig
from services.worker.engine.grammar import state_behind
from services.worker.engine.request import EngineRequest, RequestTooLarge
from services.worker.engine.sequence import RequestState, Sequence, SequenceState


class Intake:
    """`max_model_len` bounds prompt plus output of a choice. `tables` name the blocks of its prompt."""

    def __init__(self, config: EngineConfig, max_model_len: int, eos_token_ids: Seq[int], tables: BlockTables) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tables = tables

    def take(self, request: EngineRequest) -> RequestState:
        """The request with its unfinished choices. RequestTooLarge if one of them could never run."""
        max_output_tokens = self._max_output_tokens(request)
        group = self._tables.open(request)
        for index in range(request.n):
            if index not in request.finished_choices:
                group.sequences.append(self._choice(group, index, max_output_tokens))
        return group

    def _max_output_tokens(self, request: EngineRequest) -> int:
        prompt_tokens, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        room = self._max_model_len - prompt_tokens
        if room < 0 or (room == 0 and max_tokens != 0):
            raise RequestTooLarge(f"the prompt has {prompt_tokens} tokens; the context of {self._max_model_len} leaves no room for output")
        max_output_tokens = room if max_tokens is None else min(room, max_tokens)
        needed = self._tables.num_blocks(prompt_tokens + max(max_output_tokens - 1, 0))
        if needed > self._tables.pool.num_blocks:
            raise RequestTooLarge(
                f"{prompt_tokens} prompt tokens and up to {max_output_tokens} output tokens need {needed} blocks of "
                f"{self._config.block_size}; there are {self._tables.pool.num_blocks}: ask for fewer tokens"
            )
        return max_output_tokens

    def _choice(self, group: RequestState, index: int, max_output_tokens: int) -> Sequence:
        """One that waits, or has ended where nothing is left to do."""
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
            grammar=None if request.grammar is None else state_behind(request.grammar, delivered),
            scores_prompt=first and request.sampling.prompt_logprobs is not None,
        )
        sequence.finish_reason = sequence.ending
        if sequence.finish_reason and not sequence.needs_scoring:
            sequence.state = SequenceState.FINISHED
        return sequence
