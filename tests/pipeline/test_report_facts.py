"""What a report knows: of the plan, of the artifacts, and of a calibration without torch."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import DEMO_MODEL, MakeHf
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.manifest import Identity, Manifest
from trtforge.core.progress import Silent
from trtforge.core.recipe import Recipe, load_recipe
from trtforge.formats.calibration import FILE, open_calibration, rounding_warnings
from trtforge.pipeline.build import Build
from trtforge.pipeline.paths import Paths
from trtforge.pipeline.record import Facts, RoundingRecord
from trtforge.pipeline.report import BuildReport, weight_compression, write_report
from trtforge.pipeline.report_facts import calibrated_layers, planned_facts, sensitivity_file, with_artifacts
from trtforge.pipeline.report_words import rounding
from trtforge.pipeline.summary import light_model, model_record

ROOT = DEMO_MODEL.parent


def artifact(directory: Path, identity: Identity) -> Manifest:
    """A directory with only this manifest."""
    directory.mkdir(parents=True)
    manifest = Manifest(identity=identity, files={})
    manifest.write(directory)
    return manifest


def calibration(directory: Path) -> Manifest:
    """A calibration of two layers."""
    tensors = {
        "model.layers.0.mlp.up_proj.input_amax": 3.0,
        "model.layers.0.self_attn.o_proj.input_amax": 7.0,
        "model.layers.0.self_attn.o_proj.output_error": 0.25,
        "model.layers.1.mlp.up_proj.input_amax": 2.0,
        "layers.1.kv_amax": 9.0,
    }
    manifest = artifact(directory, Identity(stage="calibration"))
    vectors = {"model.layers.0.mlp.up_proj.pre_quant_scale": torch.ones(8)}
    save_file({name: torch.tensor([value]) for name, value in tensors.items()} | vectors, directory / FILE)
    return manifest


def test_the_largest_figures_of_each_layer_are_read(tmp_path: Path) -> None:
    calibration(tmp_path / "calibration")
    first, second = calibrated_layers(tmp_path / "calibration")
    assert (first.layer, first.input_amax, first.input_amax_of) == (0, 7.0, "self_attn.o_proj")
    assert (first.output_error, first.output_error_of) == (0.25, "self_attn.o_proj")
    assert (second.layer, second.input_amax, second.output_error) == (1, 2.0, None)
    assert calibrated_layers(tmp_path) == ()


def test_how_weights_were_rounded_is_reported(make_hf: MakeHf, tmp_path: Path) -> None:
    """200 tokens are fewer than the 256 inputs of the down projections."""
    source = make_hf(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    ids = torch.randint(0, 97, (8, 25), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    data = {"data": str(tmp_path / "ids.safetensors"), "samples": 8, "sequence_length": 25}
    for method in ("compensated", "nearest"):
        settings = {"format": "int4_awq", "rounding": method, "data": data}
        calibrate(CalibrateConfig.parse(settings, "test"), source, tmp_path / method / "calibration")
    calibrate(CalibrateConfig.parse({"format": "fp8", "data": data}, "test"), source, tmp_path / "fp8" / "calibration")

    found = facts_of(tmp_path / "compensated")
    assert found.rounding is not None
    assert (found.rounding.method, found.rounding.compensated, found.rounding.nearest) == ("compensated", 14, 0)
    assert found.rounding.fewest_tokens == 200
    assert 0 < (found.rounding.error_left or 0) < 0.9
    (warning,) = found.warnings
    assert warning.startswith("fewer tokens than inputs reached model.layers.0.mlp.down_proj, model.layers.1.mlp.down")
    assert open_calibration(tmp_path / "compensated" / "calibration").warnings == found.warnings
    words = f"14 linear layers rounded with compensation, which leaves {found.rounding.error_left:.2%} of the output"
    assert rounding(found.rounding).startswith(words)

    plain = facts_of(tmp_path / "nearest")
    assert (plain.rounding, plain.warnings) == (RoundingRecord(method="nearest"), ())
    assert facts_of(tmp_path / "fp8").rounding is None


@pytest.mark.parametrize(
    ("quant", "bits"),
    [("fp8", 8), ("fp8_rowwise", 8), ("int8_sq", 8), ("int4_awq", 4), ("w4a8_awq", 4), ("nvfp4", 4.5), ("int8_wo", 16)],
)
def test_how_much_smaller_quantised_layers_are(make_hf: MakeHf, quant: str, bits: float, tmp_path: Path) -> None:
    """Than in 16 bits; scales take a few percent more than these bits."""
    source = make_hf(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    save_file({"input_ids": torch.randint(0, 97, (4, 40))}, tmp_path / "ids.safetensors")
    data = {"data": str(tmp_path / "ids.safetensors"), "samples": 4, "sequence_length": 40}
    calibration = None
    if quant not in ("fp8_rowwise", "int8_wo"):
        calibration = tmp_path / "calibration"
        calibrate(CalibrateConfig.parse({"format": quant, "data": data}, "test"), source, calibration)
    checkpoint = tmp_path / "checkpoint"
    convert(ConvertConfig.parse({"quant": quant}, "test"), source, checkpoint, calibration=calibration)
    found = weight_compression(checkpoint)
    assert 0.92 * 16 / bits < found <= 16 / bits


def facts_of(build: Path) -> Facts:
    """The facts of a build that has a calibration only."""
    paths = Paths(build)
    return with_artifacts(Facts(), paths, [str(paths.calibration)], "now")


def test_layers_left_to_the_nearest_are_said() -> None:
    record = RoundingRecord(method="compensated", compensated=7, nearest=2)
    assert rounding(record) == "7 linear layers rounded with compensation; 2 rounded to the nearest"
    few, fewer = {"a": 100.0, "b": 127.0, "c": 128.0, "d": 128.0}, {"a": 64, "b": 64, "c": 128, "d": 256}
    assert list(rounding_warnings(few, fewer)) == [
        "fewer than 128 tokens reached a, b: rounded to the nearest, without compensation; calibrate with more samples",
        "fewer tokens than inputs reached d: compensated rounding may fit the samples instead of the model; calibrate "
        "with more samples",
    ]


def test_a_plan_with_a_gpu_gives_memory_and_estimates() -> None:
    recipe = load_recipe(ROOT / "llama-3.1-405b-fp8.yaml")
    facts = planned_facts(recipe, Path("out"))
    assert facts.model is not None
    assert (facts.model.parameters, facts.model.source_bytes) == (405_853_388_800, 811_706_777_600)
    assert [(gpu.name, gpu.gpus) for gpu in facts.memory] == [("ranks 0 to 7", 8), ("ranks 8 to 15", 8)]
    assert all(0 < sum(gpu.parts.values()) <= (gpu.capacity or 0) for gpu in facts.memory)
    assert facts.estimates is not None
    assert "not measurements" in facts.estimates.note
    concurrencies = [point.concurrency for point in facts.estimates.curve]
    assert concurrencies == sorted(set(concurrencies))
    assert facts.deployment is not None
    assert facts.deployment.hardware == "16 x h100-80gb"
    assert facts.settings["name"] == "llama-3.1-405b-fp8"
    assert "serving" not in facts.settings or "max_queue_size" not in facts.settings["serving"]


def test_a_model_that_is_not_known_leaves_its_facts_open() -> None:
    recipe = Recipe.parse({"name": "x", "model": {"source": "nobody/nothing"}}, "test")
    facts = planned_facts(recipe, Path("out"))
    assert (facts.model, facts.memory, facts.estimates) == (None, (), None)
    assert facts.gate is not None


def test_parameters_are_counted_as_the_files_have_them() -> None:
    model = light_model(load_recipe(ROOT / "demo-fp32.yaml"))
    assert model is not None
    record = model_record(model)
    assert record.parameters * 2 == 8_131_072  # bytes of its tensors in bfloat16
    assert record.source_bytes == (DEMO_MODEL / "model.safetensors").stat().st_size


def test_only_the_calibration_of_the_checkpoint_is_reported(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    made_with = calibration(paths.calibration)
    artifact(paths.checkpoint, Identity(stage="checkpoint", inputs={"calibration": made_with.digest}))
    found = with_artifacts(Facts(), paths, [str(paths.checkpoint)], "now")
    assert len(found.calibration) == 2
    other = Paths(tmp_path / "other")
    calibration(other.calibration)
    artifact(other.checkpoint, Identity(stage="checkpoint", inputs={"calibration": "00"}))
    assert with_artifacts(Facts(), other, [str(other.checkpoint)], "now").calibration == ()


def test_a_ranking_is_reported_while_its_calibration_is_the_same(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    manifest = calibration(paths.calibration)
    ranking = [{"modules": ["model.layers.0.mlp.up_proj"], "error": 0.125}]
    file = sensitivity_file(paths.calibration)
    file.write_text(json.dumps({"calibration": manifest.digest, "ranking": ranking}))
    (damage,) = with_artifacts(Facts(), paths, [str(paths.calibration)], "now").sensitivity
    assert (damage.modules, damage.error) == (("model.layers.0.mlp.up_proj",), 0.125)
    file.write_text(json.dumps({"calibration": "00", "ranking": ranking}))
    assert with_artifacts(Facts(), paths, [str(paths.calibration)], "now").sensitivity == ()


def test_a_ranking_is_kept_beside_the_calibration_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "out-sensitivity.json"
    (tmp_path / "out" / "below").mkdir(parents=True)
    assert sensitivity_file(tmp_path / "out") == beside
    monkeypatch.chdir(tmp_path / "out")
    assert sensitivity_file(Path()) == beside
    monkeypatch.chdir("below")
    assert sensitivity_file(Path("..")) == beside


def test_a_damaged_calibration_of_an_earlier_run_is_left_out(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    manifest = calibration(paths.calibration)
    artifact(paths.checkpoint, Identity(stage="checkpoint", inputs={"calibration": manifest.digest}))
    (paths.calibration / FILE).write_bytes(b"\xff" * 20)
    assert with_artifacts(Facts(), paths, [str(paths.checkpoint)], "now").calibration == ()


def test_versions_are_those_that_made_the_artifacts(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    artifact(paths.engine, Identity(stage="engine", versions={"tensorrt_llm": "1.2.1"}))
    found = with_artifacts(Facts(), paths, [str(paths.engine)], "2026-01-31T00:00:00+00:00")
    assert found.versions.keys() >= {"trtforge", "python", "tensorrt_llm"}
    assert (found.engine_bytes, found.finished) == (0, "2026-01-31T00:00:00+00:00")


def test_warnings_of_stages_are_collected(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    import logging

    report = BuildReport(recipe="x", facts=Facts(warnings=("of the plan",)))
    with report.collecting_warnings():
        logging.getLogger("trtforge.convert").warning("of a %s", "stage")
        logging.getLogger("trtforge.convert").info("a note")
    logging.getLogger("trtforge.convert").warning("later")
    write_report(tmp_path / "report.json", report)
    kept = json.loads((tmp_path / "report.json").read_text())
    assert kept["warnings"] == ["of the plan", "of a stage"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]


def test_warnings_before_the_first_stage_are_in_the_report_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beyond = "engine.max_seq_len 100000 is more than the model's context length of 2048"
    recipe = load_recipe(ROOT / "demo-fp32.yaml", ("engine.max_seq_len=100000",))
    (planned,) = planned_facts(recipe, tmp_path).warnings
    assert beyond in planned
    monkeypatch.setattr("trtforge.pipeline.build.warnings_of", lambda plan: (planned, "of the engine"))
    report = Build(recipe, tmp_path / "out", Silent()).run(("convert", "compile"), started=lambda stage: None)
    logged = [message for message in caplog.messages if message in (planned, "of the engine")]
    assert logged == [planned, "of the engine"]
    assert report.as_json()["warnings"] == [planned, "of the engine"]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["warnings"] == [planned, "of the engine"]
    for page in ("report.html", "report.md"):
        assert (tmp_path / "out" / page).read_text().count("of the engine") == 1, page
