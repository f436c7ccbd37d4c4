"""The one table of what a request may ask for; both faces read it, so both give the same answer.

Takes plain JSON-like values, strictly: a boolean is no number, a string no integer, null is absence. Knows neither a face's field names
(the caller passes its own, for errors) nor tokenizers.
"""

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import invalid
from services.gateway.field import Field, check_unicode, shown
from services.gateway.grammar_field import check_grammar
from services.text.grammar import Grammar

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 16
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 300
MAX_LABEL_CHARS = 128

_INT32 = (-(2**31), 2**31 - 1)
_INT64 = (-(2**63), 2**63 - 1)
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class Limits:
    """What the bounds of some fields depend on. All in tokens."""

    vocab_size: int
    max_model_len: int
    max_tokens_cap: int = 32_768
    num_prompt_tokens: int = 0  # 0 while the prompt isn't tokenised yet
    allow_no_output: bool = False  # max_tokens 0: scoring, which needs the prompt echoed
    most_reserved: int = 0  # prompt and output of all choices that the org's quota can ever hold; 0: any number
    most_held: int = 0  # prompt and output of one choice that the org's share of a worker's cache holds; 0: any number

    @property
    def room(self) -> int:
        """Tokens that the context leaves behind the prompt."""
        return self.max_model_len - self.num_prompt_tokens

    def default_max_tokens(self, num_choices: int) -> int:
        """As many as there is room for, and as a full quota and the org's share of a cache have: more would be refused whenever it came."""
        most = min(self.max_tokens_cap, self.room)
        if self.most_reserved:
            most = min(most, (self.most_reserved - self.num_prompt_tokens) // num_choices)
        if self.most_held:
            most = min(most, self.most_held - self.num_prompt_tokens)
        return max(0 if self.allow_no_output else 1, most)


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, every default filled in; numbers are what float32 holds, as on the wire to the worker."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0  # admission draws one where the request has none
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculation: bool = True
    grammar: Grammar | None = None


def whole(low: int, high: int) -> Callable[[Field, Limits], int]:
    """An integer from `low` to `high`."""

    def check(entry: Field, _: Limits) -> int:
        value = entry.value
        if isinstance(value, bool) or not isinstance(value, int):
            raise entry.refuse("must be an integer, without quotes or a fraction")
        if not low <= value <= high:
            raise entry.refuse(f"must be from {low} to {high}")
        return value

    return check


def number(low: float, high: float, *, above: bool = False) -> Callable[[Field, Limits], float]:
    """A number from `low` to `high`; `above`: `low` itself is refused. The answer is what float32 makes of it."""
    bounds = f"must be above {low:g} and at most {high:g}" if above else f"must be from {low:g} to {high:g}"
    low, high = _float32(low), _float32(high)  # so that a bound itself passes, however it came

    def check(entry: Field, _: Limits) -> float:
        value = entry.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise entry.refuse("must be a number, without quotes")
        if isinstance(value, float) and not math.isfinite(value):
            raise entry.refuse("must be a finite number")
        if not low <= value <= high or (above and value == low):
            raise entry.refuse(bounds)
        if value == 0 and math.copysign(1, value) < 0:
            raise entry.refuse("must be 0 without a sign, or another number")
        rounded = _float32(value)
        if above and rounded <= low:
            raise entry.refuse(f"is too close to {low:g}")
        return rounded

    return check


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def flag(entry: Field, _: Limits) -> bool:
    """true or false."""
    if not isinstance(entry.value, bool):
        raise entry.refuse("must be true or false, without quotes")
    return entry.value


def _max_tokens(entry: Field, limits: Limits) -> int:
    most = min(limits.max_tokens_cap, limits.room)
    value = whole(0, _INT32[1])(entry, limits)
    if value == 0 and not limits.allow_no_output:
        raise entry.refuse("must be at least 1; 0 is for scoring a prompt and needs echo")
    if value > limits.max_tokens_cap:
        raise entry.refuse(f"must be at most {limits.max_tokens_cap} on this server; leave it out for as many as there is room for")
    if value > limits.room:
        raise entry.refuse(
            f"and the prompt's {limits.num_prompt_tokens} tokens exceed the context of {limits.max_model_len} tokens; "
            f"ask for at most {most}, or leave it out"
        )
    return value


def _top_k(entry: Field, limits: Limits) -> int:
    value = whole(-1, _INT32[1])(entry, limits)
    return min(max(value, 0), limits.vocab_size)


def token_id_of(entry: Field, limits: Limits) -> int:
    """A token id of the model's vocabulary."""
    return whole(0, limits.vocab_size - 1)(entry, limits)


def _stop(entry: Field, _: Limits) -> tuple[str, ...]:
    stops = [entry.value] if isinstance(entry.value, str) else entry.value
    if not isinstance(stops, list | tuple):
        raise entry.refuse("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise entry.refuse(f"may have at most {MAX_STOPS} strings")
    for index, stop in enumerate(stops):
        item = entry if stop is entry.value else Field(f"{entry.name}[{index}]", stop)
        if not isinstance(stop, str):
            raise item.refuse("must be a string")
        if not stop:
            raise item.refuse("must not be empty; leave it out for no stop string")
        if len(stop) > MAX_STOP_CHARS:
            raise item.refuse(f"may have at most {MAX_STOP_CHARS} characters")
        check_unicode(item)
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(entry: Field, limits: Limits) -> tuple[int, ...]:
    if not isinstance(entry.value, list | tuple):
        raise entry.refuse("must be a list of token ids")
    if len(entry.value) > MAX_STOP_TOKENS:
        raise entry.refuse(f"may have at most {MAX_STOP_TOKENS} token ids")
    return tuple(token_id_of(Field(f"{entry.name}[{index}]", value), limits) for index, value in enumerate(entry.value))


def _logit_bias(entry: Field, limits: Limits) -> dict[int, float]:
    if not isinstance(entry.value, Mapping):
        raise entry.refuse("must be an object from token id to bias")
    if len(entry.value) > MAX_LOGIT_BIASES:
        raise entry.refuse(f"may have at most {MAX_LOGIT_BIASES} entries")
    biases = {}
    for key, bias in entry.value.items():
        if isinstance(key, str) and not _TOKEN_ID.fullmatch(key):
            raise invalid(entry.name, f"{entry.name} has the key {shown(key)}: keys must be token ids from 0 to {limits.vocab_size - 1}")
        token_id = int(key) if isinstance(key, str) else key
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < limits.vocab_size:
            raise invalid(entry.name, f"{entry.name} has the key {shown(key)}: token ids must be from 0 to {limits.vocab_size - 1}")
        name = f"{entry.name}[{token_id}]"
        biases[token_id] = number(-100, 100)(Field(name, bias), limits)
    return biases


_TABLE: Mapping[str, Callable[[Field, Limits], Any]] = {
    "max_tokens": _max_tokens,
    "min_tokens": whole(0, _INT32[1]),
    "temperature": number(0, 100),
    "top_p": number(0, 1, above=True),
    "top_k": _top_k,
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(1e-6, 100),
    "logit_bias": _logit_bias,
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": flag,
    "seed": whole(*_INT64),
    "n": whole(1, MAX_CHOICES),
    "logprobs": whole(0, MAX_LOGPROBS),
    "prompt_logprobs": whole(0, MAX_LOGPROBS),
    "grammar": lambda entry, _: check_grammar(entry),
    "best_of": whole(1, MAX_CHOICES),
    "speculation": flag,
}
FIELDS = frozenset(_TABLE)
"""What validate_sampling reads."""


def validate_sampling(fields: Mapping[str, object], *, limits: Limits, names: Mapping[str, str] = _NOTHING) -> Sampling:
    """The sampling that `fields` ask for; null is absence, keys outside FIELDS are not looked at.

    `names` maps a field to what the client called it, where that differs: {"max_tokens": "max_completion_tokens"}.
    Raises INVALID_ARGUMENT naming the field as the client did, its value, its limit and what to do.
    """
    given = {name: Field(names.get(name, name), fields[name]) for name in _TABLE if fields.get(name) is not None}
    values = {name: _TABLE[name](entry, limits) for name, entry in given.items()}
    values.setdefault("max_tokens", limits.default_max_tokens(values.get("n", 1)))
    if values.get("min_tokens", 0) > values["max_tokens"]:
        bound = "max_tokens" if "max_tokens" in given else "the tokens there is room for"
        raise given["min_tokens"].refuse(f"must be at most {names.get('max_tokens', bound)}, {values['max_tokens']}")
    if values.get("ignore_eos") and "grammar" in values:
        raise given["ignore_eos"].refuse(f"can't go with {given['grammar'].name}, which says where the output ends")
    best_of, n = values.pop("best_of", None), values.get("n", 1)
    if best_of is not None and best_of < n:
        raise given["best_of"].refuse(f"must be at least n, {n}")
    if best_of is not None and best_of > n:
        raise given["best_of"].refuse(
            f"must equal n, {n}: this server doesn't choose among more; ask for n = {best_of} and choose yourself"
        )
    return Sampling(**values)


def validate_label(value: object, *, name: str = "label") -> str:
    """A client's own id, which is echoed and never used as a key: at most 128 characters, none of them control characters."""
    if value is None:
        return ""
    entry = Field(name, value)
    if not isinstance(value, str):
        raise entry.refuse("must be a text")
    if len(value) > MAX_LABEL_CHARS:
        raise entry.refuse(f"may have at most {MAX_LABEL_CHARS} characters")
    if not value.isprintable():
        raise entry.refuse("must not have control characters or line breaks")
    return value
