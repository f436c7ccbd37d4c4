"""Weights of a torch decoder that move: one flat copy in host memory, from which they come to the device part by part.

Lines for CUDA (pinned memory, a stream of its own) were not run on a GPU.
"""

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.engine.kernels.memory import ALIGNMENT
from services.worker.engine.models.decoder import Decoder, Layer


class _Place(NamedTuple):
    """A tensor of the decoder: the byte of the flat copy that it begins at, and how it lies there."""

    tensor: Tensor
    start: int
    shape: torch.Size
    stride: tuple[int, ...]


class MovingWeights:
    """Of one decoder, which can't compute until they were moved. Its parts: the embedding, each layer, the rest."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._device = decoder.device
        on_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._places: list[_Place] = []
        self._ends: list[int] = []
        offsets: dict[tuple[int, int], int] = {}  # of what lies there already: a tied embedding is the head
        regions: list[tuple[Tensor, int]] = []
        size = 0
        for part in _parts(decoder):
            for tensor in part:
                key = tensor.data_ptr(), tensor.numel()
                if key not in offsets:
                    offsets[key] = size
                    regions.append((_bytes(tensor), size))
                    size += tensor.nbytes + -tensor.nbytes % ALIGNMENT
                self._places.append(_Place(tensor, offsets[key], tensor.shape, _stride(tensor)))
            self._ends.append(size)
        self.weights = torch.zeros(size, dtype=torch.uint8, pin_memory=on_cuda)
        for region, start in regions:
            self.weights[start : start + len(region)].copy_(region)
        self._arrival = _Arrival()
        decoder.await_part = self._arrival.wait
        self.move(None)

    def move(self, place: Tensor | None) -> None:
        """The decoder reads its weights at `place` from now on, where `bring` has still to copy them. None: nowhere.

        `place` is uint8 of one dimension on its device. Not while a step computes, and not before the last `bring` is over.
        """
        assert place is None or len(place) == len(self.weights), (place.shape, self.weights.shape)
        self._place = place
        self._arrival.begin()
        nowhere = torch.empty(0, dtype=torch.uint8, device=self._device).untyped_storage()
        with torch.no_grad():
            for tensor, start, shape, stride in self._places:
                if place is None:  # its memory is free, and whoever reads it all the same fails
                    tensor.set_(nowhere, 0, (0,) * len(shape), stride)
                    continue
                offset = place.storage_offset() + start
                assert offset % tensor.itemsize == 0, (offset, tensor.dtype)
                tensor.set_(place.untyped_storage(), offset // tensor.itemsize, shape, stride)

    def bring(self) -> None:
        """Copies the weights to where they were moved, on any thread; steps may compute meanwhile, each layer as soon as it is there."""
        assert self._place is not None
        start = 0
        for number, end in enumerate(self._ends, 1):
            with torch.cuda.stream(self._stream) if self._stream is not None else torch.inference_mode():
                self._place[start:end].copy_(self.weights[start:end], non_blocking=self._stream is not None)
            if self._stream is not None:
                self._stream.synchronize()
            self._arrival.there(number)
            start = end


class _Arrival:
    """How many parts are there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_parts = 0

    def begin(self) -> None:
        """None of them."""
        with self._changed:
            self._num_parts = 0

    def there(self, count: int) -> None:
        """So many."""
        with self._changed:
            self._num_parts = count
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Until so many are."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_parts >= count)


def _stride(tensor: Tensor) -> tuple[int, ...]:
    """As it lies in the flat copy: as before, transposed perhaps, but without gaps."""
    return tensor.stride() if tensor.t().is_contiguous() else tensor.contiguous().stride()


def _bytes(tensor: Tensor) -> Tensor:
    """uint8, one dimension, in the order of `_stride`."""
    return (tensor.t() if tensor.t().is_contiguous() else tensor.contiguous()).flatten().view(torch.uint8)


def _parts(decoder: Decoder) -> list[list[Tensor]]:
    head = [tensor for tensor in (decoder.head.weight, decoder.head.bias) if tensor is not None]
    return [[decoder.embedding], *(_of_layer(layer) for layer in decoder.layers), [decoder.norm.weight, *head]]


def _of_layer(layer: Layer) -> list[Tensor]:
    linears = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    norms = (layer.attention_norm, layer.attention.q_norm, layer.attention.k_norm, layer.mlp_norm)
    tensors = [norm.weight for norm in norms if norm is not None] + [linear.weight for linear in linears]
    return tensors + [linear.bias for linear in linears if linear.bias is not None]
