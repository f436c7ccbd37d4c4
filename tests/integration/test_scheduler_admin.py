"""AdminService over gRPC: orgs, keys, usage; every change and refused attempt is written down, seen by every scheduler; no secret is."""

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from forebay.v1 import admin_pb2, scheduler_pb2, types_pb2
from services.common.errors import Code, StatusError, from_rpc
from services.policy import api_key
from services.policy.watched import PolicyFile
from services.scheduler import audit, keys
from services.scheduler.api_keys import ApiKeys
from services.scheduler.audit import Act, Audit
from tests.scheduler_harness import RunningScheduler, fake_worker, lease_of, running_scheduler, until, wire_ticket

POLICY = """\
tiers:
  free: {requests_per_minute: 60, ceiling_class: standard}
  gold: {tokens_per_minute: 1000000}
default_tier: free
orgs:
  acme: {tier: gold}
"""
Pair = tuple[RunningScheduler, RunningScheduler]


@pytest.fixture
async def pair(redis_server, tmp_path: Path) -> AsyncIterator[Pair]:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    async with (
        running_scheduler(redis_server.url, "s1", policy=PolicyFile(path)) as one,
        running_scheduler(redis_server.url, "s2", policy=PolicyFile(path)) as two,
    ):
        yield one, two


async def _error(call: Any) -> StatusError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc(caught.value)


async def _org(scheduler: RunningScheduler, org: str) -> types_pb2.OrgPolicy:
    return (await scheduler.stub.GetOrg(scheduler_pb2.GetOrgRequest(org=org))).policy


async def _audit(scheduler: RunningScheduler, limit: int = 0) -> list[tuple[str, str, str, str]]:
    entries = (await scheduler.admin.ListAudit(admin_pb2.ListAuditRequest(limit=limit))).entries
    return [(entry.actor, entry.act, entry.target, entry.outcome) for entry in entries]


def _set(org: str, fields: list[str], **values: Any) -> admin_pb2.SetOrgRequest:
    return admin_pb2.SetOrgRequest(policy=types_pb2.OrgPolicy(org=org, **values), fields=fields, actor="ops/jane")


async def _authenticate(scheduler: RunningScheduler, key: str) -> scheduler_pb2.AuthenticateResponse:
    return await scheduler.stub.Authenticate(scheduler_pb2.AuthenticateRequest(key_hash=api_key.key_hash(key)))


async def test_an_org_has_its_tiers_policy_until_an_operator_sets_another(pair: Pair) -> None:
    one, two = pair
    assert (await _org(one, "stranger")).requests_burst == 60
    answer = await one.admin.SetOrg(
        _set("stranger", ["tier", "max_concurrent", "models", "weight"], tier="gold", max_concurrent=5, models=["a*"], weight=2.5)
    )
    assert answer.policy == types_pb2.OrgPolicy(
        org="stranger", tier="gold", tokens_per_minute=1_000_000, tokens_burst=1_000_000, default_class=2, ceiling_class=1, models=["a*"],
        max_concurrent=5, kv_share=1, weight=2.5,
    )  # fmt: skip
    assert await _org(one, "stranger") == answer.policy

    async def seen() -> bool:
        return await _org(two, "stranger") == answer.policy

    await until(seen)
    listed = await two.admin.ListOrgs(admin_pb2.ListOrgsRequest())
    assert [policy.org for policy in listed.orgs] == ["*", "acme", "stranger"]
    assert listed.overridden == ["stranger"]
    reset = await two.admin.ResetOrg(admin_pb2.ResetOrgRequest(org="stranger", actor="ops/jane"))
    assert (reset.policy.tier, reset.policy.max_concurrent) == ("free", 0)
    assert await two.admin.ResetOrg(admin_pb2.ResetOrgRequest(org="stranger", actor="ops/jane")) == reset, "nothing left to take back"
    assert await _audit(one) == [("ops/jane", "ResetOrg", "stranger", "OK"), ("ops/jane", "SetOrg", "stranger", "OK")]


async def test_fields_set_one_after_the_other_add_up(pair: Pair) -> None:
    one, two = pair
    await one.admin.SetOrg(_set("x", ["max_concurrent"], max_concurrent=5, weight=9))
    policy = (await two.admin.SetOrg(_set("x", ["ceiling_class"], ceiling_class=3))).policy
    assert (policy.max_concurrent, policy.ceiling_class, policy.default_class, policy.weight) == (5, 3, 3, 1)


@pytest.mark.parametrize(
    ("fields", "values", "field", "words"),
    [
        ([], {}, "fields", "is no field to set"),
        (["org"], {}, "fields", "'org' is no field to set"),
        (["weight"], {"weight": 0.0}, "weight", "must be a number over 0"),
        (["weight"], {"weight": float("nan")}, "weight", "must be a number over 0"),
        (["kv_share"], {"kv_share": 2.0}, "kv_share", "at most 1"),
        (["requests_per_minute"], {"requests_per_minute": -1}, "requests_per_minute", "whole number"),
        (["tokens_burst"], {"tokens_burst": 10**12}, "tokens_burst", "whole number"),
        (["requests_burst"], {"requests_burst": 5}, "requests_burst", "means nothing without requests_per_minute"),
        (["default_class"], {}, "default_class", "must be realtime or standard or batch"),
        (["models"], {"models": ["a", "a"]}, "models", "names a twice"),
        (["models"], {"models": ["\n"]}, "models", "printable"),
        (["tier"], {"tier": "silver"}, "tier", "doesn't have; it has: free, gold"),
        (["tier"], {"tier": ""}, "tier", "must be a name"),
    ],
)
async def test_what_an_org_cannot_have_is_refused_by_name_and_written_down(
    pair: Pair, fields: list[str], values: dict[str, Any], field: str, words: str
) -> None:
    error = await _error(pair[0].admin.SetOrg(_set("acme", fields, **values)))
    assert error.code is Code.INVALID_ARGUMENT
    assert [violation.field for violation in error.violations] == [field]
    assert words in error.message
    assert await _audit(pair[0]) == [("ops/jane", "SetOrg", "acme", "INVALID_ARGUMENT")]
    assert (await pair[0].admin.ListOrgs(admin_pb2.ListOrgsRequest())).overridden == []


async def test_all_others_are_no_org_to_set(pair: Pair) -> None:
    error = await _error(pair[0].admin.SetOrg(_set("*", ["weight"], weight=2)))
    assert "change the default tier" in error.message


@pytest.mark.parametrize("org", ["", "a\nb", "a b", "x" * 129])
async def test_an_org_that_no_token_could_name_is_refused(pair: Pair, org: str) -> None:
    error = await _error(pair[0].admin.SetOrg(_set(org, ["weight"], weight=2)))
    assert [violation.field for violation in error.violations] == ["policy.org"]
    assert (await pair[0].admin.ListOrgs(admin_pb2.ListOrgsRequest())).overridden == []


async def test_who_does_something_must_be_named(pair: Pair) -> None:
    request = _set("acme", ["weight"], weight=2)
    request.actor = ""
    assert (await _error(pair[0].admin.SetOrg(request))).violations[0].field == "actor"
    assert await _audit(pair[0]) == [("", "SetOrg", "acme", "INVALID_ARGUMENT")]


async def test_a_key_speaks_for_its_org_until_it_is_revoked(pair: Pair) -> None:
    one, two = pair
    made = await one.admin.CreateKey(admin_pb2.CreateKeyRequest(org="acme", name="ci", roles=["user", "operator"], actor="ops/jane"))
    assert api_key.is_key(made.key)
    answer = await _authenticate(two, made.key)
    assert (answer.key_id, answer.org, list(answer.roles), answer.expires_at) == (made.info.key_id, "acme", ["user", "operator"], 0)
    other = await two.admin.CreateKey(admin_pb2.CreateKeyRequest(org="b", name="x", lifetime_seconds=60, actor="ops/jane"))
    assert list(other.info.roles) == ["user"]
    assert other.info.expires_at == other.info.created_at + 60
    assert list((await one.admin.ListKeys(admin_pb2.ListKeysRequest())).keys) == [made.info, other.info]
    assert list((await one.admin.ListKeys(admin_pb2.ListKeysRequest(org="b"))).keys) == [other.info]
    await one.admin.RevokeKey(admin_pb2.RevokeKeyRequest(key_id=made.info.key_id, actor="ops/jane"))
    error = await _error(_authenticate(two, made.key))
    assert (error.code, error.reason) == (Code.UNAUTHENTICATED, "UNKNOWN_KEY")
    await two.admin.RevokeKey(admin_pb2.RevokeKeyRequest(key_id=made.info.key_id, actor="ops/jane"))  # sent again, to another scheduler
    again = await _error(one.admin.RevokeKey(admin_pb2.RevokeKeyRequest(key_id=made.info.key_id, actor="ops/john")))
    assert again.code is Code.NOT_FOUND
    assert await _audit(two) == [
        ("ops/john", "RevokeKey", made.info.key_id, "NOT_FOUND"),
        ("ops/jane", "RevokeKey", made.info.key_id, "OK"),
        ("ops/jane", "CreateKey", other.info.key_id, "OK"),
        ("ops/jane", "CreateKey", made.info.key_id, "OK"),
    ]


async def test_no_secret_is_kept(pair: Pair) -> None:
    made = await pair[0].admin.CreateKey(admin_pb2.CreateKeyRequest(org="acme", name="ci", actor="ops/jane"))
    (kept,) = await pair[0].store.commands(["HGETALL", keys.API_KEYS])
    (written,) = await pair[0].store.commands(["LRANGE", keys.AUDIT, 0, -1])
    assert kept[0] == api_key.key_hash(made.key).hex()
    assert made.key not in json.dumps([kept, written])
    assert kept[0] not in json.dumps(written)


async def test_an_expired_key_is_worthless(pair: Pair) -> None:
    now = 1000.0
    api_keys = ApiKeys(pair[0].store, Audit(pair[0].store, "s"), lambda: now)
    key, _ = await api_keys.create("ops/jane", "acme", "ci", [], 60)
    now = 1059.9
    assert (await api_keys.authenticate(api_key.key_hash(key))).org == "acme"
    now = 1060.0
    with pytest.raises(StatusError, match="expired"):
        await api_keys.authenticate(api_key.key_hash(key))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"roles": ["root"]}, "roles"),
        ({"lifetime_seconds": -1.0}, "lifetime_seconds"),
        ({"lifetime_seconds": float("nan")}, "lifetime_seconds"),
        ({"org": ""}, "org"),
        ({"org": "*"}, "org"),
        ({"org": "a\x07b"}, "org"),
    ],
)
async def test_a_key_that_cannot_be_is_refused_by_name(pair: Pair, fields: dict[str, Any], field: str) -> None:
    request = admin_pb2.CreateKeyRequest(**{"org": "acme", "name": "ci", "actor": "ops/jane", **fields})
    error = await _error(pair[0].admin.CreateKey(request))
    assert [violation.field for violation in error.violations] == [field]
    assert [outcome for *_, outcome in await _audit(pair[0])] == ["INVALID_ARGUMENT"]


@pytest.mark.parametrize("key_hash", [b"", b"\x00", b"x" * 32, b"x" * 1000])
async def test_nobodys_hash_is_nobody(pair: Pair, key_hash: bytes) -> None:
    error = await _error(pair[0].stub.Authenticate(scheduler_pb2.AuthenticateRequest(key_hash=key_hash)))
    assert error.code is Code.UNAUTHENTICATED


async def test_there_is_an_end_to_keys_and_to_the_audit(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    book = Audit(pair[0].store, "s")
    await book.change(Act("a", "Set", "x"), keys.API_KEYS, "f1", "v", most=1)
    with pytest.raises(StatusError, match="somebody else has changed x just now"):
        await book.change(Act("a", "Set", "x"), keys.API_KEYS, "f1", "v2", most=1, known="other")
    with pytest.raises(StatusError, match="there are 1 already"):
        await book.change(Act("a", "Set", "y"), keys.API_KEYS, "f2", "v", most=1)
    await book.change(Act("a", "Set", "again", "x" * 10_000), keys.API_KEYS, "f1", "v2", most=1, known="v")
    assert len((await book.latest(1))[0].details) == audit.MAX_DETAILS_CHARS
    assert [act.target for act in await book.latest(10)] == ["again", "x"]
    monkeypatch.setattr(audit, "MAX_ENTRIES", 3)
    for number in range(5):
        await book.refused(Act("a", "Set", str(number)), StatusError(Code.NOT_FOUND, "no"))
    assert [act.target for act in await book.latest(10)] == ["4", "3", "2"]
    await book.change(Act("a", "Set", "last"), keys.API_KEYS, "f1", "v3", most=1)
    assert [act.target for act in await book.latest(10)] == ["last", "4", "3"]


@pytest.mark.parametrize(("value", "known"), [("v", ""), ("", "old"), ("", None)], ids=["set", "taken out", "taken out, whatever it was"])
async def test_an_act_whose_answer_was_lost_is_done_when_it_is_sent_again(pair: Pair, value: str, known: str | None) -> None:
    """As the store does when its connection breaks behind the script: the very same call."""
    book = Audit(pair[0].store, "s", lambda: 1000.0)
    if not value:
        await pair[0].store.commands(["HSET", keys.API_KEYS, "acme", "old"])
    for _ in range(2):
        await book.change(Act("a", "Set", "acme", "x"), keys.API_KEYS, "acme", value, most=9, known=known)
    assert len(await book.latest(9)) == 1
    assert (await pair[0].store.commands(["HGET", keys.API_KEYS, "acme"])) == [value or None]


async def test_an_act_that_overtook_its_own_first_try_is_done(pair: Pair) -> None:
    """A gateway that waited too long asks another scheduler, which had read what was there before: it is written down twice."""
    now = 1000.0
    book = Audit(pair[0].store, "s", lambda: now)
    await book.change(Act("a", "Set", "acme"), keys.API_KEYS, "acme", "v", most=9, known="")
    now += 5
    await book.change(Act("a", "Set", "acme"), keys.API_KEYS, "acme", "v", most=9, known="")
    with pytest.raises(StatusError, match="somebody else"):
        await book.change(Act("a", "Set", "acme", "v2"), keys.API_KEYS, "acme", "v2", most=9, known="")
    await book.change(Act("a", "Reset", "acme"), keys.API_KEYS, "acme", "", most=9)
    now += audit.REPEAT_SECONDS
    await book.change(Act("a", "Reset", "acme"), keys.API_KEYS, "acme", "", most=9)
    now += 0.1
    with pytest.raises(StatusError, match="there is no acme"):
        await book.change(Act("a", "Reset", "acme"), keys.API_KEYS, "acme", "", most=9)


async def test_who_is_no_operator_is_in_the_audit_and_pushes_nobody_out_of_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    monkeypatch.setattr(audit, "MAX_DENIED", 2)
    await one.admin.SetOrg(admin_pb2.SetOrgRequest(policy=types_pb2.OrgPolicy(org="acme", weight=2), fields=["weight"], actor="ops/jane"))
    for number in range(4):
        await two.stub.NoteRefusal(scheduler_pb2.NoteRefusalRequest(actor=f"acme/{number}", act="SetOrg"))
    assert await _audit(one) == [
        ("acme/3", "SetOrg", "", "PERMISSION_DENIED"),
        ("acme/2", "SetOrg", "", "PERMISSION_DENIED"),
        ("ops/jane", "SetOrg", "acme", "OK"),
    ]
    assert (await _error(one.stub.NoteRefusal(scheduler_pb2.NoteRefusalRequest(actor="", act="SetOrg")))).code is Code.INVALID_ARGUMENT


async def test_use_is_listed_by_org(pair: Pair) -> None:
    one, two = pair
    async with fake_worker(one, two):
        for number, org in enumerate(("acme", "acme", "b")):
            lease = await lease_of(one.place(wire_ticket(f"r{number}", org=org)))
            usage = types_pb2.Usage(prompt_tokens=16, completion_tokens=5, cached_tokens=3)
            end = scheduler_pb2.FinishRequest(request_id=lease.request_id, epoch=lease.epoch, usage=usage, finish_reason=1)
            assert (await two.stub.Finish(end)).ended
    rows = (await one.admin.GetUsage(admin_pb2.GetUsageRequest(days=2))).rows
    assert [
        (r.org, r.model, r.latency_class, r.num_requests, r.num_failed, r.prompt_tokens, r.completion_tokens, r.cached_tokens) for r in rows
    ] == [
        ("acme", "tiny@fp32", 2, 2, 0, 32, 10, 6),
        ("b", "tiny@fp32", 2, 1, 0, 16, 5, 3),
    ]
    assert [row.org for row in (await two.admin.GetUsage(admin_pb2.GetUsageRequest(org="b"))).rows] == ["b"]


async def test_pages_of_use_are_all_of_it_once(pair: Pair) -> None:
    one, two = pair
    kinds = [(f"o{i % 5}", f"m{i % 3}@fp32", 1 + i % 2) for i in range(30)]
    for org, model, latency_class in kinds:
        for day in (20_000, int(time.time() // 86_400)):
            await one.store.commands(["HSET", keys.usage(day, org), f"requests:{keys.line_name(model, latency_class)}", 1])
            await one.store.commands(["SADD", keys.users(day), org])
    seen: list[tuple[str, str, int]] = []
    request = admin_pb2.GetUsageRequest(page_size=7)
    for scheduler in (one, two, one, two, one):
        page = await scheduler.admin.GetUsage(request)
        seen += [(row.org, row.model, row.latency_class) for row in page.rows]
        request.page_token = page.next_page_token
    assert not request.page_token
    assert seen == sorted(kinds)
    exactly = await one.admin.GetUsage(admin_pb2.GetUsageRequest(page_size=30))
    assert (len(exactly.rows), exactly.next_page_token) == (30, "")


@pytest.mark.parametrize(
    "fields", [{"page_size": -1}, {"page_size": 1001}, *({"page_token": token} for token in ("x", "e30=", "ä", "W" * 5000))]
)
async def test_pages_are_bounded_and_their_tokens_checked(pair: Pair, fields: dict[str, Any]) -> None:
    assert (await _error(pair[0].admin.GetUsage(admin_pb2.GetUsageRequest(**fields)))).violations[0].field in fields


@pytest.mark.parametrize("days", [-1, 91])
async def test_days_are_bounded(pair: Pair, days: int) -> None:
    assert (await _error(pair[0].admin.GetUsage(admin_pb2.GetUsageRequest(days=days)))).violations[0].field == "days"


@pytest.mark.parametrize("limit", [-1, 1001])
async def test_what_is_listed_of_the_audit_is_bounded(pair: Pair, limit: int) -> None:
    assert (await _error(pair[0].admin.ListAudit(admin_pb2.ListAuditRequest(limit=limit)))).violations[0].field == "limit"
