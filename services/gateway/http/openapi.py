"""What /openapi.json says of each route. The bodies are parsed and refused by the endpoints themselves; this describes them."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.gateway.embed_request import MAX_INPUTS
from services.gateway.grammar_field import MAX_GRAMMAR_CHOICES
from services.gateway.idempotency import MAX_KEY_CHARS
from services.gateway.latency import CLASSES
from services.gateway.prompts import MAX_PROMPTS, ROLES
from services.gateway.tools import MAX_TOOLS
from services.gateway.validator import (
    MAX_CHOICES,
    MAX_LABEL_CHARS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
)

Schema = dict[str, Any]


def _number(low: float, high: float, **more: Any) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high, **more}


def _whole(low: int, high: int | None = None, **more: Any) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, **({} if high is None else {"maximum": high}), **more}


_FLAG: Schema = {"type": ["boolean", "null"]}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_TOKEN: Schema = {"type": "integer", "minimum": 0}
_SAMPLING: dict[str, Schema] = {
    "max_tokens": _whole(0, description="Most tokens per choice; 0 only with echo. Default: the room left in the context."),
    "min_tokens": _whole(0),
    "temperature": _number(0, 100, description="0: greedy. Default 1."),
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _whole(-1, description="0 or -1: off."),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": {"type": ["number", "null"], "minimum": 1e-6, "maximum": 100},
    "logit_bias": {
        "type": ["object", "null"],
        "maxProperties": MAX_LOGIT_BIASES,
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, {"type": "null"}]},
    "stop_token_ids": {"type": ["array", "null"], "items": _TOKEN, "maxItems": MAX_STOP_TOKENS},
    "ignore_eos": _FLAG,
    "seed": {"type": ["integer", "null"]},
    "n": _whole(1, MAX_CHOICES),
    "speculation": {**_FLAG, "description": "Whether drafts may be verified. It changes no token, only when it comes. Default true."},
}
_FORMATS: dict[str, Schema] = {
    "response_format": {
        "type": ["object", "null"],
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {
                "type": "object",
                "required": ["schema"],
                "properties": {"name": {"type": "string"}, "strict": _FLAG, "schema": {"type": "object"}},
            },
        },
        "description": "A schema is always enforced; what in it can't be is refused.",
    },
    "structured_outputs": {
        "type": ["object", "null"],
        "minProperties": 1,
        "maxProperties": 1,
        "properties": {
            "json": {"type": ["object", "string"]},
            "json_object": {"const": True},
            "regex": {"type": "string", "minLength": 1},
            "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_GRAMMAR_CHOICES},
            "grammar": {"type": "string", "minLength": 1, "description": "llguidance's dialect of Lark."},
        },
    },
}
_COMMON: dict[str, Schema] = {
    "model": {"type": ["string", "null"], "description": "A name or alias from /v1/models. May be left out where there is one model."},
    "stream": _FLAG,
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _FLAG}},
    "user": {"type": ["string", "null"], "maxLength": MAX_LABEL_CHARS},
    "service_tier": {"enum": [*CLASSES, None], "description": "priority: realtime; default: standard; flex: batch; auto: the org's."},
    **_FORMATS,
    "strict": {**_FLAG, "description": "Refuse unknown fields instead of naming them in x-forebay-ignored."},
}
_MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"description": "A text, or a list of text parts. May be null beside tool_calls."},
            "name": {"type": "string"},
            "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
            "tool_call_id": {"type": ["string", "null"]},
            "reasoning_content": {"type": ["string", "null"]},
        },
    },
}
_CHAT_ONLY: dict[str, Schema] = {
    "tools": {
        "type": ["array", "null"],
        "maxItems": MAX_TOOLS,
        "items": {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                        "description": {"type": ["string", "null"]},
                        "parameters": {"type": ["object", "null"], "description": "A JSON schema; always enforced."},
                        "strict": _FLAG,
                    },
                },
            },
        },
    },
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object", "required": ["type", "function"]}]},
    "parallel_tool_calls": _FLAG,
    "enable_thinking": {**_FLAG, "description": "Refused where the model's template has no such switch."},
    "chat_template_kwargs": {"type": ["object", "null"], "properties": {"enable_thinking": _FLAG}, "additionalProperties": False},
}


def _inputs(most: int) -> Schema:
    """A text, texts, token ids, or lists of them."""
    return {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": most},
            {"type": "array", "items": _TOKEN, "minItems": 1},
            {"type": "array", "items": {"type": "array", "items": _TOKEN, "minItems": 1}, "minItems": 1, "maxItems": most},
        ]
    }


_PROMPT = _inputs(MAX_PROMPTS)
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANSWERS = {
    400: "The request can't be honoured; `param` names the field.",
    401: "No valid token.",
    403: "The token lacks the role for this.",
    404: "No such model.",
    408: "The body took longer than 30 s.",
    413: "Larger than 8 MiB.",
    415: "Not JSON.",
    429: "Over the org's quota, see x-ratelimit-* and retry-after; or the answer was not read fast enough.",
    500: "Our fault.",
    503: "No worker has room, or no scheduler answers; see retry-after.",
    504: "The deadline passed.",
}


def _responses(*codes: int, streams: bool = False) -> Mapping[int | str, Any]:
    content: Schema = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    failures: dict[int | str, Any] = {
        code: {"description": _ANSWERS[code], "content": {"application/json": {"schema": _ERROR}}} for code in codes
    }
    return {200: {"description": "The answer.", "content": content}, **failures}


def _header(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "header", "required": False, "schema": schema}


def query(name: str, schema: Schema) -> Schema:
    """An optional parameter of the query."""
    return {"name": name, "in": "query", "required": False, "schema": schema}


HEADER_ID = _header("x-request-id", {"type": "string", "maxLength": MAX_LABEL_CHARS})
_STRICT = _header("x-forebay-strict", {"enum": ["1", "true"], "description": "As the field strict."})
_HEADERS = [
    HEADER_ID,
    _STRICT,
    _header("x-forebay-class", {"enum": list(CLASSES)}),
    _header("x-forebay-deadline", {"type": "number", "exclusiveMinimum": 0, "maximum": 86400}),
    _header("idempotency-key", {"type": "string", "pattern": f"^[!-~]{{1,{MAX_KEY_CHARS}}}$", "description": "Sent again: billed once."}),
]


def post(
    summary: str, properties: Mapping[str, Schema], required: list[str], headers: list[Schema], *, streams: bool = False, runs: bool = True
) -> dict[str, Any]:
    """A route that takes JSON."""
    schema = {"type": "object", "required": required, "properties": properties}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    codes = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504) if runs else (400, 401, 403, 404, 408, 413, 415, 500, 503)
    return {
        "summary": summary,
        "responses": _responses(*codes, streams=streams),
        "openapi_extra": {"requestBody": body, "parameters": headers, "security": [{"bearer": []}]},
        "response_model": None,
    }


def get(summary: str, *codes: int, secured: bool = True) -> dict[str, Any]:
    """A route without a body."""
    extra: dict[str, Any] = {"parameters": [HEADER_ID]}
    if secured:
        extra["security"] = [{"bearer": []}]
    return {"summary": summary, "responses": _responses(400, *codes), "openapi_extra": extra, "response_model": None}


CHAT = post(
    "Answer a conversation",
    {
        **_COMMON,
        "messages": _MESSAGES,
        **_SAMPLING,
        "max_completion_tokens": _whole(1),
        "logprobs": _FLAG,
        "top_logprobs": _whole(0, MAX_LOGPROBS),
        **_CHAT_ONLY,
    },
    ["messages"],
    _HEADERS,
    streams=True,
)
COMPLETIONS = post(
    "Continue a prompt",
    {**_COMMON, "prompt": _PROMPT, **_SAMPLING, "echo": _FLAG, "best_of": _whole(1, MAX_CHOICES), "logprobs": _whole(0, MAX_LOGPROBS)},
    ["prompt"],
    _HEADERS,
    streams=True,
)
EMBEDDINGS = post(
    "Turn texts into vectors",
    {
        "model": {**_COMMON["model"], "description": "One that embeds. May be left out where there is one."},
        "input": {
            **_inputs(MAX_INPUTS),
            "description": "Texts, 4 MiB together, or token ids. One that is too long for the model is refused.",
        },
        "encoding_format": {"enum": ["float", "base64", None], "description": "base64: of little-endian float32. Default float."},
        "dimensions": _whole(1, description="The first numbers of each vector alone, of length 1 again. Default: all."),
        **{name: _COMMON[name] for name in ("user", "service_tier", "strict")},
    },
    ["input"],
    _HEADERS,
)
TOKENIZE = post(
    "Count and return tokens",
    {"model": _COMMON["model"], "prompt": {"type": "string"}, "messages": _MESSAGES, **_CHAT_ONLY, **_FORMATS, "strict": _FLAG},
    [],
    [HEADER_ID, _STRICT],
    runs=False,
)
MODELS = get("List models", 401, 403, 503)
MODEL = get("Describe a model", 401, 403, 404, 503)
MODEL["openapi_extra"] = {
    **MODEL["openapi_extra"],
    "parameters": [HEADER_ID, {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
}
USAGE = get("The org's use by day (UTC), model and class", 401, 403, 503)
USAGE["openapi_extra"] = {
    **USAGE["openapi_extra"],
    "parameters": [
        HEADER_ID,
        query("days", {"type": "integer", "minimum": 1, "maximum": 90, "description": "Days back, today among them; 1 by default."}),
        query("org", {"type": "string", "description": "For operators; left out: all. Users see their own org's."}),
        query("page_size", {"type": "integer", "minimum": 1, "maximum": 1000, "description": "Rows at most; 1000 by default."}),
        query("page_token", {"type": "string", "description": "next_page_token of the page before; left out: the first page."}),
    ],
}
HEALTH = get("The process answers", secured=False)
READY = get("It takes work; 503 says why not", 503, secured=False)


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        made.setdefault("components", {})["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}}
        app.openapi_schema = made
    return app.openapi_schema
