"""The simulated fleet: its engine against the real batcher, its choices against the real policy, and that it makes none of its own."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench.fleet.compare import Result, Task, losses, run, stale_costs, traces
from bench.fleet.devices import A100, H100, LARGE, SMALL, Thermals, law
from bench.fleet.mesh import Arrival, Beats, Mesh, Outcome
from bench.fleet.node import FOREVER, Job, Node
from bench.fleet.scenario import node_of, nodes, scenario
from bench.fleet.trace import BLOCK_TOKENS, SAMPLE, Row, ideal_hits, load, window
from services.scheduler.policy import routing
from services.scheduler.policy.fleet import Worker
from services.scheduler.policy.order import Fifo, Order
from services.scheduler.policy.pick import plan
from services.scheduler.policy.routing import ROUTINGS, Routing
from services.scheduler.policy.rules import Rules
from services.worker.engine.batch import SpanResult
from services.worker.engine.batcher import Batcher
from services.worker.engine.config import EngineConfig
from services.worker.engine.request import EngineRequest, SamplingParams
from tests.scheduler_harness import make_ticket, make_worker

ROWS = [Row(0.0, 3000, 40, (1, 2, 3, 4, 5)), Row(0.05, 700, 5), Row(0.06, 5000, 100, (1, 2, 3, 7)), Row(1.5, 3100, 60, (1, 2, 3, 4, 5, 6))]


def _run_alone(node: Node, rows: list[Row]) -> dict[str, Job]:
    """The node by itself, each job at its time."""
    jobs, ended, left = {}, {}, list(enumerate(rows))
    while left or node.until != FOREVER:
        if left and left[0][1].at <= node.until:
            number, row = left.pop(0)
            keys = [block.to_bytes(8, "big") for block in row.blocks]
            job = Job(f"r{number}", row.num_prompt_tokens, row.num_output_tokens, keys, row.at)
            jobs[job.request_id] = job
            node.take(job, row.at)
        else:
            _, done = node.turn(node.until)
            ended |= {job.request_id: job for job in done}
    assert ended == jobs
    node.pool.check_integrity([])
    return jobs


def _run_batcher(rows: list[Row]) -> dict[str, tuple[float, float]]:
    """(first token, end) by the real batcher, step by step, with the same law of step times."""
    engine = node_of("n", H100, SMALL, 20.0).engine
    config = EngineConfig(engine.block_tokens, engine.num_blocks, engine.max_sequences, engine.max_step_tokens)
    batcher, times, now = Batcher(config, 1 << 17, (), "v1", "bf16"), law(H100, SMALL), 0.0
    left, first, end = list(enumerate(rows)), {}, {}
    while left or batcher.has_work:
        if not batcher.has_work:
            now = max(now, left[0][1].at)
        while left and left[0][1].at <= now:
            number, row = left.pop(0)
            ids = [block for block in row.blocks for _ in range(BLOCK_TOKENS)]
            ids += [10_000 + number] * (row.num_prompt_tokens - len(ids))
            batcher.add(EngineRequest(f"r{number}", ids, SamplingParams(max_tokens=row.num_output_tokens, ignore_eos=True)))
        batch = batcher.schedule(now)
        pairs = sum(span.length * (span.start + span.length / 2) if span.length > 1 else span.end for span in batch.spans)
        keys, rows_sampled = sum(span.end for span in batch.spans), sum(span.samples for span in batch.spans)
        now += times.seconds(batch.num_tokens, rows_sampled, keys, pairs)
        for output in batcher.commit(batch, [SpanResult([7] if span.samples else []) for span in batch.spans], now):
            if output.token_ids:
                first.setdefault(output.request_id, now)
            if output.finish_reason:
                end[output.request_id] = now
    return {request_id: (first[request_id], end[request_id]) for request_id in end}


def test_its_engine_takes_as_long_as_the_real_batcher_step_by_step() -> None:
    jobs, real = _run_alone(node_of("n", H100, SMALL, 20.0), ROWS), _run_batcher(ROWS)
    assert jobs.keys() == real.keys()
    for request_id, job in jobs.items():
        assert (job.first_at, job.ended_at) == pytest.approx(real[request_id], rel=0.01), request_id
    assert [job.num_found for job in jobs.values()] == [0, 0, 3 * BLOCK_TOKENS, 5 * BLOCK_TOKENS]


def test_a_run_of_decoding_is_cut_where_somebody_comes() -> None:
    node = node_of("n", H100, SMALL, 20.0)
    jobs = _run_alone(node, [Row(0.0, 100, 5000), Row(10.0, 100, 2)])
    assert jobs["r1"].first_at - 10.0 < 0.1
    alone = _run_alone(node_of("n", H100, SMALL, 20.0), [Row(0.0, 100, 5000)])
    assert jobs["r0"].ended_at == pytest.approx(alone["r0"].ended_at, rel=0.01)


def test_a_device_that_is_always_busy_in_warm_air_throttles_and_recovers() -> None:
    thermals = Thermals(H100, air_celsius=40.0)
    for _ in range(200):
        thermals.pass_time(1.0, busy=1.0)
    assert thermals.is_slowed
    assert thermals.speed < 1
    assert thermals.celsius == pytest.approx(88.0, abs=0.1)
    assert 100 < thermals.slowed_seconds < 200
    thermals.pass_time(30.0, busy=0.0)
    assert (thermals.is_slowed, thermals.speed) == (False, 1.0)
    assert thermals.celsius_per_second < 0


def _small(routing: Routing, seed: int = 1, beats: Beats | None = None) -> Outcome:
    case = scenario(load(SAMPLE), num_nodes=16, num_requests=200, seed=seed)
    return Mesh(case.nodes(), Rules(routing=routing), beats=beats, seed=seed).run(case.arrivals)


def test_it_is_the_same_each_time_and_every_request_ends_once() -> None:
    first, again = _small(ROUTINGS["seconds"]), _small(ROUTINGS["seconds"])
    assert first == again
    assert len(first.ttft) == len(first.where) == 200
    assert min(first.ttft) > 0
    assert first != _small(ROUTINGS["seconds"], beats=Beats(late=0.5)), "what it hears late changes what it does"


def test_a_change_of_the_policy_changes_the_simulation_and_the_real_choice_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no decision of its own: with the costs turned round, the dearest worker is taken in both."""

    def choice() -> str:
        ticket, rules = make_ticket(num_prompt_tokens=200), Rules()
        workers = [replace(make_worker(name, name), used_slots=(0, 0, used, 0)) for name, used in (("idle", 0), ("busy", 3))]
        return plan(Order([Fifo([ticket])], rules), workers, rules)[0].worker.worker_id

    before, chosen = _small(ROUTINGS["seconds"]), choice()
    real = routing.displaced
    monkeypatch.setattr(routing, "displaced", lambda offer: tuple(-part - sum(offer.worker.used_slots) for part in real(offer)))
    after = _small(ROUTINGS["seconds"])
    assert (chosen, choice()) == ("idle", "busy")
    assert max(Counter(after.where.values()).values()) > 2 * max(Counter(before.where.values()).values())


def test_every_choice_is_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: dict[str, str] = {}

    def spy(order: Order, workers: list[Worker], *arguments: object, **named: object) -> object:
        placements = plan(order, workers, *arguments, **named)  # type: ignore[arg-type]
        planned.update({p.ticket.request_id: p.worker.worker_id for p in placements})
        return placements

    monkeypatch.setattr("bench.fleet.mesh.plan", spy)
    assert _small(ROUTINGS["prefix"]).where == planned


def test_a_request_goes_only_where_its_model_is() -> None:
    case = scenario(load(SAMPLE), num_nodes=16, num_requests=200, seed=3)
    where = Mesh(case.nodes(), Rules(), seed=3).run(case.arrivals).where
    assert {(arrival.model, where[f"r{i}"].split("-")[0]) for i, arrival in enumerate(case.arrivals)} == {
        (name, name) for name in ("7b", "32b", "embed")
    }


def test_a_full_fleet_keeps_them_waiting_until_there_is_room() -> None:
    node = node_of("n", A100, LARGE, 20.0)
    node.warm_up()
    rows = [Arrival(Row(0.0, 60_000, 4), LARGE.name) for _ in range(9)]
    outcome = Mesh([node], Rules()).run(rows)
    assert len(outcome.ended_at) == 9
    assert max(outcome.ttft) > 4 * min(outcome.ttft)


def test_the_fleet_is_mixed_and_grows_in_proportion() -> None:
    counts = Counter((node.thermals.device.name, node.model) for node in nodes(16))
    assert sum(counts.values()) == 16
    assert len(counts) >= 5
    assert Counter((node.thermals.device.name, node.model) for node in nodes(192)) == {kind: 12 * count for kind, count in counts.items()}


# --- traces


def test_a_window_goes_round_with_other_prompts() -> None:
    rows = [Row(0.0, 600, 1, (0,)), Row(1.0, 600, 1, (0,)), Row(3.0, 600, 1, (4,))]
    taken = window(rows, 1, 4)
    assert [row.at for row in taken] == [0.0, 2.0, 3.0, 4.0]
    assert [row.blocks for row in taken] == [(0,), (4,), (5,), (5,)]


def test_ideal_hits_are_what_an_endless_cache_finds() -> None:
    assert ideal_hits([Row(0, 1600, 1, (1, 2, 3)), Row(1, 1600, 1, (1, 2, 4)), Row(2, 1600, 1, (9,))]) == 2 * BLOCK_TOKENS


def test_both_formats_are_read(tmp_path: Path) -> None:
    azure, mooncake = tmp_path / "a.csv", tmp_path / "m.jsonl"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04.0319600,3180,8\n2023-11-16 18:17:03.9819600,4808,10\n")
    mooncake.write_text('{"timestamp": 500, "input_length": 1025, "output_length": 0, "hash_ids": [3, 4, 5]}\n')
    rows = load(azure)
    assert [(row.num_prompt_tokens, row.num_output_tokens, row.blocks) for row in rows] == [(4808, 10, ()), (3180, 8, ())]
    assert rows[1].at == pytest.approx(0.05)
    assert load(mooncake) == [Row(0.0, 1025, 1, (3, 4))], "the last token is always computed"


def test_without_published_traces_the_sample_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOREBAY_TRACES", str(tmp_path))
    assert traces() == {"sample": SAMPLE}
    (tmp_path / "AzureLLMInferenceTrace_code.csv").touch()
    assert list(traces()) == ["azure_code"]


# --- figures


def test_every_rule_runs_on_the_same_requests() -> None:
    names = [*ROUTINGS, "random", "lmetric", "dynamo", "stale"]
    results = run(Task("sample", SAMPLE, 1, 16, 100, names))
    assert [result.policy for result in results] == names
    assert all(0 <= (result.hit_share or 0) <= 1 and result.ttft_p50 <= result.ttft_p99 for result in results)


def test_the_loss_is_against_the_best_rule_and_late_heartbeats_are_none() -> None:
    def result(trace: str, policy: str, p99: float) -> Result:
        return Result(trace, policy, 0, p99, 0, 0, None, 0, 0)

    results = [result("a", "seconds", 3), result("a", "paper", 2), result("a", "stale", 1), result("b", "seconds", 1)]
    assert losses(results) == {"a": 1.5, "b": 1.0}
    assert stale_costs(results) == {"a": 1 / 3}
