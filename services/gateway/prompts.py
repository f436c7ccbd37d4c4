"""What may stand for a prompt: texts, token ids, or a conversation. Checked before anything is tokenised; knows no tokenizer."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from services.common.errors import invalid
from services.gateway import strict_json
from services.gateway.field import Field, check_unicode
from services.gateway.validator import Limits, token_id_of, validate_label

MAX_PROMPT_BYTES = 1 << 20
MAX_PROMPTS = 64
MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")

_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content"})
_PART_FIELDS = frozenset({"type", "text"})
_NOT_OFFERED_IN_MESSAGES = frozenset({"function_call", "audio", "refusal"})
_MAX_CALLS = 128  # of one message

Prompt = str | list[int]
"""A text, or token ids that are taken as they are."""


@dataclass(frozen=True)
class Bounds:
    """How much an endpoint takes. `check_length` refuses a prompt of so many tokens, as the client calls it."""

    most: int = MAX_PROMPTS
    most_bytes: int = MAX_PROMPT_BYTES
    check_length: Callable[[int, Limits, str], None] = lambda num_tokens, limits, name: check_prompt_length(
        num_tokens, limits=limits, name=name
    )


_COMPLETION = Bounds()


def validate_prompts(value: object, *, limits: Limits, name: str = "prompt", bounds: Bounds = _COMPLETION) -> list[Prompt]:
    """The prompts of a completion: one text, a list of texts, of token ids, or of lists of token ids; none of them empty.

    Texts together are bounded, which is checked before any is tokenised; ids by the context. Raises INVALID_ARGUMENT.
    """
    entry = Field(name, value)
    if value is None:
        raise invalid(name, f"{name} is missing: send a text or token ids")
    if isinstance(value, str):
        return _texts([entry], bounds)
    if not isinstance(value, list | tuple):
        raise entry.refuse("must be a text, a list of texts, or token ids")
    if not value:
        raise entry.refuse("must hold a text or token ids")
    if not isinstance(value[0], str | list | tuple):
        return [_prompt_ids(entry, limits, bounds)]
    if len(value) > bounds.most:
        raise invalid(name, f"{name} has {len(value)} entries: it may have at most {bounds.most}; send the others in another request")
    items = [Field(f"{name}[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value[0], str):
        return _texts(items, bounds)
    return [_prompt_ids(item, limits, bounds) for item in items]


def _texts(items: Sequence[Field], bounds: Bounds) -> list[Prompt]:
    num_bytes = 0
    for item in items:
        if not isinstance(item.value, str):
            raise item.refuse("must be a text, as those before it")
        if not item.value:
            raise item.refuse("must have at least one character")
        # No character is less than a byte: what is surely too long need not be encoded to know.
        num_bytes += len(item.value) if len(item.value) > bounds.most_bytes else len(check_unicode(item))
        if num_bytes > bounds.most_bytes:
            raise invalid(item.name, f"{item.name} takes the request over {bounds.most_bytes} bytes of text: send less")
    return [item.value for item in items]


def _prompt_ids(entry: Field, limits: Limits, bounds: Bounds) -> list[int]:
    ids = entry.value
    if not isinstance(ids, list | tuple):
        raise entry.refuse("must be a list of token ids, as those before it")
    bounds.check_length(len(ids), limits, entry.name)
    if not _are_token_ids(ids, limits.vocab_size):
        for index, value in enumerate(ids):
            token_id_of(Field(f"{entry.name}[{index}]", value), limits)
    return list(ids)


def _are_token_ids(ids: Sequence[object], vocab_size: int) -> TypeGuard[Sequence[int]]:
    return all(type(value) is int and 0 <= value < vocab_size for value in ids)


def check_prompt_length(num_tokens: int, *, limits: Limits, name: str = "prompt") -> None:
    """A prompt needs at least one token, and leaves room for one unless it is only scored. Raises INVALID_ARGUMENT."""
    if num_tokens < 1:
        raise invalid(name, f"{name} has no tokens: send at least one")
    most = limits.max_model_len - (0 if limits.allow_no_output else 1)
    if num_tokens > most:
        raise invalid(
            name,
            f"{name} has {num_tokens} tokens: with at least {limits.max_model_len - most} token of output it must fit the context of "
            f"{limits.max_model_len}; shorten it by {num_tokens - most} tokens",
        )


Message = dict[str, Any]


def validate_messages(value: object, *, name: str = "messages") -> list[Message]:
    """A conversation as templates take it: role, content, and where given name, tool_call_id, reasoning_content and tool_calls.

    Content may come as a text or as text parts; a call's arguments, which come as JSON text, are an object then. `developer` becomes
    `system`, the word that models know. Raises INVALID_ARGUMENT naming the message and its field.
    """
    entry = Field(name, value)
    if value is None:
        raise invalid(name, f"{name} is missing: send at least one message")
    if not isinstance(value, list | tuple):
        raise entry.refuse("must be a list of messages")
    if not value:
        raise entry.refuse("must have at least one message")
    if len(value) > MAX_MESSAGES:
        raise entry.refuse(f"may have at most {MAX_MESSAGES} messages")
    messages = [_message(Field(f"{name}[{index}]", item)) for index, item in enumerate(value)]
    num_bytes = sum(map(num_bytes_of, messages))
    if num_bytes > MAX_PROMPT_BYTES:
        raise invalid(name, f"{name} has {num_bytes} bytes of text: it may have at most {MAX_PROMPT_BYTES}; send less")
    return messages


def num_bytes_of(message: Message) -> int:
    """A message's text."""
    return sum(len((value if isinstance(value, str) else json.dumps(value)).encode()) for value in message.values())


def unknown_message_fields(value: object, name: str = "messages") -> list[str]:
    """Fields of messages and of their text parts that nothing here reads, as `messages[0].field`: for a face to name or to refuse."""
    unknown: list[str] = []
    for index, message in enumerate(value[:MAX_MESSAGES] if isinstance(value, list | tuple) else ()):
        if isinstance(message, Mapping):
            unknown += _others(message, _MESSAGE_FIELDS | _NOT_OFFERED_IN_MESSAGES, f"{name}[{index}]")
            content = message.get("content")
            for number, part in enumerate(content if isinstance(content, list | tuple) else ()):
                if isinstance(part, Mapping):
                    unknown += _others(part, _PART_FIELDS, f"{name}[{index}].content[{number}]")
    return unknown


def _others(value: Mapping[str, object], known: frozenset[str], name: str) -> list[str]:
    return [f"{name}.{field}" for field in value if field not in known]


def _message(entry: Field) -> Message:
    message = entry.value
    if not isinstance(message, Mapping):
        raise entry.refuse("must be an object with role and content")
    role = Field(f"{entry.name}.role", message.get("role"))
    if not isinstance(role.value, str) or role.value not in ROLES:
        raise role.refuse(f"must be one of {', '.join(ROLES)}")
    for name in _NOT_OFFERED_IN_MESSAGES:
        if message.get(name):
            raise invalid(f"{entry.name}.{name}", f"{entry.name}.{name} is not offered by this server: leave it out")
    calls = _tool_calls(Field(f"{entry.name}.tool_calls", message.get("tool_calls")), role.value)
    content = message.get("content")
    out: Message = {
        "role": "system" if role.value == "developer" else role.value,
        "content": "" if calls and content is None else _content(Field(f"{entry.name}.content", content)),
    }
    if calls:
        out["tool_calls"] = calls
    if message.get("reasoning_content") is not None:
        out["reasoning_content"] = _content(Field(f"{entry.name}.reasoning_content", message["reasoning_content"]))
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            out[name] = validate_label(message[name], name=f"{entry.name}.{name}")
    return out


def _tool_calls(entry: Field, role: str) -> list[Message]:
    if entry.value in (None, []):
        return []
    if role != "assistant":
        raise invalid(entry.name, f"{entry.name} are the assistant's: leave them out of the message of another role")
    if not isinstance(entry.value, list | tuple) or len(entry.value) > _MAX_CALLS:
        raise entry.refuse(f"must be a list of at most {_MAX_CALLS} calls")
    return [_tool_call(Field(f"{entry.name}[{index}]", call)) for index, call in enumerate(entry.value)]


def _tool_call(entry: Field) -> Message:
    function = (
        entry.value.get("function") if isinstance(entry.value, Mapping) and entry.value.get("type", "function") == "function" else None
    )
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise entry.refuse('must be {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}')
    arguments = Field(f"{entry.name}.function.arguments", function.get("arguments"))
    if not isinstance(arguments.value, str):
        raise arguments.refuse("must be JSON text")
    check_unicode(arguments)
    try:
        value = strict_json.loads(arguments.value)
    except ValueError as error:
        raise invalid(arguments.name, f"{arguments.name} {error}") from None
    if not isinstance(value, dict):
        raise invalid(arguments.name, f"{arguments.name} must be the JSON text of an object")
    name = validate_label(function["name"], name=f"{entry.name}.function.name")
    call_id = validate_label(entry.value.get("id"), name=f"{entry.name}.id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": value}}


def _content(entry: Field) -> str:
    if isinstance(entry.value, str):
        check_unicode(entry)
        return entry.value
    if not isinstance(entry.value, list | tuple):
        raise entry.refuse("must be a text or a list of text parts")
    texts = []
    for index, part in enumerate(entry.value):
        item = Field(f"{entry.name}[{index}]", part)
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise item.refuse('must be a text part, {"type": "text", "text": ...}: other kinds are not offered')
        text = Field(f"{item.name}.text", part.get("text"))
        if not isinstance(text.value, str):
            raise text.refuse("must be a text")
        check_unicode(text)
        texts.append(text.value)
    return "".join(texts)
