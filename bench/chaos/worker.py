"""`python -m bench.chaos.worker`: services.worker with BlockRunner for a model; the one thing that is replaced.

SIGUSR1 hangs its next step, SIGUSR2 its event loop.
"""

import asyncio
import signal
import threading
from types import SimpleNamespace

import torch

import services.worker.__main__ as service
from bench.chaos.runner import EOS, VOCAB_SIZE, BlockRunner
from services.worker.engine.config import EngineConfig
from services.worker.engine.engine import Engine
from services.worker.loading import Loaded
from services.worker.settings import WorkerSettings
from services.worker.wire import Served

MODEL = "chaos"
_VERSION = "c" * 16


async def load(settings: WorkerSettings, _: asyncio.Event) -> Loaded:
    """What services.worker.loading.load gives, without a model."""
    num_blocks = settings.num_blocks or 1024
    config = EngineConfig(
        block_size=settings.block_size,
        num_blocks=num_blocks,
        max_sequences=settings.max_sequences,
        max_step_tokens=settings.max_step_tokens,
        prefix_cache=settings.prefix_cache,
        class_preemption=settings.preemption,
        swap_blocks=num_blocks // 4,
        host_blocks=num_blocks // 4,
        speculation=2,
    )
    if settings.device != "cpu":
        _pretend_to_have_a_gpu()
    runner = BlockRunner(num_blocks, config.block_size, config.num_host_slots)
    engine = Engine(runner, config, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], max_model_len=4096, model_version=_VERSION)
    served = Served(f"{MODEL}@fp32", _VERSION, "chaos", VOCAB_SIZE, config.block_size, num_blocks, engine.max_model_len)
    signal.signal(signal.SIGUSR1, lambda *_: runner.hang.set())
    signal.signal(signal.SIGUSR2, lambda *_: _stick())
    return Loaded([(engine, served)])


def _pretend_to_have_a_gpu() -> None:
    """One whose driver tells its name once, and then nothing any more."""
    for name, says in (("get_device_properties", SimpleNamespace(name="none", uuid=None)), ("get_device_name", "none")):
        setattr(torch.cuda, name, lambda *_, says=says: says)
    torch.cuda.mem_get_info = _no_memory_info  # type: ignore[assignment]  # whatever it is asked


def _no_memory_info(*_: object) -> tuple[int, int]:
    raise RuntimeError("the driver is gone")


def _stick() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def main() -> None:
    """A worker's life."""
    setattr(service, "load", load)  # noqa: B010  # the one place where something of the service is replaced
    service.leave(service.main())


if __name__ == "__main__":
    main()
