"""How commands print what a mesh answers: JSON for programs, and words for times, classes and limits in tables."""

import json
from datetime import UTC, datetime

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from forebay.v1 import types_pb2

NOTHING = "-"


def as_dict(message: Message) -> dict[str, object]:
    """Every field under its own name, empty ones too."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def print_json(fields: dict[str, object]) -> None:
    """One object on one line."""
    print(json.dumps(fields, ensure_ascii=False))


def class_word(latency_class: types_pb2.LatencyClass.ValueType) -> str:
    """realtime, standard, batch."""
    return types_pb2.LatencyClass.Name(latency_class).removeprefix("LATENCY_CLASS_").lower()


def when(seconds: float) -> str:
    """A time, given in seconds since the epoch, in UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}" if seconds else NOTHING


def limit(number: int) -> str:
    """A limit, 0 being none."""
    return f"{number:,}" if number else NOTHING
