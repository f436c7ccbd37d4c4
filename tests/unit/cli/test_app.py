"""The command line from outside: one-line errors, no traceback, wrong Python."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.cli import __main__ as entry


def _forebay(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("FOREBAY_ADDRESS", "FOREBAY_TOKEN")}
    environment["FOREBAY_HOME"] = str(home)
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ps"], "no mesh is up"),
        (["models", "--json"], "no mesh is up"),
        (["run", "hello"], "no mesh is up"),
        (["run", "--class", "urgent", "hello"], "must be realtime, standard or batch"),
        (["up", "--model", "/no/such.gguf"], "no model at /no/such.gguf"),
    ],
)
def test_a_problem_is_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = _forebay(*arguments, home=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("forebay: ")
    assert words in done.stderr


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


@pytest.mark.parametrize("version", [(3, 10), (3, 14), (4, 0)])
def test_a_wrong_python_is_one_line(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    monkeypatch.setattr(entry, "sys", SimpleNamespace(version_info=(*version, 0), exit=sys.exit))
    with pytest.raises(SystemExit, match=rf"this is Python {version[0]}\.{version[1]}, and Forebay needs 3\.11"):
        entry.main()
