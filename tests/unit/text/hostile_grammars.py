"""Grammars that are wrong, that ask for what can't be enforced, or that are built to cost time and memory."""

import json
from typing import Any

A = {"type": "string"}


def deep(levels: int, around: str = "properties") -> dict[str, Any]:
    """A schema of so many schemas inside each other."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {
            "properties": {"properties": {"a": schema}},
            "items": {"type": "array", "items": schema},
            "anyOf": {"anyOf": [schema, A]},
            "allOf": {"allOf": [schema]},
        }[around]
    return schema


UNKNOWN_KEYWORDS = [
    "frobnicate", "nullable", "discriminator", "x-guidance", "x-order", "contentEncoding", "contentMediaType", "contentSchema",
    "uniqueItems", "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "additionalItems", "$dynamicRef", "$dynamicAnchor",
    "$recursiveRef", "$recursiveAnchor", "$vocabulary", "extends", "disallow", "divisibleBy", "enumNames", "Type", "TYPE", "type ", "",
    "minlength", "max_length", "regex", "oneof", "\u0000", "pattern\n", "a/b", "a~b",
]  # fmt: skip

# Schemas that `check_schema` refuses, with the pointer that it blames.
UNENFORCEABLE: list[tuple[Any, str]] = [
    *(({"properties": {"a": {keyword: True}}}, "#/properties/a/") for keyword in UNKNOWN_KEYWORDS),
    (5, "#"), ("string", "#"), (None, "#"), ([], "#"), (1.5, "#"),
    ({"type": "foo"}, "#/type"), ({"type": ["string", "foo"]}, "#/type"), ({"type": 5}, "#/type"), ({"type": [None]}, "#/type"),
    ({"type": {"a": 1}}, "#/type"),
    ({"items": [{"type": "integer"}]}, "#/items"), ({"items": 5}, "#/items"), ({"items": "a"}, "#/items"),
    ({"properties": []}, "#/properties"), ({"properties": {"a": 5}}, "#/properties/a"), ({"properties": "a"}, "#/properties"),
    ({"patternProperties": {"^a": 7}}, "#/patternProperties/^a"), ({"$defs": 5}, "#/$defs"),
    ({"$defs": {"a": {"frob": 1}}}, "#/$defs/a/frob"),
    ({"definitions": {"a/b": {"frob": 1}}}, "#/definitions/a~1b/frob"),
    ({"anyOf": {}}, "#/anyOf"), ({"anyOf": [{"not": {}}]}, "#/anyOf/0/not"), ({"allOf": 5}, "#/allOf"), ({"oneOf": [5]}, "#/oneOf/0"),
    ({"prefixItems": {"a": 1}}, "#/prefixItems"), ({"additionalProperties": 5}, "#/additionalProperties"),
    ({"format": "foo"}, "#/format"), ({"format": "regex"}, "#/format"), ({"format": 5}, "#/format"), ({"format": ["date"]}, "#/format"),
    ({"format": "iri"}, "#/format"), ({"format": "json-pointer"}, "#/format"),
    ({"$ref": "http://example.com/schema.json"}, "#/$ref"), ({"$ref": "file:///etc/passwd"}, "#/$ref"), ({"$ref": "other.json"}, "#/$ref"),
    ({"$ref": "//x/y"}, "#/$ref"), ({"$ref": 5}, "#/$ref"), ({"$ref": None}, "#/$ref"), ({"$ref": ""}, "#/$ref"),
    ({"multipleOf": 0}, "#/multipleOf"), ({"multipleOf": -1}, "#/multipleOf"), ({"multipleOf": "2"}, "#/multipleOf"),
    ({"multipleOf": float("nan")}, "#/multipleOf"), ({"multipleOf": True}, "#/multipleOf"),
    ({"multipleOf": 999_983}, "#/multipleOf"), ({"multipleOf": 2**40}, "#/multipleOf"),
    ({"multipleOf": 1.00001}, "#/multipleOf"), ({"multipleOf": float("inf")}, "#/multipleOf"),
    ({"minimum": "5"}, "#/minimum"), ({"maximum": None}, "#/maximum"), ({"exclusiveMinimum": True}, "#/exclusiveMinimum"),
    ({"exclusiveMaximum": [1]}, "#/exclusiveMaximum"),
    ({"minProperties": 2}, "#/minProperties"), ({"minProperties": 4, "required": ["a", "b"]}, "#/minProperties"),
    (deep(65), "#/properties/a"), (deep(1000), "#/properties/a"), (deep(65, "items"), "#/items"), (deep(100, "anyOf"), "#/anyOf/0"),
    (deep(100, "allOf"), "#/allOf/0"),
]  # fmt: skip

# Schemas that pass `check_schema`, and llguidance refuses.
REFUSED_SCHEMAS: list[Any] = [
    False, {"enum": []}, {"enum": 5}, {"enum": "a"}, {"anyOf": []}, {"required": "a"}, {"required": [5]}, {"required": {"a": 1}},
    {"minLength": -1}, {"minLength": 1.5}, {"minLength": "1"}, {"maxLength": None}, {"minItems": -1}, {"maxItems": "x"}, {"minItems": [1]},
    {"type": "integer", "minimum": 5, "maximum": 3}, {"type": "number", "exclusiveMinimum": 5, "exclusiveMaximum": 5},
    {"type": "string", "minLength": 5, "maxLength": 3}, {"type": "array", "minItems": 5, "maxItems": 3},
    {"type": "array", "items": False, "minItems": 1}, {"type": "object", "required": ["a"], "additionalProperties": False},
    {"type": "string", "enum": [1, 2]}, {"type": "integer", "const": "a"}, {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]}, {"oneOf": [A, A]},
    {"type": "string", "pattern": "(?=a)b"}, {"type": "string", "pattern": "(?!a)b"}, {"type": "string", "pattern": "(?<=a)b"},
    {"type": "string", "pattern": "(a)\\1"}, {"type": "string", "pattern": "a("}, {"type": "string", "pattern": "["},
    {"type": "string", "pattern": "*"}, {"type": "string", "pattern": "a{5,3}"}, {"type": "string", "pattern": 5},
    {"type": "string", "pattern": "\\p{Nonsense}"}, {"type": "string", "pattern": "(" * 1000 + "a" + ")" * 1000},
    {"$ref": "#"}, {"$ref": "#/$defs/nowhere"}, {"$ref": "#/properties"}, {"allOf": [{"$ref": "#"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$schema": "urn:nowhere"}, {"$schema": "http://example.com/nope#"},
    {"type": "object", "minProperties": 1, "properties": {"a": A, "b": A}, "required": ["a"], "maxProperties": 0},
    {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 3},
]  # fmt: skip

# Schemas that cost: refused or compiled, in bounded time.
COSTLY_SCHEMAS: list[Any] = [
    {"enum": [f"value {number}" for number in range(4000)]},
    {"enum": ["a" * length for length in range(1, 350)]},
    {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(1500)}},
    {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}, "required": [f"p{i}" for i in range(1500)]},
    {"type": "string", "minLength": 10**9}, {"type": "string", "maxLength": 10**9}, {"type": "string", "minLength": 10**18},
    {"type": "array", "items": A, "minItems": 10**9}, {"type": "array", "items": A, "maxItems": 10**9},
    {"type": "array", "items": {"const": 1}, "minItems": 10**6, "maxItems": 10**6},
    {"type": "integer", "multipleOf": 9973}, {"type": "number", "multipleOf": 1e-300},
    {"type": "number", "multipleOf": 0.9973, "minimum": -1e6, "maximum": 1e6},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
    {"type": "number", "maximum": 1e308},
    {"type": "string", "pattern": "^(a*)*b$"}, {"type": "string", "pattern": "(a|a)*(a|a)*(a|a)*c"},
    {"type": "string", "pattern": "(a{1000}){1000}"}, {"type": "string", "pattern": "((a{100}){100}){100}"},
    {"type": "string", "pattern": "(x+x+)+y"}, {"type": "string", "pattern": ".*a.{30}b.*c.{30}d"},
    {"type": "string", "pattern": "[ab]*a[ab]{25}"}, {"type": "string", "pattern": "\\p{L}{1,5000}"},
    {"type": "string", "pattern": "|".join("a" * length for length in range(300))},
    {"const": "a" * 60_000}, {"const": list(range(10_000))},
    {"allOf": [{"properties": {f"p{i}": A}} for i in range(500)]}, {"anyOf": [{"properties": {f"p{i}": A}} for i in range(1000)]},
    {"anyOf": [{"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(500)]},
    {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(20)]},
    {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(14)]},
    {"type": "object", "patternProperties": {f"^a{i}": A for i in range(100)}},
    {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)} | {"d30": A}, "$ref": "#/$defs/d0"},
    {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(20)} | {"d20": A}, "$ref": "#/$defs/d0"},
    deep(60), deep(60, "items"), deep(30, "anyOf"), deep(60, "allOf"),
]  # fmt: skip

REFUSED_REGEXES = [
    "(?=a)", "(?!a)", "(?<=a)b", "(?<!a)b", "(a)\\1", "(?P=x)", "a(", "a)", "[", "[z-a]", "*", "+", "?", "a{5,3}", "\\p{X}",
    "(?z)", "(" * 300 + "a" + ")" * 300, "(" * 20_000 + "a" + ")" * 20_000, "\\xZZ", "\\u{110000}", "a{99999999999999999999}",
]  # fmt: skip

COSTLY_REGEXES = [
    "(a*)*b", "(a+)+$", "(a|aa)+", "(.*)*", "(x+x+)+y", "a{1000000000}", "(a{1000}){1000}", "((a{100}){100}){100}", "(a|b)*a(a|b){20}",
    "(a|b)*a(a|b){200}", "(.*a.{100}b.*c.{100}d)", "\\p{L}{1,5000}", "|".join(str(i) * 3 for i in range(12_000)), "ab" * 30_000,
    "".join(f"(a{i}|b{i})" for i in range(5_000)), "[\\x{0}-\\x{10ffff}]{0,2000}", "(?i)" + "abcdefgh" * 1000,
    ".{0,100000}", "(.{0,300}\n){300}",
    "((((a?){30}){30}){30}){30}a", "(a?){2000}a{2000}", "(?s:.*)" * 500,
]  # fmt: skip

REFUSED_LARK = [
    "start", "start: foo", 'foo: "a"', "start: <nope>", "start: @foo", 'start: "a', "start: /a", "start: ((", 'start: "a"{3,1}',
    'start: %json {"not": {}}', "start: %json {", "start: %json 5", "start: A\nA: A", "start: a\na: a", "%import nope.NOPE\nstart: NOPE",
    "start: /(?=a)/", 'start: "a" "b', "start: %regex { }", "%declare X\nstart: X", "start: ~", "start: " + "(" * 50_000, "\x00", "🎉",
    "start: " + "(" * 5000 + '"a"' + ")" * 5000,
]  # fmt: skip

COSTLY_LARK = [
    'start: "a"{1000000000}', 'start: (("a"{10000}){10000}){10000}', 'start: start start | "a" | ""', 'start: a\na: a a | "x" | ""',
    "start: " + " | ".join(f'"{i}"' for i in range(6000)),
    "\n".join(["start: r0", *(f'r{i}: r{i + 1} "x" | "y"' for i in range(2500)), 'r2500: "z"']),
    "start: X\nX: ~(/(?s:.*)a.{30}/) & /(a|b)*a(a|b){20}/", 'start: %regex {"substring_chars": "' + "ab" * 10_000 + '"}',
    'start: x*\nx: "a" | "b" | "ab" | "aba" | "bab"', "start: " + " ".join('("a" | "b")?' for _ in range(3000)),
    "start: /./*", 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/',
]  # fmt: skip

NUM_CASES = sum(map(len, (UNENFORCEABLE, REFUSED_SCHEMAS, COSTLY_SCHEMAS, REFUSED_REGEXES, COSTLY_REGEXES, REFUSED_LARK, COSTLY_LARK)))


def as_text(schema: Any) -> str:
    """As it goes over the wire."""
    return json.dumps(schema)
