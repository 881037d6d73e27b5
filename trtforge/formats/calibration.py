"""The calibration artifact: statistics of each linear of the unsplit model, valid for every parallel layout."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.core.errors import ForgeError
from trtforge.core.figures import listed
from trtforge.core.manifest import FILE_NAME, Manifest, open_artifact
from trtforge.core.number_limits import FP8_MAX
from trtforge.formats.calibration_values import require_scales
from trtforge.formats.shards import StoredTensor, read_header
from trtforge.formats.tensor_files import load_tensors

if TYPE_CHECKING:
    from torch import Tensor

FILE = "calibration.safetensors"
LEAST_TOKENS = 128
"""With fewer tokens of an input, its linears are rounded to the nearest instead of with compensation."""
OF_DATA = ("samples_asked", "sequence_length", "seed")
"""How samples were chosen from the data; unknown for older calibrations."""
IN_CHECKPOINTS = ("awq_clip", "rounding", "kv_scales", *OF_DATA)
"""Settings of a checkpoint that come from its calibration and are recorded in it."""
_RISKY_KV = 0.5  # of E4M3's maximum; ModelOpt warns above it (export/quant_utils.py, `get_kv_cache_scaling_factor`)


def codes_file(layer: int) -> str:
    """The file with the codes and scales of a layer's linears that were rounded with compensation."""
    return f"codes-{layer:05d}.safetensors"


def settings_of(manifest: Manifest) -> Mapping[str, Any]:
    """The settings of a calibration; scales of the KV cache are recorded only if searched."""
    return {"kv_scales": "largest"} | manifest.identity.config


@dataclass(frozen=True)
class RoundedWeight:
    """A weight (out, in), rounded with compensation, of the unsplit model, as in rank files (models.transforms).

    INT4: `codes` (out / 2, in) int8, two outputs a byte, and `scales` (out, in / group) float32. NVFP4: `codes` (out,
    in / 2) uint8, two inputs a byte, and `scales` (out, in / 16) float8_e4m3fn.
    """

    codes: StoredTensor
    scales: StoredTensor


@dataclass(frozen=True)
class Calibration:
    """Tensors by Hugging Face module name, float32, on the CPU.

    `<module>.input_amax` and `.weight_amax` (1,); `.input_channel_amax` and `.weight_column_amax` (in,), amax per input
    (int8_sq, w4a8_awq); `.pre_quant_scale` (in,), AWQ's, with its `.alpha` (1,) and `.output_error` (1,), relative to
    the output's energy; `.clip_ratio` (out, in / group), a block's clipping threshold / its amax; `.dead_channels`
    (1,), number of inputs that were always zero; `.zero_weight` (1,), present if a weight is all zeros;
    `layers.<i>.kv_amax` (1,), amax of keys and values, and `.kv_scale` (1,), the scale found by search. With
    compensated rounding also `.tokens` and `.inputs` (1,), their numbers, and `.nearest_error` (1,), the
    `.output_error` of rounding to the nearest.
    """

    manifest: Manifest
    tensors: dict[str, "Tensor"]
    rounded: Mapping[str, RoundedWeight] = field(default_factory=dict)
    """By module: weights with codes from compensated rounding; conversion rounds the others to the nearest."""

    @property
    def quant(self) -> str:
        """The number format of the calibration."""
        return str(self._config_value("format", str))

    @property
    def group_size(self) -> int:
        """INT4-AWQ's group size."""
        return int(self._config_value("group_size", int))

    def input_amax(self, module: str) -> "Tensor":
        """Largest input magnitude of a linear, (1,)."""
        return self._tensor(f"{module}.input_amax")

    def weight_amax(self, module: str) -> "Tensor":
        """Largest weight magnitude of a linear, (1,)."""
        return self._tensor(f"{module}.weight_amax")

    def pre_quant_scale(self, module: str) -> "Tensor":
        """AWQ's pre-quantisation scale of a linear, (in,)."""
        return self._tensor(f"{module}.pre_quant_scale")

    def input_channel_amax(self, module: str) -> "Tensor":
        """Largest magnitude of each input, (in,)."""
        return self._tensor(f"{module}.input_channel_amax")

    def weight_column_amax(self, module: str) -> "Tensor":
        """Largest magnitude of each column of the weight, (in,)."""
        return self._tensor(f"{module}.weight_column_amax")

    def clip_ratio(self, module: str) -> "Tensor | None":
        """Clipping threshold / amax of each block, (out, in / group); None if clipping was not searched."""
        return self.tensors.get(f"{module}.clip_ratio")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user about the quality of the calibrated formats."""
        return tuple(_warnings(self))

    def kv_amax(self, layer: int) -> "Tensor | None":
        """Largest key or value of a layer, (1,); None if the KV cache was not calibrated."""
        return self.tensors.get(f"layers.{layer}.kv_amax")

    def kv_scale(self, layer: int, quant: str) -> "Tensor | None":
        """The searched scale of a layer's KV cache in this format, (1,); None if it follows from the amax."""
        searched_for = self.manifest.identity.config.get("kv_cache")
        return self.tensors.get(f"layers.{layer}.kv_scale") if searched_for == quant else None

    @property
    def has_kv_cache(self) -> bool:
        """Whether keys and values were measured."""
        return any(name.endswith(".kv_amax") for name in self.tensors)

    def _config_value(self, key: str, kind: type[str] | type[int]) -> str | int:
        value = self.manifest.identity.config.get(key)
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ForgeError(f"{FILE_NAME}: {key} of the calibration is {value!r}", hint="Calibrate this model again.")
        return value

    def _tensor(self, name: str) -> "Tensor":
        try:
            return self.tensors[name]
        except KeyError:
            raise ForgeError(
                f"the calibration has no {name}", hint="It belongs to another model: calibrate this model."
            ) from None


def _warnings(calibration: Calibration) -> Iterator[str]:
    tensors = calibration.tensors
    if calibration.manifest.identity.config.get("kv_cache") == "fp8":
        amax = {name: float(value) for name, value in tensors.items() if name.endswith(".kv_amax")}
        large = [name.removesuffix(".kv_amax") for name, value in amax.items() if value > _RISKY_KV * FP8_MAX]
        if large:
            yield (
                f"keys or values reach {max(amax.values()):.0f} in {listed(large)}, where FP8 has low precision: "
                "verify, and compare with --kv-cache none"
            )
    dead = [name.removesuffix(".dead_channels") for name, value in tensors.items() if _is(name, "dead_channels", value)]
    if dead:
        yield f"inputs that were always zero: {listed(dead)}; calibrate with more or other data to check them"
    edge = [name.removesuffix(".alpha") for name, value in tensors.items() if _at_edge(name, value)]
    tokens = {name.removesuffix(".tokens"): float(value) for name, value in tensors.items() if name.endswith(".tokens")}
    inputs = {name.removesuffix(".inputs"): float(value) for name, value in tensors.items() if name.endswith(".inputs")}
    yield from rounding_warnings(tokens, inputs)
    if edge:
        yield f"AWQ chose its largest exponent, 1, in {listed(edge)}: few channels dominate; verify the quality"


def rounding_warnings(tokens: Mapping[str, float], widths: Mapping[str, float]) -> Iterator[str]:
    """Warnings of compensated rounding, from each linear's tokens and inputs: linears left out, too few tokens for the
    width."""
    left = [module for module, seen in tokens.items() if seen < LEAST_TOKENS]
    if left:
        yield (
            f"fewer than {LEAST_TOKENS} tokens reached {listed(left)}: rounded to the nearest, without compensation; "
            "calibrate with more samples"
        )
    few = [module for module, seen in tokens.items() if LEAST_TOKENS <= seen < widths.get(module, 0)]
    if few:
        yield (
            f"fewer tokens than inputs reached {listed(few)}: compensated rounding may fit the samples instead of the "
            "model; calibrate with more samples"
        )


def _is(name: str, kind: str, value: "Tensor") -> bool:
    return name.endswith(f".{kind}") and float(value) > 0


def _at_edge(name: str, value: "Tensor") -> bool:
    return name.endswith(".alpha") and float(value) == 1.0


def open_calibration(directory: Path) -> Calibration:
    """Read a calibration artifact. Raises ForgeError for a damaged one and for values that cannot be scales."""
    manifest = open_artifact(directory, "calibration")
    tensors = load_tensors(directory / FILE)
    require_scales(directory / FILE, tensors)
    return Calibration(manifest, tensors, rounded_weights(directory, manifest))


def rounded_weights(directory: Path, manifest: Manifest) -> dict[str, RoundedWeight]:
    """The weights that a calibration rounded with compensation, by module, from the headers of their files."""
    stored = {
        tensor.spec.name: tensor
        for name in sorted(manifest.files)
        if name.startswith("codes-")
        for tensor in read_header(directory / name)
    }
    modules = [name.removesuffix(".codes") for name in stored if name.endswith(".codes")]
    return {module: RoundedWeight(stored[f"{module}.codes"], stored[f"{module}.scales"]) for module in modules}
