"""A model that is larger than the memory that calibration may use."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from trtforge.formats.calibration import open_calibration

LAYERS = 27
LIMIT = 800_000_000
MEASURED = """
import sys
from trtforge.cli.app import main
from trtforge.core.usage import peak_memory
try:
    main()
finally:
    print(peak_memory(), file=sys.stderr)
"""


def write_random(directory: Path, layers: int) -> int:
    """A Llama with random float32 weights in one file a layer, so that none is in memory as a whole; its bytes."""
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=256, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    index = {}
    groups: dict[str, list[str]] = {}
    for name in shapes:
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        groups.setdefault(layer, []).append(name)
    for layer, names in groups.items():
        file = f"model-{layer}.safetensors"
        save_file({name: torch.randn(shapes[name], generator=generator) * 0.02 for name in names}, directory / file)
        index |= dict.fromkeys(names, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(4 * torch.Size(shape).numel() for shape in shapes.values())


def test_calibrates_a_model_of_one_and_a_half_times_the_limit_under_it(tmp_path: Path) -> None:
    size = write_random(tmp_path / "hf", LAYERS)
    assert size >= 1.5 * LIMIT
    ids = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    command = ["calibrate", tmp_path / "hf", tmp_path / "out", "--quant", "fp8", "--memory", LIMIT]
    command += ["--data", tmp_path / "ids.safetensors", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, command)], capture_output=True, text=True, check=True
    )
    peak = int(done.stderr.splitlines()[-1])
    assert peak < LIMIT
    tensors = open_calibration(tmp_path / "out").tensors
    assert sum(name.endswith(".input_amax") for name in tensors) == LAYERS * 7
