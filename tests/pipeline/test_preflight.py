"""What cannot be deployed is refused before anything starts: the plan's rule, and the change that makes it legal."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL, MakeHf
from tests.recipes.shipped import SHIPPED
from trtforge.core.assets import asset_directory
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.progress import Silent
from trtforge.core.recipe import Recipe, load_recipe
from trtforge.machine.host import Host
from trtforge.machine.memory import Memory
from trtforge.pipeline.build import Build
from trtforge.pipeline.preflight import preflight, require_files, warn_of_verification
from trtforge.pipeline.stages import StageName, selected


@pytest.mark.parametrize(
    ("name", "overrides", "message", "hint"),
    [
        (
            "llama-3.1-8b-fp8",
            ("engine.target.gpu=a100-80gb",),
            "llama-3.1-8b-fp8: a100-80gb has compute capability 8.0: fp8 needs 8.9 (Ada, Hopper or later)",
            "Use --set quantization.format=int8_wo --set quantization.kv_cache=none. "
            "`trtforge plan` shows all 2 problems.",
        ),
        (
            "llama-3.1-70b-int4-awq",
            ("engine.target.gpu=b200",),
            "b200 has compute capability 10.0: TensorRT-LLM refuses W4A16_AWQ there",
            "Use --set quantization.format=nvfp4.",
        ),
        (
            "llama-3.1-8b-int4-awq",
            ("engine.target.gpu=b200", "quantization.format=int8_sq"),
            "b200 has compute capability 10.0: TensorRT-LLM refuses W8A8_SQ_PER_CHANNEL there",
            "Use --set quantization.format=fp8.",
        ),
        (
            "llama-3.1-70b-fp8",
            ("parallel.tp=1", "quantization.format=none", "quantization.kv_cache=none"),
            "weights, activations and buffers take 144.6 GB per GPU and leave no KV cache in the 84.9 GB of h100-80gb",
            "Use --set parallel.tp=2.",
        ),
        (
            "mixtral-8x7b-fp8",
            ("parallel.tp=3",),
            "32 attention heads cannot be split over tp 3",
            "parallel.tp=4",
        ),
        (
            "llama-3.1-70b-int4-awq",
            ("parallel.tp=1", "parallel.ep=2"),
            "ep 2",
            "Use --set parallel.ep=1",
        ),
        (
            "llama-3.1-8b-int4-awq",
            ("engine.max_seq_len=120000",),
            "the KV pool of 105696 tokens is too small for one request of max_seq_len 120000",
            "Use --set engine.max_seq_len=105696.",
        ),
    ],
)
def test_a_recipe_is_refused_by_its_first_rule(name: str, overrides: tuple[str, ...], message: str, hint: str) -> None:
    with pytest.raises(ForgeError) as caught:
        preflight(load_recipe(SHIPPED[name], overrides))
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("name", SHIPPED)
def test_the_change_that_is_proposed_makes_the_recipe_legal(name: str) -> None:
    wrong = ("engine.target.gpu=a100-40gb", "parallel.tp=3")
    with pytest.raises(ForgeError) as caught:
        preflight(load_recipe(SHIPPED[name], wrong))
    words = caught.value.hint.partition(". `trtforge")[0].rstrip(".").split()
    assert words[0] == "Use"
    assert set(words[1::2]) == {"--set"}
    assert preflight(load_recipe(SHIPPED[name], (*wrong, *words[2::2]))).evaluation.legal


def recipe(source: Path, **values: Any) -> Recipe:
    return Recipe.parse({"name": "mine", "model": {"source": str(source)}, **values}, "test")


INT4_FOR_B200: dict[str, Any] = {"quantization": {"format": "int4_awq"}, "engine": {"target": {"gpu": "b200"}}}


@pytest.mark.parametrize("first", ["calibrate", "convert", "verify"])
def test_a_build_is_refused_before_its_first_stage(first: StageName, tmp_path: Path) -> None:
    build = Build(recipe(DEMO_MODEL, **INT4_FOR_B200), tmp_path / "out", Silent())
    started: list[StageName] = []
    with pytest.raises(ForgeError, match="TensorRT-LLM refuses W4A16_AWQ there"):
        build.run(selected(build.recipe, first, "package"), started.append)
    assert started == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format_", ["fp8", "int8_wo", "none"])
def test_a_rounding_that_the_format_lacks_is_refused(format_: str) -> None:
    asked = {"format": format_, "rounding": "compensated"}
    recipe = Recipe.parse({"name": "x", "model": {"source": str(DEMO_MODEL)}, "quantization": asked}, "test")
    with pytest.raises(UsageError, match=f"rounding compensated is not available for {format_}, only for int4_awq and"):
        preflight(recipe)


@pytest.mark.parametrize(
    ("values", "first"),
    [
        ({"quantization": {"format": "fp8", "calibration": {"data": "none.jsonl"}}}, "calibrate"),
        ({"gate": {"data": "none.jsonl"}}, "convert"),
    ],
)
def test_data_that_is_not_there_is_missed_before_the_first_stage(
    values: dict[str, Any], first: StageName, tmp_path: Path
) -> None:
    build = Build(recipe(DEMO_MODEL, **values), tmp_path / "out", Silent())
    with pytest.raises(ForgeError, match=r"none\.jsonl: no such file"):
        build.run(selected(build.recipe, first, "package"), started=lambda stage: pytest.fail(stage))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (("model.safetensors",), "model has no tokenizer (tokenizer.json or tokenizer.model)"),
        (("tokenizer.json",), "model has neither model.safetensors nor model.safetensors.index.json"),
        (("tokenizer.json", "pytorch_model.bin"), "model holds pickled weights (pytorch_model.bin), which run code"),
    ],
)
@pytest.mark.parametrize("format_", ["int8_wo", "fp8"])
def test_files_of_the_model_are_missed_before_the_first_stage(
    kept: tuple[str, ...], message: str, format_: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", *kept):
        (model / name).write_bytes((DEMO_MODEL / name).read_bytes() if (DEMO_MODEL / name).is_file() else b"")
    build = Build(recipe(model, quantization={"format": format_}), tmp_path / "out", Silent())
    with pytest.raises(ForgeError) as caught:
        build.run(selected(build.recipe, "calibrate", "package"), started=lambda stage: pytest.fail(stage))
    assert message in caught.value.message
    assert not (tmp_path / "out").exists()


def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(DEMO_MODEL / name)
    ids = tmp_path / "ids.safetensors"
    ids.touch()
    require_files(recipe(tmp_path, gate={"data": str(ids)}), ("convert", "verify"))
    require_files(recipe(tmp_path), ("convert",))


def test_rules_of_tensorrt_bind_its_engines_alone(make_hf: MakeHf) -> None:
    """The demo model has heads of 32 values, one of 16 has none of TensorRT-LLM's attention kernels."""
    source = make_hf()
    free: tuple[dict[str, Any], ...] = ({"backend": "torch"}, {"backend": "torch", "target": {"gpu": "b200"}}, {})
    for engine in free:
        assert preflight(recipe(source, engine=engine)).evaluation.legal
        assert preflight(recipe(source, quantization={"format": "int8_sq"}, engine=engine)).evaluation.legal
    bound: tuple[dict[str, Any], ...] = ({"backend": "tensorrt_llm"}, {"target": {"gpu": "h100-80gb"}})
    for engine in bound:
        with pytest.raises(ForgeError, match="head size 16"):
            preflight(recipe(source, engine=engine))


def test_weights_that_are_not_the_configs_are_refused(make_hf: MakeHf, edit_config: Any) -> None:
    source = make_hf()
    edit_config(source, intermediate_size=256)
    with pytest.raises(ForgeError, match=r"mine: .*has shape \[64, 128\], config.json says \[64, 256\]"):
        preflight(recipe(source))


def test_a_build_starts_nothing_that_its_dry_run_refuses(tmp_path: Path) -> None:
    """The engine is planned before the first stage: here for the backend that `auto` is on this machine."""
    path = tmp_path / "mine.yaml"
    source = asset_directory("recipes") / "demo-model"
    path.write_text(f"name: mine\nmodel: {{source: {source}}}\nengine: {{features: {{medusa: true}}}}\n")
    started: list[str] = []
    build = Build(load_recipe(path), tmp_path / "out", Silent())
    with pytest.raises(ForgeError, match="not supported by the torch backend"):
        build.run(("convert", "compile"), started=started.append)
    assert started == []
    assert not (tmp_path / "out").exists()


def machine_of(tmp_path: Path, gigabytes: int) -> Host:
    (tmp_path / "proc").mkdir()
    kib = gigabytes * 10**9 // 1024
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {kib} kB\nMemAvailable: {kib} kB\n")
    return Host(root=tmp_path)


@pytest.mark.parametrize(("gigabytes", "warned"), [(16, True), (40, True), (42, False)])
def test_verification_beyond_this_machines_memory_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gigabytes: int, warned: bool
) -> None:
    judged = preflight(load_recipe(SHIPPED["llama-3.1-405b-fp8"]))
    warn_of_verification(judged, machine_of(tmp_path, gigabytes))
    start = f"verification takes 41 GB of host memory, this machine has {gigabytes} GB: build with --to convert"
    assert [message.startswith(start) for message in caplog.messages] == [True] * warned


@pytest.mark.parametrize(("last", "warned"), [("convert", False), ("verify", True)])
def test_a_build_warns_before_its_first_stage_if_it_verifies(
    last: StageName, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Begun(Exception):
        pass

    def stop(stage: StageName) -> None:
        raise Begun

    monkeypatch.setattr(
        "trtforge.pipeline.preflight.read_memory", lambda host: Memory(total=10**6, available=10**6, limit=None)
    )
    build = Build(recipe(DEMO_MODEL), tmp_path / "out", Silent())
    with pytest.raises(Begun):
        build.run(selected(build.recipe, "convert", last), stop)
    said = "of host memory, this machine has 1 MB: build with --to convert"
    assert [said in message for message in caplog.messages] == [True] * warned
