"""The decoder in C++ on the CPU: packs the weights once, then computes a step by a single call. See kernels/forward.cpp.

Serves the same architectures and levels as models/decoder.py, which is its oracle; `unsupported` names what it can't hold.
"""

import ctypes
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.engine.config import ModelConfig
from services.worker.engine.kernels import library
from services.worker.engine.kernels.cache import NativeCache
from services.worker.engine.kernels.memory import ALIGNMENT, Flat
from services.worker.engine.kernels.packing import PANEL, interleave, pack
from services.worker.engine.models.rotary import Rotary
from services.worker.engine.models.step import Step
from services.worker.engine.packed_file import Packed
from services.worker.engine.quantization import GROUP, Quantized, Weights, stack, tensor

MAX_HEAD_DIM = 256  # as kMaxWidth in attention.h
MAX_BLOCK_SIZE = 256
MAX_TASKS = 1 << 30  # heads of all tokens of a step: the kernels count them in 32 bits
# How long a thread that waits for the others spins before it sleeps: some microseconds. See ARCHITECTURE.md, decision 14.
NUM_SPINS = 2000


def unsupported(config: ModelConfig, block_size: int) -> str | None:
    """Why the native decoder can't serve this model in blocks of this size; None where it can."""
    if config.head_dim > MAX_HEAD_DIM:
        return f"head_dim is {config.head_dim}; the kernels hold {MAX_HEAD_DIM}"
    if block_size > MAX_BLOCK_SIZE:
        return f"block_size is {block_size}; the kernels hold {MAX_BLOCK_SIZE}"
    return None


class NativeDecoder:
    """A whole model. `num_threads` compute a step together, the caller's among them."""

    def __init__(
        self, config: ModelConfig, weights: Weights | Packed, version: str, level: str, compiled: library.Library, num_threads: int
    ) -> None:
        """`weights` are packed here, unless they come from a file of packed ones."""
        self.config = config
        self.version = version
        self.device = torch.device("cpu")
        self._runner, self._process = ctypes.c_void_p(), os.getpid()
        self._cache: NativeCache | None = None
        self._functions = compiled.functions
        self._num_threads = num_threads
        self._packed = weights if isinstance(weights, Packed) else None
        self._ends: list[int] = []  # of its parts: the embedding, each layer, the rest
        if self._packed is not None:
            self._memory, self._ends = self._packed.bytes, self._packed.ends
            self._layers, self._model = _pointing_to(self._packed, config.num_layers)
        else:
            self._pack(weights, level)  # type: ignore[arg-type]
            self._memory = self._flat.bytes
        self._place: Tensor | None = self._memory  # where the structures point to; None: nowhere
        self._rotary = Rotary(config, torch.float32, "cpu")

    def __del__(self) -> None:
        self._close()

    @property
    def matrices(self) -> list[library.Matrix]:
        """Of the layers, in the order of a step; then the head."""
        return [matrix for layer in self._layers for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down)] + [self._model.head]

    # --- weights that move

    @property
    def weights(self) -> Tensor:
        """uint8, one dimension: all weights, in host memory, as the kernels read them."""
        return self._memory

    @property
    def ends(self) -> list[int]:
        """Bytes of `weights` up to the end of each part."""
        return self._ends

    def structures(self) -> bytes:
        """What tells the kernels where weights are, with pointers that count the first of them as `ALIGNMENT`. Before the first move."""
        assert self._place is self._memory, "the weights were moved"
        parts = [*(type(layer).from_buffer_copy(layer) for layer in self._layers), type(self._model).from_buffer_copy(self._model)]
        for part in parts:
            library.shift(part, ALIGNMENT - self._memory.data_ptr())  # none of them is 0, which means nowhere
        parts[-1].layers = None
        return b"".join(bytes(part) for part in parts)

    def move(self, place: Tensor | None) -> None:
        """The kernels read the weights at `place` from now on, where `bring` has still to copy them. None: nowhere, it can't compute.

        OSError: they are gone from the file that they were in. Not while a step computes, and not before the last `bring` is over.
        """
        assert self._runner, "no cache is bound yet"
        assert place is None or len(place) == len(self.weights), (place.shape, self.weights.shape)
        if place is not None:
            if self._packed is not None:
                self._packed.check()
            base = ctypes.cast(self._model.embedding.data, ctypes.c_void_p).value
            assert base is not None
            distance = place.data_ptr() - base  # the embedding comes first
            for part in (self._model, *self._layers):
                library.shift(part, distance)
            self._functions.forebay_move(self._runner, ctypes.byref(self._model))
        self._place = place

    def bring(self) -> None:
        """Copies the weights to where they were moved, on any thread; steps may compute meanwhile, each layer as soon as it is there."""
        assert self._place is not None
        ends = (ctypes.c_int64 * len(self._ends))(*self._ends)
        self._functions.forebay_bring(self._runner, self._place.data_ptr(), self.weights.data_ptr(), ends, len(ends))

    def bind(self, kv: NativeCache) -> None:
        """Starts the threads of a step, which reads and writes `kv` from now on. OSError: the system gives no more threads or memory."""
        self._close()
        self._process = os.getpid()
        code = self._functions.forebay_open(
            ctypes.byref(self._model), ctypes.byref(kv.wire()), self._num_threads, NUM_SPINS, ctypes.byref(self._runner)
        )
        library.check(code, f"{self._num_threads} threads of the CPU kernels")
        self._cache = kv

    def forward(self, step: Step, kv: NativeCache) -> Tensor:
        """Logits [num_logit_rows, vocab] fp32. Writes the tokens' keys and values into `kv`, which stays the same between calls.

        OSError: there is no memory for so many tokens; nothing was written.
        """
        assert self._place is not None, "the weights are nowhere"
        if kv is not self._cache or self._process != os.getpid():
            self.bind(kv)
        longest = max(step.context_lengths)
        self._rotary.reach(longest)
        needed = [-(-context // kv.block_size) for context in step.context_lengths]
        width = max(needed)
        tables: list[int] = []
        starts = [0]
        for table, count, length in zip(step.block_tables, needed, step.query_lengths, strict=True):
            assert count <= len(table), (count, len(table))
            tables += table[:count]
            tables += [0] * (width - count)
            starts.append(starts[-1] + length)
        positions = step.positions()
        self._check(step, kv, positions, tables)
        logits = torch.empty(len(step.logit_rows), self.config.vocab_size)
        # Kept in a name until the call is over.
        ints = [torch.tensor(values, dtype=torch.int32) for values in (step.tokens, positions, starts, tables, step.logit_rows)]
        tokens, places, query_starts, block_tables, rows = (values.data_ptr() for values in ints)
        wire = library.Step(
            num_tokens=len(step.tokens),
            num_sequences=len(step.query_lengths),
            table_width=width,
            num_logit_rows=len(step.logit_rows),
            tokens=tokens,
            positions=places,
            turns=self._rotary.table.data_ptr(),
            query_starts=query_starts,
            tables=block_tables,
            logit_rows=rows,
            logits=logits.data_ptr(),
        )
        code = self._functions.forebay_forward(self._runner, ctypes.byref(wire))
        library.check(code, f"a step of {len(step.tokens)} tokens")
        return logits

    def _close(self) -> None:
        # A forked child has what its parent wrote down of the threads, but not the threads: it would wait for them for ever.
        if self._runner and self._process == os.getpid():
            self._functions.forebay_close(self._runner)
        self._runner, self._cache = ctypes.c_void_p(), None

    def _check(self, step: Step, kv: NativeCache, positions: list[int], tables: list[int]) -> None:
        """Asserts all that the kernels take on trust."""
        num_tokens = len(step.tokens)
        assert num_tokens == len(positions), (num_tokens, len(positions))
        assert num_tokens * (self.config.num_heads + self.config.num_kv_heads) <= MAX_TASKS, num_tokens
        assert min(step.query_lengths) > 0, step.query_lengths
        assert 0 <= min(positions) <= max(positions) < self.config.max_position, (min(positions), max(positions), self.config.max_position)
        assert 0 <= min(step.tokens) <= max(step.tokens) < self.config.vocab_size, (min(step.tokens), max(step.tokens))
        assert 0 <= min(tables) <= max(tables) < kv.num_blocks, (min(tables), max(tables), kv.num_blocks)
        if step.logit_rows:
            assert 0 <= min(step.logit_rows) <= max(step.logit_rows) < num_tokens, (min(step.logit_rows), max(step.logit_rows), num_tokens)

    # --- packing

    def _pack(self, weights: Weights, level: str) -> None:
        config = self.config
        self._flat = Flat(_most_bytes(config))  # what the structures point to, until the weights are moved
        embedding = self._matrix(weights("model.embed_tokens.weight"))
        self._end_part()
        self._layers = (library.Layer * config.num_layers)()
        for index in range(config.num_layers):
            self._layers[index] = self._layer(weights, index)
            self._end_part()
        self._model = self._whole(weights, level, embedding)
        self._end_part()

    def _end_part(self) -> None:
        self._ends.append(self._flat.num_bytes)

    def _whole(self, weights: Weights, level: str, embedding: library.Matrix) -> library.Model:
        config = self.config
        head = embedding if config.tied_embeddings else self._matrix(weights("lm_head.weight"))
        return library.Model(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            sliding_window=config.sliding_window or 0,
            norm_epsilon=config.norm_epsilon,
            rows_format=library.FORMATS["int8" if level == "int4" else level],
            layers=ctypes.cast(self._layers, ctypes.POINTER(library.Layer)),
            norm=self._floats(weights("model.norm.weight")),
            embedding=embedding,
            head=head,
            vocab_size=config.vocab_size,
        )

    def _layer(self, weights: Weights, index: int) -> library.Layer:
        prefix, config = f"model.layers.{index}", self.config
        attention = f"{prefix}.self_attn"
        sides = [f"{attention}.{side}_proj" for side in "qkv"]
        bias = torch.cat([tensor(weights(f"{name}.bias")) for name in sides]) if config.attention_bias else None
        return library.Layer(
            attention_norm=self._floats(weights(f"{prefix}.input_layernorm.weight")),
            qkv=self._matrix(stack([weights(f"{name}.weight") for name in sides]), bias),
            query_norm=self._floats(weights(f"{attention}.q_norm.weight")) if config.qk_norm else None,
            key_norm=self._floats(weights(f"{attention}.k_norm.weight")) if config.qk_norm else None,
            out=self._matrix(weights(f"{attention}.o_proj.weight"), width=config.head_dim),
            mlp_norm=self._floats(weights(f"{prefix}.post_attention_layernorm.weight")),
            gate_up=self._matrix(_gates(*(weights(f"{prefix}.mlp.{name}_proj.weight") for name in ("gate", "up")))),
            down=self._matrix(weights(f"{prefix}.mlp.down_proj.weight")),
        )

    def _matrix(self, weight: Tensor | Quantized, bias: Tensor | None = None, width: int | None = None) -> library.Matrix:
        """`width` is that of a head where the inputs are heads side by side."""
        if isinstance(weight, Quantized):
            num_outputs, num_inputs = weight.values.shape
            kind = "int8" if weight.offsets is None else "int4"
        else:
            num_outputs, num_inputs = weight.shape
            num_inputs += (-width % GROUP) * (num_inputs // width) if width else -num_inputs % GROUP
            kind = "fp32" if weight.dtype == torch.float32 else "bf16"
        packed = self._flat.place(pack(weight, width))
        num_outputs += -num_outputs % PANEL
        return library.Matrix(
            data=packed.data_ptr(),
            bias=None if bias is None else self._floats(bias, num_outputs),
            num_inputs=num_inputs,
            num_outputs=num_outputs,
            format=library.FORMATS[kind],
        )

    def _floats(self, values: Tensor | Quantized, count: int | None = None) -> int:
        """fp32, filled up with zeros to `count`, or to whole groups."""
        values = tensor(values).float()
        padded = F.pad(values, (0, (count or len(values) + -len(values) % GROUP) - len(values))).contiguous()
        return self._flat.place(padded.view(torch.uint8)).data_ptr()


def _pointing_to(packed: Packed, num_layers: int) -> tuple[ctypes.Array[library.Layer], library.Model]:
    """The structures of a file, which point to where it is mapped."""
    size = num_layers * ctypes.sizeof(library.Layer)
    assert len(packed.structures) == size + ctypes.sizeof(library.Model), packed.path
    layers = (library.Layer * num_layers).from_buffer_copy(packed.structures[:size])
    model = library.Model.from_buffer_copy(packed.structures[size:])
    for part in (model, *layers):
        library.shift(part, packed.bytes.data_ptr() - ALIGNMENT)
    model.layers = ctypes.cast(layers, ctypes.POINTER(library.Layer))
    return layers, model


def _most_bytes(config: ModelConfig) -> int:
    """What the weights can take at any level: four bytes each, filled up to whole panels and groups."""

    def filled(number: int) -> int:
        return number + -number % max(PANEL, GROUP)

    hidden, inner, head = filled(config.hidden_size), filled(config.intermediate_size), filled(config.head_dim)
    qkv = filled((config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    matrices = qkv * hidden + hidden * config.num_heads * head + 3 * hidden * inner
    vectors = 2 * hidden + qkv + 2 * head + 16 * ALIGNMENT
    return 4 * (config.num_layers * (matrices + vectors) + 2 * filled(config.vocab_size) * hidden + hidden + 16 * ALIGNMENT)


def _gates(gate: Tensor | Quantized, up: Tensor | Quantized) -> Tensor | Quantized:
    """Gate and up in one matrix, in the order in which the kernels multiply them; both are filled up to whole groups of outputs."""
    both = stack([gate, up])
    num_outputs = len(both.values if isinstance(both, Quantized) else both) // 2
    missing = -num_outputs % GROUP
    order = interleave(num_outputs + missing)
    half = num_outputs + missing
    within = order % half
    # Places in [gate; up; one row of zeros].
    source = torch.where(within < num_outputs, order // half * num_outputs + within, 2 * num_outputs)
    if isinstance(both, Tensor):
        return torch.cat([both, both.new_zeros(1, both.shape[1])])[source]
    return _with_empty_row(both).rows(source)


def _with_empty_row(weight: Quantized) -> Quantized:
    def grow(part: Tensor) -> Tensor:
        return torch.cat([part, part.new_zeros(1, part.shape[1])])

    return Quantized(weight.width, grow(weight.values), grow(weight.scales), None if weight.offsets is None else grow(weight.offsets))
