"""Runs the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer, and their team of threads under ThreadSanitizer.

Both paths of simd.h are tested where this CPU has both. Needs g++ and its sanitizers. Usage: python tools/sanitize_kernels.py
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from services.worker.engine.kernels import library
from tools.build_kernels import FLAGS, NoKernels, compile_sources

_TESTS = Path("tests/unit/worker/engine")
_MEMORY = [
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=all",
    "-shared",
]
_THREADS = ["-O1", "-g", "-fsanitize=thread", f"-I{library.FOLDER}"]
_TEAMS = [("2", "0"), ("2", "2000"), ("5", "0"), ("5", "100")]  # (threads, spins)


def check_memory(folder: Path) -> int:
    """The tests of the native decoder and sampler on instrumented libraries; exit code."""
    for target in ("native", "v3"):
        print(f"compiling kernels for {target} with sanitizers", flush=True)
        compile_sources(sorted(library.FOLDER.glob("*.cpp")), folder / f"forebay-{target}-sanitized.so", [*FLAGS[target], *_MEMORY])
    # The second, as the sanitizer looks for what throws exceptions before Python has loaded it.
    runtimes = " ".join(_runtime(name) for name in ("libasan.so", "libstdc++.so"))
    # Python's own leaks are none of ours; a test asks for more memory than there is.
    options = {"LD_PRELOAD": runtimes, "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-s",
        "--timeout",
        "3000",
        *(str(_TESTS / f"test_{name}.py") for name in ("native", "moving_weights", "sampler")),
    ]
    return subprocess.run(command, env=os.environ | options | {"FOREBAY_TEST_KERNELS": str(folder)}).returncode  # noqa: S603


def _runtime(name: str) -> str:
    return subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603, S607


def check_threads(folder: Path) -> int:
    """team.h alone: Python and torch aren't instrumented, so their own locks would look like races. Exit code."""
    driver = folder / "team"
    compile_sources([_TESTS / "kernels" / "team.cpp"], driver, [*FLAGS["v3"], *_THREADS])
    for threads, spins in _TEAMS:
        print(f"a team of {threads} threads, {spins} spins", flush=True)
        code = subprocess.run([str(driver), threads, spins]).returncode  # noqa: S603
        if code:
            return code
    return 0


def main() -> int:
    """0 where nothing was found."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return check_threads(Path(folder)) or check_memory(Path(folder))
        except NoKernels as error:
            print(f"no sanitizers: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
