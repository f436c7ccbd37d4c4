"""The proof that sharing a device shows in nobody's tokens, at the size that fits here; and that it would show."""

import pytest
import torch

from bench.sharing_proof import ORGS, Mesh, Run, alone, num_unequal, requests
from bench.sharing_watch import POISON, Ledger
from services.worker.engine.block_pool import CacheIdentity
from services.worker.engine.engine import EngineRequest
from services.worker.engine.kernels import library
from tests.engine_harness import greedy
from tests.tiny_models import kernels


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find", kernels)


@pytest.mark.parametrize("seed", [1, 2])
def test_x02_b17_six_models_that_share_a_device_say_what_each_says_alone(seed: int) -> None:
    """With preemption, swapping of weights and blocks, prefix and host cache, drafts, 8-bit caches, and poison in whatever is nobody's."""
    coming, mesh = requests(120, seed), Mesh()
    run = mesh.serve(coming, seed)
    assert num_unequal(run, alone(coming)) == 0
    assert mesh.ledger.foreign_reads == []
    assert not any(mesh.left_over().values()), mesh.left_over()
    stats = [engine.stats() for engine in mesh.engines.values()]
    residents = mesh.weights.residency.residents.values()
    assert mesh.ledger.num_reads > 1000
    assert min(resident.num_loads for resident in residents) >= 2
    for shown in ("num_class_preemptions", "num_capacity_preemptions", "num_swaps", "num_prefix_hit_tokens", "num_host_hit_tokens"):
        assert sum(getattr(of_model, shown) for of_model in stats) > 0, f"nothing is shown of {shown}"
    assert sum(of_model.num_draft_tokens - of_model.num_accepted_tokens for of_model in stats) > 0


def test_a_page_that_another_org_wrote_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where keys left out the salt, tokens would be the same: the ledger alone sees it."""
    monkeypatch.setattr(CacheIdentity, "root_key", lambda self: self.model_version.encode().ljust(32))
    mesh = Mesh()
    prompt = list(range(100))
    coming = [EngineRequest(f"of {org!r}", prompt, greedy(2), cache_salt=org, model="m0") for org in ORGS]
    for request in coming:
        mesh.serve([request], 1, share_left=0)
    assert any("org b" in read and "org a" in read for read in mesh.ledger.foreign_reads)


def test_a_page_that_goes_on_unused_still_holds_what_was_written_before() -> None:
    """A sequence that is put off in the step that admits it hands its pages on, with what has yet to be saved in them."""
    ledger = Ledger(torch.zeros(2, 4, dtype=torch.uint8), {1: ("m0", ORGS[0])})
    for _ in range(2):
        ledger.handed_over(1)
        assert ledger.writer(1) == ("m0", ORGS[0])
    ledger.poison_fresh()
    assert ledger.writer(1) is None
    assert ledger.pages[1].tolist() == [POISON] * 4


@pytest.mark.parametrize("poisoned", [False, True])
def test_poison_beneath_a_running_sequence_shows_in_its_tokens(poisoned: bool) -> None:
    """As if its first page were given away too early."""
    mesh, run = Mesh(), Run()
    request = EngineRequest("r", list(range(100)), greedy(12), model="m0")
    mesh.device.add(request)
    for now in range(4):
        run.collect(mesh.device.step(float(now)).outputs)
        mesh.weights.finish()
    if poisoned:
        mesh.ledger.pages[mesh.engines["m0"].batcher.queue.running[0].block_table[0]].fill_(POISON)
    while mesh.device.has_work:
        run.collect(mesh.device.step(9.0).outputs)
    assert num_unequal(run, alone([request])) == poisoned
