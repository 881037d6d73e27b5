"""TensorRT-LLM engines, built with a stand-in for TensorRT-LLM that has its recorded signatures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.compile.checkpoints import engine, llama
from tests.compile.engines import build, files, names
from tests.compile.trtllm import MACHINE, Trtllm, write_checkpoint
from trtforge.compile.build_config import build_config
from trtforge.compile.engine_agreement import check_config
from trtforge.compile.machine import Machine
from trtforge.compile.stage import CompileOptions, compile_engine, plan_engine
from trtforge.core.errors import ForgeError, LoggedError
from trtforge.core.manifest import open_artifact
from trtforge.formats.engine_target import EngineTarget
from trtforge.formats.releases import containers_of, release
from trtforge.formats.trtllm import read_engine_config
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.plan.limits import derive_limits
from trtforge.serve.config import ServeConfig
from trtforge.serve.stage import serve


def test_an_engine_of_one_rank(tmp_path: Path, trtllm: Trtllm) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    made = build(tmp_path)
    assert not made.cached
    assert sorted(files(made.path)) == ["config.json", "forge.json", "rank0.engine", "tokenizer/tokenizer.json"]
    assert (made.path / "rank0.engine").read_bytes() == b"engine of rank 0"
    assert [call["call"] for call in trtllm.calls()] == ["from_checkpoint", "build", "timings", "save"]
    assert trtllm.calls("from_checkpoint")[0]["ckpt_dir"] == str(checkpoint)
    _, config = read_engine_config(made.path)
    assert config["version"] == "1.2.1"
    assert config["build_config"]["max_batch_size"] == 8
    assert config["build_config"]["plugin_config"]["use_paged_context_fmha"] is True


def test_the_manifest_says_what_the_engine_was_built_with(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    manifest = open_artifact(build(tmp_path).path, "engine")
    assert EngineTarget.recorded(manifest.identity.versions) == EngineTarget(
        tensorrt_llm="1.2.1", tensorrt="10.14.1.48", cuda="13.0", sm="90", gpu="NVIDIA H100 80GB HBM3"
    )
    assert manifest.identity.inputs == {
        "checkpoint": open_artifact(tmp_path / "checkpoint", "checkpoint").digest,
    }
    assert str(tmp_path) not in manifest.to_json()


def test_nothing_of_this_machine_is_in_the_engine(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    engine_directory = build(tmp_path, workers=2).path
    for name, content in files(engine_directory).items():
        assert str(tmp_path).encode() not in content, name
    assert names(tmp_path) == ["cache", "checkpoint", "engine", "engine.logs", "site"]


def test_every_rank_has_a_log_beside_the_engine(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    build(tmp_path)
    assert names(tmp_path / "engine.logs") == ["rank0.log", "rank1.log"]
    assert "[TRT-LLM] [I] Build TensorRT engine" in (tmp_path / "engine.logs/rank1.log").read_text()


@pytest.mark.parametrize("version", ["0.17.0", "0.18.2", "0.19.0", "0.20.0", "0.21.0", "1.0.0", "1.1.0", "1.2.1"])
def test_every_release_takes_the_configuration_and_its_engine_is_packaged_and_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trtllm: Trtllm, version: str
) -> None:
    """The stand-in refuses any key that the release does not have, and a missing one that its loader requires.

    It writes what the release writes; the engine goes on to the dry run of its server.
    """
    Trtllm.install(trtllm.site, version)
    container = containers_of(release(version))[0]
    (trtllm.site / "tensorrt.py").write_text(f'__version__ = "{container.tensorrt}"\n')
    write_checkpoint(tmp_path / "checkpoint")
    config = engine(backend="tensorrt_llm", target={"tensorrt_llm": version})
    build(tmp_path, machine=Machine(tensorrt_llm=version, gpu=True), config=config)
    given = trtllm.calls("build")[0]["build_config"]
    assert given["kv_cache_type"] == "PAGED"
    assert given["input_timing_cache"] == given["output_timing_cache"] == "model.cache"
    written = json.loads((tmp_path / "engine/config.json").read_text())["build_config"]["kv_cache_type"]
    assert written == ("paged" if version.startswith("1.2") else "PAGED")
    repository = package(PackageConfig(), tmp_path / "engine", None, tmp_path / "repository").path
    capsys.readouterr()
    assert serve(ServeConfig(dry_run=True, launcher="docker"), repository) == 0
    shown = capsys.readouterr().out
    assert container.image in shown
    assert f"{repository}:/models:ro" in shown
    assert '"/models/tensorrt_llm/1/engine"' in (repository / "tensorrt_llm" / "config.pbtxt").read_text()


def test_a_build_for_another_cuda_is_of_the_same_release(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    trtllm.behaves(version={"0": "1.2.1+cu130"})
    assert not build(tmp_path).cached


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"changes": {"0": {"max_batch_size": 4}}}, r"with build_config\.max_batch_size 4, not 8"),
        (
            {"changes": {"0": {"plugin_config.use_paged_context_fmha": False}}},
            r"with plugin_config\.use_paged_context_fmha false, not true",
        ),
        (
            {"changes": {"0": {"plugin_config.remove_input_padding": "disable"}}},
            r"remove_input_padding disable, not true",
        ),
        ({"changes": {"0": {"max_input_len": None}}}, r"with build_config\.max_input_len none, not"),
        (
            {"changes": {"0": {"kv_cache_type": "CONTINUOUS"}}},
            r"kv_cache_type continuous, not PAGED",
        ),
        ({"version": {"0": "1.2.0"}}, r"with version 1\.2\.0, not 1\.2\.1"),
        ({"empty": {"1": True}}, r"rank 1 without an error, but did not write rank1\.engine"),
        ({"writes_too": {"1": {"rank7.engine": "?"}}}, r"wrote an unexpected file for rank 1: rank7\.engine"),
        ({"writes_too": {"0": {"config.json": ""}}}, r"rank 0 without an error, but did not write config\.json"),
    ],
)
def test_an_engine_that_is_not_as_planned_is_not_published(
    tmp_path: Path, trtllm: Trtllm, behaviour: Mapping[str, Any], message: str
) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    trtllm.behaves(**behaviour)
    with pytest.raises(ForgeError, match=message) as caught:
        build(tmp_path)
    assert "Nothing was published" in caught.value.hint
    assert names(tmp_path) in (
        ["cache", "checkpoint", "engine.logs", "site"],
        ["checkpoint", "engine.logs", "site"],
    )


def test_what_a_release_makes_of_auto_and_of_draft_tokens_agrees(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    changes = {
        "plugin_config.gemm_plugin": "bfloat16",
        "speculative_decoding_mode": 2,
        "max_seq_len": 4101,
        "max_num_tokens": 9000,
    }
    trtllm.behaves(changes={"0": changes})
    assert not build(tmp_path).cached
    trtllm.behaves(changes={"0": {**changes, "max_seq_len": 4000}})
    with pytest.raises(ForgeError, match=r"max_seq_len 4000, not 4096"):
        build(tmp_path, force=True)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"kv_cache_type": "KVCacheType.PAGED"}, None),
        ({"plugin_config.use_paged_context_fmha": "enable", "plugin_config.gemm_plugin": "AUTO"}, None),
        ({"speculative_decoding_mode": "NONE", "max_draft_len": None}, None),
        ({"plugin_config.gemm_plugin": None}, "plugin_config.gemm_plugin: the engine was built with none, not auto"),
        ({"plugin_config.context_fmha": "disable"}, "plugin_config.context_fmha: the engine was built with disable"),
        ({"max_num_tokens": 9000}, "max_num_tokens: the engine was built with 9000, above the plan's 8192"),
    ],
)
def test_other_spellings_and_kernels_are_no_reason_to_refuse_an_engine(
    tmp_path: Path,
    trtllm: Trtllm,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    warning: str | None,
) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    trtllm.behaves(changes={"0": changes})
    build(tmp_path)
    said = [record.getMessage() for record in caplog.records if "config." in record.getMessage()]
    assert [warning in text for text in said if warning is not None] == ([] if warning is None else [True])
    assert bool(said) is (warning is not None)


@pytest.mark.parametrize("key", ["paged_kv_cache", "use_fused_mlp"])
def test_a_field_that_a_release_leaves_out_is_a_warning(key: str, tmp_path: Path) -> None:
    model, settings = llama(), engine(max_batch_size=8, max_seq_len=4096)
    plan = build_config(model, settings, derive_limits(model, settings, 32), release("1.2.1"))
    written = plan.to_json()
    assert isinstance(written["plugin_config"], dict)
    del written["plugin_config"][key]
    config = {"version": "1.2.1", "pretrained_config": model.model_dump(mode="json"), "build_config": written}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert check_config(tmp_path, plan, model) == (
        f"plugin_config.{key}: the engine's config.json does not say it, the plan is true",
    )


def test_managed_weights_and_adapters_belong_to_the_engine(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    adapter = {"lora/0/adapter_config.json": "{}"}
    trtllm.behaves(
        writes_too={"0": {**adapter, "rank0_managed_weights.safetensors": "w"}, "1": adapter}, fails={"1": "no"}
    )
    with pytest.raises(LoggedError):
        build(tmp_path)
    trtllm.behaves(writes_too={"1": adapter})
    made = build(tmp_path)
    assert sorted(made.manifest.files) == [
        "config.json",
        "lora/0/adapter_config.json",
        "rank0.engine",
        "rank0_managed_weights.safetensors",
        "rank1.engine",
        "tokenizer/tokenizer.json",
    ]


def test_the_torch_backend_has_no_container(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ForgeError, match="applies only to the tensorrt_llm backend, not to torch") as caught:
        compile_engine(
            engine(),
            tmp_path / "checkpoint",
            tmp_path / "engine",
            CompileOptions(container="image"),
            machine=Machine(docker=True, gpu=True),
        )
    assert "--backend tensorrt_llm" in caught.value.hint


def test_auto_is_tensorrt_llm_where_it_is_installed_beside_a_gpu(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    made = build(tmp_path, config=engine())
    assert (made.path / "rank0.engine").is_file()


def test_planning_starts_nothing(tmp_path: Path, trtllm: Trtllm) -> None:
    write_checkpoint(tmp_path / "checkpoint", tp=2)
    plan = plan_engine(
        engine(backend="tensorrt_llm"),
        tmp_path / "checkpoint",
        tmp_path / "engine",
        CompileOptions(workers=2),
        machine=MACHINE,
    )
    runs = plan.as_json()["runs"]
    assert [run["rank"] for run in runs] == [0, 1]
    assert [run["environment"] for run in runs] == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert runs[1]["directory"] == str(tmp_path / ".engine.partial/.rank1")
    assert runs[1]["command"][2:] == ["build", str(tmp_path / "checkpoint"), "build_config.json", "1", "engine"]
    assert json.loads(json.dumps(plan.as_json()))["place"] == "this machine"
    assert trtllm.calls() == []
    assert names(tmp_path) == ["checkpoint", "site"]
