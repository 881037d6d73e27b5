"""The reference of an already quantised checkpoint: transformers' model with the weights that codes and scales mean.

transformers itself needs a package of each tool to read them, and takes ModelOpt's for what they are not.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfCheckpoint
from trtforge.formats.quantized_source import Packing, QuantizedSource
from trtforge.models.quantized_plan import FLOATS
from trtforge.models.repack import repack_awq, repack_gptq
from trtforge.models.transforms import NVFP4_BLOCK, dequantize_int4, unpack_int4
from trtforge.runtime.nvfp4_linear import from_e2m1

_OF_ITS_OWN: dict[Packing, str] = {"awq": "qweight", "gptq": "qweight", "pack_quantized": "weight_packed"}
"""A tensor that only quantised modules have; the other packings' is weight_scale."""


def load_dequantized(checkpoint: HfCheckpoint, source: QuantizedSource) -> PreTrainedModel:
    """The float32 model on the CPU. Raises ForgeError if its parameters are not those of the checkpoint."""
    config = AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    turned = tuple(name for name, part in skeleton.named_modules() if isinstance(part, Conv1D))
    tensors = _Tensors(checkpoint)
    state = {}
    for module, weight in _weights(tensors, source):
        state[f"{module}.weight"] = weight.T if any(name.endswith(module) for name in turned) else weight
    for name in tensors.names - set(state):
        if tensors.is_plain(name):
            state[name] = tensors.take(name).float()
    model, info = type(skeleton).from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
    )
    for name in sorted(info["missing_keys"]):
        raise ForgeError(f"{checkpoint.directory} lacks {name}", hint="Fetch the checkpoint again.")
    loaded: PreTrainedModel = model
    return loaded


def _weights(tensors: "_Tensors", source: QuantizedSource) -> Iterator[tuple[str, Tensor]]:
    """Every quantised module with the float32 (out, in) that it means."""
    for name in tensors.names:
        module, _, kind = name.rpartition(".")
        if kind == _OF_ITS_OWN.get(source.packing, "weight_scale"):
            yield module, _weight(tensors, module, source)


def _weight(tensors: "_Tensors", module: str, source: QuantizedSource) -> Tensor:
    def take(suffix: str) -> Tensor:
        return tensors.take(f"{module}.{suffix}")

    match source.packing:
        case "awq":
            return dequantize_int4(unpack_int4(repack_awq(take("qweight").T)), take("scales").T.float())
        case "gptq":
            return dequantize_int4(unpack_int4(repack_gptq(take("qweight").T)), take("scales").T.float())
        case "pack_quantized":
            return dequantize_int4(unpack_int4(repack_gptq(take("weight_packed"))), take("weight_scale").float())
        case "modelopt_int4":
            values = dequantize_int4(unpack_int4(take("weight").view(torch.int8)), take("weight_scale").float())
            name = f"{module}.pre_quant_scale"
            return values * tensors.take(name).float() if name in tensors.names else values
        case "nvfp4":
            scales = take("weight_scale").float() * take("weight_scale_2").float()
            return from_e2m1(take("weight")) * scales.repeat_interleave(NVFP4_BLOCK, dim=1)
        case "fp8" | "fp8_rows" | "fp8_one_scale":
            return take("weight").float() * take("weight_scale").float().reshape(-1, 1)


class _Tensors:
    """A checkpoint's tensors, read one at a time."""

    def __init__(self, checkpoint: HfCheckpoint) -> None:
        self.names = frozenset(checkpoint.tensors)
        self._files: dict[str, Path] = {name: stored.file for name, stored in checkpoint.tensors.items()}
        self._dtypes = {name: stored.spec.dtype.name for name, stored in checkpoint.tensors.items()}

    def is_plain(self, name: str) -> bool:
        """Whether it is no part of a quantised weight, but a norm, an embedding, a bias or a weight left alone."""
        return name.endswith((".weight", ".bias")) and self._dtypes[name] in FLOATS

    def take(self, name: str) -> Tensor:
        with safe_open(str(self._files[name]), "pt", device="cpu") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
