"""Clients of the stack over HTTP, who count: answers, tries that came to nothing, and requests that got no answer however often tried."""

import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

import httpx

_PAUSE_SECONDS = 0.2
_MESSAGES = [{"role": "user", "content": "Name the capital of France."}]


@dataclass(frozen=True)
class Gateway:
    """Its published address and a token that it takes."""

    url: str
    token: str
    model: str
    embedding: str = ""
    """The model that embeds, where there is one."""

    def client(self) -> httpx.Client:
        """A client with connections of its own; never by a proxy."""
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self.token}"}, timeout=120, trust_env=False)

    def body(self, **fields: object) -> Mapping[str, object]:
        """A chat completion's request."""
        return {"model": self.model, "messages": _MESSAGES, "temperature": 0, **fields}


def answer(client: httpx.Client, gateway: Gateway, max_tokens: int) -> str:
    """One whole answer. httpx.HTTPError where there is none."""
    response = client.post("/v1/chat/completions", json=gateway.body(max_tokens=max_tokens))
    response.raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


class Stream(threading.Thread):
    """One long stream, read to its end."""

    def __init__(self, gateway: Gateway, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self._gateway = gateway
        self._body = gateway.body(max_tokens=num_tokens, ignore_eos=True, stream=True)
        self.begun = threading.Event()
        self.whole = False

    def run(self) -> None:
        """Whole is what ends as the API says that streams end: with a finish reason and [DONE]."""
        reasons: list[str] = []
        with self._gateway.client() as client, client.stream("POST", "/v1/chat/completions", json=self._body) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    self.whole = reasons == ["length"]
                elif line.startswith("data: "):
                    self.begun.set()
                    choices = json.loads(line[6:]).get("choices", [])
                    reasons += [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


@dataclass
class Load:
    """Clients that ask one after another while the block lasts. Who gets nothing tries again, `patience` seconds long."""

    gateway: Gateway
    patience: float = 0.0
    num_clients: int = 4
    num_answered: int = 0
    num_lost_tries: int = 0
    errors: list[str] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(self.num_clients)
        self._clients: list[Future[None]] = [self._pool.submit(self._ask_on) for _ in range(self.num_clients)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()

    def _ask_on(self) -> None:
        with self.gateway.client() as client:
            while not self._over.is_set():
                self._ask(client)

    def _ask(self, client: httpx.Client) -> None:
        give_up = time.monotonic() + self.patience
        while True:
            try:
                answer(client, self.gateway, max_tokens=32)
                self.num_answered += 1
                return
            except httpx.HTTPError as error:
                self.num_lost_tries += 1
                if time.monotonic() >= give_up:
                    self.errors.append(f"{type(error).__name__}: {error}")
                    return
            time.sleep(_PAUSE_SECONDS)
