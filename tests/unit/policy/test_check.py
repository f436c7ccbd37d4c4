"""All that is wrong with a policy file, with its lines, and nothing that isn't."""

from pathlib import Path

import pytest

from services.policy.check import MAX_PROBLEMS, problems


def told(tmp_path: Path, text: str | bytes) -> list[tuple[int, str]]:
    """Line and words of each problem; every one names the file."""
    file = tmp_path / "policy.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = problems(file)
    assert all(str(problem).startswith(f"{file}:{problem.line}: ") for problem in found)
    return [(problem.line, problem.message.partition(";")[0]) for problem in found]


def test_nothing_is_wrong_with_a_good_one(tmp_path: Path) -> None:
    assert told(tmp_path, "") == []
    assert told(tmp_path, "orgs: {acme: {weight: 2}}") == []


def test_every_wrong_value_and_only_those(tmp_path: Path) -> None:
    text = """
tiers:
  gold: {requests_per_minute: lots, weight: 0, models: [a, b, a]}
  free:
    tokens_per_minute: -5
    ceiling_class: urgent
default_tier: golden
orgs:
  acme:
    tier: gold
    colour: red
  other: {tier: silver}
models:
  chat: {targets: tiny, fallbacks: [nowhere]}
"""
    assert told(tmp_path, text) == [
        (3, "tiers.gold.requests_per_minute is lots"),
        (3, "tiers.gold.weight is 0"),
        (3, "tiers.gold.models names a twice"),
        (5, "tiers.free.tokens_per_minute is -5"),
        (6, "tiers.free.ceiling_class is urgent"),
        (11, "'colour' is no field of orgs.acme"),
        (14, "models.chat.fallbacks names nowhere, which is no model here"),
        (7, "default_tier is golden, which is no tier here"),
        (12, "orgs.other.tier is silver, which is no tier here"),
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [("a: [", 2), ("a: 1\na: 2", 2), ("orgs: &x {}", 1), ("orgs: 5", 1), ("tiers:\n  gold: [1]", 2), (b"a: 1\nb: \xff", 2)],
)
def test_where_more_than_a_value_is_wrong_it_is_the_last_that_is_said(tmp_path: Path, text: str | bytes, line: int) -> None:
    ((found, _),) = told(tmp_path, text)
    assert found == line


def test_there_is_an_end_to_it(tmp_path: Path) -> None:
    orgs = "\n".join(f"  org{number}: {{weight: -{number}}}" for number in range(1, 300))
    assert len(told(tmp_path, f"orgs:\n{orgs}")) == MAX_PROBLEMS


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        problems(tmp_path / "none.yaml")
