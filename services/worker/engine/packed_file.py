"""Weights as the kernels read them, in a file that is written once and mapped by every worker of a host.

A file is one user's: what another owns, or may write, isn't read. It is named by all that its bytes depend on: the weights' version, the
level, the shape, the kernels and the code that packs. Whoever cuts a mapped file short kills the workers that read it then; `check` sees
it before.
"""

import hashlib
import json
import mmap
import os
import shutil
import stat
import struct
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

SUFFIX = ".packed"
_MAGIC = b"forebay packed 1"
_PAGE = 4096
_HEAD = struct.Struct("<16sQ32s")  # magic, bytes of the header that follows, its SHA-256
_MAX_HEADER_BYTES = 16 << 20
_NUM_SAMPLES = 64


class Packed:
    """A mapped file. `structures` are the kernels' own, see NativeDecoder."""

    def __init__(self, path: Path, memory: mmap.mmap, start: int, structures: bytes, ends: Sequence[int]) -> None:
        """Made by `find`."""
        self.path = path
        self.structures = structures
        self.ends = list(ends)
        self._memory = memory
        with warnings.catch_warnings():  # torch warns of memory that can't be written: it is never to be
            warnings.simplefilter("ignore")
            self.bytes = torch.frombuffer(memory, dtype=torch.uint8, offset=start)  # uint8 [ends[-1]]

    def check(self) -> None:
        """OSError: the file isn't as long as it was."""
        if self._memory.size() < len(self._memory):
            raise OSError(f"{self.path} has {self._memory.size()} of {len(self._memory)} bytes left: it was cut short while it was in use")


def file_of(folder: Path, *identity: str) -> Path:
    """Where weights of that identity lie, if they do."""
    return folder / (hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32] + SUFFIX)


def find(path: Path) -> Packed | None:
    """None: there is none, or none that can be trusted; it is removed where it is one's own."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not (_is_own(os.stat(path.parent)) and _is_own(os.fstat(descriptor))):
            return None
        packed = _read(path, descriptor)
        if packed is None:
            path.unlink(missing_ok=True)
        else:
            os.utime(path)  # used now: `make_room` takes others first
        return packed
    finally:
        os.close(descriptor)


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(path: Path, descriptor: int) -> Packed | None:
    size = os.fstat(descriptor).st_size
    head = os.pread(descriptor, _HEAD.size, 0)
    if len(head) < _HEAD.size:
        return None
    magic, length, digest = _HEAD.unpack(head)
    if magic != _MAGIC or length > _MAX_HEADER_BYTES:
        return None
    header = os.pread(descriptor, length, _HEAD.size)
    if hashlib.sha256(header).digest() != digest:
        return None
    told = json.loads(header)
    start = _start(length)
    if size != start + told["ends"][-1]:
        return None
    memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    packed = Packed(path, memory, start, bytes.fromhex(told["structures"]), told["ends"])
    return packed if _samples(packed.bytes) == told["samples"] else None


def write(path: Path, structures: bytes, ends: Sequence[int], weights: Tensor, max_bytes: int) -> None:
    """Writes what `find` finds; whoever else did so meanwhile wins. OSError: there is no room, or the folder is another's."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(path.parent.stat()):
        raise PermissionError(f"{path.parent} is another user's, or others may write it: choose a folder that is yours alone")
    assert len(weights) == ends[-1], (len(weights), ends)
    header = json.dumps({"structures": structures.hex(), "ends": list(ends), "samples": _samples(weights)}).encode()
    _make_room(path.parent, len(weights), max_bytes)
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(_HEAD.pack(_MAGIC, len(header), hashlib.sha256(header).digest()) + header)
            stream.seek(_start(len(header)))
            weights.numpy().tofile(stream)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.link(name, path)
        except FileExistsError:
            return
    finally:
        os.unlink(name)


def _make_room(folder: Path, num_bytes: int, max_bytes: int) -> None:
    """The least recently used go; whoever has one mapped keeps it. OSError: there would still be too little."""
    found = sorted(((file.stat(), file) for file in folder.glob(f"*{SUFFIX}")), key=lambda pair: pair[0].st_mtime)
    total = sum(of_file.st_size for of_file, _ in found)
    while found and total + num_bytes > max_bytes:
        of_file, file = found.pop(0)
        file.unlink(missing_ok=True)
        total -= of_file.st_size
    if total + num_bytes > max_bytes or shutil.disk_usage(folder).free < 2 * num_bytes:
        raise OSError(
            f"{folder} has no room for {num_bytes} bytes: {max_bytes} are allowed, {shutil.disk_usage(folder).free} free on its disk"
        )


def _start(header_bytes: int) -> int:
    """Where the weights begin: at a page."""
    return -(-(_HEAD.size + header_bytes) // _PAGE) * _PAGE


def _samples(weights: Tensor) -> str:
    """A digest of evenly spaced pages: not all, or a start would read everything."""
    digest, last = hashlib.sha256(), max(0, len(weights) - _PAGE)
    for index in range(_NUM_SAMPLES):
        start = last * index // (_NUM_SAMPLES - 1)
        digest.update(weights[start : start + _PAGE].numpy().tobytes())
    return digest.hexdigest()
