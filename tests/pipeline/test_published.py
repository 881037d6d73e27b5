"""A build of FP8 weights with block scales for the LLM API serves them as they are published."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import DEMO_MODEL
from tests.quantized import BLOCKS, fp8_blocks
from tests.recipes.shipped import SHIPPED
from trtforge.compile.stage import CompileOptions
from trtforge.core.errors import ForgeError
from trtforge.core.progress import Silent
from trtforge.core.recipe import Recipe, load_recipe
from trtforge.pipeline.build import Build
from trtforge.pipeline.dry_run import dry_run
from trtforge.pipeline.paths import Paths
from trtforge.pipeline.report import BuildReport
from trtforge.pipeline.stages import STAGES, StageName, selected


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with its linear layers in FP8 with block scales."""
    directory = tmp_path_factory.mktemp("published") / "model"
    shutil.copytree(DEMO_MODEL, directory, ignore=shutil.ignore_patterns("*.safetensors", "heldout.txt"))
    pack, tensors = fp8_blocks(128, 128), dict[str, torch.Tensor]()
    for name, tensor in load_file(DEMO_MODEL / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stored, _ = pack(name, tensor.float())
            tensors |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in stored.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    values = json.loads((directory / "config.json").read_text()) | {"quantization_config": BLOCKS}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def recipe(source: Path, **quantization: Any) -> Recipe:
    values = {
        "name": "published",
        "model": {"source": str(source)},
        "quantization": {"format": "fp8", **quantization},
        "parallel": {"tp": 2},
        "engine": {"backend": "llmapi", "max_batch_size": 4, "max_seq_len": 256, "target": {"gpu": "h100-80gb"}},
    }
    return Recipe.parse(values, "test")


def run(wanted: Recipe, out: Path, *stages: StageName) -> BuildReport:
    return Build(wanted, out, Silent()).run(stages or STAGES, started=lambda stage: None)


def test_the_engine_has_the_publishers_weights(source: Path, tmp_path: Path) -> None:
    report = run(recipe(source, kv_cache="fp8"), tmp_path / "build")
    assert [stage.stage for stage in report.stages] == ["compile", "package"]
    paths = Paths(tmp_path / "build")
    assert not paths.checkpoint.exists()
    assert (paths.engine / "model.safetensors").samefile(source / "model.safetensors")
    assert json.loads((paths.engine / "config.json").read_text())["quantization_config"] == BLOCKS
    written = (paths.engine / "model.yaml").read_text()
    assert "tensor_parallel_size: 2" in written
    assert "dtype: fp8" in written
    assert report.verification is None
    assert report.compression is None
    assert json.loads(paths.report.read_text())["stages"][0]["stage"] == "compile"
    again = run(recipe(source, kv_cache="fp8"), tmp_path / "build", "compile", "package")
    assert [stage.cached for stage in again.stages] == [True, True]
    assert [stage.cached for stage in run(recipe(source, kv_cache="fp8"), tmp_path / "build", "package").stages] == [
        True
    ]


def test_other_formats_and_backends_convert_it(source: Path, tmp_path: Path) -> None:
    def stages(wanted: Recipe) -> list[str]:
        planned = dry_run(wanted, Paths(tmp_path), selected(wanted, "calibrate", "package"), CompileOptions())
        return list(planned["stages"])

    assert stages(recipe(source)) == ["compile", "package"]
    assert stages(recipe(source, format="fp8_rowwise")) == ["convert", "verify", "compile", "package"]
    engine = {"backend": "tensorrt_llm", "max_seq_len": 256, "target": {"gpu": "h100-80gb"}}
    on_engines = Recipe.parse(recipe(source).model_dump(mode="json") | {"engine": engine}, "test")
    assert stages(on_engines) == list(STAGES)


def test_what_cannot_be_served_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="is FP8 with block scales already") as refused:
        run(recipe(source), tmp_path / "build", "convert", "verify")
    assert "--to compile" in refused.value.hint
    with pytest.raises(ForgeError, match="exclude_modules applies to no checkpoint that is served as it was published"):
        run(recipe(source, exclude_modules=["*.o_proj"]), tmp_path / "build")
    ada = Recipe.parse(recipe(source).model_dump(mode="json") | {"parallel": {"tp": 1}}, "test")
    ada = ada.model_copy(
        update={"engine": ada.engine.model_copy(update={"target": ada.engine.target.model_copy(update={"gpu": "l4"})})}
    )
    with pytest.raises(ForgeError, match=r"l4: TensorRT-LLM has no FP8 with block scales on compute capability 8\.9"):
        run(ada, tmp_path / "build")
    assert not (tmp_path / "build").exists()


def test_deepseek_r1_is_planned_as_published() -> None:
    wanted = load_recipe(SHIPPED["deepseek-r1-fp8"])
    planned = dry_run(wanted, Paths(Path("build")), selected(wanted, "calibrate", "package"), CompileOptions())
    assert list(planned["stages"]) == ["compile", "package"]
    engine = planned["stages"]["compile"]
    assert engine["made_from"] == "hugging_face"
    arguments = engine["model_yaml"]
    assert arguments["tensor_parallel_size"] == 8
    assert arguments["moe_expert_parallel_size"] == 8
    assert 671e9 / 8 < planned["deployment"]["weights_per_gpu"] < 1.06 * 671e9 / 8
