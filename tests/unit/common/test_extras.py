"""What each part of the mesh installs, read from the metadata of the packages that are installed here."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


def _needs(name: str, extras: frozenset[str], found: set[tuple[str, frozenset[str]]]) -> None:
    """Adds `name` and all that it needs to `found`."""
    name = canonicalize_name(name)
    if (name, extras) in found:
        return
    found.add((name, extras))
    if name == _PROJECT["name"]:
        texts = [*_PROJECT["dependencies"], *(text for extra in extras for text in _PROJECT["optional-dependencies"][extra])]
    else:
        texts = importlib.metadata.requires(name) or []
    for requirement in map(Requirement, texts):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            _needs(requirement.name, frozenset(requirement.extras), found)


def _closure(*extras: str) -> set[str]:
    found: set[tuple[str, frozenset[str]]] = set()
    _needs(_PROJECT["name"], frozenset(extras), found)
    return {name for name, _ in found} - {_PROJECT["name"]}


def test_a_client_needs_grpc_and_protobuf_alone() -> None:
    assert _closure() == _closure("client") == {"grpcio", "protobuf", "typing-extensions"}


@pytest.mark.parametrize("service", ["gateway", "scheduler"])
def test_gateway_and_scheduler_install_without_torch(service: str) -> None:
    assert {"grpcio", "structlog"} <= _closure(service)
    assert not {"torch", "numpy", "safetensors", "gguf", "transformers"} & _closure(service)


def test_only_the_scheduler_brings_redis() -> None:
    assert "redis" in _closure("scheduler")
    assert not {"redis"} & (_closure("gateway") | _closure("worker"))


def test_development_is_pinned_whole() -> None:
    lines = (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines if not line.startswith("#")}
    # torch pins what its CUDA build needs by itself; its CPU build needs none of that.
    needed = {name for name in _closure("dev") if not name.startswith(("cuda-", "nvidia-")) and name != "triton"}
    assert needed - pinned == {"certifi"}
