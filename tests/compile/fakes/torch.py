"""The GPUs of the stand-in: those of `gpus.json`, as far as CUDA_VISIBLE_DEVICES shows them."""

import json
import os
from pathlib import Path
from types import SimpleNamespace


def _gpus():
    every = json.loads((Path(__file__).parent / "gpus.json").read_text())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return every if visible is None else [every[int(index)] for index in visible.split(",") if index]


version = SimpleNamespace(cuda="13.0")
cuda = SimpleNamespace(
    device_count=lambda: len(_gpus()), get_device_properties=lambda index: SimpleNamespace(**_gpus()[index])
)
