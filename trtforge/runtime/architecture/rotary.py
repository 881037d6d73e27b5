"""Rotary position embedding in both layouts of a head, with the scalings that Hugging Face models use.

Formulas: transformers/modeling_rope_utils.py; llama3 and yarn also in TensorRT-LLM's `RopeEmbeddingUtils`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtforge.core.errors import ForgeError
from trtforge.formats.rope import longrope_factor
from trtforge.runtime.cuda.fused import StepKernels, step_kernels_for


@dataclass(frozen=True)
class RotarySpec:
    """A rotary embedding of a checkpoint's config.json. `scaling` is its rotary_scaling object.

    Elements i and i + dim / 2 of a head are rotated together (rope_gpt_neox), or, `interleaved`, elements 2i and
    2i + 1 (rope_gptj).
    """

    dim: int
    base: float
    max_positions: int
    scaling: Mapping[str, Any] | None = None
    interleaved: bool = False

    @property
    def kind(self) -> str:
        """Name of the scaling."""
        scaling = self.scaling or {}
        return str(scaling.get("rope_type") or scaling.get("type") or "none")

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies differ between short and long sequences."""
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines (tokens, 1, dim) for the tokens of a step; the sine of a pair's first element is negated."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    kernels: StepKernels | None = None

    def turn(self, heads: Tensor) -> None:
        """Rotate the first `dim` elements of (tokens, heads, size) in place."""
        if self.kernels is not None:
            self.kernels.rotate(heads, self.cos, self.sin, interleaved=self.interleaved)
            return
        part = heads[..., : self.cos.shape[-1]]
        if self.interleaved:
            swapped = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            first, second = part.chunk(2, dim=-1)
            swapped = torch.cat((second, first), dim=-1)
        part.mul_(self.cos).addcmul_(swapped, self.sin)


class Rotary:
    """Computes rotations, once per step for all layers. `longest`: maximum sequence length of the engine."""

    def __init__(self, spec: RotarySpec, longest: int, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._of_longest = self._frequencies(longest)

    def at(self, positions: Tensor, dtype: torch.dtype, length: int = 0) -> Rotation:
        """The rotation of these positions.

        `length`: total length of their sequence if known; by default the maximum, as in a TensorRT-LLM engine.
        """
        known = length and self._spec.depends_on_length
        frequencies, factor = self._frequencies(length) if known else self._of_longest
        interleaved, kernels = self._spec.interleaved, step_kernels_for(self._device, dtype)
        if kernels is not None:
            cos, sin = kernels.rotation(positions, frequencies, factor, dtype, interleaved=interleaved)
            return Rotation(cos, sin, interleaved, kernels)
        angles = positions.float().unsqueeze(1) * frequencies
        cos, sin = angles.cos() * factor, angles.sin() * factor
        join = _interleaved if interleaved else _halves
        return Rotation(join(cos, cos).to(dtype), join(-sin, sin).to(dtype), interleaved)

    def _frequencies(self, longest: int) -> tuple[Tensor, float]:
        frequencies, factor = inverse_frequencies(self._spec, longest)
        return frequencies.to(self._device), factor


def _halves(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second), dim=1).unsqueeze(1)


def _interleaved(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), dim=2).flatten(1).unsqueeze(1)


def inverse_frequencies(spec: RotarySpec, longest: int) -> tuple[Tensor, float]:
    """float32 (dim / 2,) frequencies and the factor on cosines and sines.

    `longest`: the sequence length that dynamic scaling and longrope are computed for.
    """
    scaling = spec.scaling or {}
    steps = torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim
    plain = 1.0 / (spec.base**steps)
    factor = float(scaling.get("factor") or 1.0)
    match spec.kind:
        case "none" | "default" | "mrope":
            return plain, 1.0
        case "linear":
            return plain / factor, 1.0
        case "dynamic":  # ignores original_max_position_embeddings
            stretch = max(longest / spec.max_positions, 1.0)
            base = spec.base * (factor * stretch - (factor - 1)) ** (spec.dim / (spec.dim - 2))
            return 1.0 / (base**steps), 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(spec, plain, scaling)
        case "longrope":
            return _longrope(spec, plain, scaling, longest)
        case kind:
            raise ForgeError(
                f"rotary scaling {kind} is not supported by the embedded engine",
                hint="It supports none, linear, dynamic, llama3, yarn and longrope; use the tensorrt_llm backend.",
            )


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    factor = float(scaling.get("factor", 8.0))
    low, high = float(scaling.get("low_freq_factor", 1.0)), float(scaling.get("high_freq_factor", 4.0))
    original = float(scaling.get("original_max_position_embeddings", 8192))
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > original / low, plain / factor, plain)
    if high == low:  # no frequencies in between
        return stretched
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * stretched / factor + smooth * stretched
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(medium, between, stretched)


def _yarn(spec: RotarySpec, plain: Tensor, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    original = int(scaling.get("original_max_position_embeddings") or spec.max_positions)
    factor = float(scaling.get("factor") or spec.max_positions / original)
    fast, slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)

    def turning(rotations: float) -> float:
        """The dimension that completes this number of rotations within the original length."""
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
    own, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if own and of_all:
        return yarn_mscale(factor, float(own)) / yarn_mscale(factor, float(of_all))
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, multiplier: float) -> float:
    """YaRN's attention factor for positions stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def _longrope(spec: RotarySpec, plain: Tensor, scaling: Mapping[str, Any], longest: int) -> tuple[Tensor, float]:
    """Divide by the long factors if the sequence exceeds the original length, else by the short ones."""
    original = int(scaling.get("original_max_position_embeddings") or spec.max_positions)
    divisors = scaling.get("long_factor" if longest > original else "short_factor")
    if divisors is None or len(divisors) != len(plain):
        raise ForgeError(
            f"longrope of {spec.dim} rotated elements needs {len(plain)} short and long factors",
            hint="Convert the checkpoint again.",
        )
    return plain / torch.tensor(divisors, dtype=torch.float32), longrope_factor(scaling, spec.max_positions, original)
