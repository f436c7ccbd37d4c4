"""What operators ask goes on to a scheduler, under the token's name; what others ask doesn't."""

from typing import Any

import grpc
import pytest

from forebay.v1 import admin_pb2, scheduler_pb2, types_pb2
from services.common.errors import Code, StatusError, from_rpc, invalid, unavailable
from services.policy import api_key
from tests.fakes import play
from tests.unit.gateway.build import Stack, make_token, stack
from tests.unit.gateway.test_server import metadata

OPERATOR = make_token("ops", "user", "operator", sub="olga")
CALLS: list[tuple[str, Any]] = [
    ("Drain", admin_pb2.DrainRequest(name="w1", undrain=True, actor="forged")),
    ("SetModel", admin_pb2.SetModelRequest(model="m", actor="forged")),
    ("ListOrgs", admin_pb2.ListOrgsRequest()),
    ("SetOrg", admin_pb2.SetOrgRequest(policy=types_pb2.OrgPolicy(org="acme", weight=2), fields=["weight"], actor="forged")),
    ("ResetOrg", admin_pb2.ResetOrgRequest(org="acme", actor="forged")),
    ("CreateKey", admin_pb2.CreateKeyRequest(org="acme", name="n", actor="forged")),
    ("ListKeys", admin_pb2.ListKeysRequest(org="acme")),
    ("RevokeKey", admin_pb2.RevokeKeyRequest(key_id="k-1", actor="forged")),
    ("ListAudit", admin_pb2.ListAuditRequest(limit=5)),
]


async def call(mesh: Stack, method: str, request: Any, token: str) -> Any:
    """The answer; a failure as StatusError."""
    try:
        return await getattr(mesh.admin, method)(request, metadata=metadata(token))
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from None


@pytest.mark.parametrize(("method", "request_"), CALLS)
async def test_operators_calls_go_on_with_their_own_name(method: str, request_: Any) -> None:
    async with stack(play([])) as mesh:
        await call(mesh, method, request_, OPERATOR)
        (asked,) = mesh.scheduler.acts
        if "actor" in request_.DESCRIPTOR.fields_by_name:
            assert asked.actor == "ops/olga"
            asked.actor = "forged"
        assert asked == request_


@pytest.mark.parametrize(("method", "request_"), CALLS)
async def test_others_are_refused_before_a_scheduler_hears_of_it(method: str, request_: Any) -> None:
    async with stack(play([])) as mesh:
        for token in (make_token("acme", "user"), make_token("acme", roles=[])):
            with pytest.raises(StatusError) as caught:
                await call(mesh, method, request_, token)
            assert caught.value.code is Code.PERMISSION_DENIED
        assert not mesh.scheduler.acts
        await mesh.scheduler.denied.until_length(1)
        assert mesh.scheduler.denied == [("acme/someone", method)]


async def test_a_flood_of_refused_acts_is_noted_once() -> None:
    async with stack(play([])) as mesh:
        for method in ("ListKeys", "ListKeys", "GetFleet", "ListKeys"):
            with pytest.raises(StatusError):
                await call(mesh, method, dict(CALLS).get(method, admin_pb2.GetFleetRequest()), make_token("acme", "user"))
        await mesh.scheduler.denied.until_length(2)
        assert sorted(mesh.scheduler.denied) == [("acme/someone", "GetFleet"), ("acme/someone", "ListKeys")]


async def test_an_api_key_acts_under_its_id() -> None:
    key = api_key.make()
    async with stack(play([])) as mesh:
        answer = scheduler_pb2.AuthenticateResponse(key_id="k-9", org="ops", roles=["operator"])
        mesh.scheduler.key_owners[api_key.key_hash(key)] = answer
        await call(mesh, "RevokeKey", admin_pb2.RevokeKeyRequest(key_id="k-1"), f"Bearer {key}")
        assert mesh.scheduler.acts[0].actor == "k-9"


async def test_users_see_the_use_of_their_own_org_alone() -> None:
    user = make_token("acme", "user")
    async with stack(play([])) as mesh:
        for org in ("", "acme"):
            used = await call(mesh, "GetUsage", admin_pb2.GetUsageRequest(org=org, days=3), user)
            assert [row.org for row in used.rows] == ["acme"]
        with pytest.raises(StatusError) as caught:
            await call(mesh, "GetUsage", admin_pb2.GetUsageRequest(org="other"), user)
        assert caught.value.code is Code.PERMISSION_DENIED
        for org in ("", "other"):
            await call(mesh, "GetUsage", admin_pb2.GetUsageRequest(org=org), OPERATOR)
        assert [request.org for request in mesh.scheduler.acts] == ["acme", "acme", "", "other"]


async def test_users_are_told_of_their_own_requests_alone() -> None:
    async with stack(play([])) as mesh:
        for token, org in ((make_token("acme", "user"), "other"), (OPERATOR, "other"), (OPERATOR, "")):
            await call(mesh, "Explain", admin_pb2.ExplainRequest(request_id="r", org=org), token)
        assert [request.org for request in mesh.scheduler.acts] == ["acme", "other", ""]


async def test_over_http_users_see_the_use_of_their_own_org_alone_too() -> None:
    async with stack(play([])) as mesh:
        for query in ("", "?org=acme&days=3"):
            answer = await mesh.http.get(f"/v1/usage{query}")
            assert answer.status_code == 200
            assert [row["org"] for row in answer.json()["data"]] == ["acme"]
        refused = await mesh.http.get("/v1/usage?org=other")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        for query in ("", "?org=other"):
            assert (await mesh.http.get(f"/v1/usage{query}", headers={"authorization": OPERATOR})).status_code == 200
        assert [(request.org, request.days) for request in mesh.scheduler.acts] == [("acme", 1), ("acme", 3), ("", 1), ("other", 1)]
        assert (await mesh.http.get("/v1/usage", headers={"authorization": ""})).status_code == 401


@pytest.mark.parametrize("days", ["0", "91", "-1", "x", "1e1", "\u0663", ""])
async def test_days_of_use_are_whole_and_bounded(days: str) -> None:
    async with stack(play([])) as mesh:
        answer = await mesh.http.get("/v1/usage", params={"days": days})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "days")
        assert not mesh.scheduler.acts


async def test_refusals_of_a_scheduler_come_back_whole() -> None:
    async with stack(play([])) as mesh:
        mesh.scheduler.refusals.append(invalid("weight", "weight is -1; it must be over 0"))
        with pytest.raises(StatusError) as caught:
            await call(mesh, "SetOrg", admin_pb2.SetOrgRequest(), OPERATOR)
        assert (caught.value.code, caught.value.violations[0].field) == (Code.INVALID_ARGUMENT, "weight")


async def test_where_no_scheduler_answers_a_key_is_not_asked_for_twice() -> None:
    async with stack(play([])) as mesh:
        for method in ("CreateKey", "ListKeys"):
            mesh.scheduler.refusals.append(unavailable("Redis is away", reason="STORE_UNAVAILABLE"))
            with pytest.raises(StatusError) as caught:
                await call(mesh, method, dict(CALLS)[method], OPERATOR)
            assert caught.value.code is Code.UNAVAILABLE
        assert len(mesh.scheduler.acts) == 2


async def test_use_is_told_by_pages_on_both_faces() -> None:
    async with stack(play([])) as mesh:
        used = await call(mesh, "GetUsage", admin_pb2.GetUsageRequest(page_size=7, page_token="t"), OPERATOR)
        answer = await mesh.http.get("/v1/usage", params={"page_size": "7", "page_token": "t"})
        assert used.next_page_token == answer.json()["next_page_token"] == "next"
        assert [(request.page_size, request.page_token) for request in mesh.scheduler.acts] == [(7, "t"), (7, "t")]
        for page_size in ("0", "1001", "x", "99999"):
            answer = await mesh.http.get("/v1/usage", params={"page_size": page_size})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "page_size")
        assert len(mesh.scheduler.acts) == 2
