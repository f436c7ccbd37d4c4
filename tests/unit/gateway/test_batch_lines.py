"""A job's lines: cut into whole ones however their bytes come, and refused with their number where they make no sense."""

import json
import random
from typing import Any

import pytest

from services.common.errors import StatusError
from services.gateway.batch_lines import MAX_ERRORS, MAX_LINE_BYTES, MAX_LINES, LineCheck, Part, Parts

URL = "/v1/completions"


def _line(**fields: Any) -> str:
    line: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": URL, "body": {"prompt": "x"}}
    return json.dumps({name: value for name, value in (line | fields).items() if value is not ...})


def _errors(*lines: str, endpoint: str = URL) -> list[tuple[str, int, str]]:
    check = LineCheck(endpoint)
    check.part("\n".join(lines))
    check.end()
    return [(error.code, error.line, error.param) for error in check.errors]


def _cut(data: bytes, sizes: list[int]) -> list[Part]:
    parts, found = Parts(), []
    for size in sizes:
        found += list(parts.feed(data[:size]))
        data = data[size:]
    return found + list(parts.feed(data)) + list(parts.end())


def test_parts_are_the_file_whole_lines_in_order_whatever_comes_together() -> None:
    chance = random.Random(3)
    text = "".join("ü" * chance.randrange(2000) + "\n" for _ in range(300)) + "the last has no end"
    for sizes in [[], *([chance.randrange(1, 20_000) for _ in range(40)] for _ in range(4))]:
        parts = _cut(text.encode(), sizes)
        assert "".join(part.text for part in parts) == text
        assert [part.number for part in parts] == list(range(len(parts)))
        assert all(part.text.endswith("\n") for part in parts[:-1])
        assert all(len(part.text) < 200_000 for part in parts)
        starts = [text[: text.index(part.text)].count("\n") for part in parts]
        assert [part.first_line for part in parts] == starts


@pytest.mark.parametrize("sizes", [[], [1] * 8, [6]])
def test_what_is_no_text_is_named_by_its_line(sizes: list[int]) -> None:
    with pytest.raises(StatusError, match="line 2 of the file is not UTF-8: byte 0xff"):
        _cut(b"eins\nzw\xffei\n", sizes)


@pytest.mark.parametrize("sizes", [[], [600_000, 600_000]])
def test_a_line_too_long_is_named(sizes: list[int]) -> None:
    with pytest.raises(StatusError, match="line 3 of the file is longer than"):
        _cut(b"a\nb\n" + b"x" * (MAX_LINE_BYTES + 1) + b"\n", sizes)


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(StatusError, match="the file is empty"):
        _cut(b"", [])


def test_good_lines() -> None:
    check = LineCheck(URL)
    check.part(_line() + "\n" + _line(custom_id="b") + "\r\n")
    check.part(_line(custom_id="c", body={"service_tier": "flex", "stream": False}) + "\n\n \n")
    check.end()
    assert (check.num_lines, list(check.errors)) == (3, [])


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        ("{", "invalid_json_line", ""),
        ("[1]", "invalid_json_line", ""),
        ('{"custom_id": "a", "custom_id": "b"}', "invalid_json_line", ""),
        (_line(custom_id=...), "invalid_custom_id", "custom_id"),
        (_line(custom_id=7), "invalid_custom_id", "custom_id"),
        (_line(custom_id=""), "invalid_custom_id", "custom_id"),
        (_line(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (_line(method="GET"), "invalid_method", "method"),
        (_line(method=...), "invalid_method", "method"),
        (_line(url="/v1/chat/completions"), "invalid_url", "url"),
        (_line(url=...), "invalid_url", "url"),
        (_line(body=...), "invalid_request", "body"),
        (_line(body="x"), "invalid_request", "body"),
        (_line(body={"stream": True}), "invalid_request", "body.stream"),
        (_line(body={"service_tier": "priority"}), "invalid_request", "body.service_tier"),
        (_line(body={"service_tier": ["flex"]}), "invalid_request", "body.service_tier"),
        (_line(headers={}), "invalid_request", "headers"),
    ],
)
def test_a_line_that_makes_no_sense(line: str, code: str, param: str) -> None:
    assert _errors(_line(custom_id="first"), line) == [(code, 2, param)]


def test_an_id_given_twice_names_both_lines() -> None:
    check = LineCheck(URL)
    check.part("\n".join([_line(custom_id="a"), _line(custom_id="b"), _line(custom_id="a")]))
    (error,) = check.errors
    assert (error.code, error.line) == ("duplicate_custom_id", 3)
    assert "line 1" in error.message


def test_empty_lines_are_faults_but_at_the_end() -> None:
    assert _errors(_line(), "", " ", _line(custom_id="b"), "", "") == [("invalid_json_line", 2, ""), ("invalid_json_line", 3, "")]
    assert _errors(" ", "") == [("empty_file", 0, "")]


def test_errors_are_bounded_and_so_are_lines() -> None:
    assert len(_errors(*["{"] * 500)) == MAX_ERRORS
    check = LineCheck(URL)
    for number in range(MAX_LINES + 1):
        check.part(f'{{"custom_id": "{number}", "method": "POST", "url": "{URL}", "body": {{}}}}\n')
    check.end()
    assert [error.code for error in check.errors] == ["too_many_lines"]
