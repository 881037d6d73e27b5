"""GPT-OSS with its experts in MXFP4, as OpenAI publishes it, and the values that `transformers` reads in them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
EXPERTS = ("gate_up_proj", "down_proj")


def in_mxfp4(bfloat16: Path, out: Path) -> Path:
    """The checkpoint with other experts: random codes, scales of 1/32 to 1/4. No two bytes that must differ agree."""
    tensors, generator = load_file(bfloat16 / "model.safetensors"), torch.Generator().manual_seed(11)
    for name in sorted(name for name in tensors if name.endswith(EXPERTS)):
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, shape, generator=generator).to(torch.uint8)
    out.mkdir()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    values = json.loads((bfloat16 / "config.json").read_text()) | {"quantization_config": MXFP4}
    (out / "config.json").write_text(json.dumps(values))
    return out


def meant(directory: Path) -> dict[str, Tensor]:
    """The bfloat16 tensors that `transformers` reads."""
    stored = load_file(directory / "model.safetensors")
    found = {name: tensor for name, tensor in stored.items() if not name.endswith(("_blocks", "_scales"))}
    for name in (name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")):
        found[name] = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
    return found
