"""Mixed precision: chosen for a budget, converted, run by the embedded engine, exported for the LLM API."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import DEMO_MODEL
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.compile.stage import CompileOptions, compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.progress import Silent
from trtforge.core.recipe import EngineConfig, GateConfig, Recipe
from trtforge.formats.shards import read_header
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.pipeline.build import Build
from trtforge.pipeline.mixed import Mixed, choose_formats, damages_file
from trtforge.pipeline.preflight import preflight
from trtforge.pipeline.record import read_record
from trtforge.plan.checkpoint_model import model_to_plan
from trtforge.plan.evaluate import evaluate
from trtforge.plan.request import request_of
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.verify.stage import verify

GATE = GateConfig(data=str(DEMO_MODEL / "heldout.txt"), samples=4, sequence_length=128)
BUDGET = 5.5


@dataclass(frozen=True)
class Made:
    calibration: Path
    mixed: Mixed
    checkpoint: Path


def chosen(budget: float, calibration: Path, **more: tuple[str, ...]) -> Mixed:
    return choose_formats(budget, DEMO_MODEL, calibration, GATE, progress=Silent(), **more)


def converted(made: Mixed, calibration: Path, out: Path, **settings: object) -> Path:
    wanted = {"quant": "int4_awq", "budget": BUDGET, "formats": made.formats, "shared_pre_quant_scale": True} | settings
    return convert(ConvertConfig.parse(wanted, "test"), DEMO_MODEL, out, calibration=calibration).path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    directory = tmp_path_factory.mktemp("mixed")
    data = {"samples": 16, "sequence_length": 128}
    config = CalibrateConfig.parse({"format": "int4_awq", "data": data}, "test")
    calibration = calibrate(config, DEMO_MODEL, directory / "calibration").path
    mixed = chosen(BUDGET, calibration)
    return Made(calibration, mixed, converted(mixed, calibration, directory / "checkpoint"))


def test_the_choice_keeps_to_its_budget_and_is_near_the_best(made: Made) -> None:
    record = made.mixed.record
    assert 4.25 < record.bits <= BUDGET
    assert set(record.weights) >= {"int4_awq", "fp8"}
    assert record.least_error <= record.predicted_error < record.uniform_error
    assert record.predicted_error < 1.1 * record.least_error
    assert {quant for _, quant in made.mixed.formats} <= {"fp8", "none"}


def test_more_bits_do_less_damage_and_predictions_are_kept(made: Made) -> None:
    assert damages_file(made.calibration).is_file()
    before = damages_file(made.calibration).stat().st_mtime_ns
    errors = [chosen(budget, made.calibration).record.predicted_error for budget in (4.25, 5, 6, 8, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0.0
    assert chosen(4.25, made.calibration).formats == ()
    assert damages_file(made.calibration).stat().st_mtime_ns == before


def test_excluded_layers_stay_unquantised(made: Made) -> None:
    found = chosen(6, made.calibration, exclude_modules=("*.0.mlp.down_proj",))
    assert ("model.layers.0.mlp.down_proj", "none") in found.formats
    with pytest.raises(UsageError, match=r"a budget of 4\.3 bits is too small: .* a weight has 7\.3\d+ bits") as error:
        chosen(4.3, made.calibration, exclude_modules=("*.mlp.down_proj",))
    assert "Give a budget between 7.32 and 16 bits" in str(error.value.hint)


def test_the_checkpoint_says_which_layer_has_which_format(made: Made) -> None:
    config = json.loads((made.checkpoint / "config.json").read_text())["quantization"]
    assert config["quant_algo"] == "MIXED_PRECISION"
    assert "quantized_layers" not in config
    layers = json.loads((made.checkpoint / "quant_cfg.json").read_text())["quantized_layers"]
    algorithms, formats = {"fp8": "FP8", "none": None, None: "W4A16_AWQ"}, dict(made.mixed.formats)
    names = {"self_attn.q_proj": "attention.qkv", "self_attn.o_proj": "attention.dense", "mlp.gate_proj": "mlp.fc",
             "mlp.down_proj": "mlp.proj"}  # fmt: skip
    for layer in range(4):
        for module, target in names.items():
            wanted = algorithms[formats.get(f"model.layers.{layer}.{module}")]
            assert layers.get(f"transformer.layers.{layer}.{target}", {}).get("quant_algo") == wanted
    tensors = load_file(made.checkpoint / "rank0.safetensors")
    spec = DecoderSpec.of(read_checkpoint_config(made.checkpoint), 0)
    for name in layers:
        dtype = str(tensors[f"{name}.weight"].dtype)
        assert dtype == {"fp8": "torch.float8_e4m3fn", "int4_awq": "torch.int8"}[spec.format_of(name)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quant_algo": "FP8_BLOCK_SCALES"}, "has the algorithm FP8_BLOCK_SCALES"),
        ({"quant_algo": "W4A16_AWQ", "group_size": 64}, "has groups of 64, config.json of 128"),
    ],
)
def test_a_layer_that_no_format_describes_is_refused(
    made: Made, tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    copy = tmp_path / "checkpoint"
    shutil.copytree(made.checkpoint, copy)
    (copy / "forge.json").unlink()
    layers = json.loads((copy / "quant_cfg.json").read_text())
    layers["quantized_layers"]["transformer.layers.0.mlp.proj"] = changed
    (copy / "quant_cfg.json").write_text(json.dumps(layers))
    with pytest.raises(ForgeError, match=message):
        verify(copy, DEMO_MODEL, GATE)


def test_predictions_that_cannot_be_kept_are_still_used(
    made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = damages_file(made.calibration).read_text()
    damages_file(made.calibration).write_text("{}")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert chosen(5, made.calibration).record.predicted_error > 0
    assert "are not kept for the next budget" in caplog.text
    monkeypatch.undo()
    damages_file(made.calibration).write_text(kept)


def test_the_damage_is_what_was_predicted_and_less_than_with_one_format(made: Made, tmp_path: Path) -> None:
    found = verify(made.checkpoint, DEMO_MODEL, GATE, layers=True)
    assert found.layers[-1].error == pytest.approx(made.mixed.record.predicted_error, rel=0.35)
    plain = convert(ConvertConfig(quant="int4_awq"), DEMO_MODEL, tmp_path / "plain", calibration=made.calibration).path
    assert found.kl_mean < verify(plain, DEMO_MODEL, GATE).kl_mean


def test_two_ranks_compute_the_same(made: Made, tmp_path: Path) -> None:
    split = converted(made.mixed, made.calibration, tmp_path / "tp2", tp=2)
    one, two = (verify(each, DEMO_MODEL, GATE) for each in (made.checkpoint, split))
    assert two.kl_mean == pytest.approx(one.kl_mean, rel=0.05)
    assert two.perplexity.candidate == pytest.approx(one.perplexity.candidate, rel=1e-4)


def test_the_embedded_engine_runs_it(made: Made, tmp_path: Path) -> None:
    engine = compile_engine(
        EngineConfig(backend="torch", device="cpu"), made.checkpoint, tmp_path / "engine", CompileOptions()
    ).path
    kernels = json.loads((engine / "config.json").read_text())["forge"]["kernels"]
    assert kernels["fp8"] == "fp8_native_cpu"
    one, other = verify(made.checkpoint, DEMO_MODEL, GATE), verify(engine, DEMO_MODEL, GATE)
    assert other.perplexity.candidate == pytest.approx(one.perplexity.candidate, rel=0.01)


def test_the_llm_api_gets_the_format_of_each_layer(made: Made, tmp_path: Path) -> None:
    out = compile_engine(EngineConfig(backend="llmapi"), made.checkpoint, tmp_path / "hf", CompileOptions()).path
    found = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert (found["quant_algo"], found["kv_cache_quant_algo"]) == ("MIXED_PRECISION", None)
    layers, fp8 = found["quantized_layers"], {name for name, quant in made.mixed.formats if quant == "fp8"}
    assert json.loads((out / "quant_cfg.json").read_text())["quantized_layers"] == layers
    assert {name for name, layer in layers.items() if layer == {"quant_algo": "FP8"}} == fp8
    awq = {"quant_algo": "W4A16_AWQ", "group_size": 128, "has_zero_point": False, "pre_quant_scale": True}
    assert all(layer == awq for name, layer in layers.items() if name not in fp8)
    assert len(layers) == 4 * 7 - sum(quant == "none" for _, quant in made.mixed.formats)
    assert set(found["exclude_modules"]).isdisjoint(layers)
    tensors = load_file(out / "model.safetensors")
    for name in layers:
        assert str(tensors[f"{name}.weight"].dtype) == ("torch.float8_e4m3fn" if name in fp8 else "torch.uint8")
        assert (f"{name}.input_scale" in tensors) == (name in fp8)


def test_a_tensorrt_engine_is_refused(made: Made, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="TensorRT engines of mixed precision are not supported") as error:
        compile_engine(EngineConfig(backend="tensorrt_llm"), made.checkpoint, tmp_path / "trt", CompileOptions())
    assert "engine.backend llmapi or torch" in str(error.value.hint)


def recipe(**changes: object) -> Recipe:
    values: dict[str, object] = {
        "name": "x",
        "model": {"source": str(DEMO_MODEL)},
        "quantization": {"format": "int4_awq", "budget": "4.5bits"},
        "engine": {"backend": "torch"},
    }
    return Recipe.parse(values | changes, "test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": {"format": "fp8", "budget": 9}}, "quantization.budget needs the format int4_awq, not fp8"),
        ({"parallel": {"pp": 2}}, "quantization.budget with pipeline parallelism"),
        ({"engine": {"backend": "tensorrt_llm"}}, "quantization.budget with engine.backend tensorrt_llm"),
        ({"engine": {"backend": "llmapi", "target": {"gpu": "a100-80gb"}}}, "fp8 needs 8.9"),
    ],
)
def test_what_cannot_be_mixed_is_refused_before_the_build(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ForgeError) as error:
        preflight(recipe(**changes))
    assert message in str(error.value)


def test_a_budget_is_written_with_or_without_its_unit() -> None:
    assert preflight(recipe()).model is not None
    assert recipe().quantization.budget == 4.5
    with pytest.raises(ForgeError, match=r"quantization\.budget: .*write 4\.5bits, or 4\.5"):
        recipe(quantization={"format": "int4_awq", "budget": "few"})


def test_a_continued_build_keeps_what_is_known_of_the_choice(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.calibration, tmp_path / "calibration")
    shutil.copy(damages_file(made.calibration), damages_file(tmp_path / "calibration"))
    quantization = {"format": "int4_awq", "budget": BUDGET, "calibration": {"samples": 16, "sequence_length": 128}}
    build = Build(recipe(quantization=quantization, gate=GATE), tmp_path, Silent())
    assert build.run(("convert",), lambda stage: None).facts.mixed == made.mixed.record
    for stages in (("compile",), ("package",)):
        build.run(stages, lambda stage: None)
        assert read_record(tmp_path).mixed == made.mixed.record
    other = Build(recipe(quantization=quantization | {"budget": 6}, gate=GATE), tmp_path, Silent())
    with pytest.raises(ForgeError, match=r"it has budget 5\.5, the recipe budget 6\.0"):
        other.run(("compile",), lambda stage: None)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_plan_of_a_mixed_checkpoint_holds_what_conversion_wrote(made: Made, tmp_path: Path, tp: int) -> None:
    checkpoint = converted(made.mixed, made.calibration, tmp_path / "checkpoint", tp=tp)
    model = model_to_plan(str(checkpoint))
    asked = Recipe.parse({"name": "x", "model": {"source": str(checkpoint)}, "engine": {"backend": "llmapi"}}, "test")
    memory = evaluate(model, request_of(asked, model, {})).memory
    assert memory is not None
    assert memory.fullest.weights == stored_bytes(checkpoint)


@pytest.mark.parametrize("exclude", [(), ("*.layers.0.mlp.down_proj",)])
def test_the_plan_of_a_budget_bounds_what_conversion_writes(
    made: Made, tmp_path: Path, exclude: tuple[str, ...]
) -> None:
    mixed = chosen(BUDGET, made.calibration, exclude_modules=exclude)
    checkpoint = converted(mixed, made.calibration, tmp_path / "checkpoint", exclude_modules=exclude)
    asked = {"format": "int4_awq", "budget": BUDGET, "exclude_modules": list(exclude)}
    found = preflight(recipe(quantization=asked, engine={"backend": "llmapi"})).evaluation.memory
    assert found is not None
    unused = (BUDGET - mixed.record.bits) * sum(mixed.record.weights.values()) / 8
    assert stored_bytes(checkpoint) <= found.weights <= 1.01 * (stored_bytes(checkpoint) + unused)
    plain = preflight(recipe(quantization={"format": "int4_awq"}, engine={"backend": "llmapi"})).evaluation.memory
    assert plain is not None
    assert found.weights > 1.05 * plain.weights
    embedded = [
        preflight(recipe(quantization={"format": "int4_awq"} | more)).evaluation.memory
        for more in ({}, {"budget": BUDGET}, {"budget": 16})
    ]
    weights = [memory.weights for memory in embedded if memory is not None]
    assert weights == sorted(weights)


def stored_bytes(checkpoint: Path) -> int:
    return sum(tensor.spec.nbytes for tensor in read_header(checkpoint / "rank0.safetensors"))


def test_plan_refuses_a_budget_as_the_build_does() -> None:
    for changes, message in (
        ({"quantization": {"format": "fp8", "budget": 9}}, "quantization.budget needs the format int4_awq, not fp8"),
        ({"quantization": {"format": "int4_awq", "budget": 4.2}}, "a budget of 4.2 bits is too small"),
        (
            {"quantization": {"format": "int4_awq", "budget": 4.3, "exclude_modules": ["*.0.mlp.down_proj"]}},
            "a budget of 4.3 bits is too small: with int4_awq wherever it is possible, a weight has ",
        ),
        ({"parallel": {"pp": 2}}, "quantization.budget with pipeline parallelism"),
        ({"engine": {"backend": "tensorrt_llm"}}, "quantization.budget with engine.backend tensorrt_llm"),
        ({"engine": {"backend": "llmapi", "target": {"gpu": "a100-80gb"}}}, "fp8 needs 8.9"),
    ):
        model = model_to_plan(str(DEMO_MODEL))
        found = evaluate(model, request_of(recipe(**changes), model, {}))
        assert any(message in problem.message for problem in found.problems), message
        with pytest.raises(ForgeError) as error:
            preflight(recipe(**changes))
        assert message in str(error.value)


def test_a_calibration_of_another_format_is_refused(tmp_path: Path) -> None:
    data = {"samples": 2, "sequence_length": 32}
    found = calibrate(CalibrateConfig.parse({"format": "fp8", "data": data}, "test"), DEMO_MODEL, tmp_path / "fp8").path
    with pytest.raises(ForgeError, match="was calibrated for fp8: a budget needs int4_awq"):
        chosen(6, found)
