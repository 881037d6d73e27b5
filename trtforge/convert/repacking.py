"""Repacks tensors of an already quantised source, after checking that their values fit TensorRT-LLM's layout."""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from trtforge.convert.encode import Bytes, Encode, Part, as_bytes
from trtforge.core.dtypes import Dtype
from trtforge.core.errors import ForgeError
from trtforge.formats.quantization_values import ORIGINAL
from trtforge.formats.shards import RowReader, StoredTensor
from trtforge.models.content import (
    Repacked,
    Rescaled,
    StoredPreQuant,
    StoredRowScales,
    StoredScalar,
    StoredScalarRows,
    StoredScalars,
    StoredVector,
)
from trtforge.models.repack import repack_awq, repack_gptq, rescale_fp8
from trtforge.models.split import Cut
from trtforge.models.stored_parts import Expected, StoredSources
from trtforge.models.torch_tensors import all_finite
from trtforge.models.transforms import TORCH

_SLAB_BYTES = 16 << 20
_SYMMETRIC = 8
_E4M3_SIGN = 0x80
_NOT_NEGATIVE = "a scaling factor must not be negative"
_DAMAGED = "The file is damaged: fetch it again."


class SmallTensors:
    """Scalars and vectors of a source, each read whole on demand."""

    def __init__(self, sources: Mapping[str, StoredTensor]) -> None:
        self._sources = sources

    def has(self, name: str) -> bool:
        """Whether the source has this tensor."""
        return name in self._sources

    def take(self, name: str) -> Tensor:
        """All values, flat, in the source's dtype."""
        stored = self._sources[name]
        data = bytearray(stored.spec.nbytes)
        with RowReader() as reader:
            reader.read_bytes(stored, 0, memoryview(data))
        return torch.frombuffer(data, dtype=TORCH[stored.spec.dtype.name])

    def finite(self, name: str) -> Tensor:
        """Like `take`, but raises ForgeError for scaling factors that are not finite."""
        vector = self.take(name)
        if not all_finite(vector):
            raise ForgeError(f"{name} holds NaN or infinity, scaling factors must be finite", hint=_DAMAGED)
        return vector

    def scalar(self, name: str) -> Tensor:
        """(1,) float32."""
        return self.take(name).float()

    def largest(self, names: tuple[str, ...], least: float = 0.0, *, divisors: bool = False) -> Tensor:
        """(1,) float32: the largest of the scalars that exist, or of their inverses, at least `least`."""
        found = [self.scalar(name) for name in names if self.has(name)]
        found = [scalar.reciprocal() for scalar in found] if divisors else found
        return torch.cat([*found, torch.tensor([least])]).amax(dim=0, keepdim=True)


def check_values(wanted: StoredSources, sources: Mapping[str, StoredTensor]) -> None:
    """Raises ForgeError naming a tensor whose values TensorRT-LLM's layout cannot represent. Assumes checked shapes."""
    small = SmallTensors(sources)
    for name, expected in wanted.tensors.items():
        if name in sources:
            _check(name, expected, sources[name], small)
    for names in wanted.alike:
        _check_alike(names, small)
    for names in wanted.input_scales:
        _check_input_scale(names, small, divisors=wanted.tensors[names[0]].holds == "a_divisor")


def _check(name: str, expected: Expected, stored: StoredTensor, small: SmallTensors) -> None:
    match expected.holds:
        case "zero_points":
            _check_zero_points(stored, expected.code)
        case "groups_in_order":
            indices = small.take(name).long()
            if not torch.equal(indices, torch.arange(len(indices)) // expected.code):
                raise ForgeError(
                    f"{name} is not i // {expected.code}: act-order (desc_act) permutes the inputs, TensorRT-LLM needs "
                    "groups of consecutive inputs",
                    hint="Use a GPTQ checkpoint with desc_act false, or convert the original one.",
                )
        case "zeros":
            if bool(small.take(name).count_nonzero()):
                raise ForgeError(
                    f"{name} is a non-zero bias that config.json does not declare",
                    hint="Use the config.json of this model, or set attention_bias or mlp_bias in it.",
                )
        case "a_scale":
            scale = small.scalar(name)
            if not bool(torch.isfinite(scale) & (scale >= 0)):
                raise ForgeError(
                    f"{name} is {scale.item()}: a scaling factor must be finite and not negative", hint=_DAMAGED
                )
        case "scales":
            smallest = small.take(name).float().amin()
            if bool(smallest < 0):
                raise ForgeError(f"{name} holds {smallest.item()}: {_NOT_NEGATIVE}", hint=_DAMAGED)
        case "a_divisor":
            divisor = small.scalar(name)
            if not bool(torch.isfinite(divisor) & (divisor > 0) & torch.isfinite(divisor.reciprocal())):
                raise ForgeError(
                    f"{name} is {divisor.item()}: a divisor must be finite and above zero, and so must its inverse",
                    hint=_DAMAGED,
                )
        case "anything":
            pass


def _check_input_scale(names: tuple[str, ...], small: SmallTensors, *, divisors: bool) -> None:
    """Raises ForgeError unless inputs can be divided by the largest of the scales."""
    present = [name for name in names if small.has(name)]
    largest = small.largest(tuple(present), divisors=divisors)
    if present and not (bool(largest > 0) and bool(torch.isfinite(largest.reciprocal()))):
        others = f", and {len(present) - 1} others are not larger" if len(present) > 1 else ""
        raise ForgeError(
            f"{present[0]} is {small.scalar(present[0]).item()}{others}: a scaling factor of inputs must be above zero",
            hint=_DAMAGED,
        )


def _check_zero_points(stored: StoredTensor, code: int) -> None:
    """Raises ForgeError unless every nibble is `code`, which encodes a zero point of 8."""
    buffer = bytearray(min(_SLAB_BYTES, stored.spec.nbytes))
    with RowReader() as reader:
        for first in range(0, stored.spec.nbytes, len(buffer)):
            wanted = memoryview(buffer)[: stored.spec.nbytes - first]
            found = np.frombuffer(reader.read_bytes(stored, first, wanted), np.uint8)
            others = found[found != code * 0x11]
            if len(others):
                low, high = int(others[0]) & 0x0F, int(others[0]) >> 4
                zero_point = (low if low != code else high) + _SYMMETRIC - code
                raise ForgeError(
                    f"{stored.spec.name} holds the zero point {zero_point}: TensorRT-LLM's W4A16_AWQ layout has no "
                    f"zero points, so all must be {_SYMMETRIC} (symmetric quantisation)",
                    hint=f"Use a symmetrically quantised checkpoint, or {ORIGINAL[0].lower()}{ORIGINAL[1:]}",
                )


def _check_alike(names: tuple[str, ...], small: SmallTensors) -> None:
    present = [name for name in names if small.has(name)]
    for name in names:
        if present and name not in present:
            raise ForgeError(f"{present[0]} exists, {name} does not: TensorRT-LLM uses one for both", hint=ORIGINAL)
    for name in present[1:]:
        if not torch.equal(small.take(present[0]).float(), small.take(name).float()):
            raise ForgeError(
                f"{present[0]} and {name} differ: TensorRT-LLM uses one for both, merging them would round again",
                hint=ORIGINAL,
            )


def piece_encoders(content: Repacked | Rescaled, small: SmallTensors) -> tuple[Encode, ...]:
    """The encoder of each piece's slabs."""
    match content:
        case Repacked(scales=True):
            return tuple(partial(_not_negative, name=piece.source) for piece in content.pieces)
        case Repacked(words=None):
            return (_unchanged,) * len(content.pieces)
        case Repacked(words=words):
            repack = repack_awq if words == "awq" else repack_gptq
            return (partial(_repacked, repack=repack),) * len(content.pieces)
        case Rescaled(scales=scales, shared=shared):
            return tuple(
                partial(_rescaled, scale=small.scalar(name), new_scale=small.largest(group))
                for name, group in zip(scales, shared, strict=True)
            )


def _unchanged(part: Part, dtype: Dtype, cut: Cut) -> Part:
    return part


def _not_negative(part: Part, dtype: Dtype, cut: Cut, *, name: str) -> Part:
    """The E4M3 scales unchanged. Raises ForgeError for a negative one: GPUs read them as unsigned (UE4M3)."""
    if bool((part.view(np.uint8) > _E4M3_SIGN).any()):
        raise ForgeError(f"{name} holds a negative number: {_NOT_NEGATIVE}", hint=_DAMAGED)
    return part


def _repacked(part: Part, dtype: Dtype, cut: Cut, *, repack: Callable[[Tensor], Tensor]) -> Bytes:
    return as_bytes(repack(torch.from_numpy(part)))


def _rescaled(part: Part, dtype: Dtype, cut: Cut, *, scale: Tensor, new_scale: Tensor) -> Bytes:
    return as_bytes(rescale_fp8(torch.from_numpy(part).view(TORCH[dtype.name]), scale, new_scale))


def stored_vector(content: StoredVector, small: SmallTensors, tp_rank: int, model_dtype: Dtype) -> Bytes:
    """A rank's tensor, made from scalars or one vector of the source."""
    match content:
        case StoredScalar(names=names, least=least, divisors=divisors):
            return as_bytes(small.largest(names, least, divisors=divisors))
        case StoredScalars(groups=groups, divisors=divisors):
            return as_bytes(torch.cat([small.largest(names, divisors=divisors) for names in groups[tp_rank]]))
        case StoredScalarRows(names=names, cuts=cuts):
            rows = [own[tp_rank].height for own in cuts]
            return as_bytes(
                torch.cat([small.scalar(name).expand(count) for name, count in zip(names, rows, strict=True)])
            )
        case StoredRowScales(names=names, cuts=cuts, groups=groups):
            spans = [(name, rows) for name, own in zip(names, cuts, strict=True) for rows in own[tp_rank].rows]
            scales = torch.cat([small.finite(name)[rows.start : rows.stop].float() for name, rows in spans])
            return as_bytes(scales.unsqueeze(1).expand(-1, groups))
        case StoredPreQuant(names=names, cuts=cuts, experts=experts):
            columns, dtype = cuts[tp_rank].cols, TORCH[model_dtype.name]
            if not names or not small.has(names[0]):
                return as_bytes(torch.ones(len(columns) * (experts or 1), dtype=dtype))
            part = small.finite(names[0])[columns.start : columns.stop].to(dtype)
            return as_bytes(part if experts is None else part.repeat(experts, 1))
