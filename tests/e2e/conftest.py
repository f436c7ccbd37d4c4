"""One mesh with the real model for all e2e tests of a test process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import mesh as meshes
from tests.spans import Receiver


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One xdist worker runs all of them (--dist loadgroup), so that they share a mesh; each may take its start's time."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.xdist_group("e2e"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(autouse=True)
def closed_sdks() -> Iterator[None]:
    """No test leaves a connection behind."""
    yield
    meshes.close_sdks()


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[meshes.Mesh]:
    """`forebay up` with the default model."""
    with meshes.running(tmp_path_factory.mktemp("mesh") / "home") as running:
        yield running


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    """Takes the spans of `traced`."""
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def traced(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[meshes.Mesh]:
    """A mesh that traces every request and says all in its logs. One sequence at a time: a second waits, a realtime one preempts."""
    settings = {
        "FOREBAY_MAX_SEQUENCES": "1",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
    }
    with meshes.running(tmp_path_factory.mktemp("traced") / "home", "--log-level", "debug", settings=settings) as running:
        yield running
