"""Two orgs on one mesh: keys made by the command, a quota that refuses and tells the truth, use that adds up, a class that is lowered."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e import mesh as meshes
from tests.e2e.mesh import Mesh, sdk, wait_until

POLICY = """
tiers:
  paid: {requests_per_minute: 600, tokens_per_minute: 100000}
orgs:
  big: {tier: paid}
  small: {tokens_per_minute: 60, tokens_burst: 200, ceiling_class: batch}
models:
  chat: {targets: smollm2-135m-instruct, aliases: [gpt-4o]}
  secret: {targets: smollm2-135m-instruct, orgs: [big]}
"""
MESSAGES: Any = [{"role": "user", "content": "Count to three."}]


@pytest.fixture(scope="module")
def orgs_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A mesh under the policy above."""
    folder = tmp_path_factory.mktemp("orgs")
    (folder / "policy.yaml").write_text(POLICY)
    with meshes.running(folder / "home", "--policy", str(folder / "policy.yaml"), "--model", "smollm2-135m-instruct") as running:
        yield running


def told(mesh: Mesh, *arguments: str) -> Any:
    """What a command says to programs."""
    done = mesh.forebay(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def client(mesh: Mesh, org: str) -> tuple[openai.OpenAI, str]:
    """The SDK with a new key of the org, and the key's id."""
    made = told(mesh, "keys", "create", "--org", org, "--name", "e2e")
    return sdk(mesh, made["key"]), made["info"]["key_id"]


def test_keys_quota_class_and_use(orgs_mesh: Mesh) -> None:
    big, big_key = client(orgs_mesh, "big")
    small, _ = client(orgs_mesh, "small")
    raw = small.chat.completions.with_raw_response.create(model="gpt-4o", messages=MESSAGES, max_tokens=5, service_tier="priority")
    answer = raw.parse()
    assert answer.usage is not None
    assert (raw.headers["x-forebay-class"], raw.headers["x-forebay-class-lowered-from"]) == ("batch", "realtime")
    assert answer.service_tier == "flex"
    assert raw.headers["x-ratelimit-limit-tokens"] == "200"
    left = int(raw.headers["x-ratelimit-remaining-tokens"])
    assert left == 200 - answer.usage.prompt_tokens - 5

    def refuse(max_tokens: int) -> openai.RateLimitError:
        with pytest.raises(openai.RateLimitError) as refused:
            small.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=max_tokens)
        return refused.value

    over = refuse(200 - answer.usage.prompt_tokens)
    assert over.code == "rate_limit_exceeded"
    assert 0 < int(over.response.headers["retry-after-ms"]) <= 60_000
    assert left <= int(over.response.headers["x-ratelimit-remaining-tokens"]) < 200
    assert refuse(500).code == "insufficient_quota"

    used = [big.chat.completions.create(model=name, messages=MESSAGES, max_tokens=4).usage for name in ("chat", "secret")]
    with pytest.raises(openai.NotFoundError):
        small.chat.completions.create(model="secret", messages=MESSAGES)
    assert [model.id for model in small.models.list()] == ["chat"]

    def rows() -> dict[str, Any]:
        return {row["org"]: row for row in told(orgs_mesh, "usage")["rows"]}

    wait_until(lambda: rows().get("big", {}).get("num_requests") == "2" and "small" in rows(), "the use of both orgs is settled")
    found = rows()
    assert int(found["big"]["prompt_tokens"]) == sum(usage.prompt_tokens for usage in used if usage)
    assert int(found["big"]["completion_tokens"]) == sum(usage.completion_tokens for usage in used if usage)
    assert int(found["small"]["completion_tokens"]) == answer.usage.completion_tokens
    assert (found["small"]["num_requests"], found["small"]["latency_class"]) == ("1", "LATENCY_CLASS_BATCH")

    told(orgs_mesh, "keys", "revoke", big_key)

    def refused() -> bool:
        try:
            big.models.list()
        except openai.AuthenticationError:
            return True
        return False

    wait_until(refused, "the revoked key is refused")
    acts = [entry["act"] for entry in told(orgs_mesh, "audit")["entries"]]
    assert acts == ["RevokeKey", "CreateKey", "CreateKey"]


def test_an_operator_s_override_wins_over_the_file(orgs_mesh: Mesh) -> None:
    sdk, _ = client(orgs_mesh, "third")
    assert sdk.models.list().data
    assert told(orgs_mesh, "orgs", "set", "third", "models=none", "tokens_per_minute=7")["policy"]["tokens_per_minute"] == "7"
    wait_until(lambda: not sdk.models.list().data, "the override reaches the gateway")
    assert told(orgs_mesh, "orgs")["overridden"] == ["third"]
    told(orgs_mesh, "orgs", "reset", "third")
    wait_until(lambda: bool(sdk.models.list().data), "the file holds again")
