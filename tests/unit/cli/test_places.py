"""Where weights are, in words; `ps`, `models` and `top` show it of models that take turns, and the device's budget."""

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from forebay.v1 import admin_pb2, scheduler_pb2
from services.cli import places
from services.cli.app import app
from services.cli.top import picture
from tests.unit.cli.gateway import Gateway

HOST, DEVICE = scheduler_pb2.MODEL_PLACE_HOST, scheduler_pb2.MODEL_PLACE_DEVICE


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (scheduler_pb2.ModelState(place=DEVICE), "device"),
        (scheduler_pb2.ModelState(place=DEVICE, pinned=True, load_seconds=1), "device, pinned"),
        (scheduler_pb2.ModelState(place=HOST), "host"),
        (scheduler_pb2.ModelState(place=HOST, load_seconds=1.234), "host, 1.2 s to load"),
        (scheduler_pb2.ModelState(place=scheduler_pb2.MODEL_PLACE_LOADING), "loading"),
        (scheduler_pb2.ModelState(place=scheduler_pb2.MODEL_PLACE_COLD), "not to be had"),
        (scheduler_pb2.ModelState(), "-"),
    ],
)
def test_words(state: scheduler_pb2.ModelState, words: str) -> None:
    assert places.place(state) == words


def _worker(worker_id: str, *states: scheduler_pb2.ModelState, ready: bool = True) -> admin_pb2.WorkerState:
    worker = admin_pb2.WorkerState(registration=scheduler_pb2.Register(worker_id=worker_id), ready=ready)
    worker.heartbeat.models.extend(states)
    return worker


def test_by_model_and_of_workers_that_are_there_alone() -> None:
    workers = [
        _worker("w1", scheduler_pb2.ModelState(model="a@fp32", place=DEVICE), scheduler_pb2.ModelState(model="b@fp32", place=HOST)),
        _worker("w2", scheduler_pb2.ModelState(model="a@fp32", place=HOST)),
        _worker("w3", scheduler_pb2.ModelState(model="a@fp32", place=DEVICE), ready=False),
    ]
    assert places.by_model(workers) == {"a@fp32": "w1: device; w2: host", "b@fp32": "w1: host"}


def test_the_budget_by_name() -> None:
    worker = _worker("w1")
    assert places.budget(worker) == ""
    worker.heartbeat.budget.CopyFrom(scheduler_pb2.DeviceBudget(weights_bytes=1 << 30, kv_bytes=1 << 29, workspace_bytes=1 << 28))
    assert places.budget(worker) == "weights 1.00 kv 0.50 workspace 0.25 reserve 0.00 GiB"


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_commands_show_it(gateway: Gateway) -> None:
    state = scheduler_pb2.ModelState(model="tiny@fp32", place=DEVICE, pinned=True, num_bytes=5 << 20, num_requests=3, num_used_blocks=40)
    gateway.states = [state]
    gateway.budget = scheduler_pb2.DeviceBudget(weights_bytes=1 << 30)
    title, worker, _, header, row, *_ = _run("ps").splitlines()
    assert title.split()[-1] == "budget"
    assert worker.endswith("weights 1.00 kv 0.00 workspace 0.00 reserve 0.00 GiB")
    assert header.split() == ["worker", "model", "weights", "size", "requests", "blocks"]
    assert row.split() == ["worker-1", "tiny@fp32", "device,", "pinned", "5", "MiB", "3", "40"]
    assert json.loads(_run("ps", "--json"))["workers"][0]["heartbeat"]["budget"]["weights_bytes"] == str(1 << 30)
    assert "worker-1: device, pinned" in _run("models")
    assert json.loads(_run("models", "--json"))["places"] == {"tiny@fp32": "worker-1: device, pinned"}
    assert "device, pinned" in _run("top")


def test_a_user_who_is_no_operator_sees_the_models_alone(gateway: Gateway) -> None:
    gateway.states = [scheduler_pb2.ModelState(model="tiny@fp32", place=DEVICE)]
    gateway.is_for_users = True
    assert "tiny" in _run("models")
    assert "places" not in json.loads(_run("models", "--json"))


def test_models_that_all_stay_need_no_table() -> None:
    fleet = admin_pb2.GetFleetResponse(workers=[_worker("w1", scheduler_pb2.ModelState(model="a@fp32", place=DEVICE))])
    assert places.columns(fleet.workers) == []
    assert "a@fp32" not in picture(fleet, Console(width=200).width)
