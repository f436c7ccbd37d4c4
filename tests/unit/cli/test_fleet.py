"""`forebay queue` and `forebay workers`: what is shown of a fleet, and that old numbers are no news."""

import json

from typer.testing import CliRunner

from services.cli.app import app
from tests.unit.cli.gateway import Gateway


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_queue(gateway: Gateway) -> None:
    title, row = _run("queue").splitlines()
    assert title.split() == ["model", "class", "waiting", "oldest"]
    assert row.split() == ["tiny@fp32", "batch", "4", "2.0", "s"]
    assert json.loads(_run("queue", "--json"))["queues"][0]["num_waiting"] == 4
    gateway.fleet_is_empty = True
    assert _run("queue") == "nobody waits\n"


def test_workers(gateway: Gateway) -> None:
    title, first, second = _run("workers").splitlines()
    assert title.split() == ["worker", "cache", "batch", "busy", "memory", "tokens/s", "temperature", "power"]
    assert first.split() == [
        "worker-1", "████░░░░░░", "40%", "█░░░░░░░░░", "9%", "█████░░░░░", "50%", "░░░░░░░░░░", "0%", "0", "61", "°C", "-",
    ]  # fmt: skip
    assert second.split() == ["worker-2", *"-------"]
    assert json.loads(_run("workers", "--json"))["workers"][0]["heartbeat"]["num_running"] == 3
    gateway.fleet_is_empty = True
    assert _run("workers") == "no workers\n"
