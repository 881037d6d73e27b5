"""Rotary position embedding, rope_gpt_neox style (a head's two halves are rotated), with every HF scaling but longrope.

Formulas: transformers/modeling_rope_utils.py; llama3 and yarn also in TensorRT-LLM's `RopeEmbeddingUtils`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError


@dataclass(frozen=True)
class RotarySpec:
    """What a checkpoint's config.json says. `scaling` is its rotary_scaling object."""

    dim: int
    base: float
    max_positions: int
    scaling: Mapping[str, Any] | None = None

    @property
    def kind(self) -> str:
        """Name of the scaling."""
        scaling = self.scaling or {}
        return str(scaling.get("rope_type") or scaling.get("type") or "none")


class Rotary:
    """Cosines and sines for positions, computed once a step for all layers."""

    def __init__(self, spec: RotarySpec, longest: int, device: torch.device) -> None:
        frequencies, self._attention_factor = inverse_frequencies(spec, longest)
        self._frequencies = frequencies.to(device)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both (tokens, 1, dim) of `dtype`; the sine of the first half is negated, as `rotate` wants it."""
        angles = positions.float().unsqueeze(1) * self._frequencies
        cos, sin = angles.cos() * self._attention_factor, angles.sin() * self._attention_factor
        return torch.cat((cos, cos), 1).unsqueeze(1).to(dtype), torch.cat((-sin, sin), 1).unsqueeze(1).to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first `dim` elements of (tokens, heads, head_size) in place."""
    part = heads[..., : cos.shape[-1]]
    first, second = part.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    part.mul_(cos).addcmul_(swapped, sin)


def inverse_frequencies(spec: RotarySpec, longest: int) -> tuple[Tensor, float]:
    """float32 (dim / 2,) frequencies and the factor on cosines and sines.

    `longest` is the longest sequence: dynamic scaling, whose base depends on the length, is fixed at that one.
    """
    scaling = spec.scaling or {}
    steps = torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim
    plain = 1.0 / (spec.base**steps)
    factor = float(scaling.get("factor", 1.0))
    match spec.kind:
        case "none" | "default" | "mrope":
            return plain, 1.0
        case "linear":
            return plain / factor, 1.0
        case "dynamic":
            original = int(scaling.get("original_max_position_embeddings") or spec.max_positions)
            length = max(longest, original)
            base = spec.base * ((factor * length / original) - (factor - 1)) ** (spec.dim / (spec.dim - 2))
            return 1.0 / (base**steps), 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(spec, plain, scaling)
        case kind:
            raise ForgeError(
                f"rotary scaling {kind} is not known to the embedded engine",
                hint="It knows none, linear, dynamic, llama3 and yarn; use the tensorrt_llm backend.",
            )


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    factor = float(scaling.get("factor", 8.0))
    low, high = float(scaling.get("low_freq_factor", 1.0)), float(scaling.get("high_freq_factor", 4.0))
    original = float(scaling.get("original_max_position_embeddings", 8192))
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > original / low, plain / factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * stretched / factor + smooth * stretched
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(medium, between, stretched)


def _yarn(spec: RotarySpec, plain: Tensor, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    original = int(scaling.get("original_max_position_embeddings") or spec.max_positions)
    factor = float(scaling.get("factor") or spec.max_positions / original)
    fast, slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)

    def turning(rotations: float) -> float:
        """The dimension that turns this often within the original length."""
        return spec.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.base))

    first, last = turning(fast), turning(slow)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.dim - 1)
    last = last + 0.001 if first == last else last
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)
    return frequencies, _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def mscale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    own, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if own and of_all:
        return mscale(float(own)) / mscale(float(of_all))
    return mscale(1.0)
