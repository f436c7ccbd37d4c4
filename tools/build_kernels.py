"""Compiles the CPU kernels with g++: for this machine, or for a level of x86-64 that an image carries (v3, v4).

A machine without a compiler, or with another kind of CPU, is no error: its engine computes by torch.
Usage: python tools/build_kernels.py [native | v3 | v4]...; exit code 1 where one can't be had.
"""

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from services.worker.engine.kernels import library

FLAGS = {
    "native": ["-march=native"],
    "v4": ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"],
    "v3": ["-march=x86-64-v3"],
}
# Contraction off: only what the source fuses is fused, so that a row's bits don't depend on how a loop was unrolled.
COMMON = ["-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread", "-Wall", "-Wextra"]
COMMON += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # g++ 12 finds some in its own intrinsics


class NoKernels(Exception):
    """A target can't be compiled here; one line that says why."""


def build(target: str) -> Path:
    """The library for `target`, compiled unless it is there and no older than these flags. NoKernels, OSError."""
    with _alone():
        return _build(target, library.native_target() if target == "native" else target)


@contextmanager
def _alone() -> Iterator[None]:
    """One build at a time in a checkout: who comes second finds what the first has made."""
    folder = os.open(library.FOLDER, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _build(target: str, name: str) -> Path:
    path = library.library_path(name)
    if path.exists() and path.stat().st_mtime >= Path(__file__).stat().st_mtime:
        return path
    if target == "native" and not library.LEVELS["v3"] <= library.cpu_flags():
        raise NoKernels(f"they need an x86-64 CPU with AVX2, and this one ({platform.machine()}) is another")
    print(f"compiling kernels for {target} (about half a minute)", flush=True)
    with tempfile.TemporaryDirectory(dir=library.FOLDER) as folder:
        fresh = Path(folder) / path.name
        compile_sources(sorted(library.FOLDER.glob("*.cpp")), fresh, [*FLAGS[target], "-shared"])
        fresh.replace(path)
    for stale in library.FOLDER.glob(f"forebay-{name}-*.so"):
        if stale != path:
            stale.unlink(missing_ok=True)
    return path


def compile_sources(sources: Sequence[Path], output: Path, flags: Sequence[str]) -> None:
    """Runs g++ with the common flags and `flags`, which come last. NoKernels."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoKernels("there is no g++")
    code = subprocess.run([compiler, *COMMON, *flags, *map(str, sources), "-o", str(output)]).returncode  # noqa: S603
    if code != 0:
        raise NoKernels(f"{compiler} ended with {code}")


def main(targets: list[str]) -> int:
    """Builds the targets, or native; one line for each that can't be had."""
    unknown = sorted(set(targets) - set(FLAGS))
    if unknown:
        print(f"{unknown[0]} is no target: known are {', '.join(FLAGS)}", file=sys.stderr)
        return 2
    code = 0
    for target in targets or ["native"]:
        try:
            build(target)
        except (NoKernels, OSError) as error:
            print(f"no kernels for {target}: {error}; without any the engine computes by torch, several times slower", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
