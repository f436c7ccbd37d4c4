"""The command line from outside: one-line errors, no traceback, wrong Python."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from services.cli import __main__ as entry
from tests.unit.cli.gateway import Gateway

FOREBAY = (sys.executable, "-P", "-m", "services.cli")
_GATEWAYS_FILES = {"CERT": "gateway.pem", "KEY": "gateway.key", "CA": "ca.pem"}


def _forebay(*arguments: str | bytes, home: Path, stdout: IO[str] | int = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "FOREBAY_HOME": str(home)}
    return subprocess.run(
        [*FOREBAY, *arguments], env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ps"], "no mesh is up"),
        (["models", "--json"], "no mesh is up"),
        (["run", "hello"], "no mesh is up"),
        (["up", "--model", "/no/such.gguf"], "no model at /no/such.gguf"),
    ],
)
def test_a_problem_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str) -> None:
    for variable in ("FOREBAY_ADDRESS", "FOREBAY_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    done = _forebay(*arguments, home=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("forebay: ")
    assert words in done.stderr


def test_up_doesnt_take_a_public_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_PUBLIC_TLS_CERT_FILE", "/some.pem")
    done = _forebay("up", home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("forebay: FOREBAY_PUBLIC_TLS_CERT_FILE is for a gateway run by itself")


def test_certs_tells_what_to_set_and_replaces_nothing_unasked(tmp_path: Path) -> None:
    made = _forebay("certs", str(tmp_path / "certs"), home=tmp_path)
    assert (made.returncode, made.stderr) == (0, "")
    lines = made.stdout.splitlines()
    assert lines[:4] == ["# gateway", *(f"FOREBAY_TLS_{k}_FILE={tmp_path}/certs/{f}" for k, f in _GATEWAYS_FILES.items())]
    assert [line for line in lines if line.startswith("#")] == ["# gateway", "# scheduler", "# worker"]
    again = _forebay("certs", str(tmp_path / "certs"), home=tmp_path)
    assert again.returncode == 1
    assert "already: --renew" in again.stderr
    assert len(again.stderr.splitlines()) == 1


def test_a_token_for_nobody_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path))
    command = [sys.executable, "-m", "services.cli", "ps"]
    environment = {**os.environ, "FOREBAY_ADDRESS": "127.0.0.1:1", "FOREBAY_TOKEN": "x"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "forebay: nothing answers at 127.0.0.1:1: is the mesh up?\n")


def test_without_its_packages_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from services.cli.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "forebay: the command needs more than the client (typer is missing): pip install 'forebay[cli]'\n"


def test_version(tmp_path: Path) -> None:
    done = _forebay("--version", home=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"forebay {importlib.metadata.version('forebay')}\n")


def test_alone_it_says_what_there_is(tmp_path: Path) -> None:
    done = _forebay(home=tmp_path)
    assert done.returncode == 0
    for command in ("up", "run", "ps", "models", "keys", "orgs", "usage", "audit", "policy", "demo"):
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize("command", ["up", "run", "ps", "models", "keys", "orgs", "usage", "audit", "policy", "demo"])
def test_help_is_for_people(tmp_path: Path, command: str) -> None:
    done = _forebay(command, "--help", home=tmp_path)
    assert done.returncode == 0
    assert not re.search(r"<\w+|None|\bstr\b|\bbool\b|\[\[", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--seed", "99999999999999999999", "hi"], "--seed is 99999999999999999999: it must be a whole number from -92233720368547"),
        (["run", "--max-tokens", "99999999999", "hi"], "--max-tokens is 99999999999: it must be a whole number from 0 to 2147483647"),
        (["run", "--temperature", "nan", "hi"], "--temperature is nan: it must be a number from 0 to 100"),
        (["run", "--class", "urgent", "hi"], "--class is urgent: it must be realtime, standard or batch"),
        (["run", b"\xff\xfe"], "the prompt isn't UTF-8 (byte 0xff at position 0)"),
        (["run", "--system", b"a\xfe", "hi"], "--system isn't UTF-8 (byte 0xfe at position 1)"),
        (["up", "--share", "--device-memory", "lots"], "--device-memory is lots: it must be a size over 0, such as 512MB or 2GiB"),
        (["up", "--kv-memory", "lots"], "--kv-memory is lots: it must be a size over 0, such as 512MB or 2GiB"),
        (["up", "--log-level", "loud"], "--log-level is loud: it must be debug, info, warning or error"),
        (["up", "--workers", "65"], "--workers is 65: it must be a whole number from 1 to 64"),
        (["up", "--http-port", "-1"], "--http-port is -1: it must be a whole number from 0 to 65535"),
        (["frobnicate"], "No such command 'frobnicate': see `forebay --help`"),
        (["ps", "--all"], "No such option: --all: see `forebay --help`"),
    ],
)
def test_wrong_usage_is_one_line_before_anything_starts(tmp_path: Path, arguments: list[str | bytes], words: str) -> None:
    done = _forebay(*arguments, home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"forebay: {words}")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_device_memory_needs_models_that_share_a_worker(tmp_path: Path) -> None:
    done = _forebay("up", "--device-memory", "1GB", home=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "forebay: --device-memory is for models that share a worker: give --share, too\n"


def test_standard_input_that_is_no_text_is_one_line() -> None:
    environment = {**os.environ, "FOREBAY_ADDRESS": "127.0.0.1:1", "FOREBAY_TOKEN": "x"}
    for encoding, name in (("utf-8", "UTF-8"), ("utf-8:surrogateescape", "UTF-8")):
        done = subprocess.run(
            [*FOREBAY, "run", "-"], env=environment | {"PYTHONIOENCODING": encoding}, input=b"ab\xff", capture_output=True, check=False
        )
        assert done.returncode == 2
        assert done.stderr.decode().startswith(f"forebay: standard input isn't {name} (byte 0xff at position 2)")


@pytest.mark.parametrize(("token", "words"), [("a\nb", "a line break at position 1"), ("ab\u00fc", "the character '\\xfc' at position 2")])
@pytest.mark.parametrize("command", [("ps",), ("models",), ("run", "hi")])
def test_a_token_that_no_call_can_carry_is_one_line(token: str, words: str, command: tuple[str, ...]) -> None:
    environment = {**os.environ, "FOREBAY_ADDRESS": "127.0.0.1:1", "FOREBAY_TOKEN": token}
    done = subprocess.run([*FOREBAY, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"forebay: FOREBAY_TOKEN has {words}: a token is printable ASCII, such as `forebay keys` prints\n"


def test_an_address_that_is_none_is_one_line() -> None:
    environment = {**os.environ, "FOREBAY_ADDRESS": "nowhere", "FOREBAY_TOKEN": "x"}
    done = subprocess.run([*FOREBAY, "ps"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("forebay: FOREBAY_ADDRESS is nowhere: not host:port")


@pytest.mark.parametrize("command", [("run", "hi"), ("run", "--json", "hi"), ("ps",), ("models", "--json"), ("keys",), ("--help",)])
def test_a_full_disk_is_one_line(gateway: Gateway, tmp_path: Path, command: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = _forebay(*command, home=tmp_path, stdout=full)
    assert (done.returncode, done.stderr) == (1, "forebay: No space left on device\n")


@pytest.mark.parametrize("command", [("run", "hi"), ("run", "forever"), ("ps",), ("models", "--json")])
def test_a_reader_that_has_gone_is_no_news(gateway: Gateway, tmp_path: Path, command: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        assert _forebay(*command, home=tmp_path, stdout=gone).stderr == ""


@pytest.mark.parametrize("version", [(3, 10), (3, 14), (4, 0)])
def test_a_wrong_python_is_one_line(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    monkeypatch.setattr(entry, "sys", SimpleNamespace(version_info=(*version, 0), exit=sys.exit))
    with pytest.raises(SystemExit, match=rf"this is Python {version[0]}\.{version[1]}, and Forebay needs 3\.11"):
        entry.main()
