"""Fused CUDA kernels for the operations between matrix products and attention, which take torch several kernels.

The methods are those of the CPU kernels (`native.bindings.Native`).
"""

import functools
from typing import Any

import torch
from torch import Tensor

from trtforge.runtime.cuda.launcher import Launcher, launcher_for
from trtforge.runtime.cuda.triton_support import converts_e4m3, power_from, runs_triton
from trtforge.runtime.native.bindings import ACTIVATIONS, Native, native_for
from trtforge.runtime.native.rms_norms import RmsNorms

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = 1024
"""Columns of a row that one program computes."""
_TOGETHER = 4096  # elements of heads that one program rotates
_SEARCHED = 2048  # columns that one program searches


class FusedKernels(RmsNorms):
    """Launches `kernels`, the module `step_kernels`. Tensors are contiguous unless stated otherwise."""

    def __init__(self, kernels: Any, launch: Launcher, *, e4m3: bool) -> None:
        """`e4m3`: whether the GPU has instructions to convert to E4M3."""
        self._kernels = kernels
        self._launch = launch
        self.e4m3 = e4m3

    def rms_norm_into(self, x: Tensor, weight: Tensor, epsilon: float, y: Tensor) -> None:
        """See RmsNorms."""
        self._norm(x.unsqueeze(1), None, weight, None, y.unsqueeze(1), 1.0, epsilon)

    def rms_norm_codes(self, x: Tensor, weight: Tensor, epsilon: float, code_scale: Tensor) -> Tensor:
        """`quantize` of `rms_norm` of x (rows, size)."""
        codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        self._norm(x.unsqueeze(1), None, weight, None, codes.unsqueeze(1), 1.0, epsilon, code_scale)
        return codes

    def rms_norm_heads(self, heads: Tensor, weight: Tensor, epsilon: float) -> None:
        """`rms_norm` of (tokens, heads, size) in place; `heads` may be a slice of a tensor with more heads."""
        self._norm(heads, None, weight, None, heads, 1.0, epsilon)

    def add_rms_norm(
        self,
        x: Tensor,
        change: Tensor,
        weight: Tensor,
        scale: float,
        epsilon: float,
        code_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x + scale * change, and its RMS norm; x and change are (rows, size).

        `code_scale`: if given, the norm is returned as E4M3 codes with this scale.
        """
        total, y = torch.empty_like(x), torch.empty_like(x, dtype=_output_dtype(x, code_scale))
        self._norm(x.unsqueeze(1), change, weight, total, y.unsqueeze(1), scale, epsilon, code_scale)
        return total, y

    def _norm(
        self,
        x: Tensor,
        change: Tensor | None,
        weight: Tensor,
        total: Tensor | None,
        y: Tensor,
        scale: float,
        epsilon: float,
        code_scale: Tensor | None = None,
    ) -> None:
        """RMS norm of x (+ scale * change), (rows, heads, size), contiguous within a head; `code_scale`: for E4M3 y."""
        rows, heads, size = x.shape
        if not rows:
            return
        padded = power_from(size)
        self._launch(
            self._kernels.rms_norm,
            (rows, heads, 1),
            x,
            x if change is None else change,
            weight,
            x if total is None else total,
            y,
            weight if code_scale is None else code_scale,
            *x.stride()[:2],
            *y.stride()[:2],
            size,
            scale,
            epsilon,
            ADDS=change is not None,
            SIZE_PADDED=padded,
            warps=min(16, max(1, padded // 512)),
        )

    def add(self, x: Tensor, change: Tensor, scale: float) -> Tensor:
        """x + scale * change, of contiguous tensors of one shape."""
        total, count = torch.empty_like(x), x.numel()
        if count:
            grid = (-(-count // COLUMNS), 1, 1)
            self._launch(self._kernels.add, grid, x, change, total, scale, count, COLUMNS=COLUMNS)
        return total

    def gate(self, halves: Tensor, activation: str, activated: int, code_scale: Tensor | None = None) -> Tensor:
        """activation(one half) * other half, for (rows, 2 x size). `activated`: index of the activated half.

        `code_scale`: if given, returns E4M3 codes with this scale, see `quantize`.
        """
        halves = halves.contiguous()
        rows, size = halves.shape[0], halves.shape[1] // 2
        y = halves.new_empty(rows, size, dtype=_output_dtype(halves, code_scale))
        if rows:
            self._launch(
                self._kernels.gate,
                (rows, -(-size // COLUMNS), 1),
                halves,
                y,
                halves if code_scale is None else code_scale,
                size,
                ACTIVATED=activated,
                KIND=ACTIVATIONS[activation],
                COLUMNS=COLUMNS,
            )
        return y

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
        """Rotate the first elements of (tokens, heads, size) in place; cos and sin are (tokens, 1, dim).

        `heads` may be a slice of a tensor with more heads or larger ones.
        """
        tokens, count, _ = heads.shape
        if not tokens:
            return
        dim = cos.shape[-1]
        half = power_from(dim // 2)
        together = max(1, min(power_from(count), _TOGETHER // half))
        self._launch(
            self._kernels.rotate,
            (tokens, -(-count // together), 1),
            heads,
            cos,
            sin,
            count,
            *heads.stride()[:2],
            DIM=dim,
            HALF_PADDED=half,
            HEADS=together,
            INTERLEAVED=interleaved,
        )

    def rotation(
        self, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype, *, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        """cos and sin for `rotate`, from int64 positions (tokens,) and frequencies (dim / 2,)."""
        half = len(frequencies)
        shape = len(positions), 1, 2 * half
        cos, sin = (torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2))
        if len(positions):
            self._launch(
                self._kernels.rotation,
                (len(positions), 1, 1),
                positions.contiguous(),
                frequencies.contiguous(),
                cos,
                sin,
                factor,
                HALF=half,
                HALF_PADDED=power_from(half),
                INTERLEAVED=interleaved,
            )
        return cos, sin

    def write_slots(self, storage: Tensor, slots: Tensor, values: Tensor) -> None:
        """storage[slots] = values: storage (slots, vectors, size), values (tokens, vectors, size), may be a slice."""
        self.quantize_slots(storage, slots, values, 1.0)

    def quantize_slots(self, storage: Tensor, slots: Tensor, values: Tensor, scale: float) -> None:
        """Like `write_slots`, for values / scale rounded to INT8 (int8 storage) or E4M3 (uint8 storage)."""
        width = values.shape[1] * values.shape[2]
        if not len(slots):
            return
        self._launch(
            self._kernels.write_slots,
            (len(slots), -(-width // COLUMNS), 1),
            values,
            slots,
            storage,
            values.stride(0),
            width,
            scale,
            COLUMNS=COLUMNS,
            INT8=storage.dtype is torch.int8,
            E4M3=storage.dtype is torch.uint8,
        )

    def rotate_and_write(
        self,
        heads: Tensor,
        cos: Tensor,
        sin: Tensor,
        storage: Tensor,
        slots: Tensor,
        scale: float,
        *,
        queries: int,
        keys: int,
        interleaved: bool,
    ) -> None:
        """`rotate` of the first `queries` + `keys` heads, and `quantize_slots` of all heads after the queries.

        heads: (tokens, queries + cached vectors, size), contiguous within a token; `scale`: 1.0 if the storage has
        their dtype.
        """
        tokens, count, size = heads.shape
        if not tokens:
            return
        padded = power_from(size)
        together = max(1, min(power_from(count), _TOGETHER // padded))
        self._launch(
            self._kernels.rotate_and_write,
            (tokens, -(-count // together), 1),
            heads,
            cos,
            sin,
            slots,
            storage,
            count,
            queries,
            queries + keys,
            *heads.stride()[:2],
            scale,
            DIM=cos.shape[-1],
            SIZE=size,
            SIZE_PADDED=padded,
            HEADS=together,
            INTERLEAVED=interleaved,
            INT8=storage.dtype is torch.int8,
            E4M3=storage.dtype is torch.uint8,
        )

    def quantize(self, values: Tensor, scale: Tensor) -> Tensor:
        """E4M3 codes of values / scale, saturated; scale (1,)."""
        values = values.contiguous()
        codes = torch.empty_like(values, dtype=torch.float8_e4m3fn)
        count = values.numel()
        if count:
            parts = -(-count // COLUMNS)
            self._launch(self._kernels.quantize, (parts, 1, 1), values, codes, scale, count, COLUMNS=COLUMNS)
        return codes

    def scale_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        """x * factors: x (rows, size), contiguous within a row, factors (size,)."""
        rows, size = x.shape
        y = x.new_empty(rows, size)
        if rows:
            grid = (rows, -(-size // COLUMNS), 1)
            self._launch(self._kernels.scale_columns, grid, x, factors, y, x.stride(0), size, COLUMNS=COLUMNS)
        return y

    def argmax(self, x: Tensor) -> Tensor:
        """The column of the largest element in each row of x (rows, columns), contiguous within a row: int64 (rows,).

        The first column on a tie; NaN counts as -inf.
        """
        rows, columns = x.shape
        chosen = torch.empty(rows, dtype=torch.int64, device=x.device)
        parts = -(-columns // _SEARCHED)
        padded = power_from(parts)
        values, places = (
            torch.empty(rows, padded, dtype=kind, device=x.device) for kind in (torch.float32, torch.int32)
        )
        if rows:
            one, two = self._kernels.largest_of_parts, self._kernels.largest_of_row
            sizes = {"PARTS_PADDED": padded, "COLUMNS": _SEARCHED}
            self._launch(one, (rows, parts, 1), x, values, places, x.stride(0), columns, **sizes)
            self._launch(two, (rows, 1, 1), values, places, chosen, parts, PARTS_PADDED=padded)
        return chosen


def _output_dtype(x: Tensor, code_scale: Tensor | None) -> torch.dtype:
    """Dtype of a kernel's output for `x`: E4M3 if there is a scale for it."""
    return x.dtype if code_scale is None else torch.float8_e4m3fn


def fused_for(device: torch.device, dtype: torch.dtype) -> FusedKernels | None:
    """The kernels for tensors on this device and of this dtype, if available."""
    return _on_gpu(device.index or 0) if dtype in _DTYPES and runs_triton(device) else None


@functools.cache
def _on_gpu(index: int) -> FusedKernels:
    from trtforge.runtime.cuda import step_kernels

    return FusedKernels(step_kernels, launcher_for(index), e4m3=converts_e4m3(index))


StepKernels = Native | FusedKernels
"""A device's kernels for the operations between matrix products and attention."""


def step_kernels_for(device: torch.device, dtype: torch.dtype) -> StepKernels | None:
    """The kernels for tensors on this device, a CPU or a GPU, and of this dtype, if available."""
    return native_for(device, dtype) or fused_for(device, dtype)
