"""The systems that are compared, each started, asked and stopped the same way: a load in, what its clients saw out.

All run on this machine's cores with the model loaded; none knows what is compared. Raises PeerError for one that doesn't come up or answer.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import httpx
import psutil

from bench import peer_checkpoint, peer_venvs
from bench.mesh import HttpFace, started
from bench.peer_venvs import PeerError
from bench.serving import Timing, closed_loop, http_client, http_session

_READY_SECONDS = 600.0
_CACHE_BYTES = 1 << 30
_STEP_TOKENS = 256  # prompts come in pieces as large as OpenVINO's


@dataclass(frozen=True)
class Load:
    """Prompts' token ids, asked for by so many clients, each for so many tokens, whatever the model would end at."""

    prompts: Sequence[list[int]]
    concurrency: int
    max_tokens: int


@dataclass(frozen=True)
class Site:
    """What every system is given: the model, room for so many sequences of so many tokens, prefix caches on or off.

    `root` is where peers are installed.
    """

    gguf: Path
    root: Path
    max_sequences: int
    max_length: int
    prefix_cache: bool

    @property
    def num_threads(self) -> int:
        """All cores, for every system."""
        return len(os.sched_getaffinity(0))


class System(Protocol):
    """One engine or server with the model loaded."""

    @property
    def pid(self) -> int: ...

    def run(self, load: Load) -> list[Timing]: ...


@dataclass(frozen=True)
class Server:
    """One that is asked over HTTP."""

    pid: int
    face: HttpFace

    def run(self, load: Load) -> list[Timing]:
        """See System."""
        try:
            timings = asyncio.run(self._closed_loop(load))
        except (aiohttp.ClientError, RuntimeError) as error:
            raise PeerError(f"{self.face.url} failed: {error!r}") from error
        if any(round(sum(timing.tokens)) != load.max_tokens for timing in timings):
            raise PeerError(f"{self.face.url} gave another number of tokens than {load.max_tokens}")
        return timings

    async def _closed_loop(self, load: Load) -> list[Timing]:
        prompts = iter(load.prompts)
        async with http_session() as client:
            ask = http_client(self.face, client)

            async def send() -> Timing:
                timing = Timing(time.perf_counter())
                await ask(next(prompts), load.max_tokens, 0, timing)
                return timing

            return await closed_loop(send, load.concurrency, len(load.prompts), lambda: None)


class Pipeline:
    """One that is a library: a process beside this one holds it, and its clients too."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self._name = name
        self._process = process

    def run(self, load: Load) -> list[Timing]:
        """See System."""
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps({"prompts": load.prompts, "concurrency": load.concurrency, "max_tokens": load.max_tokens}) + "\n"
        )
        self._process.stdin.flush()
        return [Timing(**timing) for timing in self.read()["timings"]]

    def read(self) -> dict[str, Any]:
        """Its next line of JSON."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise PeerError(f"{self._name} ended before its answer")


def suspend(system: System) -> None:
    """Stops all its processes where they are: some spin while they wait."""
    for process in _tree(system.pid):
        process.suspend()


def resume(system: System) -> None:
    """Lets them go on."""
    for process in _tree(system.pid):
        process.resume()


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def mesh(level: str) -> Callable[[Site], AbstractContextManager[System]]:
    """Forebay with weights at a level. Speculation is off, as with the peers."""

    @contextmanager
    def opened(site: Site) -> Iterator[System]:
        environment = {
            "FOREBAY_PREFIX_CACHE": str(site.prefix_cache).lower(),
            "FOREBAY_SPECULATION": "0",
            "FOREBAY_MAX_SEQUENCES": str(site.max_sequences),
            "FOREBAY_MAX_STEP_TOKENS": str(_STEP_TOKENS),
            "FOREBAY_KV_MEMORY": str(_CACHE_BYTES),
        }
        with started(["--model", str(site.gguf), "--level", level], environment) as up:
            server = Server(up.pid, up.http)
            try:
                yield server
            finally:
                resume(server)

    return opened


@contextmanager
def llama_cpp(site: Site) -> Iterator[System]:
    """llama.cpp's server on the GGUF as it is. A slot has its own part of the context, so there are as many parts as sequences."""
    python = peer_venvs.ensure("llama_cpp", site.root)
    command = [
        *(str(python.with_name("llama-cpp-server")), "--model", str(site.gguf), "--ctx-size", str(site.max_length * site.max_sequences)),
        *("--host", "127.0.0.1", "--port", "{port}", "--", "--threads", str(site.num_threads), "--parallel", str(site.max_sequences)),
        *("--no-ui", "--offline", "--cache-ram", "0", "--cache-prompt" if site.prefix_cache else "--no-cache-prompt"),
    ]
    with _server("llama_cpp", command, site.root) as server:
        yield server


@contextmanager
def vllm(site: Site) -> Iterator[System]:
    """vLLM in bf16. Its own choice of threads takes one per core with two siblings, so it is told to take all."""
    python = peer_venvs.ensure("vllm", site.root)
    folder = peer_checkpoint.safetensors_folder(site.gguf, site.root)
    prefix = ["--enable-prefix-caching", "--block-size", "64"] if site.prefix_cache else ["--no-enable-prefix-caching"]
    command = [
        *(str(python.with_name("vllm")), "serve", str(folder.resolve()), "--served-model-name", "peer", "--dtype", "bfloat16"),
        *(
            "--host",
            "127.0.0.1",
            "--port",
            "{port}",
            "--max-model-len",
            str(site.max_length),
            "--max-num-seqs",
            str(site.max_sequences),
            *prefix,
        ),
    ]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_BYTES >> 30),
        "VLLM_CACHE_ROOT": str((site.root / "vllm-cache").resolve()),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with _server("vllm", command, site.root, environment) as server:
        yield server


def engine(level: str) -> Callable[[Site], AbstractContextManager[System]]:
    """Forebay's engine called in its own process: the bound of what the mesh can reach."""

    @contextmanager
    def opened(site: Site) -> Iterator[System]:
        options = {
            "path": str(site.gguf),
            "level": level,
            "num_threads": site.num_threads,
            "prefix_cache": site.prefix_cache,
            "max_sequences": site.max_sequences,
            "max_length": site.max_length,
            "max_step_tokens": _STEP_TOKENS,
        }
        site.root.mkdir(parents=True, exist_ok=True)
        with _pipeline(f"engine_{level}", [sys.executable, "-m", "bench.peer_engine", json.dumps(options)], site.root) as pipeline:
            yield pipeline

    return opened


@contextmanager
def openvino(site: Site) -> Iterator[System]:
    """OpenVINO GenAI's continuous batching in int8, called in its own process: no HTTP between it and its clients."""
    python = peer_venvs.ensure("openvino", site.root)
    folder = peer_checkpoint.openvino_folder(peer_checkpoint.safetensors_folder(site.gguf, site.root), python)
    script = Path(__file__).with_name("peer_openvino.py")
    options = {"folder": str(folder), "num_threads": site.num_threads, "cache_gb": _CACHE_BYTES >> 30, "prefix_cache": site.prefix_cache}
    with _pipeline("openvino", [str(python), str(script), json.dumps(options)], site.root) as pipeline:
        yield pipeline


SYSTEMS: dict[str, Callable[[Site], AbstractContextManager[System]]] = {
    "mesh_int4": mesh("int4"),
    "mesh_int8": mesh("int8"),
    "mesh_bf16": mesh("bf16"),
    "engine_int4": engine("int4"),
    "llama_cpp": llama_cpp,
    "vllm": vllm,
    "openvino": openvino,
}


@contextmanager
def _pipeline(name: str, command: Sequence[str], root: Path) -> Iterator[Pipeline]:
    """A library's process once its model is loaded. What it logs is in a file."""
    with (root / f"{name}-run.log").open("w") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    pipeline = Pipeline(name, process)
    with _ended(process):
        pipeline.read()
        yield pipeline


@contextmanager
def _server(name: str, command: Sequence[str], root: Path, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """A server on a free port, which takes the place of {port}, once it is healthy. Its output is in a log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    log = root / f"{name}-run.log"
    with log.open("w") as output:
        words = [word.replace("{port}", port) for word in command]
        process = subprocess.Popen(words, env={**os.environ, **(environment or {})}, stdout=output, stderr=output)
    with _ended(process):
        _wait(f"http://127.0.0.1:{port}/health", process, f"{name} did not come up, see {log}")
        yield Server(process.pid, HttpFace(f"http://127.0.0.1:{port}/v1", "peer"))


def _wait(url: str, process: subprocess.Popen[bytes], failure: str) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=2).status_code == 200:
                return
        time.sleep(0.2)
    raise PeerError(failure)


@contextmanager
def _ended(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends it and its children with the block."""
    try:
        yield
    finally:
        family = _tree(process.pid) if process.poll() is None else []
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.resume()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=10)
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
