"""An engine's and a repository's settings as arguments of the LLM API, each of them accounted for."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.compile.checkpoints import engine as settings
from tests.compile.checkpoints import llama
from tests.conftest import DEMO_MODEL
from tests.package.engines import engine_config, tensorrt_engine, torch_engine, write_engine
from trtforge.cli.app import app
from trtforge.compile.build_config import build_config
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.formats.llmapi import read_llm_args
from trtforge.formats.releases import release
from trtforge.migrate.migration import Migration, migrate
from trtforge.migrate.rules import ENGINE, REPOSITORY, Carry
from trtforge.migrate.sources import read_settings
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.pipeline.migration import MigrateOptions, run_migration
from trtforge.plan.limits import derive_limits


def foreign_engine(directory: Path, **changes: Any) -> Path:
    """config.json as trtllm-build writes it: no forge.json, every key of the release."""
    model = llama("FP8", "FP8", mapping={"world_size": 4, "tp_size": 4, "pp_size": 1, "moe_ep_size": -1})
    config = settings(max_input_len=4096, max_seq_len=5120, max_batch_size=32)
    plan = build_config(model, config, derive_limits(model, config, 32), release("1.2.1"))
    build = plan.to_json()
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (build[section] if section else build)[name] = value  # type: ignore[index,call-overload]
    directory.mkdir(parents=True)
    values = {"version": "1.2.1", "pretrained_config": model.model_dump(mode="json"), "build_config": build}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def demo_engine(tp: int = 1) -> dict[str, Any]:
    """config.json of an engine of the demo model."""
    values = engine_config(tp)
    layers = json.loads((DEMO_MODEL / "config.json").read_text())["num_hidden_layers"]
    values["pretrained_config"] |= {"num_hidden_layers": layers}
    return values


def repository(directory: Path, parameters: dict[str, str], extra: str = "", name: str = "tensorrt_llm") -> Path:
    """A model as NVIDIA's template makes it."""
    text = (
        f'name: "{name}"\nbackend: "tensorrtllm"\nmax_batch_size: 32\nmodel_transaction_policy {{ decoupled: True }}\n'
    )
    for key, value in parameters.items():
        text += f'parameters: {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'
    (directory / name / "1").mkdir(parents=True)
    (directory / name / "config.pbtxt").write_text(text + extra)
    return directory


def migrated(source: Path) -> Migration:
    return migrate(read_settings(source))


def reason(entries: list[Any], key: str) -> str:
    (entry,) = [entry for entry in entries if entry.key == key]
    return str(entry.why)


def test_an_engine_of_somebody_else_becomes_arguments(tmp_path: Path) -> None:
    found = migrated(foreign_engine(tmp_path / "engine"))
    values = found.args.to_json()
    assert values["tensor_parallel_size"] == 4
    limits = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens")
    assert [values[name] for name in limits] == [32, 5119, 5120, 8192]
    assert values["kv_cache_config"] == {"dtype": "fp8", "tokens_per_block": 32}
    assert values["dtype"] == "bfloat16"
    assert "lora_config" not in values
    assert "moe_expert_parallel_size" not in values
    assert [entry.key for entry in found.attention] == [
        "pretrained_config.quantization.quant_algo",
        "build_config.max_input_len",
    ]
    assert "quantised like the engine" in found.attention[0].why
    assert "TensorRT's kernels" in reason(found.dropped, "build_config.plugin_config.*")


def test_every_setting_of_an_engine_is_accounted_for(tmp_path: Path) -> None:
    source = foreign_engine(tmp_path / "engine")
    found = migrated(source)
    listed = {entry.key for entry in (*found.carried, *found.dropped, *found.attention)}
    for entry in found.dropped:
        if entry.key.endswith(".*"):
            listed |= {entry.key[:-1] + name for name in entry.value}
    default = {rule.key for rule in ENGINE if isinstance(rule, Carry)}  # not set, or -1
    assert set(read_settings(source).engine) - listed <= default


def test_adapters_are_carried_where_the_engine_takes_them(tmp_path: Path) -> None:
    changes = {
        "plugin_config__lora_plugin": "auto",
        "lora_config__lora_dir": ["/adapters/a"],
        "lora_config__max_lora_rank": 16,
        "lora_config__lora_target_modules": ["attn_q", "attn_v"],
    }
    found = migrated(foreign_engine(tmp_path / "engine", **changes))
    args = found.args.to_json()
    assert args["enable_lora"] is True
    assert args["lora_config"] == {
        "lora_dir": ["/adapters/a"],
        "max_lora_rank": 16,
        "lora_target_modules": ["attn_q", "attn_v"],
    }
    plugin, directory = "build_config.plugin_config.lora_plugin", "build_config.lora_config.lora_dir"
    assert "ignore adapters of requests" in reason(found.attention, plugin)
    assert "paths of the machine that built the engine" in reason(found.attention, directory)
    assert {plugin, directory} <= {entry.key for entry in found.carried}


def test_without_adapters_nothing_is_said_of_them(tmp_path: Path) -> None:
    found = migrated(foreign_engine(tmp_path / "engine", lora_config__lora_dir=["/adapters/a"]))
    assert not [entry for entry in found.attention if "lora" in entry.key]


@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        ({"speculative_decoding_mode": "MEDUSA"}, "build_config.speculative_decoding_mode", "speculative_config"),
        ({"max_draft_len": 5}, "build_config.max_draft_len", "speculative_config"),
        ({"gather_context_logits": True}, "build_config.gather_context_logits", "return_context_logits"),
        ({"weight_streaming": True}, "build_config.weight_streaming", "all weights on the GPU"),
        ({"max_beam_width": 4}, "build_config.max_beam_width", "refuses every request whose beam width is not"),
    ],
)
def test_what_somebody_must_decide(tmp_path: Path, changes: dict[str, Any], key: str, said: str) -> None:
    found = migrated(foreign_engine(tmp_path / "engine", **changes))
    assert said in reason(found.attention, key)
    assert found.args.max_beam_width is None


def test_a_repository_adds_its_servers_settings(tmp_path: Path) -> None:
    engine = foreign_engine(tmp_path / "engine")
    parameters = {
        "gpt_model_path": str(engine),
        "gpt_model_type": "inflight_fused_batching",
        "batch_scheduler_policy": "max_utilization",
        "kv_cache_free_gpu_mem_fraction": "0.85",
        "max_tokens_in_paged_kv_cache": "${max_tokens_in_paged_kv_cache}",
        "kv_cache_host_memory_bytes": "1000000",
        "enable_kv_cache_reuse": "false",
        "enable_chunked_context": "true",
        "max_attention_window_size": "4096,1024",
        "lora_cache_max_adapter_size": "32",
        "guided_decoding_backend": "",
        "max_beam_width": "2",
        "gpu_device_ids": "0,1;2,3",
        "exclude_input_in_output": "true",
        "new_parameter": "x",
    }
    queue = "dynamic_batching { default_queue_policy { max_queue_size: 7 } }\ninstance_group [ { count: 2 }, { } ]\n"
    found = migrated(repository(tmp_path / "repository", parameters, queue))
    args = found.args.to_json()
    assert args["scheduler_config"] == {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    assert args["enable_chunked_prefill"] is True
    assert args["kv_cache_config"] == {
        "enable_block_reuse": False,
        "free_gpu_memory_fraction": 0.85,
        "max_attention_window": [4096, 1024],
        "host_cache_size": 1000000,
        "dtype": "fp8",
        "tokens_per_block": 32,
    }
    assert args["peft_cache_config"] == {"max_adapter_size": 32}
    assert args["triton_config"] == {"max_batch_size": 0, "decoupled": True, "cancellation_check_period_ms": 100}
    assert args["tensor_parallel_size"] == 4
    assert "serving.max_queue_size=7" in reason(found.attention, "dynamic_batching.max_queue_size")
    assert "CUDA_VISIBLE_DEVICES" in reason(found.attention, "gpu_device_ids")
    assert "beam width" in reason(found.attention, "max_beam_width")
    assert "max_beam_width" not in args
    assert reason(found.attention, "new_parameter") == "unknown setting"
    assert "one LLM serves all" in reason(found.attention, "instance_group.count")
    assert [left.value for left in found.attention if left.key == "instance_group.count"] == [3]
    assert reason(found.dropped, "gpt_model_path") == "there is no engine to load"


def test_values_that_triton_passed_over_are_named(tmp_path: Path) -> None:
    source = repository(tmp_path / "r", {"enable_kv_cache_reuse": "yes", "batch_scheduler_policy": "MAX"})
    found = migrated(source)
    assert "does not read it as a boolean" in reason(found.attention, "enable_kv_cache_reuse")
    assert "unknown to Triton" in reason(found.attention, "batch_scheduler_policy")
    assert "enable_block_reuse" not in found.args.to_json().get("kv_cache_config", {})


def test_an_engine_that_is_elsewhere_is_asked_for(tmp_path: Path) -> None:
    source = repository(tmp_path / "r", {"gpt_model_path": "/engines/llama"})
    found = migrated(source)
    assert "give it with --engine" in reason(found.attention, "gpt_model_path")
    assert found.args.max_batch_size == 32
    given = migrate(read_settings(source, foreign_engine(tmp_path / "engine")))
    assert given.args.max_seq_len == 5120


@pytest.mark.parametrize(
    ("algorithm", "lacks"),
    [
        ("INT8", "the PyTorch backend has no such KV cache"),
        ("NVFP4", "trtforge does not offer it in the LLM API"),  # TensorRT-LLM has it
    ],
)
def test_a_cache_in_int8_or_nvfp4_has_no_successor(algorithm: str, lacks: str, tmp_path: Path) -> None:
    source = foreign_engine(tmp_path / "engine")
    values = json.loads((source / "config.json").read_text())
    values["pretrained_config"]["quantization"]["kv_cache_quant_algo"] = algorithm
    (source / "config.json").write_text(json.dumps(values))
    found = migrated(source)
    why = reason(found.attention, "pretrained_config.quantization.kv_cache_quant_algo")
    assert why == f"{lacks}: it will have the model's dtype"
    assert found.args.kv_cache_config.dtype is None


def test_our_own_repository_is_migrated(tmp_path: Path) -> None:
    """Its engine lies inside; the path in config.pbtxt is that of a container."""
    engine = tensorrt_engine(tmp_path / "engine", tp=2)
    config = PackageConfig.parse({"serving": {"kv_cache_fraction": 0.7, "streaming": False}}, "test")
    source = package(config, engine, DEMO_MODEL, tmp_path / "repository").path
    found = migrated(source)
    assert (found.args.tensor_parallel_size, found.args.max_seq_len) == (2, 1024)
    assert found.args.kv_cache_config.free_gpu_memory_fraction == 0.7
    assert "serving.streaming=false" in reason(found.attention, "model_transaction_policy.decoupled")


def test_the_settings_of_our_own_embedded_repository_are_known(tmp_path: Path) -> None:
    engine = torch_engine(tmp_path / "engine")
    source = package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "repository").path
    assert migrated(source).attention == []
    waiting = PackageConfig.parse({"serving": {"max_queue_size": 7, "max_queue_seconds": 1.5}}, "test")
    found = migrated(package(waiting, engine, DEMO_MODEL, tmp_path / "limited").path)
    assert [(left.key, left.value) for left in found.attention] == [
        ("max_queue_size", "7"),
        ("max_queue_seconds", "1.5"),
    ]
    assert "serving.max_queue_size=N" in reason(found.attention, "max_queue_size")


def test_without_weights_the_arguments_and_a_report_are_written(tmp_path: Path) -> None:
    source = foreign_engine(tmp_path / "engine")
    found, made = run_migration(MigrateOptions(source, "1.3.0"), tmp_path / "out")
    assert set(made.manifest.files) == {"model.yaml", "migration.json"}
    assert read_llm_args(made.path) == found.args
    report = json.loads((made.path / "migration.json").read_text())
    assert report["model_yaml"] == yaml.safe_load((made.path / "model.yaml").read_text())
    assert "--checkpoint" in reason(found.attention, "model")
    assert run_migration(MigrateOptions(source, "1.3.0"), tmp_path / "out")[1].cached


@pytest.mark.parametrize("converted", [False, True])
def test_with_weights_the_engine_is_whole_and_can_be_packaged(tmp_path: Path, converted: bool) -> None:
    engine = write_engine(tmp_path / "engine", demo_engine(tp=2))
    source = package(
        PackageConfig.parse({"serving": {"kv_cache_fraction": 0.7, "scheduler": "max_utilization"}}, "test"),
        engine,
        DEMO_MODEL,
        tmp_path / "old",
    ).path
    weights = DEMO_MODEL
    if converted:
        weights = convert(ConvertConfig(), DEMO_MODEL, tmp_path / "checkpoint").path
    _, made = run_migration(MigrateOptions(source, "1.3.0", checkpoint=weights), tmp_path / "new")
    assert {"model.yaml", "config.json", "model.safetensors", "tokenizer.json"} <= set(made.manifest.files)
    args = read_llm_args(made.path)
    assert (args.tensor_parallel_size, args.max_batch_size, args.max_seq_len) == (2, 64, 1024)
    served = package(PackageConfig(), made.path, None, tmp_path / "repository").path
    model = yaml.safe_load((served / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert model["kv_cache_config"]["free_gpu_memory_fraction"] == 0.7
    assert model["scheduler_config"] == {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    assert "triton_config" not in model


def test_the_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    source = foreign_engine(tmp_path / "engine")
    with pytest.raises(ForgeError, match="is of another model: its num_hidden_layers is 4, the engine's 32"):
        run_migration(MigrateOptions(source, "1.3.0", checkpoint=DEMO_MODEL), tmp_path / "out")


@pytest.mark.parametrize(("tp", "padded"), [(1, 2048), (1, 2111), (2, 2175)])
def test_a_padded_vocabulary_is_of_the_same_model(tmp_path: Path, tp: int, padded: int) -> None:
    values = demo_engine(tp)
    values["pretrained_config"]["vocab_size"] = padded
    source = write_engine(tmp_path / "engine", values)
    _, made = run_migration(MigrateOptions(source, "1.3.0", checkpoint=DEMO_MODEL), tmp_path / "out")
    assert read_llm_args(made.path).tensor_parallel_size == tp


@pytest.mark.parametrize(("tp", "other"), [(1, 2047), (1, 2112), (2, 2176)])
def test_another_vocabulary_is_of_another_model(tmp_path: Path, tp: int, other: int) -> None:
    values = demo_engine(tp)
    values["pretrained_config"]["vocab_size"] = other
    source = write_engine(tmp_path / "engine", values)
    with pytest.raises(ForgeError, match=f"is of another model: its vocab_size is 2048, the engine's {other}"):
        run_migration(MigrateOptions(source, "1.3.0", checkpoint=DEMO_MODEL), tmp_path / "out")


def test_a_multimodal_checkpoints_sizes_are_its_language_models(tmp_path: Path) -> None:
    """Of a config.json with the sizes of another part at its top."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(DEMO_MODEL, checkpoint)
    text = json.loads((checkpoint / "config.json").read_text())
    whole = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "hidden_size": 7}
    (checkpoint / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    source = write_engine(tmp_path / "engine", demo_engine())
    _, made = run_migration(MigrateOptions(source, "1.3.0", checkpoint=checkpoint), tmp_path / "out")
    assert read_llm_args(made.path).max_seq_len == 1024
    text["num_hidden_layers"] += 1
    (checkpoint / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    with pytest.raises(ForgeError, match="is of another model: its num_hidden_layers is 5, the engine's 4"):
        run_migration(MigrateOptions(source, "1.3.0", checkpoint=checkpoint), tmp_path / "other")


def test_bad_sources_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="no such directory"):
        read_settings(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ForgeError, match="is neither an engine nor a model repository"):
        read_settings(tmp_path / "empty")
    with pytest.raises(ForgeError, match="pretrained_config or build_config is missing"):
        read_settings(DEMO_MODEL)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text('{"builder_config": {}, "plugin_config": {}}')
    with pytest.raises(ForgeError, match="is not an engine's") as caught:
        read_settings(tmp_path / "old")
    assert "a builder before 0.8" in caught.value.hint
    (tmp_path / "old" / "config.json").write_text("{")
    with pytest.raises(ForgeError, match="not JSON"):
        read_settings(tmp_path / "old")
    source = repository(tmp_path / "r", {"kv_cache_free_gpu_mem_fraction": "much"})
    with pytest.raises(ForgeError, match="kv_cache_free_gpu_mem_fraction is 'much', which is not valid for it"):
        migrated(source)
    source = repository(tmp_path / "beyond", {"kv_cache_free_gpu_mem_fraction": "1.5"})
    with pytest.raises(ForgeError, match="migration: kv_cache_free_gpu_mem_fraction: Input should be less than"):
        migrated(source)
    (source / "tensorrt_llm" / "config.pbtxt").write_text("max_batch_size: ${triton_max_batch_size}")
    with pytest.raises(ForgeError, match=r"config\.pbtxt, line 1: expected protobuf text format, found \$"):
        migrated(source)


def test_one_of_several_models_is_chosen_by_name(tmp_path: Path) -> None:
    source = repository(tmp_path / "r", {"kv_cache_free_gpu_mem_fraction": "0.1"}, name="a")
    repository(source, {"kv_cache_free_gpu_mem_fraction": "0.2"}, name="b")
    with pytest.raises(ForgeError, match="several models serve engines: a, b"):
        read_settings(source)
    found = migrate(read_settings(source, name="b"))
    assert found.args.kv_cache_config.free_gpu_memory_fraction == 0.2
    with pytest.raises(ForgeError, match="has no model c"):
        read_settings(source, name="c")
    shutil.rmtree(source / "a")
    (source / "b" / "config.pbtxt").write_text('name: "b" backend: "python"')
    with pytest.raises(ForgeError, match="no model serves an engine"):
        read_settings(source)


def test_every_parameter_of_the_template_has_a_rule() -> None:
    from trtforge.formats.releases import read_release_data

    known = {rule.key for rule in REPOSITORY}
    template = {
        entry["key"] for entry in read_release_data("triton-model-config")["models"]["tensorrt_llm"]["parameters"]
    }
    assert template - known == set()


def test_the_command_reports_as_json(tmp_path: Path) -> None:
    source = foreign_engine(tmp_path / "engine")
    done = CliRunner().invoke(app, ["migrate", str(source), str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["stage"] == "migration"
    assert {"key": "build_config.max_batch_size", "value": 32, "to": "max_batch_size", "argument": 32} in found[
        "carried"
    ]
    assert found["attention"][0]["key"] == "pretrained_config.quantization.quant_algo"


def test_the_command_prints_what_needs_attention_and_with_all_everything(tmp_path: Path) -> None:
    source, out = foreign_engine(tmp_path / "engine"), str(tmp_path / "out")
    short = CliRunner().invoke(app, ["migrate", str(source), out]).stdout
    found = migrated(source)
    assert short.startswith("Needs attention:\n  pretrained_config.quantization.quant_algo = ")
    assert f"{len(found.carried)} settings carried over, {len(found.dropped)} dropped; --all lists them" in short
    assert "build_config.max_batch_size" not in short
    assert len(short.splitlines()) < 20
    whole = CliRunner().invoke(app, ["migrate", str(source), out, "--all"]).stdout
    for title in ("Carried over", "Needs attention", "Dropped", "next: trtforge migrate"):
        assert title in whole
