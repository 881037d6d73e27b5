"""A model that is larger than the memory that calibration may use."""

import json
import re
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
import trtforge.calibrate.walk
trtforge.calibrate.walk._SECONDS_BETWEEN_SAVES = -1.0
from trtforge.cli.app import main
from trtforge.machine.usage import peak_memory
try:
    main()
finally:
    print(peak_memory(), file=sys.stderr)
"""


def write_random(directory: Path, layers: int, width: int = 1024, dtype: torch.dtype = torch.float32) -> int:
    """A Llama with random weights in one file a layer, so that none is in memory as a whole; its bytes."""
    config = LlamaConfig(
        hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=256, max_position_embeddings=256, tie_word_embeddings=False, dtype=dtype,
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
        made = {name: (torch.randn(shapes[name], generator=generator) * 0.02).to(dtype) for name in names}
        save_file(made, directory / file)
        index |= dict.fromkeys(names, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(dtype.itemsize * torch.Size(shape).numel() for shape in shapes.values())


def calibrated(root: Path, quant: str, tokens: tuple[int, int], limit: int) -> subprocess.CompletedProcess[str]:
    """Calibration of `root`/hf in a process of its own, whose last line says how much memory it took."""
    ids = torch.randint(0, 256, tokens, generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": ids}, root / "ids.safetensors")
    command = ["calibrate", root / "hf", root / "out", "--quant", quant, "--memory", limit]
    command += ["--data", root / "ids.safetensors", "--samples", tokens[0], "--seq-len", tokens[1], "--quiet"]
    return subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, command)], capture_output=True, text=True, check=False
    )


def test_calibrates_a_model_of_one_and_a_half_times_the_limit_under_it(tmp_path: Path) -> None:
    size = write_random(tmp_path / "hf", LAYERS)
    assert size >= 1.5 * LIMIT
    done = calibrated(tmp_path, "fp8", (8, 64), LIMIT)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.splitlines()[-1]) < LIMIT
    tensors = open_calibration(tmp_path / "out").tensors
    assert sum(name.endswith(".input_amax") for name in tensors) == LAYERS * 7


def test_awq_keeps_the_least_limit_that_it_is_given(tmp_path: Path) -> None:
    """Its search takes float32 copies of a weight and sketches, whatever type the model is computed in."""
    write_random(tmp_path / "hf", 2, width=1024, dtype=torch.bfloat16)
    refused = calibrated(tmp_path, "int4_awq", (16, 256), 1)
    needed = int(re.search(r"needs ([\d,]+) bytes", refused.stderr)[1].replace(",", ""))
    limit = needed + 2_000_000  # of 8.4 MB of hidden states
    done = calibrated(tmp_path, "int4_awq", (16, 256), limit)
    assert done.returncode == 0, done.stderr
    peak = int(done.stderr.splitlines()[-1])
    assert 0.6 * limit < peak < limit


def test_many_samples_and_their_saves_keep_the_limit(tmp_path: Path) -> None:
    """34 MB of hidden states, of which 10 MB stay in memory; every layer's are saved (MEASURED)."""
    write_random(tmp_path / "hf", 2, width=512, dtype=torch.bfloat16)
    refused = calibrated(tmp_path, "int4_awq", (128, 256), 1)
    needed = int(re.search(r"needs ([\d,]+) bytes", refused.stderr)[1].replace(",", ""))
    limit = needed + 10_000_000
    done = calibrated(tmp_path, "int4_awq", (128, 256), limit)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.splitlines()[-1]) < limit
