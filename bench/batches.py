"""A batch job under SIGKILL of every process of its mesh: lines lost, doubled, or answered otherwise than others with the same prompt.

Prints JSON lines {"figure", "value", "unit", "target", "holds"}. `make batch-soak` runs 1,000 lines on a mesh of its own.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import psutil

from bench.figure import line, show
from bench.mesh import started
from forebay.v1 import batch_pb2, inference_pb2, inference_pb2_grpc

PROCESSES = {"gateway": "services.gateway", "scheduler": "services.scheduler", "worker": "services.worker", "valkey": "valkey-server"}
"""Name -> a word of its command line."""
URL = "/v1/completions"
_OVER = (batch_pb2.BATCH_STATUS_COMPLETED, batch_pb2.BATCH_STATUS_FAILED, batch_pb2.BATCH_STATUS_EXPIRED, batch_pb2.BATCH_STATUS_CANCELLED)
_NUM_PROMPTS = 20
_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0

Answer = TypeVar("Answer")


@dataclass
class Outcome:
    """What came of a job. `kills`: name and pid of what was killed, and how many lines had results then."""

    batch: batch_pb2.Batch
    num_lines: int
    seconds: float
    kills: list[tuple[str, int, int]] = field(default_factory=list)
    results: list[dict[str, object]] = field(default_factory=list)

    @property
    def num_lost(self) -> int:
        """Lines without a result."""
        return self.num_lines - len({result["custom_id"] for result in self.results})

    @property
    def num_doubled(self) -> int:
        """Results beyond the first of a line."""
        return len(self.results) - len({result["custom_id"] for result in self.results})

    @property
    def num_failed(self) -> int:
        """Lines whose result is an error."""
        return self.batch.num_failed

    @property
    def num_differing(self) -> int:
        """Answers that are not what most lines with the same prompt got."""
        texts: dict[int, Counter[str]] = {}
        for result in self.results:
            response = result["response"]
            if isinstance(response, dict) and response["status_code"] == 200:
                number = int(str(result["custom_id"]).removeprefix("line-"))
                texts.setdefault(number % _NUM_PROMPTS, Counter())[response["body"]["choices"][0]["text"]] += 1
        return sum(sum(counts.values()) - max(counts.values()) for counts in texts.values())


class Client:
    """The gRPC face, asked again while nobody answers."""

    def __init__(self, address: str, token: str) -> None:
        # A gateway that comes back is found within a fraction of a second.
        self._channel = grpc.insecure_channel(address, options=[("grpc.max_reconnect_backoff_ms", 200)])
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {token}"),)

    def close(self) -> None:
        """Ends it."""
        self._channel.close()

    def submit(self, lines: bytes) -> batch_pb2.Batch:
        """A new job."""
        header = inference_pb2.BatchHeader(endpoint=URL, idempotency_key=f"soak-{time.time()}")

        def pieces() -> Iterator[inference_pb2.SubmitBatchRequest]:
            yield inference_pb2.SubmitBatchRequest(header=header)
            yield inference_pb2.SubmitBatchRequest(lines=lines)

        return _patiently(lambda: self._stub.SubmitBatch(pieces(), metadata=self._metadata, timeout=30)).batch

    def batch(self, batch_id: str) -> batch_pb2.Batch:
        """The job as it stands."""
        request = inference_pb2.GetBatchRequest(batch_id=batch_id)
        return _patiently(lambda: self._stub.GetBatch(request, metadata=self._metadata, timeout=10)).batch

    def results(self, batch_id: str) -> list[dict[str, object]]:
        """All of them."""
        request = inference_pb2.StreamResultsRequest(batch_id=batch_id)
        answers = _patiently(lambda: list(self._stub.StreamResults(request, metadata=self._metadata, timeout=60)))
        return [json.loads(answer.result.json) for answer in answers if answer.HasField("result")]


def _patiently(ask: Callable[[], Answer]) -> Answer:
    give_up = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return ask()
        except grpc.RpcError as error:
            away = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            if not away or time.monotonic() > give_up:
                raise
        time.sleep(_LOOK_SECONDS)


def lines_of(num: int, max_tokens: int) -> bytes:
    """A file of so many lines over a few prompts."""
    entries = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": URL,
            "body": {"prompt": f"Number {number % _NUM_PROMPTS} is", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
        }
        for number in range(num)
    ]
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


def run(client: Client, supervisor: int, num_lines: int, max_tokens: int, kills: Sequence[str]) -> Outcome:
    """A job to its end, while processes below the supervisor are killed in turn, at even shares of the lines."""
    start = time.monotonic()
    batch = client.submit(lines_of(num_lines, max_tokens))
    killed: list[tuple[str, int, int]] = []
    while batch.status not in _OVER:
        time.sleep(_LOOK_SECONDS)
        batch = client.batch(batch.batch_id)
        done = batch.num_completed + batch.num_failed
        if batch.status not in _OVER and len(killed) < len(kills) and done >= num_lines * (len(killed) + 1) / (len(kills) + 1):
            name = kills[len(killed)]
            killed.append((name, kill(supervisor, name), done))
    outcome = Outcome(batch, num_lines, time.monotonic() - start, killed, client.results(batch.batch_id))
    assert len(killed) == len(kills), f"the job was over after {len(killed)} of {len(kills)} kills: it shows nothing"
    return outcome


def kill(supervisor: int, name: str) -> int:
    """SIGKILL to one process of that name, as soon as there is one; its pid, which is gone."""
    give_up = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < give_up:
        for process in psutil.Process(supervisor).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if any(PROCESSES[name] in word for word in process.cmdline()[:5]):
                    os.kill(process.pid, signal.SIGKILL)
                    process.wait(timeout=10)
                    return process.pid
        time.sleep(_LOOK_SECONDS)
    raise AssertionError(f"there is no {name} to kill")


def main() -> int:
    """0 where nothing is lost, doubled or other than it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2, help="times that each process is killed")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    with started(["--workers", str(options.workers)]) as mesh:
        client = Client(mesh.grpc_address, mesh.token)
        try:
            outcome = run(client, mesh.pid, options.lines, options.max_tokens, list(PROCESSES) * options.rounds)
        finally:
            client.close()
    for name, pid, done in outcome.kills:
        print(json.dumps({"killed": name, "pid": pid, "lines_done": done}), flush=True)
    figures = [
        line("batch_lines_lost", outcome.num_lost, "lines", 0, at_most=True),
        line("batch_lines_doubled", outcome.num_doubled, "lines", 0, at_most=True),
        line("batch_lines_failed", outcome.num_failed, "lines", 0, at_most=True),
        line("batch_lines_differing", outcome.num_differing, "lines", 0, at_most=True),
        line("batch_seconds", outcome.seconds, "s"),
    ]
    for figure in figures:
        show(figure)
    return 0 if all(figure["holds"] in (None, True) for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
