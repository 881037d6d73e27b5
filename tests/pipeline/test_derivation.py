"""Recipes derived for models: legal, complete, and with the choices that were asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.conftest import DEMO_MODEL, MakeHf
from tests.machine.hosts import FakeGpu, FakeNvml
from tests.quantized import AWQ, Pack, awq, compressed, fp8_rows, nvfp4_divided, write_quantized
from trtforge.core.errors import ForgeError, UsageError
from trtforge.pipeline.derivation import Wish, derive, is_unedited, machine_gpus, name_for
from trtforge.pipeline.preflight import preflight
from trtforge.plan.alternatives import GOALS
from trtforge.plan.gpus import gpu_named
from trtforge.plan.known import known_ids

L4 = FakeGpu("NVIDIA L4", (8, 9), int(gpu_named("l4").memory))


def no_driver() -> Any:
    """A machine without NVIDIA's library."""
    raise ImportError


def formats(source: str, wish: Wish) -> tuple[str, str, int, int, int]:
    """Weights, KV cache, tp, pp and ep of the derived recipe, which can be deployed."""
    recipe = derive(source, wish, load=no_driver).recipe()
    preflight(recipe)
    parallel = recipe.parallel
    return recipe.quantization.format, recipe.quantization.kv_cache, parallel.tp, parallel.pp, parallel.ep


def test_without_a_gpu_it_is_for_the_embedded_engine() -> None:
    found = derive(str(DEMO_MODEL), Wish(), load=no_driver)
    recipe = found.recipe()
    assert (recipe.name, recipe.model.source) == ("demo-model", str(DEMO_MODEL.resolve()))
    engine = recipe.engine
    assert (engine.backend, engine.device, engine.max_batch_size, engine.max_seq_len) == ("torch", "cpu", 32, 2048)
    assert (engine.features.kv_reuse, engine.features.chunked_context) == (True, True)
    assert (recipe.quantization.format, recipe.gate.perplexity_increase) == ("none", 0.01)
    preflight(recipe)


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
ROWS = compressed("float-quantized", "channel", "token", kv_cache_scheme=KV_SCHEME)
NVFP4 = compressed("nvfp4-pack-quantized", "tensor_group", "tensor_group")


@pytest.mark.parametrize(
    ("pack", "values", "expected"),
    [
        (nvfp4_divided, NVFP4, {"format": "nvfp4", "kv_cache": "none"}),
        (awq(), AWQ, {"format": "int4_awq", "kv_cache": "none", "group_size": 64}),
        (fp8_rows, ROWS, {"format": "fp8_rowwise", "kv_cache": "fp8"}),
    ],
    ids=["nvfp4", "awq", "fp8_cache"],
)
def test_a_quantised_model_keeps_its_formats(
    tmp_path: Path, pack: Pack, values: dict[str, Any], expected: dict[str, Any]
) -> None:
    more = {f"model.layers.{n}.self_attn.{name}_scale": torch.tensor([1.5]) for n in range(2) for name in "kv"}
    more = more if values is ROWS else {}
    source = write_quantized(tmp_path / "hf", pack, values, dtype=torch.bfloat16, more=more).directory
    found = derive(str(source), Wish(), load=no_driver)
    preflight(found.recipe())
    assert found.values["quantization"] == expected


def test_groups_that_fit_the_model_are_in_the_recipe(make_hf: MakeHf) -> None:
    source = make_hf(hidden_size=192, intermediate_size=320, num_attention_heads=4, head_dim=48)
    found = derive(str(source), Wish({"--quant": "int4_awq"}), load=no_driver).recipe()
    assert (found.quantization.format, found.quantization.group_size) == ("int4_awq", 64)


@pytest.mark.parametrize(("goal", "quant"), [("memory", "int4_awq"), ("latency", "int4_awq"), ("quality", "none")])
def test_a_goal_chooses_the_format_on_a_cpu(goal: Any, quant: str) -> None:
    assert formats(str(DEMO_MODEL), Wish(goal=goal))[0] == quant
    assert formats(str(DEMO_MODEL), Wish({"--quant": "int8_wo"}, goal=goal))[0] == "int8_wo"


@pytest.mark.parametrize(
    ("model", "gpu", "expected"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "h100-80gb", ("fp8", "fp8", 1, 1, 1)),
        ("Qwen/Qwen2.5-7B-Instruct", "a100-80gb", ("int4_awq", "none", 1, 1, 1)),
        ("meta-llama/Llama-3.1-70B-Instruct", "h100-80gb", ("fp8", "fp8", 1, 1, 1)),
        ("meta-llama/Llama-3.1-70B-Instruct", "l40s", ("fp8", "fp8", 2, 1, 1)),
    ],
)
def test_a_gpu_has_its_usual_format_on_the_fewest_gpus_with_room(model: str, gpu: str, expected: Any) -> None:
    assert formats(model, Wish(gpu=gpu)) == expected


def test_a_gpu_without_bfloat16_gets_float16() -> None:
    found = derive("Qwen/Qwen2.5-7B-Instruct", Wish(gpu="t4"), load=no_driver)
    assert (found.recipe().model.dtype, found.recipe().quantization.format) == ("float16", "int8_wo")
    assert "dtype: float16  # t4 does not compute in bfloat16" in found.text("trtforge build mine.yaml", Path())
    preflight(found.recipe())


def test_what_is_given_stays() -> None:
    found = formats("Qwen/Qwen2.5-7B-Instruct", Wish({"--quant": "int8_sq", "--tp": "4"}, gpu="h100-80gb"))
    assert (found[0], found[2]) == ("int8_sq", 4)
    assert formats("Qwen/Qwen2.5-7B-Instruct", Wish({"--pp": "2"}, gpu="l40s", goal="throughput"))[3] == 2


def test_an_impossible_wish_names_the_nearest_legal_choice() -> None:
    with pytest.raises(ForgeError) as caught:
        derive("Qwen/Qwen2.5-7B-Instruct", Wish({"--tp": "3"}, gpu="h100-80gb"), load=no_driver)
    assert "--tp" in caught.value.hint
    with pytest.raises(ForgeError, match="GPU h1000 is not known"):
        derive("Qwen/Qwen2.5-7B-Instruct", Wish(gpu="h1000"), load=no_driver)


LARGE = [name for name in known_ids() if name.startswith("deepseek-ai/")]
"""More than eight GPUs of 80 GB; 61 layers cannot be split into equal pipeline stages."""
FROM_HOPPER = [*LARGE, *(name for name in known_ids() if name.startswith("openai/gpt-oss"))]
"""Too large for A100s, or in MXFP4."""


def test_every_well_known_model_gets_a_recipe_that_can_be_deployed() -> None:
    for model in known_ids():
        formats(model, Wish(gpu="h200" if model in LARGE else "h100-80gb"))


@pytest.mark.parametrize("goal", GOALS)
def test_every_goal_gives_a_recipe_that_can_be_deployed(goal: Any) -> None:
    for model in known_ids()[::7]:
        formats(model, Wish(gpu="b200" if model in FROM_HOPPER else "a100-80gb", goal=goal))


def test_deepseek_r1_is_served_as_published_where_that_fits() -> None:
    found = derive("deepseek-ai/DeepSeek-R1", Wish(gpu="h200"), load=no_driver).recipe()
    assert (found.engine.backend, found.quantization.format, found.quantization.kv_cache) == ("llmapi", "fp8", "none")
    assert found.parallel.tp == 8
    with pytest.raises(ForgeError, match="leave no KV cache"):
        derive("deepseek-ai/DeepSeek-R1", Wish(gpu="h100-80gb"), load=no_driver)


def test_the_gpu_of_the_machine_is_found() -> None:
    assert machine_gpus(no_driver) is None
    assert machine_gpus(lambda: FakeNvml([])) is None
    found = machine_gpus(lambda: FakeNvml([L4]))
    assert found is not None
    assert (found[0].name, found[1]) == ("l4", 1)
    recipe = derive("Qwen/Qwen2.5-7B-Instruct", Wish(), load=lambda: FakeNvml([L4]))
    assert recipe.recipe().engine.target.gpu == "l4"


def test_a_layout_fits_the_gpus_of_the_machine() -> None:
    def chosen(model: str, count: int) -> tuple[str, int]:
        found = derive(model, Wish(), load=lambda: FakeNvml([L4] * count))
        gpus = found.recipe().parallel.tp * found.recipe().parallel.pp
        assert ("more than" in found.reasons.get("parallel", "")) == (gpus > count)
        return found.recipe().quantization.format, gpus

    assert chosen("Qwen/Qwen2.5-7B-Instruct", 1) == ("fp8", 1)
    assert chosen("Qwen/Qwen1.5-32B", 1) == ("int4_awq", 1)
    assert chosen("Qwen/Qwen1.5-32B", 4) == ("fp8", 2)
    assert chosen("meta-llama/Llama-3.1-70B-Instruct", 1)[1] > 1


def test_short_models_get_short_samples(make_hf: MakeHf) -> None:
    recipe = derive(str(make_hf()), Wish({"--quant": "fp8"}), load=no_driver).recipe()
    assert (recipe.quantization.calibration.sequence_length, recipe.gate.sequence_length) == (128, 128)
    assert recipe.engine.max_seq_len == 128


def test_the_text_is_the_recipe_with_reasons() -> None:
    found = derive("Qwen/Qwen2.5-7B-Instruct", Wish(gpu="h100-80gb", goal="memory"), load=no_driver)
    text = found.text("trtforge build mine.yaml", Path())
    assert text.startswith("# trtforge build mine.yaml\n# derived by trtforge, digest ")
    assert is_unedited(text)
    assert not is_unedited(text.replace("memory", "x").replace("GB", "MB"))
    assert yaml.safe_load(text) == found.values
    assert "GB before the KV cache" in text
    changed = found.with_overrides(("engine.max_batch_size=3", "quantization.format=fp8"))
    assert (changed.recipe().engine.max_batch_size, found.recipe().engine.max_batch_size) == (3, 64)
    assert "quantization.format" in found.reasons
    assert "quantization.format" not in changed.reasons


def test_a_wrong_override_is_named() -> None:
    with pytest.raises(UsageError, match=r"^--set parallel.tp=0: Input should be greater than or equal to 1"):
        derive(str(DEMO_MODEL), Wish(), load=no_driver).with_overrides(("engine.max_batch_size=3", "parallel.tp=0"))


def test_a_relative_source_is_relative_to_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DEMO_MODEL.parent)
    found = derive("demo-model", Wish(), load=no_driver)
    assert yaml.safe_load(found.text("x", Path("build/a")))["model"]["source"] == "../../demo-model"
    assert found.recipe().model.source == str(DEMO_MODEL)


def test_names_come_from_the_source(tmp_path: Path) -> None:
    assert name_for("owner/My Model", "none") == "My-Model"
    assert name_for("owner/name", "int4_awq") == "name-int4_awq"
    (tmp_path / "..x").mkdir()
    assert name_for(str(tmp_path / "..x"), "none") == "x"
    assert name_for("owner/" + "x" * 150, "int4_awq") == "x" * 91 + "-int4_awq"
    assert name_for("...", "int4_awq") == "model-int4_awq"
