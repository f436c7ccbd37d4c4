"""The headers by themselves, in C++: vectors against plain scalar code on every path that this CPU can run, and the team of threads."""

import subprocess
from pathlib import Path

import pytest

from services.worker.engine.kernels import library
from tools.build_kernels import FLAGS, compile_sources

HERE = Path(__file__).parent
INCLUDE = ["-O0", f"-I{library.FOLDER}"]
# Beside what images carry: AVX-512 without bf16, as on CPUs of 2019.
PATHS = {
    "v3": (FLAGS["v3"], library.LEVELS["v3"]),
    "v4": (FLAGS["v4"], library.LEVELS["v4"]),
    "v4-without-bf16": ([flag for flag in FLAGS["v4"] if "bf16" not in flag], library.LEVELS["v4"] - {"avx512_bf16"}),
}


def check(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), command


@pytest.mark.parametrize("path", [name for name, (_, needed) in PATHS.items() if needed <= library.cpu_flags()])
def test_vectors_are_what_scalars_are(path: str, tmp_path: Path) -> None:
    compile_sources([HERE / "simd.cpp"], tmp_path / "simd", [*PATHS[path][0], *INCLUDE])
    check([str(tmp_path / "simd")])


def test_a_team_shares_its_loops_and_waits_for_itself(tmp_path: Path) -> None:
    compile_sources([HERE / "team.cpp"], tmp_path / "team", [*FLAGS["v3"], *INCLUDE])
    for num_threads, num_spins in [(1, 0), (2, 0), (2, 2000), (5, 0), (5, 100)]:
        check([str(tmp_path / "team"), str(num_threads), str(num_spins)])
