"""Live requests and their sequences: who waits and who runs, each in order. Knows no block and computes nothing."""

import bisect
import itertools
from operator import attrgetter

from services.worker.engine.envelope import Envelope
from services.worker.engine.sequence import RequestState, Sequence, SequenceState

_BY_ORDER = attrgetter("order")


class SequenceQueue:
    """Lower classes come last, and in a class whoever came last. A preempted sequence waits at its old place."""

    def __init__(self) -> None:
        self.requests: dict[str, RequestState] = {}  # by id
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._arrivals = itertools.count()
        self._strangers: list[RequestState] = []  # added since the last `greet`

    def add(self, group: RequestState) -> None:
        """Its choices wait, but for those that have ended. Where all have, there is no request."""
        group.arrival = next(self._arrivals)
        if group.live_sequences:
            self.requests[group.request.request_id] = group
            self._strangers.append(group)
        for sequence in group.live_sequences:
            bisect.insort(self.waiting, sequence, key=_BY_ORDER)

    def greet(self, now: float) -> list[RequestState]:
        """Those that have come since the last time; their waiting counts from now on."""
        strangers, self._strangers = self._strangers, []
        for group in strangers:
            request = group.request
            group.envelope = Envelope(now - request.waited_seconds, request.ttft_target_seconds, request.tpot_target_seconds)
            live = group.live_sequences
            group.timeline.begin(len(live), now)
            for sequence in live:
                sequence.waiting_since = now
        return strangers

    def start(self, sequence: Sequence, now: float) -> None:
        """Runs one that waits."""
        self.waiting.remove(sequence)
        sequence.state = SequenceState.RUNNING
        sequence.waited_seconds, sequence.waiting_since = sequence.waited(now), None
        bisect.insort(self.running, sequence, key=_BY_ORDER)
        if sequence.group.start_time is None:
            sequence.group.start_time = now

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Lets one that runs wait, with everything to compute again but what was swapped."""
        self.running.remove(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.waiting_since = now
        bisect.insort(self.waiting, sequence, key=_BY_ORDER)

    def finish(self, sequence: Sequence) -> None:
        """Ends one that waits or runs; the request ends with its last."""
        (self.running if sequence.state is SequenceState.RUNNING else self.waiting).remove(sequence)
        sequence.state = SequenceState.FINISHED
        if not sequence.group.live_sequences:
            del self.requests[sequence.request_id]

    def next_victim(self, growing: Sequence) -> Sequence:
        """Who gives way so that this one can grow: the last that runs, itself perhaps, and nobody who goes before it.

        None that is fully reserved, and rather none about to finish.
        """
        candidates = [sequence for sequence in reversed(self.running) if not sequence.is_reserved and sequence.order >= growing.order]
        return next((sequence for sequence in candidates if not sequence.is_about_to_finish), candidates[0])

    def check_integrity(self) -> None:
        """Asserts that every live sequence is in the list of its state, in order."""
        assert not any(sequence.block_table for sequence in self.waiting), "a waiting sequence holds blocks"
        assert self.running == sorted(self.running, key=_BY_ORDER), "running sequences out of order"
        assert self.waiting == sorted(self.waiting, key=_BY_ORDER), "waiting sequences out of order"
        live = [sequence for group in self.requests.values() for sequence in group.live_sequences]
        assert sorted(live, key=_BY_ORDER) == sorted(self.running + self.waiting, key=_BY_ORDER), "a live sequence is in no list"
