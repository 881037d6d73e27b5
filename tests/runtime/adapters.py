"""LoRA adapters of tiny models, made and saved by PEFT, and engines that hold them."""

import copy
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from trtforge.core.features import LoraFeature
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
