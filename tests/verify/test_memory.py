"""Verification of a model that would not fit if it were held as a whole."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.calibrate.test_memory import MEASURED, write_random
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import Recipe
from trtforge.plan.model import find_model
from trtforge.plan.planner import plan
from trtforge.plan.request import request_of

LAYERS = 24


def test_stays_within_what_the_plan_says(tmp_path: Path) -> None:
    size = write_random(tmp_path / "hf", LAYERS)
    out = convert(ConvertConfig(dtype="bfloat16", tp=2), tmp_path / "hf", tmp_path / "out").path
    ids = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    gate = {"data": str(tmp_path / "ids.safetensors"), "samples": 4, "sequence_length": 64}
    recipe = Recipe.parse({"name": "wide", "model": {"source": str(tmp_path / "hf")}, "gate": gate}, "test")
    model = find_model(str(tmp_path / "hf"))
    planned = plan(model, request_of(recipe, model, {}), "throughput").peaks.verify_host
    assert planned < size
    command = ["verify", out, "--against", tmp_path / "hf", "--data", gate["data"], "--samples", 4]
    command += ["--seq-len", 64, "--json", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, command)], capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout)
    assert result["kl_mean"] < 1e-3
    assert 400_000_000 < int(done.stderr.splitlines()[-1]) < planned
