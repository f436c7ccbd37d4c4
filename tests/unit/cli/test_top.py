"""`forebay top`: one look into a pipe, and at a terminal looks until Ctrl-C, whatever becomes of the mesh meanwhile."""

import io
import json
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from forebay.v1 import admin_pb2, scheduler_pb2, types_pb2
from services.cli import top
from services.cli.app import app
from services.cli.problem import Problem
from tests.unit.cli.gateway import Gateway


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["top", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def _worker(name: str, *usage: tuple[types_pb2.LatencyClass.ValueType, int]) -> admin_pb2.WorkerState:
    held = [scheduler_pb2.ClassUsage(latency_class=latency_class, num_slots=number) for latency_class, number in usage]
    beat = scheduler_pb2.Heartbeat(healthy=True, class_usage=held)
    return admin_pb2.WorkerState(registration=scheduler_pb2.Register(worker_id=name, max_sequences=8), heartbeat=beat, ready=True)


FLEET = admin_pb2.GetFleetResponse(
    workers=[
        _worker("worker-1", (types_pb2.LATENCY_CLASS_BATCH, 3), (types_pb2.LATENCY_CLASS_REALTIME, 1)),
        _worker("worker-2", (types_pb2.LATENCY_CLASS_BATCH, 1)),
    ]
)


def test_one_look(gateway: Gateway) -> None:
    shown = _run()
    assert [line.split()[0] for line in shown.splitlines() if line] == ["worker", "worker-1", "worker-2", "nothing", "model", "tiny@fp32"]
    look = json.loads(_run("--json"))
    assert (look["running"], look["queues"][0]["num_waiting"], len(look["workers"])) == ({}, 4, 2)
    gateway.fleet_is_empty = True
    assert _run() == "no workers\n\nnothing runs\n\nnobody waits\n"


def test_requests_are_counted_by_class_over_all_workers() -> None:
    assert top.running_by_class(FLEET) == {types_pb2.LATENCY_CLASS_REALTIME: 1, types_pb2.LATENCY_CLASS_BATCH: 4}
    lines = [line.split() for line in top.picture(FLEET).splitlines()]
    assert ["realtime", "1"] in lines
    assert ["batch", "4"] in lines


def test_a_worker_that_is_gone_runs_nothing() -> None:
    gone = _worker("worker-3", (types_pb2.LATENCY_CLASS_BATCH, 5))
    gone.heartbeat_age_seconds = 3600
    gone.ready = False
    assert top.running_by_class(admin_pb2.GetFleetResponse(workers=[gone])) == {}


def test_a_terminal_is_looked_at_until_ctrl_c_and_trouble_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([Problem("the mesh doesn't answer"), admin_pb2.GetFleetResponse()])
    pauses = iter([None, None, KeyboardInterrupt()])

    def ask() -> admin_pb2.GetFleetResponse:
        look = next(looks)
        if isinstance(look, Problem):
            raise look
        return look

    def pause(seconds: float) -> None:
        assert seconds == 0.5
        if (error := next(pauses)) is not None:
            raise error

    monkeypatch.setattr(top, "ask_fleet", ask)
    monkeypatch.setattr(time, "sleep", pause)
    screen = io.StringIO()
    top._watch(FLEET, Console(file=screen, force_terminal=True, width=100, height=40), 0.5)
    shown = screen.getvalue()
    assert shown.index("Ctrl-C leaves") < shown.index("the mesh doesn't answer") < shown.index("no workers")
    assert next(looks, None) is None
