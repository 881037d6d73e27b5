"""The repository of an llmapi engine."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.package.engines import llmapi_engine
from tests.package.test_stage import facts_of, model_config, parameters
from trtforge.core.artifact import produce
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import open_artifact, read_manifest
from trtforge.formats.triton import ROLES
from trtforge.package.config import PackageConfig
from trtforge.package.engine_facts import read_engine
from trtforge.package.stage import package


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llmapi_engine(tmp_path_factory.mktemp("llmapi") / "engine")


def packaged(engine: Path, out: Path, **serving: Any) -> Path:
    return package(PackageConfig.parse({"serving": serving}, "test"), engine, None, out).path


def arguments_of(repository: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((repository / "tensorrt_llm" / "1" / "model.yaml").read_text())
    return values


def test_clients_see_the_five_models_of_an_engine(engine: Path, tmp_path: Path) -> None:
    repository = packaged(engine, tmp_path / "repository")
    assert {path.name for path in repository.iterdir()} == {*ROLES, "forge.json"}
    for role in ROLES:
        config = model_config(repository, role)
        assert (config.backend, config.max_batch_size) == ("python", 16)
    inputs = {tensor.name for tensor in model_config(repository, "tensorrt_llm").input}
    assert {"input_ids", "request_output_len", "stop_words_list"} <= inputs
    values = parameters(model_config(repository, "tensorrt_llm"))
    assert (values["end_ids"], values["vocab_size"]) == ("1,3", "2048")
    assert parameters(model_config(repository, "preprocessing"))["max_input_len"] == "511"
    facts = facts_of(repository)
    assert (facts.backend, facts.device, facts.world_size, facts.tensorrt_llm) == ("llmapi", "cuda", 2, "1.3.0")


def test_settings_of_the_executor_that_the_llm_api_has_too_are_its_arguments(
    engine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    windows = {"max_attention_window_size": 256, "sink_token_length": 4}
    repository = packaged(engine, tmp_path / "a", kv_cache_host_memory_bytes="1GiB", **windows)
    cache = arguments_of(repository)["kv_cache_config"]
    assert (cache["max_attention_window"], cache["sink_token_length"], cache["host_cache_size"]) == ([256], 4, 1 << 30)
    assert "max_attention_window_size" not in parameters(model_config(repository, "tensorrt_llm"))
    assert "this network of the PyTorch backend is not known to apply a window" in caplog.text


@pytest.mark.parametrize("key", ["cuda_graph_mode", "normalize_log_probs", "speculative_decoding_fast_logits"])
def test_settings_that_the_llm_api_lacks_are_refused(key: str, engine: Path, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=rf"serving\.{key}: the LLM API has no such setting"):
        packaged(engine, tmp_path / "a", **{key: True})


def test_the_arguments_are_the_engines_and_the_serving_settings(engine: Path, tmp_path: Path) -> None:
    found = arguments_of(packaged(engine, tmp_path / "a"))
    assert found["model"] == "engine"
    assert found["tensor_parallel_size"] == 2
    assert found["kv_cache_config"]["free_gpu_memory_fraction"] == 0.9
    assert found["scheduler_config"] == {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"}
    changed = arguments_of(
        packaged(engine, tmp_path / "b", kv_cache_fraction=0.5, kv_cache_tokens=4096, scheduler="max_utilization")
    )
    assert changed["kv_cache_config"]["free_gpu_memory_fraction"] == 0.5
    assert changed["kv_cache_config"]["max_tokens"] == 4096
    assert changed["scheduler_config"] == {"capacity_scheduler_policy": "MAX_UTILIZATION"}


def test_limits_can_be_lowered_only(engine: Path, tmp_path: Path) -> None:
    found = arguments_of(packaged(engine, tmp_path / "a", max_batch_size=4, max_num_tokens=100))
    assert (found["max_batch_size"], found["max_num_tokens"]) == (4, 100)
    assert arguments_of(packaged(engine, tmp_path / "b", max_batch_size=64))["max_batch_size"] == 16


def test_the_models_directory_needs_no_trtforge(engine: Path, tmp_path: Path) -> None:
    """NVIDIA's images have none: what the model imports of it is there, and needs the standard library only."""
    directory = packaged(engine, tmp_path / "repository") / "tensorrt_llm" / "1"
    code = (
        f"import sys; sys.path[:] = [{str(directory)!r}, *(p for p in sys.path if 'site-packages' not in p)]\n"
        "import llmapi_engine, trtforge.core.errors, trtforge.engine_process.requests\n"
        "print(trtforge.__file__)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(directory / "trtforge" / "__init__.py")


def test_an_engine_without_limits_is_refused(engine: Path, tmp_path: Path) -> None:
    manifest = read_manifest(engine)
    assert manifest is not None

    def write(directory: Path) -> dict[str, Any]:
        shutil.copytree(engine, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("forge.json"))
        (directory / "model.yaml").write_text("model: .\n")
        return {}

    bare = produce(tmp_path / "engine", manifest.identity, write).path
    with pytest.raises(ForgeError, match="packaging needs max_batch_size and max_input_len"):
        packaged(bare, tmp_path / "repository")


def test_a_language_model_may_leave_its_vocabulary_to_its_class(engine: Path, tmp_path: Path) -> None:
    """As published Gemma 3 models do, which have their dtype beside the language model's values."""
    shutil.copytree(engine, tmp_path / "engine")
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16", "text_config": text}
    (tmp_path / "engine/config.json").write_text(json.dumps(values))
    facts = read_engine(tmp_path / "engine", open_artifact(engine, "engine"))
    assert (facts.vocab_size, facts.dtype) == (262208, "bfloat16")
