"""A recipe with backend llmapi, from the Hugging Face checkpoint to the model repository."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.conftest import DEMO_MODEL
from trtforge.cli.app import app
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import load_recipe
from trtforge.pipeline.description import describe
from trtforge.pipeline.stage_configs import convert_config
from trtforge.runtime.ranks.source import open_engine

TEXT = str(DEMO_MODEL / "heldout.txt")
RECIPE = {
    "name": "demo-llmapi",
    "model": {"source": str(DEMO_MODEL)},
    "quantization": {"format": "fp8", "calibration": {"data": TEXT, "samples": 4, "sequence_length": 32}},
    "parallel": {"tp": 2},
    "engine": {"backend": "llmapi", "max_seq_len": 256, "target": {"tensorrt_llm": "1.3.0"}},
    "gate": {"data": TEXT, "samples": 2, "sequence_length": 32},
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path / "recipe.yaml"


def run(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_dry_run_shows_the_plan_and_writes_nothing(recipe: Path, tmp_path: Path) -> None:
    stages = json.loads(run("build", recipe, "--out", tmp_path / "build", "--dry-run", "--json"))["stages"]
    assert list(stages) == ["calibrate", "convert", "verify", "compile", "package"]
    assert stages["compile"]["backend"] == "llmapi"
    assert stages["compile"]["tensorrt_llm"] == "1.3.0"
    assert stages["compile"]["model_yaml"]["tensor_parallel_size"] == 2
    assert not (tmp_path / "build").exists()


def test_a_build_goes_all_the_way(recipe: Path, tmp_path: Path) -> None:
    report = json.loads(run("build", recipe, "--out", tmp_path / "build", "--json"))
    assert [stage["stage"] for stage in report["stages"]] == ["calibrate", "convert", "verify", "compile", "package"]
    found = describe(tmp_path / "build" / "engine", tensors=True)
    assert (found["backend"], found["quantization"], found["family"]) == ("llmapi", "modelopt", "llama")
    names = {tensor["name"] for tensor in found["tensors"]}
    assert {"model.layers.0.mlp.up_proj.weight_scale", "model.layers.0.mlp.up_proj.input_scale"} <= names
    model = tmp_path / "build" / "repository" / "tensorrt_llm" / "1"
    assert yaml.safe_load((model / "model.yaml").read_text())["model"] == "engine"
    with pytest.raises(ForgeError, match="is an llmapi engine or a Hugging Face checkpoint"):
        open_engine(tmp_path / "build" / "engine")


def test_gate_and_up_get_one_awq_scale(recipe: Path) -> None:
    """The LLM API runs both as one linear. Other formats have no such scale."""
    assert convert_config(load_recipe(recipe, ("quantization.format=int4_awq",))).shared_pre_quant_scale
    assert not convert_config(load_recipe(recipe)).shared_pre_quant_scale
    assert not convert_config(load_recipe(recipe, ("engine.backend=torch",))).shared_pre_quant_scale


def test_a_directory_is_compiled_by_the_command(tmp_path: Path) -> None:
    made = json.loads(
        run("compile", DEMO_MODEL, tmp_path / "engine", "--backend", "llmapi", "--tp", "2", "--ep", "2", "--json")
    )
    assert made["stage"] == "engine"
    args = yaml.safe_load((tmp_path / "engine" / "model.yaml").read_text())
    assert (args["tensor_parallel_size"], args["moe_expert_parallel_size"]) == (2, 2)
    plan = json.loads(run("compile", DEMO_MODEL, tmp_path / "x", "--backend", "llmapi", "--dry-run"))
    assert plan["made_from"] == "hugging_face"
