"""The policy file: what it says is what everybody gets; what is wrong is named with its line."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policy.catalogue import Target, find, matches, open_to, reaching
from services.policy.classes import BATCH, DEFAULT_CLASSES, REALTIME, STANDARD
from services.policy.document import MAX_BYTES, PolicyError
from services.policy.org import ANY_ORG, OrgPolicy
from services.policy.policy import Policy, load, parse

WHOLE = """\
tiers:
  free:
    requests_per_minute: 60
    tokens_per_minute: 10_000
    ceiling_class: standard
    max_concurrent: 4
  gold:
    tokens_per_minute: 1_000_000
    tokens_burst: 2_000_000
    kv_share: 0.5
    weight: 2
default_tier: free
orgs:
  acme:
    tier: gold
    max_concurrent: 100
    models: [chat, "embed-*"]
  no:
    default_class: realtime
classes:
  realtime: {ttft_target_ms: 150, tpot_target_ms: 30}
  batch: {weight: 0.2, floor_share: 0.1}
models:
  chat:
    targets:
      - {model: qwen3-4b@int4, weight: 9}
      - {model: qwen3-4b@bf16}
    aliases: [chat-large]
    fallbacks: [small]
  small:
    targets: smol@int4
    orgs: [acme, "team-*"]
"""


def test_an_org_has_its_own_over_its_tiers() -> None:
    acme = parse(WHOLE).org("acme")
    assert acme == OrgPolicy(
        "acme",
        "gold",
        tokens_per_minute=1_000_000,
        tokens_burst=2_000_000,
        models=("chat", "embed-*"),
        max_concurrent=100,
        kv_share=0.5,
        weight=2,
    )


def test_an_org_that_nobody_names_has_the_default_tier() -> None:
    policy = parse(WHOLE)
    assert policy.org("stranger") == OrgPolicy(
        "stranger", "free", requests_per_minute=60, tokens_per_minute=10_000, requests_burst=60, tokens_burst=10_000,
        ceiling_class=STANDARD, max_concurrent=4,
    )  # fmt: skip
    assert policy.org(ANY_ORG).requests_per_minute == 60


def test_a_name_is_a_name_whatever_yaml_makes_of_it() -> None:
    assert "no" in parse(WHOLE).orgs


def test_an_org_may_lift_its_tiers_limit() -> None:
    org = parse("tiers:\n  a: {tokens_per_minute: 5, tokens_burst: 9}\norgs:\n  x: {tier: a, tokens_per_minute: 0}\n").org("x")
    assert (org.tokens_per_minute, org.tokens_burst) == (0, 0)


def test_a_default_class_above_the_ceiling_is_lowered() -> None:
    assert parse(WHOLE).org("no").default_class == STANDARD


def test_overrides_win_and_may_change_the_tier() -> None:
    policy = parse(WHOLE)
    assert policy.org("acme", {"max_concurrent": 7}).max_concurrent == 7
    moved = policy.org("stranger", {"tier": "gold"})
    assert (moved.tier, moved.requests_per_minute, moved.weight) == ("gold", 0, 2)
    assert policy.org("stranger", {"tier": "no more"}).tier == "free", "a tier that the file has lost"
    assert policy.org("acme", {"tier": "no more"}).tier == "gold", "and the file has one for this org"


def test_classes_keep_what_the_file_leaves_out() -> None:
    classes = parse(WHOLE).classes
    assert classes[REALTIME].ttft_target_ms == 150
    assert classes[REALTIME].weight == DEFAULT_CLASSES[REALTIME].weight
    assert (classes[BATCH].weight, classes[BATCH].floor_share) == (0.2, 0.1)
    assert classes[STANDARD] == DEFAULT_CLASSES[STANDARD]


def test_models_aliases_and_canaries() -> None:
    models = parse(WHOLE).models
    chat = find(models, "chat-large")
    assert chat is not None
    assert chat.targets == (Target("qwen3-4b@int4", 9), Target("qwen3-4b@bf16", 1))
    assert chat.fallbacks == ("small",)
    assert find(models, "qwen3-4b") is None
    assert [model.name for model in reaching(models, "smol@int4")] == ["small"]


@pytest.mark.parametrize(
    ("org", "served", "allowed"),
    [
        ("acme", "qwen3-4b@int4", True),
        ("acme", "smol@int4", False),
        ("acme", "embed-1@fp32", True),
        ("acme", "other@fp32", False),
        ("team-1", "smol@int4", True),
        ("stranger", "smol@int4", False),
        ("stranger", "other@fp32", True),
        ("stranger", "qwen3-4b@int4", True),
    ],
)
def test_who_may_use_what(org: str, served: str, allowed: bool) -> None:
    policy = parse(WHOLE)
    assert policy.may_use(policy.org(org), served) is allowed


def test_a_policy_may_name_a_target_with_or_without_its_level() -> None:
    chat = parse(WHOLE).models["chat"]
    assert open_to(chat, "x", ["qwen3-4b"])
    assert open_to(chat, "x", ["qwen3-4b@bf16"])
    assert open_to(chat, "x", ["chat-*"])
    assert not open_to(chat, "x", ["qwen"])


@given(st.lists(st.sampled_from(["a", "b", "ab", "*"]), max_size=6), st.text("ab", max_size=8))
def test_a_star_is_any_characters(parts: list[str], name: str) -> None:
    pattern = "".join(parts)
    expected = re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), name) is not None
    assert matches(name, [pattern]) is expected


@pytest.mark.parametrize("text", ["", "# nothing\n", "orgs:\n", "tiers: {}\n"])
def test_a_file_that_says_nothing_limits_nobody(text: str) -> None:
    assert parse(text).org("acme") == OrgPolicy("acme")
    assert Policy().org("acme") == OrgPolicy("acme", ceiling_class=REALTIME, default_class=STANDARD)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("orgs:\n  acme:\n    speed: 1\n", 3, "'speed' is no field of orgs.acme"),
        ("limits: 1\n", 1, "'limits' is no field of a policy"),
        ("default_tier: gold\n", 1, "default_tier is gold, which is no tier here; there are: none"),
        ("tiers:\n  a:\norgs:\n  acme:\n    weight: 1\n    tier: b\n", 6, "orgs.acme.tier is b, which is no tier here; there are: a"),
        ("tiers:\n  a:\n    requests_per_minute: -1\n", 3, "must be a whole number from 0 to 100000000000"),
        ("tiers:\n  a:\n    requests_per_minute: 1e3\n", 3, "tiers.a.requests_per_minute is 1e3"),
        ("tiers:\n  a:\n    requests_per_minute: " + "9" * 5000 + "\n", 3, "must be a whole number"),
        ("tiers:\n  a:\n    tokens_per_minute:\n", 3, "has no value"),
        ("tiers:\n  a:\n    weight: .nan\n", 3, "must be a number over 0"),
        ("tiers:\n  a:\n    weight: 0\n", 3, "must be a number over 0"),
        ("tiers:\n  a:\n    kv_share: 1.5\n", 3, "must be a number over 0 and at most 1"),
        ("tiers:\n  a:\n    models: chat\n", 3, "must be a list of names"),
        ("tiers:\n  a:\n    models: [x, x]\n", 3, "names x twice"),
        ("tiers:\n  a:\n    ceiling_class: fast\n", 3, "must be realtime or standard or batch"),
        ("tiers:\n  a: {weight: [1]}\n", 2, "not a list"),
        ("tiers:\n  a:\n    weight: 1\n    requests_burst: 5\n", 4, "tiers.a.requests_burst means nothing without requests_per_minute"),
        ("orgs:\n  a:\n    tokens_burst: 5\n", 3, "orgs.a.tokens_burst means nothing without tokens_per_minute"),
        ("tiers:\n  a: 7\n", 2, "must be a mapping"),
        ("orgs:\n  a:\n  b:\n  a:\n", 4, "'a' is here for the second time; the first is in line 2"),
        ('orgs:\n  "*":\n    weight: 2\n', 3, "can't be called"),
        ('orgs:\n  "a\\nb": {}\n', 2, "must be a name"),
        ("classes:\n  fast: {}\n", 2, "'fast' is no field of classes"),
        ("default_tier: a\ntiers: {a: }\nclasses:\n  batch: {floor_share: 0.9}\n  standard: {floor_share: 0.2}\n", 3, "together is 1.6"),
        ("models:\n  a: {aliases: [b]}\n  b: {}\n", 3, "b is the name of another model already (line 2)"),
        ("models:\n  a: {fallbacks: [c]}\n", 2, "names c, which is no model here"),
        ("models:\n  a: {fallbacks: [a]}\n", 2, "names itself"),
        ("models:\n  a:\n    targets: [{model: x, weight: 0}]\n", 3, "no target with a weight over 0"),
        ("models:\n  a:\n    targets: [{weight: 1}]\n", 3, "names no model"),
        ("models:\n  a:\n    targets: [x, x]\n", 3, "names a target twice"),
        ("a: &x 1\nb: *x\n", 1, "anchors and aliases"),
        ("a: !!python/object:os.system x\n", 1, "tags"),
        ("tiers:\n  - a\n", 2, "must be a mapping"),
        ("tiers: [\n", 2, "it isn't YAML"),
        ("tiers:\n\tx: 1\n", 2, "it isn't YAML"),
        ("a: 1\n---\nb: 1\n", 2, "a second document"),
        ("? [a]\n: b\n", 1, "a key must be a text"),
        ("[" * 50, 1, "levels deep"),
        ("[" * 100_000, 1, "nest"),
        ("[" + "x," * 200_000 + "]", 1, "more than 100000 values"),
        ("#" * (MAX_BYTES + 1), 1, "it may have at most"),
        ("a: \x00", 1, "it isn't YAML"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(text)
    assert words in str(caught.value)
    assert caught.value.line == line


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("orgs:\n  acme:\n    speed: 1\n")
    with pytest.raises(PolicyError, match=rf"^{path}:3: "):
        load(path)
    path.write_bytes(b"orgs:\n  \xff: 1\n")
    with pytest.raises(PolicyError, match=rf"^{path}:2: it isn't UTF-8"):
        load(path)


@given(st.text())
def test_any_text_is_a_policy_or_an_error_with_a_line(text: str) -> None:
    try:
        policy = parse(text)
    except PolicyError as error:
        policy = None
        lines = error.line
    assert policy is not None or lines >= 1


def test_the_example_is_one_that_works() -> None:
    example = load(Path(__file__).parents[3] / "deploy" / "policy.example.yaml")
    assert example.org("acme").default_class == REALTIME
    assert example.org("anybody else").tokens_per_minute == 20_000
    assert example.may_use(example.org("nightly-reports"), "smollm2-135m-instruct@int4")
    assert not example.may_use(example.org("nightly-reports"), "another@int4")
