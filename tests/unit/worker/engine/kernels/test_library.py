"""Which compiled library is chosen: this very CPU's, else the best level; never one of other sources."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.engine.kernels import library
from services.worker.engine.kernels.library import LEVELS
from tests.tiny_models import kernels

V3 = LEVELS["v3"] | {"sse2"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty place for libraries, with sources of its own."""
    (tmp_path / "a.h").write_text("int a;")
    (tmp_path / "b.cpp").write_text("int b;")
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr(library, "load", lambda path: path.name)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for cached in (library.find, library.digest):
        cached.cache_clear()


def find(monkeypatch: pytest.MonkeyPatch, flags: frozenset[str]) -> object:
    monkeypatch.setattr(library, "cpu_flags", lambda: flags)
    forget()
    return library.find()


def put(target: str) -> str:
    path = library.library_path(target)
    path.touch()
    return path.name


def test_the_best_that_the_cpu_can_run_is_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    v3, v4 = put("v3"), put("v4")
    assert find(monkeypatch, frozenset()) is None
    assert find(monkeypatch, V3 - {"movbe"}) is None
    assert find(monkeypatch, V3) == v3
    assert find(monkeypatch, V3 | LEVELS["v4"] - {"avx512_bf16"}) == v3
    assert find(monkeypatch, V3 | LEVELS["v4"]) == v4
    native = put(library.native_target())
    assert find(monkeypatch, V3 | LEVELS["v4"]) == native
    assert find(monkeypatch, V3) == v3  # compiled for another CPU


@pytest.mark.parametrize("source", ["a.h", "b.cpp", "c.h"])
def test_a_library_of_other_sources_is_not_found(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    v3 = put("v3")
    assert find(monkeypatch, V3) == v3
    (folder / source).write_text("int c;")
    assert find(monkeypatch, V3) is None


def test_a_name_says_target_and_sources() -> None:
    assert kernels("v3").name == f"v3-{library.digest()[:8]}"
    assert kernels().name == f"{library.native_target()}-{library.digest()[:8]}"
    assert library.native_target().startswith("native-")


def test_a_file_that_is_no_library_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "forebay-v3-0123456789abcdef.so"
    path.write_bytes(b"no library")
    with pytest.raises(OSError, match=path.name):
        library.load(path)


def test_a_cpu_that_says_nothing_can_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "Features : fp asimd\n"):
        monkeypatch.setattr(Path, "read_text", lambda _, text=text: text)
        assert library.cpu_flags.__wrapped__() == frozenset()

    def fail(_: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", fail)
    assert library.cpu_flags.__wrapped__() == frozenset()
