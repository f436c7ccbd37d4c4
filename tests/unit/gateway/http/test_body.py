"""Bodies: strict JSON within bounds, and every fault named as the client's."""

import time

import pytest

from services.common.errors import StatusError
from services.gateway.http.body import parse
from services.gateway.strict_json import MAX_DEPTH


def test_a_plain_object_is_taken_as_it_is() -> None:
    assert parse(b'{"a": [1, 2.5, true, null, "\xc3\xa9", {"b": {}}]}') == {"a": [1, 2.5, True, None, "é", {"b": {}}]}
    assert parse(b'{"pair": "\\ud83d\\ude00"}') == {"pair": "😀"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"{", "line 1"),
        (b"nonsense", "not JSON"),
        (b'{"a": 1} x', "Extra data"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' is given twice"),
        (b'{"x": {"a": 1, "a": 1}}', "given twice"),
        (b"\xff\xfe{}", "not UTF-8: byte 0"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"a": "\\ud800"}', "lone surrogate U+D800"),
        (b'{"\\udfff": 1}', "lone surrogate"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "given twice"),
        (b'{"a": [["\\ud800x"]]}', "lone surrogate"),
        (b"[1]", "must be a JSON object, not a list"),
        (b'"text"', "not a string"),
        (b"null", "not null"),
        (b"12", "not a number"),
        (b"true", "not a boolean"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON that can be used"),
        (b'{"a": ' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}", "nested deeper"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nested deeper"),
        (b"[" * 200_000 + b"]" * 200_000, "nested deeper"),
        (b'{"a":' * 100_000, "nested deeper"),
    ],
)
def test_faults_are_the_client_s_and_named(data: bytes, words: str) -> None:
    with pytest.raises(StatusError) as failure:
        parse(data)
    assert words in failure.value.message
    assert failure.value.reason == "INVALID_JSON"
    failure.value.message.encode()  # can be sent
    assert len(failure.value.message) < 300


def test_the_deepest_body_allowed_passes() -> None:
    depth = MAX_DEPTH - 1
    assert parse(b'{"a": ' + b"[" * depth + b"]" * depth + b"}")


def test_many_names_with_one_given_twice_cost_no_quadratic_time() -> None:
    pairs = ",".join(f'"{number}": 0' for number in range(50_000))
    start = time.thread_time()  # what it computes, however busy the machine is
    with pytest.raises(StatusError):
        parse(f'{{{pairs}, "49999": 1}}'.encode())
    assert time.thread_time() - start < 3
