"""A schema is enforced whole or refused at its place; what a grammar lets through validates, whatever the model would say."""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from services.text.compiler import GrammarError
from services.text.grammar import Grammar
from services.text.json_schema import FORMATS, SchemaError, check_schema
from tests.unit.text.hostile_grammars import UNENFORCEABLE
from tests.unit.text.test_compiler import COMPILER, EOS, VOCAB_SIZE, accepts


@pytest.mark.parametrize(("schema", "pointer"), UNENFORCEABLE, ids=map(str, range(len(UNENFORCEABLE))))
def test_what_would_be_ignored_is_refused_at_its_place(schema: Any, pointer: str) -> None:
    with pytest.raises(SchemaError) as caught:
        check_schema(schema)
    assert caught.value.pointer.startswith(pointer)
    assert str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"title": "T", "description": 5, "default": {"not": 1}, "examples": [{"frob": 1}], "$comment": "", "readOnly": True},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:x", "type": ["object", "null"]},
        {"enum": [{"not": 1}, {"if": 2}], "const": {"if": 2}},
        {"properties": {"not": {"type": "string"}, "if": {}, "$ref": {"type": "null"}}, "required": ["not"]},
        {"$defs": {"a": {"type": "string"}}, "anyOf": [{"$ref": "#/$defs/a"}, {"type": "array", "items": {"$ref": "#"}}]},
        *({"format": name} for name in FORMATS),
    ],
)
def test_what_is_enforced_or_says_nothing_passes(schema: Any) -> None:
    check_schema(schema)
    COMPILER.compile_now(Grammar("json_schema", json.dumps(schema)))


def test_properties_keep_their_order() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}, "required": ["a", "b"]}
    matcher = COMPILER.compile_now(Grammar("json_schema", json.dumps(schema)))
    assert accepts(matcher, '{"b": null, "a": null}')
    assert not accepts(matcher, '{"a": null, "b": null}')


NAMES = st.sampled_from(["a", "b", "c d", "é", '"q"', "not"])
SCALARS = st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=5)
NUMBERS = st.integers(-50, 50)


def bounds(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    fields = {"minimum": NUMBERS, "maximum": NUMBERS, "exclusiveMinimum": NUMBERS, "exclusiveMaximum": NUMBERS}
    if kind == "integer":
        fields["multipleOf"] = st.integers(1, 7)
    return st.fixed_dictionaries({"type": st.just(kind)}, optional=fields)


STRINGS = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={
        "minLength": st.integers(0, 4),
        "maxLength": st.integers(0, 8),
        "pattern": st.sampled_from(["^a+$", "b", "^[a-c]{2,5}", "x|y$", r"\d{2}"]),
    },
)
FORMATTED = st.fixed_dictionaries({"type": st.just("string"), "format": st.sampled_from(["date", "ipv4", "uuid", "time"])})
LEAVES = (
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["integer", "null"]}, True, {}])
    | bounds("integer")
    | bounds("number")
    | STRINGS
    | FORMATTED
    | st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=4))
    | st.builds(lambda value: {"const": value}, SCALARS)
)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    schema["required"] = [name for name in properties if draw(st.booleans())]
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.just(False) | inner)
    return schema


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner},
        optional={"minItems": st.integers(0, 2), "maxItems": st.integers(0, 4), "prefixItems": st.lists(inner, min_size=1, max_size=2)},
    )
    several = st.lists(inner, min_size=1, max_size=3)
    return arrays | objects(inner) | st.builds(lambda parts: {"anyOf": parts}, several) | st.builds(lambda parts: {"allOf": parts}, several)


FORMAT_CHECKER = jsonschema.FormatChecker(["ipv4", "uuid"])  # dates are held to their syntax: every year has a 29 February
ENDS = {*b'"]},', EOS}
SCHEMAS = st.recursive(LEAVES, containers, max_leaves=6)


def spoken(matcher: Any, rng: random.Random, most: int = 300) -> str | None:
    """What a model that says anything comes to under the mask: the whole text, or None where it goes on for too long."""
    said = bytearray()
    for _ in range(most):
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(VOCAB_SIZE) if mask[token // 8] >> token % 8 & 1]
        assert allowed, "a dead end"
        if EOS in allowed and rng.random() < 0.5:
            return said.decode()
        ends = [token for token in allowed if token in ENDS]  # so that most come to an end
        token = rng.choice(ends if ends and rng.random() < 0.4 else allowed)
        if token == EOS:
            return said.decode()
        assert matcher.consume_token(token)
        said.append(token)
        if matcher.is_stopped():
            return said.decode()
    return None


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(SCHEMAS, st.integers(0, 2**32))
def test_whatever_is_said_under_a_schema_validates(schema: Any, seed: int) -> None:
    check_schema(schema)
    try:
        matcher = COMPILER.compile_now(Grammar("json_schema", json.dumps(schema)))
    except GrammarError:
        assume(False)
    rng = random.Random(seed)
    for _ in range(3):
        text = spoken(matcher.deep_copy(), rng)
        if text is not None:
            jsonschema.validate(json.loads(text), schema, format_checker=FORMAT_CHECKER)
