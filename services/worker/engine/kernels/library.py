"""Finds the compiled library that fits this machine, and declares its C structures. Compiles nothing and knows no model.

Libraries lie beside the sources, named by what they were compiled for and by a digest of the sources: one of other sources or of
another CPU isn't found.
"""

import ctypes
import hashlib
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).parent
FORMATS = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}
CACHE_FORMATS = {"fp32": 0, "bf16": 1, "int8": 2, "fp8": 3}
_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
# What images carry, best first: x86-64 levels, and of what v4 leaves open the two that the kernels want.
LEVELS = {
    "v4": _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"},
    "v3": _V3,
}


class Matrix(ctypes.Structure):
    """See matmul.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_inputs", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class Layer(ctypes.Structure):
    """See forward.cpp."""

    _fields_ = (
        ("attention_norm", ctypes.c_void_p),
        ("qkv", Matrix),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("out", Matrix),
        ("mlp_norm", ctypes.c_void_p),
        ("gate_up", Matrix),
        ("down", Matrix),
    )


class Model(ctypes.Structure):
    """See forward.cpp."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "sliding_window")),
        ("norm_epsilon", ctypes.c_float),
        ("rows_format", ctypes.c_int32),
        ("layers", ctypes.POINTER(Layer)),
        ("norm", ctypes.c_void_p),
        ("embedding", Matrix),
        ("head", Matrix),
        ("vocab_size", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class Cache(ctypes.Structure):
    """See cache.h."""

    _fields_ = (
        ("tiles", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("block_bytes", "layer_bytes", "block_scales", "layer_scales")),
        *((name, ctypes.c_int32) for name in ("block_size", "slots", "width", "num_kv_heads", "format", "unused")),
    )


class Step(ctypes.Structure):
    """See forward.cpp."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_sequences", "table_width", "num_logit_rows")),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "turns", "query_starts", "tables", "logit_rows", "logits")),
    )


class Peak(ctypes.Structure):
    """See sampler.cpp."""

    _fields_ = (("logit", ctypes.c_float), ("token", ctypes.c_int32))


class SampledRow(ctypes.Structure):
    """See sampler.cpp."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("peak", "temperature", "top_p", "min_p")),
        ("top_k", ctypes.c_int32),
        ("key0", ctypes.c_uint32),
        ("key1", ctypes.c_uint32),
        ("token", ctypes.c_int32),
    )


def shift(structure: ctypes.Structure, distance: int) -> None:
    """Moves all that a Model or Layer points to; not a Model's layers, which are shifted one by one."""
    for name, kind in structure._fields_:  # type: ignore[misc]
        value = getattr(structure, name)
        if kind is ctypes.c_void_p and value is not None:
            setattr(structure, name, value + distance)
        elif isinstance(value, ctypes.Structure):
            shift(value, distance)


@dataclass(frozen=True)
class Library:
    """An open library. `name` says what it was compiled for and from: equal names, equal numbers."""

    name: str
    functions: ctypes.CDLL


@lru_cache
def find() -> Library | None:
    """The library for this machine, or None."""
    flags = cpu_flags()
    for target in (native_target(), *(level for level, needed in LEVELS.items() if needed <= flags)):
        path = library_path(target)
        if path.is_file():
            return load(path)
    return None


def load(path: Path) -> Library:
    """Opens a library, named as `library_path` names it. OSError."""
    target, _, sources = path.stem.removeprefix("forebay-").rpartition("-")
    return Library(f"{target}-{sources[:8]}", _declare(ctypes.CDLL(str(path))))


def check(code: int, what: str) -> None:
    """OSError where a function of the library came back with an error number."""
    if code:
        raise OSError(code, f"{what}: {os.strerror(code)}")


def library_path(target: str) -> Path:
    """Where the library for `target` lies: native_target() or one of LEVELS."""
    return FOLDER / f"forebay-{target}-{digest()}.so"


def native_target() -> str:
    """This very CPU."""
    return "native-" + hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:8]


@lru_cache
def digest() -> str:
    """Of the sources, 16 hex characters."""
    hashed = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp")]):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


@lru_cache
def cpu_flags() -> frozenset[str]:
    """What this CPU can do, in the kernel's words; empty where it doesn't say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def _declare(functions: ctypes.CDLL) -> ctypes.CDLL:
    runner = ctypes.POINTER(ctypes.c_void_p)
    functions.forebay_open.argtypes = [ctypes.POINTER(Model), ctypes.POINTER(Cache), ctypes.c_int, ctypes.c_int, runner]
    functions.forebay_open.restype = ctypes.c_int
    functions.forebay_forward.argtypes = [ctypes.c_void_p, ctypes.POINTER(Step)]
    functions.forebay_forward.restype = ctypes.c_int
    functions.forebay_move.argtypes = [ctypes.c_void_p, ctypes.POINTER(Model)]
    functions.forebay_move.restype = None
    functions.forebay_bring.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_int64),
        ctypes.c_int,
    ]
    functions.forebay_bring.restype = None
    functions.forebay_close.argtypes = [ctypes.c_void_p]
    functions.forebay_close.restype = None
    functions.forebay_peaks.argtypes = [ctypes.c_void_p, ctypes.POINTER(Peak), ctypes.c_int, ctypes.c_int, ctypes.c_int]
    functions.forebay_peaks.restype = ctypes.c_int
    functions.forebay_sample.argtypes = [ctypes.POINTER(SampledRow), ctypes.c_int, ctypes.c_int, ctypes.c_int]
    functions.forebay_sample.restype = ctypes.c_int
    functions.forebay_probe_open.argtypes = [ctypes.c_int, ctypes.c_int, runner]
    functions.forebay_probe_open.restype = ctypes.c_int
    functions.forebay_probe_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    functions.forebay_probe_read.restype = ctypes.c_double
    functions.forebay_probe_multiply.argtypes = [ctypes.c_void_p, ctypes.POINTER(Matrix), ctypes.c_int]
    functions.forebay_probe_multiply.restype = ctypes.c_double
    functions.forebay_probe_close.argtypes = [ctypes.c_void_p]
    functions.forebay_probe_close.restype = None
    return functions
