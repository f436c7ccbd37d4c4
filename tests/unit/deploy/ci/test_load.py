"""Clients that count what they got, without a stack."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import pytest

from deploy.ci.load import Gateway, Load, Stream
from deploy.ci.stack import wait_until

Answers = Callable[[httpx.Request], httpx.Response]


@dataclass(frozen=True)
class Told(Gateway):
    """A gateway that answers as it is told."""

    answers: Answers = lambda request: httpx.Response(500, request=request)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, transport=httpx.MockTransport(self.answers))


def _gateway(answers: Answers) -> Told:
    return Told("http://gateway", "token", "tiny", answers=answers)


def _paris(_: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"content": "Paris"}}]})


def test_what_comes_at_the_second_try_is_no_error() -> None:
    tries: Iterator[Answers] = iter([lambda request: httpx.Response(503, request=request)])
    with Load(_gateway(lambda request: next(tries, _paris)(request)), patience=30, num_clients=1) as load:
        wait_until(lambda: load.num_answered >= 2, 10, "answers")
    assert (load.num_lost_tries, load.errors) == (1, [])


def test_without_patience_the_first_try_counts() -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused", request=request)

    with Load(_gateway(gone), num_clients=1) as load:
        wait_until(lambda: bool(load.errors), 10, "an error")
    assert load.num_answered == 0
    assert load.errors[0] == "ConnectError: connection refused"


@pytest.mark.parametrize(
    ("tail", "whole"),
    [
        ('data: {"choices": [{"finish_reason": "length"}]}\n\ndata: [DONE]\n\n', True),
        ('data: {"choices": [{"finish_reason": "length"}]}\n\n', False),
        ("data: [DONE]\n\n", False),
        ('data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n', False),
    ],
)
def test_a_stream_is_whole_with_its_reason_and_its_end(tail: str, whole: bool) -> None:
    text = 'data: {"choices": [{"finish_reason": null}]}\n\n' + tail
    stream = Stream(_gateway(lambda _: httpx.Response(200, text=text)), 3)
    stream.start()
    stream.join(10)
    assert stream.begun.is_set()
    assert stream.whole is whole


def test_what_does_not_come_is_named() -> None:
    with pytest.raises(TimeoutError, match="an answer: not within 0 s"):
        wait_until(lambda: False, 0, "an answer")
