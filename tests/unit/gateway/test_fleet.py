"""The gateway's view of the fleet: never taken for fresh when it is old."""

from services.common.errors import unavailable
from services.gateway.fleet import STALE_SECONDS, FleetWatch
from services.gateway.mesh import Mesh
from services.gateway.models import Models
from services.gateway.orgs import Orgs
from tests.fakes import FakeScheduler, FakeWorker, play, serving
from tests.unit.gateway.build import make_model


async def test_a_view_that_nobody_refreshes_is_no_reason_to_be_ready() -> None:
    now = 100.0
    scheduler = FakeScheduler([FakeWorker(play([1]))])
    async with serving(*scheduler.workers, scheduler):
        mesh = Mesh([scheduler.address])
        watch = FleetWatch(mesh, Models([make_model(ready=False)]), Orgs(mesh), clock=lambda: now)
        assert watch.why_not_ready() == "no scheduler has answered yet"
        await watch.look()
        assert watch.why_not_ready() is None
        now += STALE_SECONDS + 1
        assert "last seen" in (watch.why_not_ready() or "")
        await mesh.close()


async def test_what_an_operator_is_told_is_what_the_gateway_goes_by() -> None:
    scheduler = FakeScheduler([FakeWorker(play([1]))])
    async with serving(*scheduler.workers, scheduler):
        mesh, models = Mesh([scheduler.address]), Models([make_model(ready=False)])
        assert len((await FleetWatch(mesh, models, Orgs(mesh)).see()).workers) == 1
        assert models.list()[0].ready
        await mesh.close()


async def test_a_change_of_policies_makes_those_that_are_kept_old() -> None:
    scheduler = FakeScheduler([])
    async with serving(scheduler):
        mesh = Mesh([scheduler.address])
        orgs = Orgs(mesh)
        watch = FleetWatch(mesh, Models([make_model()]), orgs)
        for digest, num_questions in (("a", 1), ("a", 1), ("b", 2), ("b", 2)):
            scheduler.policies_digest = digest
            await watch.look()
            await orgs.policy("acme")
            assert len(scheduler.org_questions) == num_questions
        scheduler.away = unavailable("gone", reason="STORE_UNAVAILABLE")
        scheduler.policies_digest = "c"
        await watch.look()
        assert (await orgs.policy("acme")).org == "acme", "the last good one while nobody answers"
        await mesh.close()
