"""The keys that features put into config.pbtxt, read back as Triton reads them."""

from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2

from tests.conftest import DEMO_MODEL
from tests.package.engines import FORGE, engine_config, tensorrt_engine, torch_engine, write_engine
from tests.package.test_stage import model_config
from tests.package.test_stage import parameters as read_parameters
from trtforge.core.errors import ForgeError
from trtforge.core.features import FeaturesConfig
from trtforge.formats.adapter import resolved_lora
from trtforge.formats.releases import read_release_data, release
from trtforge.formats.triton import parameters
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.plan.runtime_keys import runtime_keys

RELEASES = ("0.17.0", "0.20.0", "1.0.0", "1.1.0", "1.2.1")


def built(**values: Any) -> dict[str, Any]:
    """Features as a compiled engine's manifest has them."""
    features = FeaturesConfig.parse(values, "test")
    if features.lora is not None:
        features = features.model_copy(update={"lora": resolved_lora(features.lora)})
    return features.model_dump(mode="json")


def keys(tmp_path: Path, version: str = "1.2.1", draft: int = 0, **values: Any) -> dict[str, str]:
    engine = tensorrt_engine(tmp_path / "engine", version=version, features=built(**values), max_draft_len=draft)
    repository = package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "out").path
    return read_parameters(model_config(repository, "tensorrt_llm"))


def test_models_of_an_embedded_engine_know_which_tensors_it_takes(tmp_path: Path) -> None:
    """Sizes of lookahead decoding are a request's to lower; adapters may come with requests of all models."""
    found = {}
    for name, features in (
        ("plain", {}),
        ("lookahead", {"lookahead": {"window": 5, "ngram": 3, "verification": 2}}),
        ("lora", built(lora={"max_rank": 8})),
    ):
        config = engine_config(forge=FORGE | {"features": features})
        config["build_config"] |= {"max_draft_len": 13 if name == "lookahead" else 0}
        if name == "lora":
            config["build_config"] |= {"lora_config": {"max_lora_rank": 8}}
            config["build_config"]["plugin_config"] |= {"lora_plugin": "auto"}
        engine = write_engine(tmp_path / name, config)
        repository = package(PackageConfig(), engine, DEMO_MODEL, tmp_path / f"{name}-repository").path
        found[name] = [read_parameters(model_config(repository, role)) for role in ("tensorrt_llm", "ensemble")]
    sizes = [f"lookahead_{name}_size" for name in ("window", "ngram", "verification_set")]
    assert [found["lookahead"][0][size] for size in sizes] == ["5", "3", "2"]
    assert [each.get("takes_adapters") for each in found["lora"]] == ["true", "true"]
    for each in (*found["plain"], found["lookahead"][1]):
        assert "lookahead_window_size" not in each
        assert "takes_adapters" not in each


def test_the_name_of_an_adapter_is_no_models(tmp_path: Path) -> None:
    """OpenAI's API would answer with the model alone."""
    config = engine_config(
        forge=FORGE
        | {
            "features": built(lora={"max_rank": 8})
            | {"lora": {"max_rank": 8, "modules": ["attn_q"], "adapters": ["sql", "ensemble"]}}
        }
    )
    config["build_config"] |= {"lora_config": {"max_lora_rank": 8}}
    config["build_config"]["plugin_config"] |= {"lora_plugin": "auto"}
    engine = write_engine(tmp_path / "engine", config)
    with pytest.raises(ForgeError, match="ensemble is the name of a LoRA adapter of the engine, and of a model of"):
        package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "repository")
    assert not (tmp_path / "repository").exists()
    package(PackageConfig(name_prefix="llama_"), engine, DEMO_MODEL, tmp_path / "repository")


@pytest.mark.parametrize("version", RELEASES)
def test_lora_caches_fit_the_adapters(tmp_path: Path, version: str) -> None:
    lora = {"max_rank": 16, "gpu_fraction": 0.1, "host_memory": 2 << 30}
    found = keys(tmp_path, version, lora=lora)
    assert found["lora_cache_max_adapter_size"] == found["lora_cache_optimal_adapter_size"] == "16"
    assert found["lora_cache_gpu_memory_fraction"] == "0.1"
    assert found["lora_cache_host_memory_bytes"] == "2147483648"


def test_lookahead_says_all_three_sizes(tmp_path: Path) -> None:
    found = keys(tmp_path, draft=83, lookahead={"window": 7, "ngram": 6, "verification": 5})
    assert found["decoding_mode"] == "lookahead"
    assert found["lookahead_window_size"] == "7"
    assert found["lookahead_ngram_size"] == "6"
    assert found["lookahead_verification_set_size"] == "5"


@pytest.mark.parametrize("version", RELEASES)
def test_a_tree_is_written_as_the_backend_parses_it(tmp_path: Path, version: str) -> None:
    found = keys(tmp_path, version, draft=63, medusa={"choices": [[0], [0, 0], [1]]})
    assert (found["decoding_mode"], found["medusa_choices"]) == ("medusa", "{0}, {0, 0}, {1}")
    assert found["multi_block_mode"] == "false"
    assert "eagle_choices" not in found


def test_without_choices_the_tree_is_tensorrt_llms_own(tmp_path: Path) -> None:
    found = keys(tmp_path, draft=63, eagle=True)
    assert found["decoding_mode"] == "eagle"
    assert "eagle_choices" not in found


def test_streamed_weights(tmp_path: Path) -> None:
    assert keys(tmp_path, weights_on_gpu=0.25)["gpu_weights_percent"] == "0.25"


def test_draft_tokens_come_with_the_request(tmp_path: Path) -> None:
    """One target engine: the client, or a Triton model of its own, asks the draft model, then sends draft_input_ids."""
    engine = tensorrt_engine(tmp_path / "engine", features=built(draft={"tokens": 5}), max_draft_len=5)
    repository = package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "out").path
    config = model_config(repository, "tensorrt_llm")
    assert {"draft_input_ids", "draft_logits", "draft_acceptance_threshold"} <= {tensor.name for tensor in config.input}
    found = read_parameters(config)
    assert found["enable_kv_cache_reuse"] == "true"
    assert "decoding_mode" not in found
    with pytest.raises(ForgeError, match="kv_reuse is off: an engine that verifies a draft model's tokens needs it"):
        package(PackageConfig(kv_reuse=False), engine, DEMO_MODEL, tmp_path / "other")


def test_logits_that_an_engine_gathers_can_be_asked_for(tmp_path: Path) -> None:
    engine = tensorrt_engine(tmp_path / "engine", features=built(context_logits=True, generation_logits=True))
    repository = package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "out").path
    for name in ("ensemble", "tensorrt_llm"):
        config = model_config(repository, name)
        assert {"return_context_logits", "return_generation_logits"} <= {tensor.name for tensor in config.input}
        assert {"context_logits", "generation_logits"} <= {tensor.name for tensor in config.output}


def test_no_feature_no_key(tmp_path: Path) -> None:
    known = {entry["key"] for entry in read_release_data("triton-model-config")["models"]["tensorrt_llm"]["parameters"]}
    of_features = {key for key in known if key.startswith(("lora_", "lookahead_", "medusa_", "eagle_", "decoding_"))}
    assert not of_features & keys(tmp_path).keys()


def test_an_engine_that_verifies_drafts_says_who_drafts(tmp_path: Path) -> None:
    engine = tensorrt_engine(tmp_path / "engine", max_draft_len=83)
    with pytest.raises(ForgeError, match="max_draft_len is 83, but the engine's speculative") as caught:
        package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "out")
    assert "--feature draft, medusa, eagle or lookahead" in caught.value.hint
    said = PackageConfig.parse({"features": {"lookahead": {"window": 7, "ngram": 7, "verification": 7}}}, "test")
    repository = package(said, engine, DEMO_MODEL, tmp_path / "out").path
    assert read_parameters(model_config(repository, "tensorrt_llm"))["lookahead_ngram_size"] == "7"


@pytest.mark.parametrize(
    ("features", "lacking"),
    [
        ({"lookahead": True}, "lookahead"),
        ({"lora": True}, "lora of rank 64"),
        ({"weights_on_gpu": 0}, "weights_on_gpu"),
    ],
)
def test_an_engine_is_not_served_with_what_it_was_not_built_for(
    tmp_path: Path, features: dict[str, Any], lacking: str
) -> None:
    config = PackageConfig.parse({"features": features}, "test")
    for engine in (tensorrt_engine(tmp_path / "engine"), torch_engine(tmp_path / "embedded")):
        with pytest.raises(ForgeError, match=f"the engine was not built for {lacking}"):
            package(config, engine, DEMO_MODEL, tmp_path / "out")


def test_an_engine_that_takes_adapters_gets_a_cache_for_them_in_any_case(tmp_path: Path) -> None:
    config = engine_config()
    config["build_config"] |= {"lora_config": {"max_lora_rank": 200}}
    config["build_config"]["plugin_config"] |= {"lora_plugin": "float16"}
    repository = package(PackageConfig(), write_engine(tmp_path / "engine", config), DEMO_MODEL, tmp_path / "out").path
    found = read_parameters(model_config(repository, "tensorrt_llm"))
    assert found["lora_cache_max_adapter_size"] == "200"
    assert found["lora_cache_gpu_memory_fraction"] == "0.05"


def test_an_adapter_larger_than_the_engines_is_refused(tmp_path: Path) -> None:
    engine = tensorrt_engine(tmp_path / "engine", features=built(lora={"max_rank": 64}))
    with pytest.raises(ForgeError, match="the engine was not built for lora of rank 65"):
        package(
            PackageConfig.parse({"features": {"lora": {"max_rank": 65}}}, "test"), engine, DEMO_MODEL, tmp_path / "out"
        )


def test_a_repository_names_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "target_modules": ["q_proj"]}')
    config = PackageConfig.parse({"features": {"lora": {"adapters": [str(tmp_path)]}}}, "test")
    engine = tensorrt_engine(tmp_path / "engine", features=built(lora={"max_rank": 8}))
    repository = package(config, engine, DEMO_MODEL, tmp_path / "out").path
    assert str(tmp_path) not in (repository / "forge.json").read_text()
    assert read_parameters(model_config(repository, "tensorrt_llm"))["lora_cache_max_adapter_size"] == "8"


def test_a_key_that_the_serving_release_lacks_is_refused(tmp_path: Path) -> None:
    engine = tensorrt_engine(tmp_path / "engine", version="0.17.0", features=built(lookahead=True), max_draft_len=15)
    with pytest.raises(ForgeError, match=r"TensorRT-LLM 0\.17\.0 has no parameter lookahead_"):
        package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "out")


@pytest.mark.parametrize("version", RELEASES)
def test_every_key_is_one_that_the_release_reads_with_a_value_that_it_takes(version: str) -> None:
    entries = read_release_data("triton-model-config")["models"]["tensorrt_llm"]["parameters"]
    allowed = {entry["key"]: entry["allowed"] for entry in entries}
    known = {parameter.key for parameter in parameters("tensorrt_llm", release(version))}
    for method in ({"medusa": {"choices": [[0]]}}, {"eagle": True}, {"lookahead": True}):
        for key in runtime_keys(FeaturesConfig.parse(method | {"weights_on_gpu": 0.5}, "test")):
            assert key.key in known or (version == "0.17.0" and key.feature == "lookahead")
            assert allowed[key.key] is None or key.value in allowed[key.key]


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize(
    ("dtype", "expected"), [("float16", "TYPE_FP16"), ("bfloat16", "TYPE_BF16"), ("float32", "TYPE_FP32")]
)
def test_adapters_have_the_engines_type(dtype: str, expected: str, version: str, tmp_path: Path) -> None:
    config = engine_config(version=version)
    config["pretrained_config"]["dtype"] = dtype
    repository = package(PackageConfig(), write_engine(tmp_path / "engine", config), DEMO_MODEL, tmp_path / "out").path
    types = inputs(repository, "tensorrt_llm")
    assert types["lora_weights"] == expected
    converted = {name for name, kind in types.items() if kind == "TYPE_BF16"}
    for role in ("ensemble", "tensorrt_llm_bls"):
        of_text = inputs(repository, role)
        assert of_text["lora_weights"] == "TYPE_FP16"
        assert "TYPE_BF16" not in of_text.values()
        named = read_parameters(model_config(repository, role))["bfloat16_inputs"]
        assert {name for name in named.split(",") if name} == converted


def inputs(repository: Path, role: str) -> dict[str, str]:
    """Data types by name."""
    declared = model_config(repository, role).input
    return {tensor.name: model_config_pb2.DataType.Name(tensor.data_type) for tensor in declared}
