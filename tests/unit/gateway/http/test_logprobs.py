"""Both OpenAI shapes of log-probabilities."""

import math

import orjson

from forebay.v1 import types_pb2
from services.gateway.http.logprobs import LOWEST, LegacyLogprobs, chat_content


def token(data: bytes, logprob: float = -1.0) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(token_id=1, logprob=logprob, text=data.decode("utf-8", "replace"), text_bytes=data)


def entry(data: bytes, *top: bytes, has_logprob: bool = True) -> types_pb2.PositionLogprobs:
    return types_pb2.PositionLogprobs(chosen=token(data), top=[token(other, -2.0) for other in top], has_logprob=has_logprob)


def test_chat_shape_has_text_and_bytes() -> None:
    (content,) = chat_content([entry("é".encode(), b"\xc3")])
    assert content["token"] == "é"
    assert content["bytes"] == [0xC3, 0xA9]
    assert content["top_logprobs"] == [{"token": "bytes:\\xc3", "logprob": -2.0, "bytes": [0xC3]}]


def test_legacy_offsets_go_on_over_pieces_and_characters_in_parts() -> None:
    legacy = LegacyLogprobs()
    first = legacy.piece([entry(b"ab", has_logprob=False), entry(b"\xc3"), entry(b"\xa9")])
    second = legacy.piece([entry(b"c", b"d")])
    assert first["text_offset"] == [0, 2, 2]
    assert second["text_offset"] == [3]
    assert first["tokens"] == ["ab", "bytes:\\xc3", "bytes:\\xa9"]
    assert first["token_logprobs"] == [None, -1.0, -1.0]
    assert first["top_logprobs"][0] is None
    assert second["top_logprobs"] == [{"d": -2.0, "c": -1.0}]


def test_minus_infinity_is_a_number_that_json_has() -> None:
    banned = types_pb2.PositionLogprobs(chosen=token(b"a", -math.inf), top=[token(b"a", -math.inf)], has_logprob=True)
    assert chat_content([banned])[0]["logprob"] == LOWEST
    assert b"null" not in orjson.dumps(chat_content([banned]))
    assert LegacyLogprobs().piece([banned])["token_logprobs"] == [LOWEST]
