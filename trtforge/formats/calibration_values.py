"""Check that calibration values can be scales: finite, and above zero unless the data explains a zero."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trtforge.core.errors import ForgeError

if TYPE_CHECKING:
    from torch import Tensor

_POSITIVE = "a number above zero"
_MAGNITUDE = "a non-negative number"


def require_scales(file: Path, tensors: Mapping[str, "Tensor"]) -> None:
    """Raises ForgeError naming file, tensor and value for an impossible number.

    `input_amax` may be zero if there are `dead_channels`, `weight_amax` if there is `zero_weight`; amax of single
    channels may always be zero.
    """
    for name, tensor in tensors.items():
        values = tensor.float().flatten()
        _require(file, name, values, values.isfinite(), "a number")
        module, _, kind = name.rpartition(".")
        match kind:
            case "input_amax":
                _require_magnitudes(file, name, values, zero=_above_zero(tensors.get(f"{module}.dead_channels")))
            case "weight_amax":
                _require_magnitudes(file, name, values, zero=_above_zero(tensors.get(f"{module}.zero_weight")))
            case (
                "input_channel_amax"
                | "weight_column_amax"
                | "dead_channels"
                | "output_error"
                | "nearest_error"
                | "tokens"
            ):
                _require_magnitudes(file, name, values, zero=True)
            case "pre_quant_scale" | "kv_amax" | "kv_scale" | "zero_weight":
                _require_magnitudes(file, name, values, zero=False)
            case "clip_ratio":
                _require(file, name, values, (values > 0) & (values <= 1), "a ratio above 0 and at most 1")
            case "alpha":
                _require(file, name, values, (values >= 0) & (values <= 1), "an exponent from 0 to 1")
            case _:
                pass


def _require_magnitudes(file: Path, name: str, values: "Tensor", *, zero: bool) -> None:
    if zero:
        _require(file, name, values, values >= 0, _MAGNITUDE)
    else:
        _require(file, name, values, values > 0, _POSITIVE)


def _require(file: Path, name: str, values: "Tensor", valid: "Tensor", wanted: str) -> None:
    """Raises ForgeError with the first value that is not `valid`."""
    if bool(valid.all()):
        return
    index = int(valid.logical_not().nonzero()[0])
    where = f"{name}[{index}]" if len(values) > 1 else name
    raise ForgeError(
        f"{file}: {where} is {float(values[index]):g}, not {wanted}",
        hint="The calibration is damaged or was edited: calibrate again with --force.",
    )


def _above_zero(tensor: "Tensor | None") -> bool:
    return tensor is not None and bool((tensor > 0).any())
