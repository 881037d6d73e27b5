"""Dequantised weights of an already quantised checkpoint, for the reference model.

transformers itself needs each tool's package to read such weights, and misreads ModelOpt's.
"""

import torch
from torch import Tensor

from trtforge.core.number_limits import NVFP4_BLOCK
from trtforge.formats.hf import HfCheckpoint
from trtforge.formats.quantized_source import Packing, QuantizedSource
from trtforge.models.family import Family
from trtforge.models.repack import repack_awq, repack_gptq
from trtforge.models.transforms import dequantize_int4, unpack_int4
from trtforge.reference.weights import LayerWeights
from trtforge.runtime.linears.nvfp4_linear import from_e2m1

_MARKERS: dict[Packing, str] = {"awq": "qweight", "gptq": "qweight", "pack_quantized": "weight_packed"}
"""By packing, a tensor that only quantised modules have; for other packings their scale."""


class DequantizedWeights(LayerWeights):
    """The weights of a quantised checkpoint, dequantised to float32, layer by layer."""

    def __init__(self, checkpoint: HfCheckpoint, family: Family, source: QuantizedSource) -> None:
        super().__init__(checkpoint, family, torch.device("cpu"), torch.float32)
        self._source = source
        self._transposed = tuple(f".{part.module}" for row in family.linears if row.conv1d for part in row.parts)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor, plain or quantised."""
        return super().has(name) or self._is_quantized(name)

    def _tensor(self, name: str) -> Tensor:
        if not self._is_quantized(name):
            return super()._tensor(name)
        module = name.removesuffix(".weight")
        weight = self._weight(module)
        return weight.T.contiguous() if module.endswith(self._transposed) else weight

    def _is_quantized(self, name: str) -> bool:
        module = name.removesuffix(".weight")
        source = self._source.of(module) if module != name else None
        if source is None:
            return False
        return super().has(f"{module}.{_MARKERS.get(source.packing, source.weight_scale)}")

    def _weight(self, module: str) -> Tensor:
        """The dequantised weight, (out, in) float32."""
        source = self._source.of(module)
        assert source is not None, f"{module} is not quantised"

        def take(suffix: str) -> Tensor:
            return self._as_stored(f"{module}.{suffix}")

        match source.packing:
            case "awq":
                return dequantize_int4(unpack_int4(repack_awq(take("qweight").T)), take("scales").T.float())
            case "gptq":
                return dequantize_int4(unpack_int4(repack_gptq(take("qweight").T)), take("scales").T.float())
            case "pack_quantized":
                return dequantize_int4(unpack_int4(repack_gptq(take("weight_packed"))), take("weight_scale").float())
            case "modelopt_int4" | "modelopt_w4a8":
                codes = unpack_int4(take("weight").view(torch.int8))
                return self._unscaled(module, dequantize_int4(codes, take("weight_scale").float()))
            case "nvfp4":
                tensor_scale = take(source.tensor_scale).float()
                scales = take("weight_scale").float() * (1 / tensor_scale if source.divisors else tensor_scale)
                return from_e2m1(take(source.weight)) * scales.repeat_interleave(NVFP4_BLOCK, dim=1)
            case "fp8" | "fp8_rows" | "fp8_one_scale" | "int8_rows":
                values = take("weight").float() * take(source.weight_scale).float().reshape(-1, 1)
                return self._unscaled(module, values)

    def _unscaled(self, module: str, values: Tensor) -> Tensor:
        """The weight for inputs without the module's pre-quantisation scale, if it has one."""
        name = "pre_quant_scale"
        return values * self._as_stored(f"{module}.{name}").float() if super().has(f"{module}.{name}") else values
