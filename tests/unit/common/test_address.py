"""host:port, taken apart and put together."""

import pytest

from services.common import address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("worker:50061", "worker", 50061),
        ("[::1]:65535", "::1", 65535),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
    ],
)
def test_split_and_joined_again(text: str, host: str, port: int) -> None:
    assert address.split(text) == (host, port)
    assert address.join(host, port) == text
    assert address.with_port(text, 7) == address.join(host, 7)


@pytest.mark.parametrize(
    "text",
    ["", "here", ":80", "here:", "here:http", "here:65536", "here:-1", "::1:80", "[::1]", "[here]:80", "http://here:80", "a b:80", "a:1\n"],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not host:port"):
        address.split(text)


def test_brackets_are_not_doubled() -> None:
    assert address.join("[::1]", 80) == "[::1]:80"


@pytest.mark.parametrize(
    ("listens", "reached"), [("0.0.0.0:5", "me:5"), ("[::]:5", "me:5"), ("127.0.0.1:5", "127.0.0.1:5"), ("[::1]:5", "[::1]:5")]
)
def test_what_listens_on_every_interface_is_reached_by_name(listens: str, reached: str) -> None:
    assert address.reachable(listens, "me") == reached
