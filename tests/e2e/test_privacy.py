"""What a mesh on one machine shows to others: nothing in its logs, no port but on the loopback interface."""

import json
from pathlib import Path

import psutil

from tests.e2e.mesh import Mesh

_CANARY = "xylophone-7319-canary"


def test_logs_hold_no_prompt_no_answer_no_token_no_key(mesh: Mesh) -> None:
    answer = json.loads(mesh.forebay("run", "--json", "--max-tokens", "12", "--temperature", "0", f"Say: {_CANARY}").stdout)
    assert mesh.forebay("run", "--model", "not-served", _CANARY).returncode == 1
    mesh.wait_until_idle()
    key = (mesh.home / "keys" / "ed25519.pem").read_text().splitlines()[1]
    logs = "".join(path.read_text(errors="replace") for path in (mesh.home / "logs").glob("*.log"))
    assert logs
    for secret in (_CANARY, mesh.token, mesh.token.rpartition(".")[2], key, answer["text"]):
        assert secret not in logs


def test_the_store_holds_no_prompt(mesh: Mesh) -> None:
    assert mesh.forebay("run", "--max-tokens", "4", f"Say: {_CANARY}").returncode == 0
    kept = b"".join(path.read_bytes() for path in (mesh.home / "valkey").rglob("*") if path.is_file())
    assert kept
    assert _CANARY.encode() not in kept


def test_nothing_listens_beyond_this_machine(mesh: Mesh) -> None:
    listening = {
        name: [conn.laddr for conn in psutil.Process(pid).net_connections("inet") if conn.status == psutil.CONN_LISTEN]
        for name, pid in mesh.processes.items()
    }
    assert listening["valkey"] == []
    assert listening["gateway"]
    # gRPC binds 127.0.0.1 on a socket for both families.
    assert {address.ip.removeprefix("::ffff:") for addresses in listening.values() for address in addresses} == {"127.0.0.1"}


def test_state_is_private(mesh: Mesh) -> None:
    for path in (mesh.home, mesh.home / "keys", mesh.home / "logs", mesh.home / "valkey"):
        assert _mode(path) == 0o700
    for path in (mesh.home / "mesh.json", mesh.home / "keys" / "token", mesh.home / "keys" / "ed25519.pem"):
        assert _mode(path) == 0o600


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777
