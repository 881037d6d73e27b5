"""A repository as a whole: its files, what Triton will read, and what is refused before anything is written."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2

from tests.conftest import DEMO_MODEL
from tests.package.engines import FORGE, engine_config, tensorrt_engine, torch_engine, write_engine
from trtforge.cli.options import from_options
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import read_manifest
from trtforge.formats.triton import ROLES, RepositoryFacts, read_facts
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package


def model_config(repository: Path, name: str) -> Any:
    text = (repository / name / "config.pbtxt").read_text()
    assert "${" not in text
    assert "{{" not in text
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def parameters(config: Any) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


def facts_of(repository: Path) -> RepositoryFacts:
    manifest = read_manifest(repository)
    assert manifest is not None
    return read_facts(manifest)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Of an engine of the embedded runtime."""
    return package(PackageConfig(), torch_engine(tmp_path / "engine"), DEMO_MODEL, tmp_path / "out").path


def test_repository_holds_five_complete_models(repository: Path) -> None:
    assert {path.name for path in repository.iterdir()} == {*ROLES, "forge.json"}
    for role in ROLES:
        config = model_config(repository, role)
        assert (config.name, config.backend, config.max_batch_size) == (role, "python", 64)
        assert (repository / role / "1" / "model.py").is_file()
        if role != "tensorrt_llm":
            assert (repository / role / "1" / "tokenizer" / "tokenizer.json").is_file()
    assert (repository / "preprocessing" / "1" / "tokenizer" / "tokenizer_config.json").is_file()


def test_text_models_have_the_tensors_of_tensorrt_llm(repository: Path) -> None:
    ensemble, bls = model_config(repository, "ensemble"), model_config(repository, "tensorrt_llm_bls")
    inputs = {tensor.name: tensor for tensor in ensemble.input}
    assert [name for name, tensor in inputs.items() if not tensor.optional] == ["max_tokens"]
    assert inputs["seed"].data_type == model_config_pb2.TYPE_UINT64
    assert list(inputs["lora_config"].dims) == [-1, -1], "three columns, or four"
    outputs = [tensor.name for tensor in ensemble.output]
    assert outputs[:3] == ["text_output", "cum_log_probs", "output_log_probs"]
    assert len(set(outputs)) == len(outputs)
    counts = {"num_input_tokens", "num_output_tokens", "num_cached_tokens", "prompt_thought"}
    assert counts | {"finish_reason", "logprobs", "prompt_logprobs"} < set(outputs)
    assert len(inputs) == len(ensemble.input)
    assert set(inputs) < {tensor.name for tensor in bls.input}
    assert ensemble.model_transaction_policy.decoupled
    engine = {tensor.name: tensor for tensor in model_config(repository, "tensorrt_llm").input}
    assert engine["request_output_len"].HasField("reshape")
    assert engine["input_ids"].allow_ragged_batch


def test_a_tokenizer_without_a_usable_chat_template_has_no_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, template in (("none", None), ("broken", "{% for %}")):
        directory = tmp_path / name
        shutil.copytree(DEMO_MODEL, directory)
        config = json.loads((directory / "tokenizer_config.json").read_text())
        config["chat_template"] = template
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        repository = package(PackageConfig(), torch_engine(tmp_path / f"{name}-engine"), directory, tmp_path / "out")
        ensemble = model_config(repository.path, "ensemble")
        assert "messages" not in {tensor.name for tensor in ensemble.input}
        assert parameters(ensemble)["chat_template"] == "false"
        assert list(repository.path.rglob("chat.json")) == []
    warnings = [record.getMessage() for record in caplog.records if "chat template" in record.getMessage()]
    assert warnings == [
        f"{tmp_path / 'broken'}: the chat template cannot be used, line 1: Expected an expression, got 'end of "
        "statement block': the repository is packaged without chat"
    ]


def test_nothing_in_it_names_a_place_outside(repository: Path, tmp_path: Path) -> None:
    for path in repository.rglob("*"):
        if path.is_file() and path.suffix in (".pbtxt", ".json", ".py"):
            assert str(tmp_path) not in path.read_text(encoding="utf-8")


def test_engine_is_linked_not_copied(repository: Path, tmp_path: Path) -> None:
    packed = repository / "tensorrt_llm" / "1" / "engine"
    assert os.path.samefile(packed / "rank0.safetensors", tmp_path / "engine" / "rank0.safetensors")
    assert (packed / "forge.json").read_bytes() == (tmp_path / "engine" / "forge.json").read_bytes()


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path, repository: Path) -> None:
    again = package(PackageConfig(), tmp_path / "engine", DEMO_MODEL, repository)
    assert again.cached
    other = package(PackageConfig(), tmp_path / "engine", DEMO_MODEL, tmp_path / "other")
    assert not other.cached
    assert (other.path / "forge.json").read_bytes() == (repository / "forge.json").read_bytes()


def test_prefix_names_the_models_and_their_references(tmp_path: Path) -> None:
    config = PackageConfig(name_prefix="qa-")
    repository = package(config, torch_engine(tmp_path / "engine"), DEMO_MODEL, tmp_path / "out").path
    assert {path.name for path in repository.iterdir() if path.is_dir()} == {f"qa-{role}" for role in ROLES}
    assert parameters(model_config(repository, "qa-ensemble"))["tensorrt_llm_model_name"] == "qa-tensorrt_llm"
    assert parameters(model_config(repository, "qa-tensorrt_llm_bls"))["tensorrt_llm_model_name"] == "qa-tensorrt_llm"
    assert facts_of(repository).model("ensemble") == "qa-ensemble"


def test_serving_options_reach_the_engine_model(tmp_path: Path) -> None:
    config = PackageConfig.parse(
        {
            "serving": {
                "scheduler": "max_utilization",
                "kv_cache_fraction": 0.5,
                "kv_cache_tokens": 4096,
                "max_queue_size": 9,
                "exclude_input_in_output": False,
                "streaming": False,
            }
        },
        "test",
    )
    repository = package(config, torch_engine(tmp_path / "engine"), DEMO_MODEL, tmp_path / "out").path
    engine = model_config(repository, "tensorrt_llm")
    values = parameters(engine)
    assert values["batch_scheduler_policy"] == "max_utilization"
    assert values["kv_cache_free_gpu_mem_fraction"] == "0.5"
    assert values["max_tokens_in_paged_kv_cache"] == "4096"
    assert values["exclude_input_in_output"] == "false"
    assert (values["enable_kv_cache_reuse"], values["enable_chunked_context"]) == ("true", "false")
    assert values["end_ids"] == "1,3"
    assert values["max_queue_size"] == "9"
    for name in ("ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls"):
        assert not model_config(repository, name).HasField("dynamic_batching")
    assert not engine.model_transaction_policy.decoupled
    assert not facts_of(repository).streaming


def test_tensorrt_llm_engine_gets_its_own_backend_and_all_keys_it_needs(tmp_path: Path) -> None:
    config = PackageConfig.parse({"serving": {"max_queue_size": 9}}, "test")
    repository = package(config, tensorrt_engine(tmp_path / "engine", tp=2), DEMO_MODEL, tmp_path / "out").path
    engine = model_config(repository, "tensorrt_llm")
    values = parameters(engine)
    assert engine.backend == "tensorrtllm"
    assert engine.dynamic_batching.default_queue_policy.max_queue_size == 9
    assert not (repository / "tensorrt_llm" / "1" / "model.py").exists()
    assert {path.name for path in (repository / "tensorrt_llm" / "1" / "engine").iterdir()} == {
        "config.json",
        "forge.json",
        "rank0.engine",
        "rank1.engine",
    }
    assert values["gpt_model_path"] == "/models/tensorrt_llm/1/engine"
    assert values["gpt_model_type"] == "inflight_fused_batching"
    assert values["executor_worker_path"] == "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
    for key in ("tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path"):
        assert values[key] == ""
    assert {values[key] for key in values if key.startswith("enable_")} <= {"true", "false"}
    preprocessing = parameters(model_config(repository, "preprocessing"))
    assert (preprocessing["end_ids"], preprocessing["end_ids_as_stop_words"]) == ("1,3", "true")
    facts = facts_of(repository)
    assert (facts.backend, facts.world_size, facts.tensorrt_llm) == ("tensorrt_llm", 2, "1.2.1")


def test_tensors_are_those_of_the_engines_release(tmp_path: Path) -> None:
    engine = tensorrt_engine(tmp_path / "engine", version="0.19.0")
    repository = package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "out").path
    names = {tensor.name for tensor in model_config(repository, "ensemble").input}
    assert {"random_seed", "min_length"} <= names
    assert not {"seed", "min_tokens"} & names
    assert {"messages", "return_num_input_tokens"} <= names  # those of the text models themselves
    forwarded = parameters(model_config(repository, "ensemble"))["text_to_engine"]
    assert "random_seed:random_seed" in forwarded


def test_features_that_the_engine_lacks_are_refused(tmp_path: Path) -> None:
    config = engine_config()
    config["build_config"]["plugin_config"]["use_paged_context_fmha"] = False
    engine = write_engine(tmp_path / "engine", config)
    with pytest.raises(ForgeError, match="kv_reuse: the engine was built without use_paged_context_fmha"):
        package(PackageConfig(kv_reuse=True), engine, DEMO_MODEL, tmp_path / "out")
    repository = package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "out").path
    assert parameters(model_config(repository, "tensorrt_llm"))["enable_kv_cache_reuse"] == "false"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"rank0.safetensors": b"x"}, "rank1.safetensors is missing: config.json says 2 ranks, 1 exist"),
        ({"rank0.safetensors": b"x", "rank1.safetensors": b""}, "rank1.safetensors is empty"),
        ({f"rank{i}.safetensors": b"x" for i in range(3)}, "unexpected file .*rank2.safetensors: config.json says 2"),
    ],
)
def test_incomplete_engine_is_refused(tmp_path: Path, files: dict[str, bytes], said: str) -> None:
    engine = write_engine(tmp_path / "engine", engine_config(tp=2, forge=FORGE), files)
    with pytest.raises(ForgeError, match=said):
        package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [None, "8", 0, True])
def test_engine_without_a_limit_is_refused(tmp_path: Path, value: object) -> None:
    config = engine_config(forge=FORGE)
    config["build_config"]["max_batch_size"] = value
    with pytest.raises(ForgeError, match=r"build_config\.max_batch_size is .*, not a whole number from 1"):
        package(PackageConfig(), write_engine(tmp_path / "engine", config), DEMO_MODEL, tmp_path / "out")


def test_changed_engine_is_refused(tmp_path: Path) -> None:
    engine = torch_engine(tmp_path / "engine")
    (engine / "rank0.safetensors").write_bytes(b"v" * 100)
    with pytest.raises(ForgeError, match="was changed after it was written"):
        package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "out")


def test_tokenizer_of_the_engine_is_the_default(tmp_path: Path) -> None:
    files = {"rank0.safetensors": b"x"}
    engine = torch_engine(tmp_path / "engine", files)
    with pytest.raises(ForgeError, match=r"tokenizer missing: .* contains none") as caught:
        package(PackageConfig(), engine, None, tmp_path / "out")
    assert "--tokenizer DIR" in caught.value.hint
    shutil.copytree(DEMO_MODEL, engine / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors", "heldout*"))
    repository = package(PackageConfig(), engine, None, tmp_path / "out").path
    assert json.loads((repository / "forge.json").read_text())["identity"]["config"]["end_ids"] == [1, 3]


def test_unfilled_placeholders_are_found() -> None:
    from trtforge.package.render import check_config

    with pytest.raises(ForgeError, match=r"m/config.pbtxt: unfilled template placeholder: max_batch_size: \$\{size\}"):
        check_config('name: "m"\nmax_batch_size: ${size}', "m")
    with pytest.raises(ForgeError, match=r"m/config\.pbtxt: not a model configuration"):
        check_config('name: "m"\nmax_batch_sise: 4', "m")


@pytest.mark.parametrize("prefix", ["../x", "/x", "a/b", ".", "..x", "-x", "a b", "a\n", "é", "a" * 101])
def test_a_prefix_that_is_no_part_of_a_name_is_refused(prefix: str) -> None:
    with pytest.raises(ForgeError, match="package: --name: "):
        from_options(PackageConfig, {"name_prefix": prefix}, "package")


def test_a_prefix_is_part_of_a_name() -> None:
    assert from_options(PackageConfig, {"name_prefix": "v1.2_demo-"}, "package").name_prefix == "v1.2_demo-"
