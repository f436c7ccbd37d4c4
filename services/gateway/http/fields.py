"""The one rule for a body's fields: honoured, or refused by name. Unknown ones are ignored and named; `strict` refuses them, too.

A field that OpenAI knows and we don't offer is accepted only with a value that asks for nothing. A field of another endpoint is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from services.common.errors import invalid
from services.gateway.field import shown
from services.gateway.prompts import unknown_message_fields

SAMPLING = frozenset(
    (
        *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
        *("stop", "stop_token_ids", "ignore_eos", "speculation"),
    )
)
"""Fields that go to the validator under their own names, on both endpoints."""
_FORMATS = ("response_format", "structured_outputs")
_COMMON = frozenset(("model", "stream", "stream_options", "user", "service_tier", "strict", "logprobs", *_FORMATS))
_CHAT_ONLY = ("tools", "tool_choice", "parallel_tool_calls", "enable_thinking", "chat_template_kwargs")
_MAX_NAMED = 20

# Known to OpenAI clients, not offered: field -> values that ask for nothing. null always does.
_NOT_OFFERED: Mapping[str, Sequence[Any]] = {
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "metadata": ({},),
    "suffix": ("",),
    "grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "documents": ([],),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (),
}


@dataclass(frozen=True)
class Fields:
    """What an endpoint reads itself, and which fields belong elsewhere: field -> what to do instead."""

    own: frozenset[str]
    elsewhere: Mapping[str, str]


CHAT = Fields(
    own=_COMMON | SAMPLING | {*_CHAT_ONLY, "messages", "max_completion_tokens", "top_logprobs"},
    elsewhere={
        "prompt": "send messages, or use /v1/completions",
        "echo": "it is a field of /v1/completions",
        "best_of": "it is a field of /v1/completions",
    },
)
COMPLETIONS = Fields(
    own=_COMMON | SAMPLING | {"prompt", "echo", "best_of"},
    elsewhere={
        **dict.fromkeys(_CHAT_ONLY, "it is a field of /v1/chat/completions"),
        "messages": "send a prompt, or use /v1/chat/completions",
        "max_completion_tokens": "it is a field of /v1/chat/completions: use max_tokens",
        "top_logprobs": "it is a field of /v1/chat/completions: use logprobs with a number",
    },
)
EMBEDDINGS = Fields(
    own=frozenset({"model", "input", "encoding_format", "dimensions", "user", "service_tier", "strict"}),
    elsewhere={
        **dict.fromkeys((*SAMPLING, *_CHAT_ONLY, *_FORMATS, "stream", "stream_options", "logprobs"), "vectors aren't sampled"),
        "prompt": "send input",
        "messages": "send input, a text each",
    },
)
TOKENIZE = Fields(own=frozenset({"model", "prompt", "messages", "strict", *_CHAT_ONLY, *_FORMATS}), elsewhere={})


def check(body: Mapping[str, Any], fields: Fields, request: Request) -> list[str]:
    """The unknown fields, which are ignored. Raises INVALID_ARGUMENT naming a field that can't be honoured."""
    unknown = []
    for name, value in body.items():
        if name in fields.own:
            continue
        if name in fields.elsewhere:
            if value is not None:
                raise invalid(name, f"{name} is not a field of this endpoint: {fields.elsewhere[name]}")
        elif name in _NOT_OFFERED:
            if value is not None and not any(_same(value, off) for off in _NOT_OFFERED[name]):
                raise invalid(name, f"{name} is not offered by this server: leave it out")
        else:
            unknown.append(name)
    if "messages" in fields.own:
        unknown += unknown_message_fields(body.get("messages"))
    if unknown and is_strict(body, request):
        raise invalid(unknown[0][:64], f"{unknown[0][:64]!a} is not a known field: correct it, or leave out strict to have it ignored")
    return unknown


def refuse_chat_fields(body: Mapping[str, Any]) -> None:
    """What shapes the prompt of a conversation says nothing of a text."""
    for name in (*_CHAT_ONLY, *_FORMATS):
        if body.get(name) is not None:
            raise invalid(name, f"{name} goes with messages: a prompt is counted as it is")


def is_strict(body: Mapping[str, Any], request: Request) -> bool:
    """Whether unknown fields are refused: `"strict": true`, or the header x-forebay-strict."""
    value = body.get("strict")
    if value is not None and not isinstance(value, bool):
        raise invalid("strict", f"strict must be true or false, not {shown(value)}")
    return bool(value) or request.headers.get("x-forebay-strict", "").lower() in ("1", "true")


def named(unknown: Sequence[str]) -> str:
    """The value of x-forebay-ignored: names that a header can carry, the others escaped; at most 20, 64 characters each."""
    names = ["".join(char if char.isascii() and char.isprintable() and char not in ", " else "?" for char in name[:64]) for name in unknown]
    more = [f"(+{len(names) - _MAX_NAMED})"] if len(names) > _MAX_NAMED else []
    return ",".join(names[:_MAX_NAMED] + more)


def flag(body: Mapping[str, Any], name: str) -> bool:
    """An optional boolean; null and absent are false."""
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid(name, f"{name} must be true or false, not {shown(value)}")


def include_usage(body: Mapping[str, Any], *, streamed: bool) -> bool:
    """stream_options.include_usage, for which alone stream_options is there."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise invalid("stream_options", f"stream_options must be an object, not {shown(options)}")
    if not streamed:
        raise invalid("stream_options", "stream_options needs stream: true")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise invalid(f"stream_options.{name[:64]}", f"stream_options has no option {name[:64]!a}: include_usage is offered")
    if flag(options, "include_obfuscation"):
        raise invalid("stream_options.include_obfuscation", "include_obfuscation is not offered by this server: leave it out")
    return flag(options, "include_usage")


def _same(value: object, off: object) -> bool:
    return value == off and isinstance(value, bool) == isinstance(off, bool)
