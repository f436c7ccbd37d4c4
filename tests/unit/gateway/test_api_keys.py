"""API keys at both faces: whose they are, when they stop being any, and what goes over the wire of them."""

import httpx
import pytest

from forebay.v1 import inference_pb2, scheduler_pb2
from services.common.errors import Code, StatusError, unavailable
from services.gateway.answers import Keeping
from services.gateway.api_keys import ApiKeys
from services.gateway.mesh import Mesh
from services.policy import api_key
from tests.fakes import FakeScheduler, play, serving
from tests.unit.gateway.build import FAST, Stack, letters, stack

NOW = 1_800_000_000.0


def owner(
    key_id: str = "k-1", org: str = "acme", roles: tuple[str, ...] = ("user",), expires_at: float = 0.0
) -> scheduler_pb2.AuthenticateResponse:
    return scheduler_pb2.AuthenticateResponse(key_id=key_id, org=org, roles=roles, expires_at=expires_at)


async def refusal(keys: ApiKeys, key: str) -> StatusError:
    with pytest.raises(StatusError) as caught:
        await keys.caller(key)
    assert key not in caught.value.message
    return caught.value


async def test_a_key_names_its_org_roles_and_id() -> None:
    key, scheduler = api_key.make(), FakeScheduler([])
    async with serving(scheduler):
        mesh = Mesh([scheduler.address], FAST)
        scheduler.key_owners[api_key.key_hash(key)] = owner(roles=("user", "operator", "root"), expires_at=NOW + 5)
        now = NOW
        keys = ApiKeys(mesh, clock=lambda: now)
        caller = await keys.caller(key)
        assert (caller.org, caller.roles, caller.actor, caller.expires_at) == ("acme", {"user", "operator"}, "k-1", NOW + 5)
        assert scheduler.key_questions == [api_key.key_hash(key)], "32 bytes of hash, and nothing of the key"
        now = NOW + 5
        assert (await refusal(keys, key)).code is Code.UNAUTHENTICATED, "expired, whatever is remembered"
        assert len(scheduler.key_questions) == 1
        await mesh.close()


async def test_what_cannot_be_a_key_is_never_asked_for() -> None:
    key, scheduler = api_key.make(), FakeScheduler([])
    async with serving(scheduler):
        mesh = Mesh([scheduler.address], FAST)
        keys = ApiKeys(mesh)
        for text in ("fb_", "fb_x", key[:-1], key + "A", key.swapcase(), "fb_" + "a" * 10_000, key[:10] + "\n" + key[11:]):
            assert (await refusal(keys, text)).code is Code.UNAUTHENTICATED
        assert not scheduler.key_questions
        await mesh.close()


async def test_a_revoked_key_is_refused_within_seconds() -> None:
    key, scheduler, now = api_key.make(), FakeScheduler([]), 0.0
    async with serving(scheduler):
        mesh = Mesh([scheduler.address], FAST, clock=lambda: now)
        keys = ApiKeys(mesh)
        scheduler.key_owners[api_key.key_hash(key)] = owner()
        await keys.caller(key)
        del scheduler.key_owners[api_key.key_hash(key)]
        now = 4.9
        await keys.caller(key)
        now = 5.0
        assert (await refusal(keys, key)).code is Code.UNAUTHENTICATED
        await refusal(keys, key)
        assert len(scheduler.key_questions) == 2, "the refusal is remembered, too"
        await mesh.close()


async def test_while_no_scheduler_answers_a_known_key_is_good_for_a_while_and_others_may_come_again() -> None:
    key, scheduler, now = api_key.make(), FakeScheduler([]), 0.0
    async with serving(scheduler):
        mesh = Mesh([scheduler.address], FAST, clock=lambda: now)
        keys = ApiKeys(mesh, Keeping(away_seconds=100))
        scheduler.key_owners[api_key.key_hash(key)] = owner()
        await keys.caller(key)
        scheduler.away = unavailable("Redis is away", reason="STORE_UNAVAILABLE")
        now = 100.0
        assert (await keys.caller(key)).org == "acme"
        unknown = await refusal(keys, api_key.make())
        assert (unknown.code, unknown.retry_after_seconds) == (Code.UNAVAILABLE, 1.0)
        now = 102.0
        assert (await refusal(keys, key)).code is Code.UNAVAILABLE
        await mesh.close()


async def test_a_key_is_a_token_at_both_faces() -> None:
    key = api_key.make()
    async with stack(play(letters("hi"))) as mesh:
        mesh.scheduler.key_owners[api_key.key_hash(key)] = owner(org="keyed")
        answer = await ask(mesh, key)
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "hi")
        call = mesh.inference.Generate(inference_pb2.GenerateRequest(text="a"), metadata=[("authorization", f"Bearer {key}")])
        assert [event async for event in call]
        assert [place.ticket.org for place in mesh.scheduler.places] == ["keyed", "keyed"]
        assert len(mesh.scheduler.key_questions) == 1
        refused = await ask(mesh, api_key.make())
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_token")


async def test_a_key_without_the_role_of_a_user_asks_for_nothing() -> None:
    key = api_key.make()
    async with stack(play(letters("hi"))) as mesh:
        mesh.scheduler.key_owners[api_key.key_hash(key)] = owner(roles=("operator",))
        assert (await ask(mesh, key)).status_code == 403
        assert not mesh.scheduler.places


async def ask(mesh: Stack, key: str) -> httpx.Response:
    return await mesh.http.post("/v1/completions", json={"prompt": "a"}, headers={"authorization": f"Bearer {key}"})
