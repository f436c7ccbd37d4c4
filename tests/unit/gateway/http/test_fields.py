"""One rule for fields: honoured, refused by name, or unknown and named (B12)."""

from typing import Any

import pytest
from starlette.requests import Request

from services.common.errors import StatusError
from services.gateway.http import fields


def request(**headers: str) -> Request:
    return Request({"type": "http", "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]})


@pytest.mark.parametrize("endpoint", [fields.CHAT, fields.COMPLETIONS])
def test_every_own_field_is_taken(endpoint: fields.Fields) -> None:
    assert fields.check(dict.fromkeys(endpoint.own - {"strict"}, 1), endpoint, request()) == []


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [(fields.CHAT, name) for name in fields.CHAT.elsewhere] + [(fields.COMPLETIONS, name) for name in fields.COMPLETIONS.elsewhere],
)
def test_a_field_of_another_endpoint_is_refused_with_the_way_out(endpoint: fields.Fields, name: str) -> None:
    with pytest.raises(StatusError) as failure:
        fields.check({name: 5}, endpoint, request())
    assert failure.value.violations[0].field == name
    assert fields.check({name: None}, endpoint, request()) == []


@pytest.mark.parametrize(
    ("name", "asks", "asks_nothing"),
    [
        ("functions", [{}], []),
        ("guided_json", {"type": "object"}, None),
        ("modalities", ["text", "audio"], ["text"]),
        ("audio", {"voice": "x"}, None),
        ("store", True, False),
        ("suffix", "end", ""),
        ("chat_template", "{{ x }}", None),
        ("length_penalty", True, 1.0),
    ],
)
def test_known_fields_that_are_not_offered_are_never_ignored(name: str, asks: Any, asks_nothing: Any) -> None:
    with pytest.raises(StatusError) as failure:
        fields.check({name: asks}, fields.CHAT, request())
    assert failure.value.violations[0].field == name
    assert fields.check({name: asks_nothing}, fields.CHAT, request()) == []


def test_unknown_fields_are_named_or_refused_where_that_is_asked_for() -> None:
    body = {"max_tokns": 5, "topp": 1}
    assert fields.check(body, fields.CHAT, request()) == ["max_tokns", "topp"]
    for strict_body, strict_request in [({**body, "strict": True}, request()), (body, request(x_forebay_strict="1"))]:
        with pytest.raises(StatusError) as failure:
            fields.check(strict_body, fields.CHAT, strict_request)
        assert failure.value.violations[0].field == "max_tokns"
    with pytest.raises(StatusError):
        fields.check({"strict": "yes"} | body, fields.CHAT, request())


def test_names_in_the_header_can_do_no_harm() -> None:
    value = fields.named(["a\r\nset-cookie: x", "é,b", "x" * 5000, *map(str, range(100))])
    assert value.isascii()
    assert value.isprintable()
    assert len(value) < 1500
    assert value.startswith("a??set-cookie:?x,??b,xxx")
    assert value.endswith(",(+83)")
