"""What a worker reads from its environment. Read once, in __main__."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Self

from pydantic import ByteSize, Field, StringConstraints

from services.common.settings import HostPort, HostPorts, ServiceSettings, listed
from services.worker.engine.config import Verification


class WorkerSettings(ServiceSettings):
    """One device. A field `x_y` is the variable FOREBAY_X_Y."""

    model: Annotated[str, StringConstraints(min_length=1)] = Field(
        description="PATH[=NAME][,PATH[=NAME]...]: GGUF files or Hugging Face folders, which share the device"
    )
    schedulers: HostPorts = Field("", description="host:port of every scheduler, separated by commas; the worker attaches to all of them")
    listen_address: HostPort = Field("127.0.0.1:0", description="host:port of WorkerService; port 0: any")
    advertised_address: HostPort | None = Field(
        None, description="host:port where gateways reach it; default: the address that it listens on"
    )
    worker_id: str = Field("", max_length=128, description="stable name of this worker; default: host name and port")
    node_id: str = Field("", max_length=128, description="name of the host, for GetFleet; default: the host name")
    region: str = Field("", max_length=64, description="label of where it is: requests from gateways of other regions cost their distance")
    memory_bytes_per_second: float | None = Field(None, gt=0, description="bandwidth of the device's memory; default: what NVML tells")
    flops: float | None = Field(None, gt=0, description="declared 16-bit floating-point operations per second, for operators")
    slowdown_celsius: float | None = Field(
        None, gt=0, le=200, description="from here on the device slows itself down; default: what NVML tells, else 83"
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu or cuda:N")
    level: str = Field(
        "auto",
        pattern=r"^(auto|fp32|bf16|int8|int4)$",
        description="fp32, bf16, int8 or int4 weights; auto: as few bits as the file has; by torch fp32 on a CPU, bf16 elsewhere",
    )
    kv_format: str = Field("auto", pattern=r"^(auto|fp32|bf16|int8|fp8)$", description="of the cache; auto: fp32 at level fp32, else bf16")
    backend: str = Field("auto", pattern=r"^(auto|native|torch)$", description="native CPU kernels or torch; auto: native where they fit")
    num_blocks: int | None = Field(None, ge=2, description="cache blocks; default: as many as fit into kv_memory")
    kv_memory: ByteSize = Field(ByteSize(512_000_000), gt=0, description="memory of the cache, such as 512MB or 2GiB")
    block_size: int = Field(16, ge=1, le=256, description="tokens per cache block")
    max_sequences: int = Field(32, ge=1, le=4096, description="most sequences in one step")
    max_step_tokens: int = Field(256, ge=1, le=1 << 16, description="most tokens in one step; a larger number delays the others' tokens")
    max_model_len: int | None = Field(None, ge=2, description="longest sequence in tokens; default: the model's, or what the cache holds")
    num_threads: int | None = Field(None, ge=1, le=1024, description="CPU threads of a step; default: one per core")
    prefix_cache: bool = Field(True, description="keep the blocks of ended sequences for prompts that begin alike")
    speculation: int | None = Field(
        None, ge=0, le=64, description="most draft tokens per sequence and step, 0: none; default: 8 on a CPU, none elsewhere"
    )
    draft_level: str = Field(
        "none",
        pattern=r"^(none|bf16|int8|int4)$",
        description="a second copy of the weights at this lower level drafts, such as int4 for bf16; none: lookups in the text itself do",
    )
    verification: Verification = Field(
        Verification.GUMBEL, description="gumbel: drafts change no token of a seed; rejection: they don't change the distribution"
    )
    host_memory: ByteSize = Field(
        ByteSize(0),
        ge=0,
        description="host memory for blocks that the prefix cache evicts, such as 8GiB; beside a CPU's cache, more kv_memory is better",
    )
    device_memory: ByteSize | None = Field(
        None,
        gt=0,
        description="of the device, for weights, cache and workspace of all models, such as 24GB; models take turns where their weights "
        "don't fit at once; default: all stay",
    )
    pinned_models: str = Field("", description="names of models that never give way to others in device_memory, separated by commas")
    weights_cache: Path | None = Field(
        None,
        description="folder for weights as the kernels read them: with device_memory all workers of a host map them from there, and start "
        "without reading them; default: each holds its own",
    )
    weights_cache_size: ByteSize = Field(
        ByteSize(64_000_000_000), gt=0, description="most bytes of weights_cache; the least recently used files go"
    )
    preemption: bool = Field(True, description="whether a request may take room that less urgent ones hold")
    swap_memory: ByteSize = Field(
        ByteSize(128_000_000),
        ge=0,
        description="host memory for what preempted sequences come back for; where it is full, or 0, they compute it again",
    )
    flight_record_file: Path | None = Field(
        None, description="file that outlives this process, for what was in the step that it died in; without, poison isn't found"
    )
    drain_seconds: float = Field(30.0, ge=0, description="after SIGTERM, how long running requests may go on")

    def by_model(self, has_cache: Callable[[Path], bool] = lambda _: True) -> list[Self]:
        """The settings of each model by itself, with an equal part of the memory for each that has a cache."""
        entries = [entry.strip() for entry in self.model.split(",") if entry.strip()]
        each = [self.model_copy(update={"model": entry}) for entry in entries]
        num_caches = sum(has_cache(one.model_path) for one in each)
        parts = {name: ByteSize(getattr(self, name) // max(1, num_caches)) for name in ("kv_memory", "host_memory", "swap_memory")}
        return [one.model_copy(update=parts) for one in each]

    @property
    def model_path(self) -> Path:
        """The path part of `model`, where that is one."""
        return Path(self.model.rpartition("=")[0] or self.model)

    @property
    def model_name(self) -> str:
        """The chosen name, or the file's own, without the level, where `model` is one."""
        path, _, name = self.model.rpartition("=")
        return name if path else self.model_path.name.removesuffix(".gguf").lower()

    @property
    def scheduler_addresses(self) -> list[str]:
        """host:port of each scheduler, without doubles."""
        return listed(self.schedulers)
