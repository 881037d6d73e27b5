"""Number formats of weights and the KV cache: TensorRT-LLM's names, and what conversion needs for each."""

from dataclasses import dataclass
from typing import Literal

from trtforge.core.errors import UsageError
from trtforge.core.number_limits import FP8_MAX, INT8_MAX
from trtforge.core.recipe import (
    KvCacheFormat,
    KvScaling,
    KvScalingChoice,
    QuantFormat,
    RoundingChoice,
    RoundingMethod,
)
from trtforge.formats.trtllm import MIXED_PRECISION, Quantization

Rounding = Literal["fp8", "fp8_rowwise", "int4", "int8", "nvfp4"]
"""How the weights of a format are rounded."""
Smoothing = Literal["awq", "smoothquant"]
"""The method that finds the pre-quantisation scale, which multiplies inputs and divides weights."""


@dataclass(frozen=True)
class NumberFormat:
    """A format of the decoder's linear layers.

    `rounding` None: conversion does not quantise weights. `static_activations`: inputs have a calibrated, static scale.
    `methods`: how its weights can be rounded, first the default (for a weight-only format, without calibration data).
    """

    algorithm: str | None
    rounding: Rounding | None = None
    smoothing: Smoothing | None = None
    static_activations: bool = False
    methods: tuple[RoundingMethod, ...] = ("nearest",)

    @property
    def calibrated(self) -> bool:
        """Whether conversion needs a calibration."""
        return self.static_activations or self.smoothing is not None


FORMATS: dict[QuantFormat, NumberFormat] = {
    "none": NumberFormat(None),
    "fp8": NumberFormat("FP8", "fp8", static_activations=True),
    "fp8_rowwise": NumberFormat("FP8_PER_CHANNEL_PER_TOKEN", "fp8_rowwise"),
    "int4_awq": NumberFormat("W4A16_AWQ", "int4", "awq", methods=("compensated", "nearest")),
    "w4a8_awq": NumberFormat("W4A8_AWQ", "int4", "awq", static_activations=True, methods=("compensated", "nearest")),
    "int8_sq": NumberFormat("W8A8_SQ_PER_CHANNEL", "int8", "smoothquant", static_activations=True),
    "int8_wo": NumberFormat("W8A16"),
    "int4_wo": NumberFormat("W4A16", methods=("nearest", "compensated")),
    "nvfp4": NumberFormat("NVFP4", "nvfp4", static_activations=True, methods=("compensated", "nearest")),
}
MIXED_FORMATS: tuple[QuantFormat, ...] = ("int4_awq", "fp8", "none")
"""The formats of mixed precision, the fewest bits first. A calibration for the first serves all."""
BUDGETED = FORMATS[MIXED_FORMATS[0]].algorithm
_EVERYWHERE = FORMATS["fp8"].algorithm
CACHE_ALGORITHMS: dict[KvCacheFormat, str | None] = {"none": None, "fp8": "FP8", "int8": "INT8"}
CACHE_BOUNDS: dict[KvCacheFormat, float] = {"fp8": FP8_MAX, "int8": INT8_MAX}
"""Largest magnitude of a KV cache element."""


def kv_scaling(kv_cache: KvCacheFormat, choice: KvScalingChoice) -> KvScaling:
    """How the scales of a KV cache are found, by the recipe's `choice`."""
    if choice == "auto":
        return "searched" if kv_cache == "int8" else "largest"
    return choice if kv_cache != "none" else "largest"


def measured(quant: QuantFormat, rounding: RoundingMethod) -> bool:
    """Whether weights that are rounded in this way need a calibration."""
    return FORMATS[quant].calibrated or rounding == "compensated"


def algorithm_of(quantization: Quantization) -> str | None:
    """The algorithm of a checkpoint's linear layers; in mixed precision, that of the layers that are not in FP8."""
    if quantization.quant_algo != MIXED_PRECISION:
        return quantization.quant_algo
    layers = (quantization.quantized_layers or {}).values()
    return next((layer.quant_algo for layer in layers if layer.quant_algo != _EVERYWHERE), BUDGETED)


def rounding_method(quant: QuantFormat, choice: RoundingChoice, *, data: bool = False) -> RoundingMethod:
    """How the weights of a format are rounded, by the recipe's `choice`. Raises UsageError if the format lacks it.

    `data`: calibration data was given, so that int4_wo is compensated too unless `choice` is nearest.
    """
    methods = FORMATS[quant].methods
    if choice == "auto":
        return "compensated" if data and "compensated" in methods else methods[0]
    if choice not in methods:
        able = " and ".join(name for name, known in FORMATS.items() if choice in known.methods)
        raise UsageError(
            f"rounding {choice} is not available for {quant}, only for {able}",
            hint="Leave --rounding out (quantization.rounding in a recipe).",
        )
    return choice
