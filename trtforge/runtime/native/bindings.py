"""The kernels as functions of tensors. Without a C++ compiler, torch's operations are used instead.

TRTFORGE_KERNELS=torch turns the kernels off.
"""

import ctypes
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtforge.core.threads import wait_briefly
from trtforge.runtime.native.compiler import CompileError, compiled, kernels_wanted
from trtforge.runtime.native.recorder import current_recorder
from trtforge.runtime.native.rms_norms import RmsNorms
from trtforge.runtime.native.structures import (
    ARGUMENTS,
    INTEGERS,
    PRODUCTS,
    Calls,
    IntegerLinear,
    Linear,
    Paged,
    RowCounts,
)
from trtforge.runtime.native.tiles import TILE, Int8Layer, pack_bfloat16, pack_int8

TYPES = {torch.float32: 0, torch.bfloat16: 1}
CACHES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "squared_relu": 4}
WIDTH = 16
"""Elements that attention computes at once."""
_MOST_INT8_INPUTS = 65536
"""The sum of this many products of bytes fits in 32 bits."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class PagedRows:
    """Single-token rows: int64 block numbers (rows, columns) and lengths (rows,), the token itself included.

    `apart`: see `decoder.batch.apart`; False if not used. `seen`: int64 (rows,), see `draft_trees.seen_slots`;
    None if all rows see all tokens before theirs.
    """

    tables: Tensor
    lengths: Tensor
    block_size: int
    apart: bool = False
    seen: Tensor | None = None


@dataclass(frozen=True)
class PagedHeads:
    """Attention of one layer. `slopes`: ALiBi slopes, float32 (heads,), with the scale of the scores.

    `vectors`: number of vectors cached for each token: keys and values of all KV heads, or 1 latent vector. `chunk`:
    chunk size of chunked attention. `sinks`: extra logits in the softmax, float32 (heads,).
    """

    heads: int
    kv_heads: int
    size: int
    vectors: int
    scale: float
    cap: float | None = None
    window: int | None = None
    slopes: Tensor | None = None
    chunk: int | None = None
    sinks: Tensor | None = None


class Native(RmsNorms):
    """The kernels. Tensors are on the CPU, float32 or bfloat16, and contiguous unless stated otherwise."""

    def __init__(self, library: Path) -> None:
        self.functions = ctypes.CDLL(str(library))
        self.multiplies = bool(self.functions.has_matmul())
        """Whether `linear` works: the processor has AVX512BW."""
        self.multiplies_integers = bool(self.functions.has_integers())
        """Whether `linear_int8` works: the processor has AVX512-VNNI too."""
        for name, arguments in ARGUMENTS.items():
            if self.multiplies_integers if name in INTEGERS else self.multiplies or name not in PRODUCTS:
                function = getattr(self.functions, name)
                function.argtypes, function.restype = list(arguments), None
        self.functions.use_own_threads(wait_briefly())

    def run(self, name: str, *arguments: Any) -> None:
        """Call a kernel, or record the call if a recording is active. Structures are passed by address."""
        recorder = current_recorder()
        if recorder is not None:
            recorder.add(name, arguments)
            return
        given = (ctypes.byref(each) if isinstance(each, ctypes.Structure) else each for each in arguments)
        getattr(self.functions, name)(*given)

    def replay(self, calls: Calls) -> None:
        """Run recorded calls again."""
        self.functions.replay(calls, len(calls))

    def set_rows(self, counts: RowCounts, rows: int, wanted: int) -> None:
        """Set the number of rows that recorded calls compute; the first `wanted` of them give logits."""
        self.functions.set_rows(counts, len(counts), rows, wanted)

    def rms_norm_into(self, x: Tensor, weight: Tensor, epsilon: float, y: Tensor) -> None:
        """See RmsNorms."""
        rows, size = x.shape
        pointers = (tensor.data_ptr() for tensor in (x, weight, y))
        self.run("rms_norm", TYPES[x.dtype], *pointers, rows, x.stride(0), y.stride(0), 1, size, epsilon)

    def rms_norm_heads(self, heads: Tensor, weight: Tensor, epsilon: float) -> None:
        """`rms_norm` of (tokens, heads, size) in place; `heads` may be a slice of a tensor with more heads."""
        tokens, count, size = heads.shape
        stride, pointer = heads.stride(0), heads.data_ptr()
        pointers = (pointer, weight.data_ptr(), pointer)
        self.run("rms_norm", TYPES[heads.dtype], *pointers, tokens, stride, stride, count, size, epsilon)

    def add(self, x: Tensor, change: Tensor, scale: float) -> Tensor:
        """x + scale * change, of contiguous tensors of one shape."""
        total = torch.empty_like(x)
        pointers = (tensor.data_ptr() for tensor in (x, change, total))
        self.run("add", TYPES[x.dtype], *pointers, x.numel(), scale)
        return total

    def add_rms_norm(
        self, x: Tensor, change: Tensor, weight: Tensor, scale: float, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """x + scale * change, and its RMS norm; x and change are (rows, size)."""
        total, y = torch.empty_like(x), torch.empty_like(x)
        pointers = (tensor.data_ptr() for tensor in (x, change, weight, total, y))
        self.run("add_rms_norm", TYPES[x.dtype], *pointers, *x.shape, scale, epsilon)
        return total, y

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
        """Rotate the first elements of (tokens, heads, size) in place; cos and sin are (tokens, 1, dim).

        `heads` may be a slice of a tensor with more heads or larger ones.
        """
        tokens, count, _ = heads.shape
        self.run(
            "rotate",
            TYPES[heads.dtype],
            heads.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            tokens,
            heads.stride(0),
            count,
            heads.stride(1),
            cos.shape[-1],
            interleaved,
        )

    def rotation(
        self, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype, *, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        """cos and sin for `rotate`, from int64 positions (tokens,) and frequencies (dim / 2,)."""
        positions, frequencies, half = positions.contiguous(), frequencies.contiguous(), len(frequencies)
        cos, sin = (torch.empty(len(positions), 1, 2 * half, dtype=dtype) for _ in range(2))
        pointers = (tensor.data_ptr() for tensor in (positions, frequencies, cos, sin))
        self.run("rotation", TYPES[dtype], *pointers, len(positions), half, factor, interleaved)
        return cos, sin

    def lookup(self, table: Tensor, rows: Tensor, scale: float = 1.0, first: int = 0) -> Tensor:
        """scale * table[rows - first], for a contiguous (known, size) table; zeros for rows outside it."""
        rows = rows.contiguous()
        out = table.new_empty(len(rows), table.shape[1])
        pointers = (tensor.data_ptr() for tensor in (table, rows, out))
        self.run("lookup", TYPES[table.dtype], *pointers, *out.shape, first, len(table), scale)
        return out

    def gate(self, halves: Tensor, activation: str, activated: int) -> Tensor:
        """activation(one half) * other half, for (rows, 2 x size). `activated`: index of the activated half."""
        halves = halves.contiguous()
        rows, size = halves.shape[0], halves.shape[1] // 2
        y = halves.new_empty(rows, size)
        pointers = (halves.data_ptr(), y.data_ptr())
        self.run("gate", TYPES[halves.dtype], ACTIVATIONS[activation], activated, *pointers, rows, size)
        return y

    def write_slots(self, storage: Tensor, slots: Tensor, values: Tensor) -> None:
        """storage[slots] = values: storage (slots, vectors, size), values (tokens, vectors, size), may be a slice."""
        element = values.element_size()
        self.run(
            "write_slots",
            values.data_ptr(),
            values.stride(0) * element,
            slots.data_ptr(),
            len(slots),
            values.shape[1] * values.shape[2] * element,
            storage.data_ptr(),
        )

    def quantize_slots(self, storage: Tensor, slots: Tensor, values: Tensor, scale: float) -> None:
        """Like `write_slots`, for values / scale rounded to INT8 (int8 storage) or E4M3 (uint8 storage)."""
        self.run(
            "quantize_slots",
            TYPES[values.dtype],
            CACHES[storage.dtype],
            values.data_ptr(),
            values.stride(0),
            slots.data_ptr(),
            len(slots),
            values.shape[1] * values.shape[2],
            storage.data_ptr(),
            scale,
        )

    @staticmethod
    def attends(size: int) -> bool:
        """Whether `attend` supports heads of this size."""
        return size % WIDTH == 0

    def attend(
        self, queries: Tensor, rows: PagedRows, storage: Tensor, cache_scale: float, how: PagedHeads, out: Tensor
    ) -> None:
        """Attention of single-token rows: queries (rows, heads or more, size) to out (rows, heads x size).

        storage: the layer's cache; keys and values are its elements times `cache_scale`.
        """
        given = Paged(
            queries=queries.data_ptr(),
            cache=storage.data_ptr(),
            out=out.data_ptr(),
            tables=rows.tables.data_ptr(),
            lengths=rows.lengths.data_ptr(),
            seen=None if rows.seen is None else rows.seen.data_ptr(),
            rows=len(rows.lengths),
            columns=rows.tables.shape[1],
            block=rows.block_size,
            vectors=how.vectors,
            stride=queries.stride(0),
            cache_scale=cache_scale,
            **numbers_of(how),
        )
        self.run("paged_attention", TYPES[queries.dtype], CACHES[storage.dtype], given)

    def shared_bytes(self, ranks: int) -> int:
        """Size of the shared memory that `sum_ranks` needs for this number of ranks."""
        return int(self.functions.shared_bytes(ranks))

    def sum_ranks(self, values: Tensor, ended: int, shared: int, ranks: int, rank: int) -> None:
        """Replace `values` by their sum over the ranks; `ended` and `shared` are addresses (source/ranks.cpp)."""
        self.run("sum_ranks", TYPES[values.dtype], values.data_ptr(), values.numel(), ended, shared, ranks, rank)

    def takes(self, weight: Tensor) -> bool:
        """Whether `linear` can compute this (out, in) weight."""
        outputs, inputs = weight.shape
        return self.multiplies and outputs % TILE == 0 and inputs % 2 == 0

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """x W^T + bias in bfloat16: x (..., inputs), weight as `pack_bfloat16` makes it, bias float32."""
        return self._multiply("linear_bfloat16", x, weight, None, bias, outputs)

    def linear_int4(
        self, x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None, prequant: Tensor | None = None
    ) -> Tensor:
        """Like `linear`, with `words` and float32 `scales` packed by `int4_native`. `prequant`: factors of inputs."""
        return self._multiply("linear_int4", x, words, scales, bias, scales.shape[0] * TILE, prequant)

    def linear_int8(self, x: Tensor, layer: Int8Layer) -> Tensor:
        """SmoothQuant: rounds x (..., inputs), float32 or bfloat16, to INT8; the result has the dtype of x."""
        x = x.contiguous()
        inputs, outputs = x.shape[-1], len(layer.scales)
        y = x.new_empty(*x.shape[:-1], outputs)
        codes = torch.empty(x.numel(), dtype=torch.uint8)
        given = IntegerLinear(
            x=x.data_ptr(),
            weight=layer.weight.data_ptr(),
            offsets=layer.offsets.data_ptr(),
            prequant=layer.prequant.data_ptr(),
            scales=layer.scales.data_ptr(),
            bias=None if layer.bias is None else layer.bias.data_ptr(),
            codes=codes.data_ptr(),
            y=y.data_ptr(),
            rows=x.numel() // inputs,
            inputs=inputs,
            outputs=outputs,
            activation_scale=layer.activation_scale,
        )
        self.run("linear_int8", TYPES[x.dtype], given)
        return y

    def takes_int8(self, weight: Tensor) -> bool:
        """Whether `linear_int8` can compute this (out, in) weight."""
        outputs, inputs = weight.shape
        return self.multiplies_integers and outputs % TILE == 0 and inputs % WIDTH == 0 and inputs <= _MOST_INT8_INPUTS

    def _multiply(
        self,
        function: str,
        x: Tensor,
        weight: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        outputs: int,
        prequant: Tensor | None = None,
    ) -> Tensor:
        if x.dtype is not torch.bfloat16:
            raise TypeError(f"the products are for bfloat16, not {x.dtype}")
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], outputs)
        inputs = x.shape[-1]
        scaled = None if prequant is None else torch.empty_like(x)
        given = Linear(
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            y=y.data_ptr(),
            rows=x.numel() // inputs,
            inputs=inputs,
            outputs=outputs,
            group=0 if scales is None else inputs // scales.shape[1],
            prequant=None if prequant is None else prequant.data_ptr(),
            scaled=None if scaled is None else scaled.data_ptr(),
        )
        self.run(function, given)
        return y


def numbers_of(how: PagedHeads) -> dict[str, Any]:
    """The fields that `Paged` and `Context` have in common."""
    return {
        "slopes": None if how.slopes is None else how.slopes.data_ptr(),
        "sinks": None if how.sinks is None else how.sinks.data_ptr(),
        "heads": how.heads,
        "kv_heads": how.kv_heads,
        "size": how.size,
        "window": how.window or 0,
        "chunk": how.chunk or 0,
        "scale": how.scale,
        "cap": how.cap or 0.0,
    }


def native_for(device: torch.device, dtype: torch.dtype) -> Native | None:
    """The kernels for tensors on this device and of this dtype, if there are any."""
    return native() if device.type == "cpu" and dtype in TYPES else None


def native() -> Native | None:
    """The kernels, compiled on first use; None if that is not possible or not wanted."""
    return _native() if kernels_wanted() else None


@functools.lru_cache(maxsize=1)
def _native() -> Native | None:
    try:
        for defines in ((), ("TRTFORGE_WITHOUT_AMX",)):
            kernels = Native(compiled(defines))
            if multiplies_right(kernels):
                return kernels
        raise CompileError("they compute wrong products on this processor")
    except (CompileError, OSError) as error:
        _LOG.warning("the CPU kernels are not available, torch's slower ones are used: %s", error)
        return None


def multiplies_right(kernels: Native) -> bool:
    """Whether products of few and of many rows are exact. AMX tile registers depend on the hypervisor, too."""
    if not kernels.multiplies:
        return True
    weight = (torch.arange(32 * 64) % 5 - 2).view(32, 64).to(torch.int8)
    packed = pack_bfloat16(weight.bfloat16())
    layer = Int8Layer(*pack_int8(weight), torch.ones(64), torch.ones(32), None, 1.0)
    for rows in (5, 40):
        x = (torch.arange(rows * 64) % 7 - 3).view(rows, 64).bfloat16()
        exact = x.float() @ weight.float().T
        made = [kernels.linear(x, packed, None, 32)]
        if kernels.multiplies_integers:
            made.append(kernels.linear_int8(x, layer))
        if not all(torch.equal(each.float(), exact) for each in made):
            return False
    return True
