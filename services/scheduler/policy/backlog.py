"""What each worker has still to compute of prompts: what it told last, what was sent since, less what it computes meanwhile. Pure.

Heartbeats are up to a second old. What this scheduler has sent counts from the moment of the commit, so that prompts don't herd to a
worker that looked idle. A worker is known by its incarnation.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

LISTED_SECONDS = 1.0
"""A request that no heartbeat lists after so long has ended there, or never came."""
MAX_NODES = 1024


@dataclass(slots=True)
class _Node:
    tokens: float = 0.0
    at: float = 0.0
    tokens_per_second: float = 0.0
    sent: dict[str, tuple[float, float]] = field(default_factory=dict)  # request id -> tokens, when; no heartbeat has listed it yet

    def drain(self, now: float) -> None:
        if now > self.at:
            self.tokens = max(0.0, self.tokens - (now - self.at) * self.tokens_per_second)
            self.at = now


class Backlog:
    """By incarnation. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}

    def told(self, incarnation: str, num_tokens: int, tokens_per_second: float, listed: Collection[str], now: float) -> None:
        """A heartbeat: tokens to compute, at which rate (0: unknown), and the requests that are among them or past that."""
        node = self._node(incarnation)
        for request_id, (_, at) in list(node.sent.items()):
            if request_id in listed or now - at > LISTED_SECONDS:
                del node.sent[request_id]
        node.tokens = num_tokens + sum(tokens for tokens, _ in node.sent.values())
        node.at, node.tokens_per_second = now, tokens_per_second

    def sent(self, incarnation: str, request_id: str, num_tokens: float, now: float) -> None:
        """A request goes there, with so many tokens to compute."""
        node = self._node(incarnation)
        node.drain(now)
        node.tokens += num_tokens
        node.sent[request_id] = num_tokens, now

    def ended(self, request_id: str) -> None:
        """A request is over: what no heartbeat has told of it by now was computed between two of them, or won't be."""
        for node in self._nodes.values():
            tokens, _ = node.sent.pop(request_id, (0.0, 0.0))
            node.tokens = max(0.0, node.tokens - tokens)

    def tokens(self, incarnation: str, now: float) -> float:
        """What it has to compute by now."""
        node = self._nodes.get(incarnation)
        if node is None:
            return 0.0
        node.drain(now)
        return node.tokens

    def _node(self, incarnation: str) -> _Node:
        node = self._nodes.pop(incarnation, None) or _Node()
        self._nodes[incarnation] = node  # the newest last
        if len(self._nodes) > MAX_NODES:
            del self._nodes[next(iter(self._nodes))]
        return node
