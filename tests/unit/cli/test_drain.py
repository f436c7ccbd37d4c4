"""`forebay drain` and `undrain`: whom they name, and what is said of it."""

import json

from typer.testing import CliRunner

from services.cli.app import app
from tests.unit.cli.gateway import Gateway


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_drain_and_back(gateway: Gateway) -> None:
    assert _run("drain", "host-1").startswith("worker-1, worker-2 takes no new work")
    assert _run("undrain", "host-1") == "host-1 takes work again\n"
    assert [(act.name, act.undrain) for act in gateway.acts] == [("host-1", False), ("host-1", True)]


def test_as_json(gateway: Gateway) -> None:
    assert json.loads(_run("drain", "host-1", "--json")) == {"worker_ids": ["worker-1", "worker-2"]}
