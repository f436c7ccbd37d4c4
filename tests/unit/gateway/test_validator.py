"""Table 3C of bad input, field by field: what is refused, by which name, and what is accepted as what (B09, B28, B30-B32, B42h)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.errors import Code, StatusError
from services.gateway.field import shown
from services.gateway.validator import FIELDS, Limits, Sampling, validate_label, validate_sampling
from services.text.grammar import Grammar
from tests.unit.text.hostile_grammars import UNENFORCEABLE

VOCAB = 1000
CONTEXT = 512
CAP = 400
LIMITS = Limits(vocab_size=VOCAB, max_model_len=CONTEXT, max_tokens_cap=CAP)
NAN, INF = math.nan, math.inf
HUGE = 10**400

NOT_A_NUMBER: list[Any] = ["5", "", "NaN", True, False, [], [1], {}, {"a": 1}, b"5"]
NOT_FINITE: list[Any] = [NAN, INF, -INF, -0.0]
NOT_AN_INTEGER: list[Any] = [*NOT_A_NUMBER, 1.5, 0.01, 5.0, 1e9, NAN, INF, -INF]
OUT_OF_INT32: list[Any] = [2**31, -(2**31) - 1, 2**63, HUGE, -HUGE]

REFUSED: dict[str, list[Any]] = {
    "max_tokens": [*NOT_AN_INTEGER, *OUT_OF_INT32, -1, -100, 0, CAP + 1, CONTEXT + 1, 2**31 - 1],
    "min_tokens": [*NOT_AN_INTEGER, *OUT_OF_INT32, -1, -100, CAP + 1, 10**9],
    "temperature": [*NOT_A_NUMBER, *NOT_FINITE, -1, -1e-9, -1e38, 100.0001, 101, 1e38, 1e39, HUGE, -HUGE],
    "top_p": [*NOT_A_NUMBER, *NOT_FINITE, 0, 0.0, -0.1, -1, 1.0000001, 1.1, 2, 1e38, 1e-60, HUGE, -HUGE],
    "top_k": [*NOT_AN_INTEGER, *OUT_OF_INT32, -2, -100],
    "min_p": [*NOT_A_NUMBER, *NOT_FINITE, -0.1, -1, 1.0000001, 2, 1e38, HUGE],
    "presence_penalty": [*NOT_A_NUMBER, *NOT_FINITE, -2.0001, 2.0001, 3, -3, 1e38, -1e38, HUGE],
    "frequency_penalty": [*NOT_A_NUMBER, *NOT_FINITE, -2.0001, 2.0001, 3, -3, 1e38, -1e38, HUGE],
    "repetition_penalty": [*NOT_A_NUMBER, *NOT_FINITE, 0, 0.0, -1, -0.5, 1e-9, 100.001, 1e38, HUGE],
    "logit_bias": [
        *[value for value in NOT_A_NUMBER if value != {}], 1, 1.5, NAN, {str(VOCAB): 1}, {VOCAB: 1}, {-1: 1}, {"-1": 1}, {"abc": 1},
        {"": 1},
        {"1.5": 1}, {" 1": 1}, {"+1": 1}, {"01": 1}, {"0x1": 1}, {"1_0": 1}, {"٣": 1}, {2**31: 1}, {str(2**31): 1}, {"9" * 5000: 1},
        {True: 1},
        {1.5: 1}, {None: 1}, {1: NAN}, {1: INF}, {1: -INF}, {1: 100.001}, {1: -100.001}, {1: "5"}, {1: None}, {1: True}, {1: []}, {1: HUGE},
        dict.fromkeys(range(301), 1), {str(token): 1 for token in range(10_000)},
    ],
    "stop": [
        5, 1.5, True, {}, {"a": "b"}, b"x", "", [""], ["", "x"], ["x", ""], ["x", None], ["x", 5], [["x"]], [True], ["x"] * 17,
        [str(number) for number in range(17)], "x" * 257, ["x" * 257], "x" * 10_000, "\ud800", ["ok", "\udfff"],
    ],
    "stop_token_ids": [
        5, "5", True, {}, [VOCAB], [-1], [2**31], [HUGE], ["5"], [1.5], [5.0], [True], [None], [[1]], [NAN], list(range(17)), [0] * 17,
    ],
    "ignore_eos": ["true", "", 0, 1, 1.0, [], {}, NAN],
    "seed": [*NOT_AN_INTEGER, 2**63, -(2**63) - 1, HUGE, -HUGE],
    "n": [*NOT_AN_INTEGER, *OUT_OF_INT32, 0, -1, 17, 1000],
    "best_of": [*NOT_AN_INTEGER, *OUT_OF_INT32, 0, -1, 17, 2],
    "logprobs": [*NOT_AN_INTEGER, *OUT_OF_INT32, -1, 21, 100],
    "prompt_logprobs": [*NOT_AN_INTEGER, *OUT_OF_INT32, -1, 21, 100],
    "speculation": ["false", "", 0, 1, 8, [], {}, NAN],
    "grammar": [
        "a", 5, True, [], {}, {"json": {}}, {"regex": "a", "lark": "b"}, {"regex": None}, {5: 5}, b"x",
        {"regex": ""}, {"regex": 5}, {"regex": "a" * 65_537}, {"regex": "é" * 40_000}, {"regex": "\ud800"}, {"regex": "a\\"},
        {"regex": "\\\\\\"}, {"json_object": False}, {"json_object": 1}, {"json_object": {}},
        {"choice": []}, {"choice": "a"}, {"choice": {"a": 1}}, {"choice": [""]}, {"choice": ["a", 5]}, {"choice": [None]},
        {"choice": ["\ud800"]}, {"choice": ["a"] * 1025}, {"choice": ["a" * 40_000] * 2}, {"choice": ["a" * 70_000]},
        {"lark": ""}, {"lark": []}, {"lark": "a" * 65_537}, {"lark": "start: x\nx[max_tokens=5]: /a/"},
        {"lark": "start: x\nx[temperature=0.5]: /a/"}, {"lark": 'start: x\n  ?x [lazy, stop="y"]: /a/'},
        {"lark": '%llguidance {"no_forcing": false}\nstart: "a"'}, {"lark": 'start: %json {"not": {}}'},
        {"lark": 'start: "a" %json {"type": "object", "properties": {"a": {"frob": 1}}}'},
        {"lark": 'start: %json {"x-guidance": {"lenient": true}}'},
        {"json_schema": 5}, {"json_schema": None}, {"json_schema": []}, {"json_schema": ""}, {"json_schema": "{"}, {"json_schema": "[1, 2"},
        {"json_schema": '{"a": NaN}'}, {"json_schema": '{"type": "integer", "type": "string"}'}, {"json_schema": "[" * 60_000},
        {"json_schema": '{"title": "\\ud800"}'}, {"json_schema": {"default": NAN}}, {"json_schema": {"const": INF}},
        {"json_schema": " " * 70_000}, {"json_schema": {"enum": ["a" * 70_000]}}, {"json_schema": {"enum": [["a"] * 20_000]}},
        *({"json_schema": schema} for schema, _ in UNENFORCEABLE if not isinstance(schema, str)),
    ],
}  # fmt: skip

FLOAT_TENTH = 0.10000000149011612  # as float32 has it
FLOAT_MILLIONTH = 9.999999974752427e-07
ACCEPTED: list[tuple[str, Any, Any]] = [
    ("max_tokens", 1, 1), ("max_tokens", CAP, CAP), ("max_tokens", None, CAP),
    ("min_tokens", 0, 0), ("min_tokens", CAP, CAP), ("min_tokens", None, 0),
    ("temperature", 0, 0.0), ("temperature", 0.0, 0.0), ("temperature", 100, 100.0), ("temperature", 1, 1.0), ("temperature",
    0.1, FLOAT_TENTH),
    ("temperature", 1e-60, 0.0), ("temperature", None, 1.0),
    ("top_p", 1, 1.0), ("top_p", 0.1, FLOAT_TENTH), ("top_p", 1.0, 1.0), ("top_p", None, 1.0),
    ("top_k", -1, 0), ("top_k", 0, 0), ("top_k", 1, 1), ("top_k", VOCAB, VOCAB), ("top_k", 9_999_999, VOCAB), ("top_k", 2**31 - 1, VOCAB),
    ("top_k", None, 0),
    ("min_p", 0, 0.0), ("min_p", 1, 1.0), ("min_p", 0.1, FLOAT_TENTH), ("min_p", None, 0.0),
    ("presence_penalty", 2, 2.0), ("presence_penalty", -2, -2.0), ("presence_penalty", 0, 0.0), ("presence_penalty", None, 0.0),
    ("frequency_penalty", 2, 2.0), ("frequency_penalty", -2.0, -2.0), ("frequency_penalty", None, 0.0),
    ("repetition_penalty", 1, 1.0), ("repetition_penalty", 100, 100.0), ("repetition_penalty", 0.1, FLOAT_TENTH),
    ("repetition_penalty", 1e-6, FLOAT_MILLIONTH), ("repetition_penalty", FLOAT_MILLIONTH, FLOAT_MILLIONTH),
    ("repetition_penalty", None, 1.0),
    ("logit_bias", {}, {}), ("logit_bias", {str(VOCAB - 1): 5}, {VOCAB - 1: 5.0}), ("logit_bias", {0: -100, 1: 100}, {0: -100.0, 1: 100.0}),
    ("logit_bias", {"0": 0.1}, {0: FLOAT_TENTH}), ("logit_bias", None, {}),
    ("logit_bias", dict.fromkeys(range(300), -100), dict.fromkeys(range(300), -100.0)),
    ("stop", "x", ("x",)), ("stop", ["x"], ("x",)), ("stop", [], ()), ("stop", None, ()), ("stop", ["a", "b", "a"], ("a", "b")),
    ("stop", ["x" * 256], ("x" * 256,)), ("stop", "日本" * 128, ("日本" * 128,)), ("stop", "\n", ("\n",)), ("stop", ("a", "b"), ("a", "b")),
    ("stop", [str(number) for number in range(16)], tuple(str(number) for number in range(16))),
    ("stop_token_ids", [], ()), ("stop_token_ids", [0, VOCAB - 1], (0, VOCAB - 1)), ("stop_token_ids", None, ()),
    ("ignore_eos", True, True), ("ignore_eos", False, False), ("ignore_eos", None, False),
    ("seed", 0, 0), ("seed", 2**63 - 1, 2**63 - 1), ("seed", -(2**63), -(2**63)), ("seed", -1, -1),
    ("n", 1, 1), ("n", 16, 16), ("n", None, 1),
    ("logprobs", 0, 0), ("logprobs", 20, 20), ("logprobs", None, None),
    ("grammar", None, None), ("grammar", {"json_object": True}, Grammar("json_object")),
    ("grammar", {"regex": "a\\\\"}, Grammar("regex", "a\\\\")),
    ("grammar", {"json_schema": {"const": 5}}, Grammar("json_schema", '{"const":5}')),
    ("grammar", {"json_schema": '{"const" : 5}'}, Grammar("json_schema", '{"const":5}')),
    ("grammar", {"choice": ["a"]}, Grammar("choice", '["a"]')),
    ("grammar", {"lark": 'start: "[max_tokens=5]"'}, Grammar("lark", 'start: "[max_tokens=5]"')),
    ("prompt_logprobs", 0, 0), ("prompt_logprobs", 20, 20), ("prompt_logprobs", None, None),
    ("speculation", False, False), ("speculation", True, True), ("speculation", None, True),
]  # fmt: skip

REFUSED_CASES = [(name, value) for name, values in REFUSED.items() for value in values]


def refusal(fields: Mapping[str, object], limits: Limits = LIMITS, names: Mapping[str, str] | None = None) -> StatusError:
    with pytest.raises(StatusError) as caught:
        validate_sampling(fields, limits=limits, names=names or {})
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert len(caught.value.message) < 300
    return caught.value


def test_the_table_is_as_long_as_promised_and_leaves_no_field_out() -> None:
    assert len(REFUSED_CASES) + len(ACCEPTED) >= 400
    assert set(REFUSED) == FIELDS
    assert {name for name, *_ in ACCEPTED} == FIELDS - {"best_of"}


@pytest.mark.parametrize(("name", "value"), REFUSED_CASES, ids=lambda value: shown(value)[:40])
def test_refused(name: str, value: object) -> None:
    error = refusal({name: value})
    [violation] = error.violations
    assert violation.field.split("[")[0] == name
    assert violation.description == error.message
    assert error.message.startswith(violation.field)


@pytest.mark.parametrize(("name", "value"), REFUSED_CASES, ids=lambda value: shown(value)[:40])
def test_the_error_names_the_field_as_the_client_did(name: str, value: object) -> None:
    [violation] = refusal({name: value}, names={name: "theirs"}).violations
    assert violation.field.split("[")[0] == "theirs"
    assert "theirs" in violation.description


@pytest.mark.parametrize(("name", "value", "meaning"), ACCEPTED, ids=lambda value: shown(value)[:40])
def test_accepted(name: str, value: object, meaning: object) -> None:
    result = getattr(validate_sampling({name: value}, limits=LIMITS), name)
    assert result == meaning
    assert type(result) is type(meaning)


def test_nothing_given_is_every_default() -> None:
    assert validate_sampling({}, limits=LIMITS) == Sampling(max_tokens=CAP)


def test_a_grammar_says_where_the_output_ends() -> None:
    error = refusal({"grammar": {"regex": "a"}, "ignore_eos": True}, names={"grammar": "response_format"})
    assert "response_format" in error.message
    assert validate_sampling({"grammar": {"regex": "a"}, "ignore_eos": False}, limits=LIMITS).grammar == Grammar("regex", "a")


def test_what_in_a_schema_is_refused_is_named_by_its_place() -> None:
    schema = {"type": "object", "properties": {"a/b": {"not": {}}}}
    error = refusal({"grammar": {"json_schema": schema}}, names={"grammar": "response_format"})
    assert error.message.startswith("response_format at #/properties/a~1b/not: ")


def test_fields_of_others_are_not_looked_at() -> None:
    assert validate_sampling({"messages": 5, "MAX_TOKENS": "x"}, limits=LIMITS) == Sampling(max_tokens=CAP)


class TestRoom:
    """max_tokens, the prompt and the context (B28, B29)."""

    def limits(self, num_prompt_tokens: int, *, allow_no_output: bool = False) -> Limits:
        return Limits(VOCAB, CONTEXT, CAP, num_prompt_tokens, allow_no_output)

    @pytest.mark.parametrize(
        ("num_prompt_tokens", "room"), [(0, CAP), (CONTEXT - CAP, CAP), (CONTEXT - CAP + 1, CAP - 1), (CONTEXT - 1, 1)]
    )
    def test_the_default_is_the_room_left_up_to_the_cap(self, num_prompt_tokens: int, room: int) -> None:
        assert validate_sampling({}, limits=self.limits(num_prompt_tokens)).max_tokens == room
        assert validate_sampling({"max_tokens": room}, limits=self.limits(num_prompt_tokens)).max_tokens == room

    @pytest.mark.parametrize(("n", "most"), [(1, CAP), (2, 250), (3, 166), (16, 31)])
    def test_the_default_is_no_more_than_the_quota_can_ever_hold(self, n: int, most: int) -> None:
        limits = replace(self.limits(100), most_reserved=600)
        assert validate_sampling({"n": n}, limits=limits).max_tokens == most
        assert validate_sampling({"n": n, "max_tokens": CAP}, limits=limits).max_tokens == CAP, "that is for the quota to refuse"

    def test_the_default_is_no_more_than_the_share_of_a_cache_holds(self) -> None:
        limits = replace(self.limits(100), most_held=160, most_reserved=600)
        assert validate_sampling({"n": 3}, limits=limits).max_tokens == 60
        assert validate_sampling({"n": 16}, limits=limits).max_tokens == 31
        assert validate_sampling({"max_tokens": CAP}, limits=limits).max_tokens == CAP, "that is for the scheduler to refuse"
        assert validate_sampling({}, limits=replace(limits, most_held=100)).max_tokens == 1, "and so is that prompt"

    def test_a_prompt_beyond_the_quota_leaves_one_token_to_be_refused_with(self) -> None:
        assert validate_sampling({}, limits=replace(self.limits(100), most_reserved=50)).max_tokens == 1

    def test_more_than_the_room_is_refused_with_all_numbers(self) -> None:
        error = refusal({"max_tokens": 13}, self.limits(CONTEXT - 12))
        assert all(number in error.message for number in ("13", str(CONTEXT - 12), str(CONTEXT), "at most 12"))

    def test_the_next_step_never_exceeds_the_cap(self) -> None:
        assert f"at most {CAP}" in refusal({"max_tokens": CAP + 1}, self.limits(1)).message

    def test_zero_needs_echo(self) -> None:
        assert "echo" in refusal({"max_tokens": 0}, self.limits(5)).message
        assert validate_sampling({"max_tokens": 0}, limits=self.limits(5, allow_no_output=True)).max_tokens == 0

    def test_a_prompt_that_fills_the_context_can_be_scored(self) -> None:
        assert validate_sampling({}, limits=self.limits(CONTEXT, allow_no_output=True)).max_tokens == 0

    @pytest.mark.parametrize("fields", [{"min_tokens": 10**9}, {"min_tokens": 11, "max_tokens": 10}, {"min_tokens": 13}])
    def test_b42h_min_tokens_over_max_tokens(self, fields: dict[str, object]) -> None:
        assert refusal(fields, self.limits(CONTEXT - 12)).violations[0].field == "min_tokens"

    def test_min_tokens_up_to_max_tokens(self) -> None:
        assert validate_sampling({"min_tokens": 12}, limits=self.limits(CONTEXT - 12)).min_tokens == 12


@pytest.mark.parametrize(
    ("n", "best_of", "accepted"), [(1, 1, True), (4, 4, True), (None, 1, True), (4, 3, False), (4, 5, False), (None, 2, False)]
)
def test_best_of_is_n_or_refused(n: int | None, best_of: int, accepted: bool) -> None:
    if accepted:
        assert validate_sampling({"n": n, "best_of": best_of}, limits=LIMITS).n == (n or 1)
    else:
        assert refusal({"n": n, "best_of": best_of}).violations[0].field == "best_of"


@pytest.mark.parametrize("value", ["", "a", "x" * 128, "naïve 日本 🎉", "../../etc/passwd", "a/b?c=d"])
def test_labels_that_are_echoed(value: str) -> None:
    assert validate_label(value) == value


@pytest.mark.parametrize(
    "value", ["x" * 129, "x" * (1 << 20), "a\nb", "a\0b", "\x1b[31m", "\u2028", "\u202e", "\ud800", 5, True, [], {}, 1.5, b"x"]
)
def test_labels_that_are_refused(value: object) -> None:
    with pytest.raises(StatusError) as caught:
        validate_label(value, name="user")
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert [violation.field for violation in caught.value.violations] == ["user"]
    assert caught.value.message.isprintable()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), JSON, max_size=6))
def test_any_json_is_refused_by_name_or_within_all_bounds(fields: dict[str, object]) -> None:
    refused: StatusError | None = None
    try:
        sampling = validate_sampling(fields, limits=LIMITS)
    except StatusError as error:
        refused = error
    if refused is not None:
        assert refused.code is Code.INVALID_ARGUMENT
        assert refused.violations[0].field.split("[")[0] in FIELDS
        assert refused.message.encode()
        return
    assert 1 <= sampling.max_tokens <= CAP
    assert 0 <= sampling.min_tokens <= sampling.max_tokens
    assert 0 <= sampling.temperature <= 100
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.top_k <= VOCAB
    assert 1 <= sampling.n <= 16
    assert all(0 <= token < VOCAB and abs(bias) <= 100 for token, bias in sampling.logit_bias.items())
