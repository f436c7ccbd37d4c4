"""Compiles the CPU kernels with g++: for this machine, or for a level of x86-64 that an image carries (v3, v4).

A machine without a compiler, or with another kind of CPU, is no error: its engine computes by torch.
Usage: python tools/build_kernels.py [native | v3 | v4]...
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from services.worker.engine.kernels import library

_FLAGS = {
    "native": ["-march=native"],
    "v4": ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"],
    "v3": ["-march=x86-64-v3"],
}
# Contraction off: only what the source fuses is fused, so that a row's bits don't depend on how a loop was unrolled.
_COMMON = ["-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra"]
_COMMON += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # g++ 12 finds some in its own intrinsics


def build(target: str) -> Path:
    """The library for `target`, compiled unless it is there. CalledProcessError, FileNotFoundError: no library."""
    path = library.library_path(library.native_target() if target == "native" else target)
    if path.exists():
        return path
    compiler = shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("there is no g++")
    print(f"compiling kernels for {target} (about half a minute)", flush=True)
    with tempfile.TemporaryDirectory(dir=library.FOLDER) as folder:
        fresh = Path(folder) / path.name
        sources = [str(source) for source in sorted(library.FOLDER.glob("*.cpp"))]
        subprocess.run([compiler, *_COMMON, *_FLAGS[target], *sources, "-o", str(fresh)], check=True)  # noqa: S603
        fresh.replace(path)
    for stale in library.FOLDER.glob(f"forebay-{path.name.split('-')[1]}*.so"):
        if stale != path:
            stale.unlink()
    return path


def main(targets: list[str]) -> int:
    """Exit code 0 where the torch path will do."""
    unknown = sorted(set(targets) - set(_FLAGS))
    if unknown:
        print(f"{unknown[0]} is no target: known are {', '.join(_FLAGS)}", file=sys.stderr)
        return 2
    for target in targets or ["native"]:
        try:
            build(target)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            print(f"no kernels for {target}: {error}; the engine will compute by torch, several times slower", file=sys.stderr)
            if targets:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
