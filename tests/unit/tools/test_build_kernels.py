"""Building kernels: what is there stays, what is old goes, and what can't be had is one line."""

import os
from pathlib import Path

import pytest

from services.worker.engine.kernels import library
from tools import build_kernels

AVX2 = library.LEVELS["v3"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for libraries with one small source, on a CPU with AVX2."""
    (tmp_path / "forward.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr(library, "cpu_flags", lambda: AVX2)
    monkeypatch.setattr(library, "digest", lambda: "0123456789abcdef")
    return tmp_path


def libraries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.so"))


def test_a_library_is_compiled_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_kernels.main(["v3"]) == 0
    assert libraries(folder) == ["forebay-v3-0123456789abcdef.so"]
    assert capsys.readouterr().out.startswith("compiling kernels for v3")
    assert build_kernels.main(["v3"]) == 0
    assert capsys.readouterr() == ("", "")
    assert sorted(path.name for path in folder.iterdir()) == ["forebay-v3-0123456789abcdef.so", "forward.cpp"]


def test_new_flags_compile_it_anew(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = build_kernels.build("v3")
    before = Path(build_kernels.__file__).stat().st_mtime - 1
    os.utime(path, (before, before))
    build_kernels.build("v3")
    assert path.stat().st_mtime > before
    assert capsys.readouterr().out.count("compiling") == 2


def test_old_libraries_of_the_same_target_go(folder: Path) -> None:
    native = library.native_target()
    for target in ("v3", "v4", native, "native-ffffffff"):
        (folder / f"forebay-{target}-ffffffffffffffff.so").touch()
    build_kernels.build("v3")
    assert libraries(folder) == sorted(
        ["forebay-v3-0123456789abcdef.so", *(f"forebay-{target}-ffffffffffffffff.so" for target in ("v4", native, "native-ffffffff"))]
    )


@pytest.mark.parametrize("arguments", [[], ["native"], ["v3", "v4"]])
def test_no_compiler_is_one_line_for_each(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert build_kernels.main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [line.split(";")[0] for line in lines] == [f"no kernels for {target}: there is no g++" for target in arguments or ["native"]]
    assert libraries(folder) == []


def test_another_kind_of_cpu_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(library, "cpu_flags", lambda: AVX2 - {"avx2"})
    assert build_kernels.main([]) == 1
    assert "no kernels for native: they need an x86-64 CPU with AVX2" in capsys.readouterr().err


def test_a_source_that_does_not_compile_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "forward.cpp").write_text("no C++")
    assert build_kernels.main(["v3"]) == 1
    assert "g++ ended with 1; without any the engine computes by torch" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["forward.cpp"]


def test_an_unknown_target_is_named_before_anything_is_compiled(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build_kernels.main(["v3", "v5"]) == 2
    assert capsys.readouterr().err == "v5 is no target: known are native, v4, v3\n"
    assert libraries(folder) == []
