"""The planned weights of quantised sources, and of exclusions, are those that conversion writes, byte for byte."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import MakeHf
from tests.convert.test_quantized_sources import FP8_SOURCES, INT4_SOURCES, KV_SCHEME, STATIC
from tests.modelopt import FORMATS, export_for_hugging_face, quantized_by_modelopt
from tests.plan.models import asked
from tests.quantized import Pack, compressed, fp8_static, int8_static, nvfp4_divided, write_quantized
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import QuantFormat
from trtforge.formats.hf import read_config
from trtforge.formats.shards import read_header
from trtforge.formats.trtllm import rank_file
from trtforge.models.checkpoint_plan import Layout, checkpoint_plan
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.fixes import fixes
from trtforge.plan.model import find_model

OTHER_SOURCES: list[Any] = [
    pytest.param(int8_static, compressed("int-quantized", "channel", "tensor"), id="int8"),
    pytest.param(nvfp4_divided, compressed("nvfp4-pack-quantized", "tensor_group", "tensor_group"), id="nvfp4"),
]


def written(source: Path, out: Path, tp: int, pp: int = 1) -> list[int]:
    """Bytes of the first rank file of every pipeline stage."""
    convert(ConvertConfig(tp=tp, pp=pp), source, out)
    return [sum(tensor.spec.nbytes for tensor in read_header(out / rank_file(stage * tp))) for stage in range(pp)]


def planned(source: Path, **options: Any) -> Evaluation:
    model = find_model(str(source))
    found = evaluate(model, asked(model, **options))
    assert found.problems == ()
    return found


def weights(found: Evaluation) -> list[int]:
    assert found.memory is not None
    return [stage.weights for stage in found.memory.stages]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
@pytest.mark.parametrize(("pack", "values"), INT4_SOURCES + FP8_SOURCES + OTHER_SOURCES)
def test_every_tool(pack: Pack, values: dict[str, Any], tp: int, pp: int, tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "hf", pack, values).directory
    assert weights(planned(source, tp=tp, pp=pp)) == written(source, tmp_path / "out", tp, pp)


@pytest.mark.parametrize("format_", FORMATS)
def test_exports_of_modelopt(format_: str, tmp_path: Path) -> None:
    export_for_hugging_face(quantized_by_modelopt(format_), tmp_path / "hf")
    assert weights(planned(tmp_path / "hf", tp=2)) == written(tmp_path / "hf", tmp_path / "out", 2)


def with_fp8_cache(directory: Path) -> Path:
    """A source in static FP8 with scales of an FP8 KV cache."""
    more = {f"model.layers.{n}.self_attn.{name}_scale": torch.tensor([1.5]) for n in range(2) for name in "kv"}
    values = STATIC | {"kv_cache_scheme": KV_SCHEME}
    return write_quantized(directory, fp8_static(), values, dtype=torch.bfloat16, more=more).directory


@pytest.mark.parametrize("backend", ["torch", "tensorrt_llm", "llmapi"])
def test_scales_of_an_fp8_kv_cache(tmp_path: Path, backend: str) -> None:
    source = with_fp8_cache(tmp_path / "hf")
    computed = {"compute_dtype": "bfloat16"} if backend == "torch" else {}  # as stored, on every processor
    found = planned(source, recipe={"engine": {"backend": backend, **computed}})
    assert (found.request.kv_cache, weights(found)) == ("fp8", written(source, tmp_path / "out", 1))


@pytest.mark.parametrize(("kv_cache", "use"), [("int8", "fp8"), ("none", None), ("fp8", None)])
def test_an_fp8_kv_cache_stays(tmp_path: Path, kv_cache: str, use: str | None) -> None:
    model = find_model(str(with_fp8_cache(tmp_path / "hf")))
    found = evaluate(model, asked(model, kv_cache=kv_cache))
    assert [problem.rule for problem in found.problems] == (["kv_format"] if use else [])
    if use:
        (fix,) = fixes(model, found)
        assert (fix.problem.message, fix.text) == (
            f"{model.name} is already quantised: compressed-tensors made its KV cache fp8, not int8",
            "Use --kv-cache fp8.",
        )


def test_an_int8_kv_cache_needs_a_calibration_which_a_quantised_source_cannot_have(tmp_path: Path) -> None:
    model = find_model(str(write_quantized(tmp_path / "hf", int8_static, OTHER_SOURCES[0].values[1]).directory))
    found = evaluate(model, asked(model, kv_cache="int8"))
    (fix,) = fixes(model, found)
    assert (fix.problem.rule, fix.text) == ("kv_format", "Use --kv-cache none.")
    assert fix.problem.message.endswith(
        "is already quantised (compressed-tensors): an int8 KV cache needs a calibration of unquantised weights"
    )
    assert evaluate(model, asked(model, kv_cache="fp8")).problems == ()


def test_layers_that_the_source_left_unquantised(tmp_path: Path) -> None:
    values = STATIC | {"ignore": ["lm_head", r"re:model\.layers\.1\.mlp.*"]}
    source = write_quantized(
        tmp_path / "hf", fp8_static(), values, dtype=torch.bfloat16, left=lambda module: "layers.1.mlp" in module
    ).directory
    assert weights(planned(source, tp=2)) == written(source, tmp_path / "out", 2)
    everywhere = write_quantized(tmp_path / "all", fp8_static(), STATIC, dtype=torch.bfloat16).directory
    more = weights(planned(source))[0] - weights(planned(everywhere))[0]
    assert more == 3 * (256 * 128 - 8)  # a byte more for each weight, two scales less


def test_stages_that_differ_in_what_is_left_are_refused(tmp_path: Path) -> None:
    values = STATIC | {"ignore": ["lm_head", r"re:model\.layers\.1\.mlp.*"]}
    source = write_quantized(
        tmp_path / "hf", fp8_static(), values, dtype=torch.bfloat16, left=lambda module: "layers.1.mlp" in module
    ).directory
    model = find_model(str(source))
    (problem,) = evaluate(model, asked(model, pp=2)).problems
    assert problem.rule == "exclude_modules"
    assert "leaves different layers unquantised in the 2 pipeline stages" in problem.message


@pytest.mark.parametrize("quant", ["fp8", "int4_awq", "int8_sq"])
def test_exclusions_of_a_recipe(make_hf: MakeHf, quant: QuantFormat) -> None:
    source = make_hf(hidden_size=128, intermediate_size=256, num_hidden_layers=4)
    patterns = ("model.layers.0.*", "*.down_proj")
    recipe = {"quantization": {"format": quant, "exclude_modules": patterns}}
    found = planned(source, recipe=recipe)
    model = find_model(str(source))
    layout = Layout(found.memory.parallel, "float16", quant, exclude_modules=patterns)  # type: ignore[union-attr]
    targets = checkpoint_plan(model.family, model.family.facts(read_config(source)), layout).targets
    assert weights(found) == [sum(target.spec.nbytes for target in targets)]
    assert weights(found) > weights(planned(source, recipe={"quantization": {"format": quant}}))


@pytest.mark.parametrize(
    ("backend", "patterns", "broken"),
    [
        ("torch", (), {"awq_group"}),
        ("torch", ("*.0.mlp.down_proj",), {"awq_group"}),
        ("torch", ("*.down_proj",), set()),
        ("tensorrt_llm", ("*.down_proj",), {"awq_padding"}),  # of mlp.fc and mlp.gate
        ("tensorrt_llm", ("*.mlp.*",), set()),
    ],
)
def test_a_layer_that_is_left_has_no_groups_to_cut(backend: str, patterns: tuple[str, ...], broken: set[str]) -> None:
    """Llama-2-7B on four ranks, TensorRT-LLM issue 1636."""
    model = find_model("meta-llama/Llama-2-7b-hf")
    recipe = {"quantization": {"format": "int4_awq", "exclude_modules": patterns}, "engine": {"backend": backend}}
    found = evaluate(model, asked(model, recipe=recipe, tp=4))
    assert {problem.rule for problem in found.problems} == broken


def test_a_pattern_without_a_layer_is_refused(make_hf: MakeHf) -> None:
    model = find_model(str(make_hf()))
    recipe = {"quantization": {"format": "fp8", "exclude_modules": ["*.w1"]}}
    (problem,) = evaluate(model, asked(model, recipe=recipe)).problems
    assert (problem.rule, problem.message) == (
        "exclude_modules", "exclude_modules: *.w1 matches no linear layer of this model",
    )  # fmt: skip
    with pytest.raises(ForgeError, match=r"\*\.w1 matches no linear layer"):
        model.whole("float16", ("*.w1",))
