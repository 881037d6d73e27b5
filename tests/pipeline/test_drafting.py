"""Draft heads in a build: a recipe leads to a checkpoint that holds them, which is planned, inspected and continued."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.runtime.checkpoints import tiny_llama
from tests.runtime.eagle_networks import write_network
from tests.runtime.test_medusa import write_heads
from trtforge.core.errors import ForgeError
from trtforge.core.progress import Silent
from trtforge.core.recipe import Recipe
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.pipeline.adoption import adopt
from trtforge.pipeline.build import Build
from trtforge.pipeline.continuation import require_checkpoint_of
from trtforge.pipeline.description import describe
from trtforge.plan.checkpoint_model import model_of_checkpoint
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.request import request_of


def recipe(base: Path, backend: str, method: str = "medusa", **asked: Any) -> Recipe:
    directory = {"medusa": "heads", "eagle": "network"}[method]
    features = {method: {"model": str(base / directory), **asked}} if asked != {"model": None} else {}
    values = {
        "name": "mine",
        "model": {"source": str(base / "hf"), "dtype": "float16"},
        "engine": {"backend": backend, "device": "cpu", "max_batch_size": 2, "max_seq_len": 128, "features": features},
    }
    return Recipe.parse(values, "mine")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    # TensorRT-LLM has attention kernels for heads of 32 and more.
    tiny_llama(num_attention_heads=2, num_key_value_heads=2).save_pretrained(tmp_path / "hf")
    write_heads(tmp_path / "heads")
    write_network(tmp_path / "network", "eagle")
    return tmp_path


def built(wanted: Recipe, base: Path) -> Path:
    build = Build(wanted, base / "out", Silent())
    build.run(("convert",), started=lambda stage: None)
    return build.paths.checkpoint


def evaluated(checkpoint: Path, **engine: Any) -> Evaluation:
    model = model_of_checkpoint("checkpoint", checkpoint)
    wanted = Recipe.parse({"name": "a", "model": {"source": "m"}, "engine": {"max_seq_len": 128, **engine}}, "a")
    return evaluate(model, request_of(wanted, model, {}))


def test_a_recipe_for_tensorrt_leads_to_a_checkpoint_with_heads(base: Path) -> None:
    checkpoint = built(recipe(base, "tensorrt_llm", draft_tokens=7), base)
    config = read_checkpoint_config(checkpoint)
    assert (config.architecture, config.model_dump()["max_draft_len"]) == ("MedusaForCausalLM", 7)
    require_checkpoint_of(recipe(base, "tensorrt_llm", draft_tokens=7), checkpoint, base / "calibration")
    for other in (recipe(base, "tensorrt_llm"), recipe(base, "tensorrt_llm", model=None)):
        with pytest.raises(ForgeError, match="does not match the recipe: it has medusa"):
            require_checkpoint_of(other, checkpoint, base / "calibration")


def test_a_recipe_for_tensorrt_leads_to_a_checkpoint_with_networks(base: Path) -> None:
    checkpoint = built(recipe(base, "tensorrt_llm", "eagle", depth=2), base)
    values = read_checkpoint_config(checkpoint).model_dump()
    assert (values["architecture"], values["num_eagle_layers"]) == ("EagleForCausalLM", 2)
    require_checkpoint_of(recipe(base, "tensorrt_llm", "eagle", depth=2), checkpoint, base / "calibration")
    with pytest.raises(ForgeError, match="does not match the recipe: it has eagle"):
        require_checkpoint_of(recipe(base, "tensorrt_llm", "eagle"), checkpoint, base / "calibration")


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_a_recipe_for_the_embedded_engine_leads_to_the_model_alone(base: Path, method: str) -> None:
    assert read_checkpoint_config(built(recipe(base, "torch", method), base)).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(("method", "lacks"), [("medusa", r"medusa_lm_head\.safetensors"), ("eagle", r"config\.json")])
def test_missing_files_are_told_before_the_first_stage(base: Path, method: str, lacks: str) -> None:
    wanted = recipe(base, "tensorrt_llm", method, model=str(base / "nowhere"))
    started: list[str] = []
    with pytest.raises(ForgeError, match=rf"nowhere has no {lacks}"):
        Build(wanted, base / "out", Silent()).run(("convert", "compile"), started=started.append)
    assert started == []


def test_a_checkpoint_with_heads_is_planned_and_inspected(base: Path) -> None:
    checkpoint = built(recipe(base, "tensorrt_llm"), base)
    found = describe(checkpoint, tensors=False)
    assert (found["architecture"], found["medusa_heads"]) == ("MedusaForCausalLM", 4)
    planned = evaluated(checkpoint, backend="tensorrt_llm", max_batch_size=2)
    assert planned.legal
    assert planned.limits is not None
    assert planned.limits.verified_tokens == 64
    assert planned.memory is not None
    vocab, hidden = 131, 64
    weights = 4 * (hidden * hidden + hidden + hidden * vocab) * 2
    assert planned.memory.fullest.draft == weights + 2 * 63 * vocab * 4 + 4 * 2 * 64 * vocab * 4
    embedded = evaluated(checkpoint, backend="torch", device="cpu", compute_dtype="float32", max_batch_size=2)
    assert embedded.legal
    assert embedded.limits is not None
    assert embedded.limits.verified_tokens == 5
    assert embedded.memory is not None
    assert embedded.memory.fullest.draft == 2 * weights


def test_a_checkpoint_with_networks_is_planned_and_inspected(base: Path) -> None:
    checkpoint = built(recipe(base, "tensorrt_llm", "eagle", depth=2), base)
    found = describe(checkpoint, tensors=False)
    assert (found["architecture"], found["eagle_networks"]) == ("EagleForCausalLM", 2)
    planned = evaluated(checkpoint, backend="tensorrt_llm", max_batch_size=2)
    assert planned.legal
    assert planned.limits is not None
    assert (planned.limits.verified_tokens, planned.limits.spare_tokens) == (64, 65)
    embedded = evaluated(checkpoint, backend="torch", device="cpu", compute_dtype="float32", max_batch_size=2)
    assert embedded.legal
    assert embedded.limits is not None
    assert embedded.limits.verified_tokens == 3


@pytest.mark.parametrize(("method", "added"), [("medusa", 4 * 3), ("eagle", 4 * 10)])
def test_a_checkpoint_of_another_converter_is_adopted(base: Path, method: str, added: int) -> None:
    checkpoint = built(recipe(base, "tensorrt_llm", method), base)
    shutil.rmtree(checkpoint / "source")
    (checkpoint / "forge.json").unlink()
    plain = sum(not name.startswith((f"{method}_heads", f"{method}_nets")) for name in _names(checkpoint))
    assert adopt(checkpoint).tensors == plain + added
    tensors = load_file(checkpoint / "rank0.safetensors")
    name = next(name for name in tensors if name.startswith(method) and name.endswith("lm_head.weight"))
    save_file(tensors | {name: tensors[name][:7].contiguous()}, checkpoint / "rank0.safetensors")
    (checkpoint / "forge.json").unlink()
    with pytest.raises(ForgeError, match=rf"{name} has shape \(7, 64\)"):
        adopt(checkpoint)


def _names(checkpoint: Path) -> list[str]:
    return list(load_file(checkpoint / "rank0.safetensors"))
