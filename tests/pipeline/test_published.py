"""A build for the LLM API serves FP8 weights with block scales, and GPT-OSS in MXFP4, as they are published."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from tests.conftest import DEMO_MODEL
from tests.mxfp4 import MXFP4, in_mxfp4
from tests.quantized import BLOCKS, fp8_blocks
from tests.recipes.shipped import SHIPPED
from trtforge.compile.stage import CompileOptions
from trtforge.core.errors import ForgeError
from trtforge.core.progress import Silent
from trtforge.core.recipe import Recipe, load_recipe
from trtforge.engine_process.requests import GenerationRequest
from trtforge.pipeline.build import Build
from trtforge.pipeline.dry_run import dry_run
from trtforge.pipeline.paths import Paths
from trtforge.pipeline.report import BuildReport
from trtforge.pipeline.stages import STAGES, StageName, selected
from trtforge.pipeline.summary import deployment_of, light_model, model_record
from trtforge.plan.evaluate import evaluate
from trtforge.plan.model import find_model
from trtforge.plan.request import request_of
from trtforge.runtime.generate import generate


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


@pytest.mark.parametrize(
    ("name", "said", "stored"),
    [("deepseek-r1-fp8", "fp8, as published", 671.0), ("gpt-oss-120b-mxfp4", "mxfp4, as published", 65.2)],
)
def test_the_header_says_whose_weights_they_are(name: str, said: str, stored: float) -> None:
    wanted = load_recipe(SHIPPED[name])
    model = light_model(wanted)
    assert model is not None
    assert deployment_of(wanted, model).quant == said
    assert round(model_record(model).source_bytes / 1e9, 1) == stored


@pytest.mark.parametrize(("model", "stored"), [("20b", 13_761_264_768), ("120b", 65_248_815_744)])
def test_the_bytes_of_gpt_oss_are_those_of_its_files(model: str, stored: int) -> None:
    """The total size in the index of the published checkpoints."""
    assert model_record(find_model(f"openai/gpt-oss-{model}")).source_bytes == stored


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
    with pytest.raises(ForgeError, match="as it is published: nothing is calibrated") as refused:
        run(recipe(source), tmp_path / "build", "convert", "verify")
    assert "--to compile" in refused.value.hint
    with pytest.raises(ForgeError, match="exclude_modules has no effect on a checkpoint that is served as published"):
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


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-OSS whose experts have the published tensors."""
    root = tmp_path_factory.mktemp("published")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 2048}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, sliding_window=128, max_position_embeddings=4096))
    model.bfloat16().save_pretrained(root / "bfloat16")
    directory = in_mxfp4(root / "bfloat16", root / "gpt-oss")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_MODEL / name, directory / name)
    return directory


def of_gpt_oss(source: Path, gpu: str = "h100-80gb", **quantization: Any) -> Recipe:
    target = {"gpu": gpu, "tensorrt_llm": "1.3.0"}
    values = recipe(source).model_dump(mode="json") | {
        "quantization": {"format": "none", **quantization},
        "engine": {"backend": "llmapi", "max_batch_size": 4, "max_seq_len": 256, "target": target},
    }
    return Recipe.parse(values, "test")


def test_gpt_oss_keeps_its_experts_and_windows(gpt_oss: Path, tmp_path: Path) -> None:
    report = run(of_gpt_oss(gpt_oss), tmp_path / "build")
    assert [stage.stage for stage in report.stages] == ["compile", "package"]
    engine = Paths(tmp_path / "build").engine
    assert (engine / "model.safetensors").samefile(gpt_oss / "model.safetensors")
    assert json.loads((engine / "config.json").read_text())["quantization_config"] == MXFP4
    arguments = yaml.safe_load((engine / "model.yaml").read_text())
    assert arguments["kv_cache_config"]["max_attention_window"] == [128, 256]
    assert not [warning for warning in report.warnings if "quantisation" in warning]


def test_what_is_served_in_mxfp4_is_verified_where_that_is_asked_for(gpt_oss: Path, tmp_path: Path) -> None:
    """The published weights on the embedded engine, against transformers; a later build of the engine reports it."""
    gate = {"samples": 4, "sequence_length": 64, "perplexity_increase": 1e-4, "top1_agreement": 0.99}
    wanted = of_gpt_oss(gpt_oss)
    wanted = Recipe.parse(wanted.model_dump(mode="json") | {"gate": gate}, "test")
    planned = dry_run(wanted, Paths(tmp_path), selected(wanted, "calibrate", "verify"), CompileOptions())
    assert list(planned["stages"]) == ["convert", "verify"]
    report = run(wanted, tmp_path / "build", "convert", "verify")
    assert [stage.stage for stage in report.stages] == ["convert", "verify"]
    found = report.verification
    assert found is not None
    assert found.passed
    assert found.max_abs_logit_error < 1e-2
    later = run(wanted, tmp_path / "build")
    assert [stage.stage for stage in later.stages] == ["compile", "package"]
    assert later.verification == found


def test_gpt_oss_in_mxfp4_runs_on_the_embedded_engine(gpt_oss: Path, tmp_path: Path) -> None:
    values = of_gpt_oss(gpt_oss).model_dump(mode="json") | {
        "engine": {"backend": "torch", "max_batch_size": 2, "max_seq_len": 64},
        "gate": {"samples": 2, "sequence_length": 32},
    }
    wanted = Recipe.parse(values, "test")
    report = run(wanted, tmp_path / "build", *selected(wanted, "calibrate", "package"))
    assert [stage.stage for stage in report.stages] == ["convert", "verify", "compile", "package"]
    assert report.verification is not None
    assert report.verification.passed
    (made,) = generate(Paths(tmp_path / "build").engine, [GenerationRequest("", (5, 6, 7), 4)])
    assert (made.error, len(made.tokens)) == (None, 4)


def test_the_plan_of_gpt_oss_counts_its_stored_bytes(gpt_oss: Path) -> None:
    model = find_model(str(gpt_oss))
    assert model.stored_bytes == sum(tensor.nbytes for tensor in load_file(gpt_oss / "model.safetensors").values())
    evaluation = evaluate(model, request_of(of_gpt_oss(gpt_oss), model, {"--tp": "1"}))
    assert evaluation.legal
    assert evaluation.memory is not None
    router = 2 * 4 * 64 * 2  # float32 on the GPU
    assert evaluation.memory.fullest.weights == model.stored_bytes + router
    assert evaluation.memory.windows is not None
    assert evaluation.memory.windows.layers[0] == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "fp8"}, "loads the experts of gpt_oss in bfloat16, or in MXFP4 as they are published"),
        ({"gpu": "l40s"}, r"l40s: TensorRT-LLM has no MXFP4 on compute capability 8\.9, only from 9\.0 on"),
    ],
)
def test_gpt_oss_is_refused_elsewhere(changes: dict[str, str], message: str, gpt_oss: Path, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=message):
        run(of_gpt_oss(gpt_oss, **changes), tmp_path / "build")
