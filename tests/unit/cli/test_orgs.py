"""`forebay orgs`: what is shown of policies, and what FIELD=VALUE comes to."""

import json

import pytest
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.problem import Usage
from tests.unit.cli.gateway import Gateway


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["orgs", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("command", [(), ("list",)])
def test_list(gateway: Gateway, command: tuple[str, ...]) -> None:
    title, others, acme = run(*command).splitlines()
    assert title.split()[:5] == ["org", "tier", "requests/min", "tokens/min", "bursts"]
    assert others.split() == ["*", "-", "-", "-", "-/-", "standard", "realtime", "-", "0.5", "2", "all", "file"]
    assert acme.split() == [
        "acme", "gold", "-", "60,000", "-/90,000", "standard", "realtime", "-", "0.5", "2", "chat,", "code-*", "operator",
    ]  # fmt: skip
    assert json.loads(run(*command, "--json"))["overridden"] == ["acme"]


def test_set_sends_the_fields_that_were_named(gateway: Gateway) -> None:
    run(
        *("set", "acme", "tokens_per_minute=60_000", "ceiling_class=batch", "weight=2.5", "kv_share=.5"),
        *("models=chat,code-*", "max_concurrent=0", "tier=gold"),
    )
    (request,) = gateway.acts
    assert list(request.fields) == [
        "tokens_per_minute", "ceiling_class", "weight", "kv_share", "models", "max_concurrent", "tier",
    ]  # fmt: skip
    policy = request.policy
    assert (policy.org, policy.tier, policy.tokens_per_minute, policy.max_concurrent) == ("acme", "gold", 60_000, 0)
    assert (policy.ceiling_class, policy.weight, policy.kv_share, list(policy.models)) == (3, 2.5, 0.5, ["chat", "code-*"])
    assert json.loads(run("set", "acme", "models=", "--json"))["policy"]["models"] == []


def test_reset(gateway: Gateway) -> None:
    assert run("reset", "acme").splitlines()[1].split()[0] == "acme"
    assert [request.org for request in gateway.acts] == ["acme"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("tokens_per_minute", "tokens_per_minute sets nothing: write FIELD=VALUE, such as tokens_per_minute=60000"),
        ("tokens=5", "tokens is no field of an org; there are: tier, requests_per_minute, tokens_per_minute"),
        ("org=other", "org is no field of an org"),
        ("tokens_per_minute=many", "tokens_per_minute is many; it must be a whole number from 0 to"),
        ("tokens_per_minute=-1", "tokens_per_minute is -1; it must be a whole number from 0 to"),
        ("weight=0", "weight is 0; it must be a number over 0"),
        ("weight=nan", "weight is nan; it must be a number over 0"),
        ("kv_share=", "kv_share has no value"),
        ("ceiling_class=urgent", "ceiling_class is urgent; it must be realtime or standard or batch"),
        ("models=a,a", "models names a twice"),
    ],
)
def test_what_cannot_be_set_is_said_before_anything_is_asked(gateway: Gateway, setting: str, words: str) -> None:
    with pytest.raises(Usage) as caught:
        run("set", "acme", setting)
    assert str(caught.value).startswith(words)
    assert not gateway.acts
