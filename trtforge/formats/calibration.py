"""The calibration artifact: a few numbers for each linear of the unsplit model, whatever the parallel layout."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Manifest, open_artifact

if TYPE_CHECKING:
    from torch import Tensor

FILE = "calibration.safetensors"


@dataclass(frozen=True)
class Calibration:
    """Tensors by Hugging Face module name, float32, on the CPU.

    `<module>.input_amax` and `.weight_amax` (1,), largest magnitudes; `.pre_quant_scale` (in,), what an input is
    multiplied by before an INT4-AWQ matrix product; `layers.<i>.kv_amax` (1,), largest key or value.
    """

    manifest: Manifest
    tensors: dict[str, "Tensor"]

    @property
    def quant(self) -> str:
        """The format it was made for."""
        return str(self.manifest.identity.config["format"])

    @property
    def group_size(self) -> int:
        """INT4-AWQ's group size."""
        return int(self.manifest.identity.config["group_size"])

    def input_amax(self, module: str) -> "Tensor":
        """Largest input magnitude of a linear, (1,)."""
        return self._tensor(f"{module}.input_amax")

    def weight_amax(self, module: str) -> "Tensor":
        """Largest weight magnitude of a linear, (1,)."""
        return self._tensor(f"{module}.weight_amax")

    def pre_quant_scale(self, module: str) -> "Tensor":
        """AWQ's scale of a linear's inputs, (in,)."""
        return self._tensor(f"{module}.pre_quant_scale")

    def kv_amax(self, layer: int) -> "Tensor | None":
        """Largest key or value of a layer, (1,); None where the KV cache was not calibrated."""
        return self.tensors.get(f"layers.{layer}.kv_amax")

    def _tensor(self, name: str) -> "Tensor":
        try:
            return self.tensors[name]
        except KeyError:
            raise ForgeError(
                f"the calibration holds no {name}", hint="Calibrate this model again; the artifact is of another one."
            ) from None


def open_calibration(directory: Path) -> Calibration:
    """Read and check a calibration artifact."""
    from safetensors.torch import load_file

    manifest = open_artifact(directory, "calibration")
    return Calibration(manifest, load_file(directory / FILE))
