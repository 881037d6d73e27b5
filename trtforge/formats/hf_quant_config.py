"""The quantisation metadata of a Hugging Face checkpoint, in the two files that ModelOpt writes.

Sources: `hf_quant_config.json`, which TensorRT-LLM's PyTorch backend reads (modelopt export/quant_utils.py,
`get_quant_config`, 0.47), and config.json's `quantization_config`, which others read (export/convert_hf_config.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtforge import __version__
from trtforge.core.number_limits import NVFP4_BLOCK
from trtforge.formats.trtllm import Quantization

_SCHEMES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "FP8": {
        "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
        "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
    },
    "NVFP4": {
        "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK},
        "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK},
    },
}
"""`config_groups` by algorithm; ModelOpt writes none for other algorithms."""


@dataclass(frozen=True)
class HfQuantization:
    """The quantisation of a checkpoint, and the modules excluded from it.

    `algorithms`: in mixed precision, those of the modules with another algorithm.
    """

    quantization: Quantization
    exclude_modules: Sequence[str]
    algorithms: Mapping[str, str] | None = None

    def hf_quant_config(self) -> dict[str, Any]:
        """The content of hf_quant_config.json."""
        values: dict[str, Any] = {
            "quant_algo": self.quantization.quant_algo,
            "kv_cache_quant_algo": self.quantization.kv_cache_quant_algo,
        }
        if self.quantization.quant_algo == "W4A16_AWQ":
            values |= self._awq()
        elif self.quantization.quant_algo == "NVFP4":
            values |= {"group_size": NVFP4_BLOCK}
        layers = self._layers()
        if layers is not None:
            values |= {"quantized_layers": layers}
        return {"producer": _producer(), "quantization": values | {"exclude_modules": list(self.exclude_modules)}}

    def quant_cfg(self) -> dict[str, Any] | None:
        """The content of quant_cfg.json, from which releases before 1.2 read the formats in mixed precision."""
        layers = self._layers()
        if layers is None:
            return None
        return {
            "quant_algo": self.quantization.quant_algo,
            "kv_cache_quant_algo": self.quantization.kv_cache_quant_algo,
            "quantized_layers": layers,
        }

    def _layers(self) -> dict[str, dict[str, Any]] | None:
        """`quantized_layers` (`load_modelopt_quant_config` in tensorrt_llm/_torch/model_config.py)."""
        if self.algorithms is None:
            return None
        more = {"W4A16_AWQ": self._awq(), "NVFP4": {"group_size": NVFP4_BLOCK}}
        return {
            module: {"quant_algo": algorithm} | more.get(algorithm, {}) for module, algorithm in self.algorithms.items()
        }

    def _awq(self) -> dict[str, Any]:
        return {"group_size": self.quantization.group_size, "has_zero_point": False, "pre_quant_scale": True}

    def quantization_config(self) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        algorithm = self.quantization.quant_algo
        assert algorithm is not None, "an unquantised checkpoint has no quantization_config"
        values: dict[str, Any] = {}
        if algorithm in _SCHEMES:
            values["config_groups"] = {"group_0": {**_SCHEMES[algorithm], "targets": ["Linear"]}}
        values |= {"ignore": list(self.exclude_modules), "quant_algo": algorithm}
        layers = self._layers()
        if layers is not None:
            values["quantized_layers"] = layers
        if self.quantization.kv_cache_quant_algo == "FP8":
            values["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
        return values | {"producer": _producer(), "quant_method": "modelopt"}


def _producer() -> dict[str, str]:
    return {"name": "trtforge", "version": __version__}
