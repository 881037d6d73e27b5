"""LoRA adapters of tiny models, made and saved by PEFT, and engines that hold them."""

import copy
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import PreTrainedModel

from trtforge.core.features import LoraFeature
from trtforge.engine_process.requests import SentAdapter
from trtforge.formats.adapter import ADAPTER_FILES, adapter_names, resolved_lora

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def save_adapter(model: PreTrainedModel, out: Path, seed: int, **settings: Any) -> Path:
    """A random adapter of a model, as PEFT saves it; changes the logits much."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION, *MLP]} | settings
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**values))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    adapted.save_pretrained(str(out))
    return out


_MODULE_IDS = {
    "qkv_proj": 0, "q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "gate_up_proj": 5,
    "down_proj": 6, "up_proj": 7, "c_attn": 0, "query_key_value": 0, "dense": 4, "c_fc": 5, "dense_h_to_4h": 5,
    "dense_4h_to_h": 6, "attn.c_proj": 4, "mlp.c_proj": 6,
}  # fmt: skip


def lora_tensors(adapter: Path, groups: int | None = None, size: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """`lora_config` [1, modules, 3] and float32 `lora_weights` [1, modules, values], as examples/hf_lora_convert.py of
    TensorRT-LLM (commit 05316d33) makes them of what PEFT saved.

    `groups`: key-value heads of a model, with heads of `size`, whose rows are [q ... q k v] for each of them: they are
    sorted to [q; k; v], which that program does not do."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    rows, weights = [], []
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        *_, layer, inside, module, _, _ = name.split(".")
        b = tensors[name.replace("lora_A", "lora_B")]
        if module == "gate_up_proj":
            b = torch.cat(b.chunk(2)[::-1])
        if module in ("query_key_value", "c_attn") and groups is not None:
            heads = b.view(groups, -1, size, b.shape[1])
            b = torch.cat([part.flatten(0, 2) for part in (heads[:, :-2], heads[:, -2:-1], heads[:, -1:])])
        known = module if module in _MODULE_IDS else f"{inside}.{module}"
        rows.append([_MODULE_IDS[known], int(layer), len(a)])
        weights.append(torch.cat([a.flatten(), (b * scale).flatten()]))
    padded = torch.nn.utils.rnn.pad_sequence(weights, batch_first=True)
    return np.array([rows], dtype=np.int32), padded.unsqueeze(0).numpy()


def sent(adapter: Path, groups: int | None = None, size: int = 0) -> SentAdapter:
    """An adapter as a request brings it; `groups`, `size`: see `lora_tensors`."""
    config, weights = lora_tensors(adapter, groups, size)
    return SentAdapter(tuple(map(tuple, config[0].tolist())), "float32", weights.shape[2], weights.tobytes())


def with_adapter(model: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """PEFT's model of an adapter."""
    loaded: PreTrainedModel = PeftModel.from_pretrained(copy.deepcopy(model), str(adapter))  # type: ignore[assignment]
    return loaded.eval()


def add_adapters(engine: Path, adapters: Sequence[Path], **settings: Any) -> Path:
    """Put adapters into an engine that was written without, as the compile stage does."""
    paths = tuple(map(str, adapters))
    lora = resolved_lora(LoraFeature(adapters=paths, **settings)).model_copy(update={"adapters": adapter_names(paths)})
    config = json.loads((engine / "config.json").read_text())
    features: Mapping[str, Any] = config["forge"].get("features", {})
    config["forge"]["features"] = {**features, "lora": lora.model_dump(mode="json")}
    (engine / "config.json").write_text(json.dumps(config))
    for number, adapter in enumerate(adapters, start=1):
        place = engine / "adapters" / str(number)
        place.mkdir(parents=True)
        for name in ADAPTER_FILES:
            shutil.copyfile(adapter / name, place / name)
    return engine
