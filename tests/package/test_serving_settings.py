"""The serving settings of TensorRT-LLM's executor: recipe, config.pbtxt, protobuf, and back to the value."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.conftest import DEMO_MODEL
from tests.package.engines import engine_config, tensorrt_engine, torch_engine, write_engine
from tests.package.test_features import built
from tests.package.test_stage import facts_of, model_config
from tests.package.test_stage import parameters as read_parameters
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import load_recipe
from trtforge.core.serving import ServingConfig
from trtforge.formats.foreign import engine_manifest
from trtforge.formats.releases import release
from trtforge.formats.triton import parameters
from trtforge.package.config import PackageConfig
from trtforge.package.engine_facts import EngineFacts, read_engine
from trtforge.package.parameters import engine_parameters, require_servable
from trtforge.package.render import render_config
from trtforge.package.stage import package
from trtforge.package.tokenizer import read_tokenizer
from trtforge.package.triton_models import model_specs, repository_facts
from trtforge.plan.serving_rules import EMBEDDED_SETTINGS
from trtforge.runtime.hosted import HostJob

RELEASES = ("0.17.0", "0.18.2", "0.19.0", "0.20.0", "0.21.0", "1.0.0", "1.1.0", "1.2.1")
SINCE = {"num_nodes": "0.19.0", "lora_prefetch_dir": "0.19.0", "guided_decoding_backend": "0.19.0"}
SINCE |= {"enable_trt_overlap": "1.2.1"}
ASKED: dict[str, tuple[Any, str]] = {
    "max_attention_window_size": ([4096, 1024, 4096, 1024], "4096,1024,4096,1024"),
    "sink_token_length": (4, "4"),
    "kv_cache_host_memory_bytes": ("16GB", "16000000000"),
    "cuda_graph_mode": (True, "true"),
    "cuda_graph_cache_size": (100, "100"),
    "enable_trt_overlap": (True, "true"),
    "normalize_log_probs": (False, "false"),
    "lora_prefetch_dir": ("/adapters", "/adapters"),
    "guided_decoding_backend": ("xgrammar", "xgrammar"),
    "gpu_device_ids": ("0,1;2,3", "0,1;2,3"),
    "participant_ids": ("1,2;3,4", "1,2;3,4"),
    "num_nodes": (2, "2"),
    "speculative_decoding_fast_logits": (True, "true"),
}
NEEDED: dict[str, dict[str, Any]] = {
    "cuda_graph_cache_size": {"cuda_graph_mode": True},
    "enable_trt_overlap": {"cuda_graph_mode": True},
    "speculative_decoding_fast_logits": {"participant_ids": "1,2"},
}


def tp2(tmp_path: Path, version: str, **features: Any) -> Path:
    return tensorrt_engine(tmp_path / "engine", tp=2, version=version, features=built(**features))


def packaged(tmp_path: Path, engine: Path, **serving: Any) -> Path:
    config = PackageConfig(serving=ServingConfig.parse(serving, "serving"))
    return package(config, engine, DEMO_MODEL, tmp_path / "out").path


def had(version: str) -> set[str]:
    return {key for key in ASKED if release(version).within(SINCE.get(key, "0.17.0"), None)}


def test_every_setting_of_the_executor_is_asked_here() -> None:
    names = list(ServingConfig.model_fields)
    assert set(names[names.index("max_attention_window_size") :]) == set(ASKED)


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("key", list(ASKED))
def test_a_setting_of_a_recipe_is_what_triton_reads(key: str, version: str, tmp_path: Path) -> None:
    value, expected = ASKED[key]
    recipe = {"name": "x", "model": {"source": "m"}, "serving": {**NEEDED.get(key, {}), key: value}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    serving = load_recipe(tmp_path / "recipe.yaml").serving
    engine = tp2(tmp_path, version, lora={"max_rank": 16})
    config = PackageConfig(serving=serving)
    if key not in had(version):
        with pytest.raises(ForgeError) as caught:
            package(config, engine, DEMO_MODEL, tmp_path / "out")
        assert f"TensorRT-LLM {version}: config.pbtxt: {key} was added in {SINCE[key]}" in caught.value.message
        assert caught.value.hint == f"Target {SINCE[key]}."
        assert not (tmp_path / "out").exists()
        return
    read = model_config(package(config, engine, DEMO_MODEL, tmp_path / "out").path, "tensorrt_llm")
    assert read_parameters(read)[key] == expected
    count = 2 if key == "gpu_device_ids" else 1
    assert [group.count for group in read.instance_group] == [count]


@pytest.mark.parametrize("key", [key for key in ASKED if key not in EMBEDDED_SETTINGS])
def test_the_embedded_engine_refuses_what_it_does_not_have(key: str, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=rf"serving\.{key}: the embedded engine has no such setting"):
        packaged(tmp_path, torch_engine(tmp_path / "engine"), **{key: ASKED[key][0]})


@pytest.mark.parametrize("key", sorted(EMBEDDED_SETTINGS))
def test_the_embedded_engine_gets_what_it_has(key: str, tmp_path: Path) -> None:
    asked, expected = ASKED[key]
    made = packaged(tmp_path, torch_engine(tmp_path / "engine"), **{key: asked})
    assert read_parameters(model_config(made, "tensorrt_llm"))[key] == expected


@pytest.mark.parametrize("key", ["max_batch_size", "max_num_tokens"])
def test_lower_limits_are_those_of_the_embedded_engine(key: str, tmp_path: Path) -> None:
    made = packaged(tmp_path, torch_engine(tmp_path / "engine"), **{key: 3})
    assert read_parameters(model_config(made, "tensorrt_llm"))[key] == "3"
    options = HostJob.model_validate({"engine": "e", "socket": "s", key: 3}).options()
    assert getattr(options, key) == 3
    with pytest.raises(ForgeError, match=rf"serving\.{key}: a TensorRT engine's limits are fixed"):
        packaged(tmp_path, tp2(tmp_path / "other", "1.2.1"), **{key: 3})


def test_what_the_embedded_engine_cannot_hold_is_refused_or_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = torch_engine(tmp_path / "engine")
    with pytest.raises(ForgeError, match=r"serving\.kv_cache_tokens is 1, less than a KV block of 16 tokens"):
        packaged(tmp_path, engine, kv_cache_tokens=1)
    packaged(tmp_path, engine, kv_cache_tokens=16, max_batch_size=1000)
    assert "serving.max_batch_size 1000 has no effect: the engine's is " in caplog.text


def test_settings_that_are_not_given_are_not_written(tmp_path: Path) -> None:
    found = read_parameters(model_config(packaged(tmp_path, tp2(tmp_path, "1.2.1")), "tensorrt_llm"))
    assert {key for key in ASKED if found.get(key)} == set()


@pytest.mark.parametrize(
    ("serving", "message"),
    [
        ({"cuda_graph_cache_size": 5}, "cuda_graph_cache_size: cuda_graph_mode is off"),
        ({"enable_trt_overlap": True}, "enable_trt_overlap: cuda_graph_mode is off"),
        ({"lora_prefetch_dir": "/a"}, "lora_prefetch_dir: the engine does not support adapters"),
        ({"speculative_decoding_fast_logits": True}, "the backend ignores it unless participant_ids is set"),
        ({"gpu_device_ids": "0"}, "gpu_device_ids: an instance has 1 ids, the engine 2 ranks"),
        ({"gpu_device_ids": "0,0"}, "gpu_device_ids: an id occurs twice in an instance"),
        ({"gpu_device_ids": "0,1;1,0"}, "gpu_device_ids: instances share a GPU"),
        ({"participant_ids": "0,1"}, "participant_ids: MPI rank 0 is the orchestrator"),
        ({"participant_ids": "1,2;2,3"}, "participant_ids: instances share an MPI rank"),
        ({"gpu_device_ids": "0,1;2,3", "participant_ids": "1,2"}, "gpu_device_ids has 2 instances, participant_ids 1"),
        ({"num_nodes": 3}, "num_nodes 3: the engine has 2 ranks"),
        ({"max_attention_window_size": [1, 2, 3]}, "max_attention_window_size has 3 windows, the model 4 layers"),
    ],
)
def test_a_setting_that_contradicts_the_engine_is_refused(
    serving: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ForgeError) as caught:
        packaged(tmp_path, tp2(tmp_path, "1.2.1"), **serving)
    assert message in caught.value.message
    assert caught.value.message.startswith("serving.")
    assert caught.value.hint


def test_offloaded_blocks_need_reuse(tmp_path: Path) -> None:
    config = PackageConfig(serving=ServingConfig(kv_cache_host_memory_bytes=1 << 30), kv_reuse=False)
    with pytest.raises(ForgeError, match="it needs KV reuse, but kv_reuse is off"):
        package(config, tp2(tmp_path, "1.2.1"), DEMO_MODEL, tmp_path / "out")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_attention_window_size": [0]}, "an attention window has at least one token"),
        ({"max_attention_window_size": 2**31}, "an attention window has at most 2,147,483,647 tokens"),
        ({"sink_token_length": 2**31}, "sink_token_length: Input should be less than or equal to 2147483647"),
        ({"cuda_graph_cache_size": 2**31}, "cuda_graph_cache_size: Input should be less than or equal to 2147483647"),
        ({"num_nodes": 2**31}, "num_nodes: Input should be less than or equal to 2147483647"),
        ({"gpu_device_ids": "0,1;"}, "gpu_device_ids"),
        ({"gpu_device_ids": f"0,{2**31}"}, "gpu_device_ids: an id is at most 2,147,483,647"),
        ({"participant_ids": "1;" + "9" * 5000}, "participant_ids: an id is at most 2,147,483,647"),
        ({"draft_gpu_device_ids": 2**31}, "draft_gpu_device_ids: an id is at most 2,147,483,647"),
        ({"participant_ids": "a"}, "participant_ids"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"cuda_graphs": True}, "unknown key cuda_graphs"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_their_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        ServingConfig.parse(values, "serving")


def test_the_largest_numbers_of_32_bits_are_taken() -> None:
    most = 2**31 - 1
    values = {"gpu_device_ids": f"0,{most};000{most}", "sink_token_length": most, "max_attention_window_size": most}
    found = ServingConfig.parse(values, "s")
    assert found.instances == ((0, most), (most,))
    assert (found.sink_token_length, found.max_attention_window_size) == (most, (most,))


def test_single_ids_and_windows_may_be_numbers() -> None:
    found = ServingConfig.parse({"gpu_device_ids": 1, "participant_ids": 2, "max_attention_window_size": 4096}, "s")
    assert found.executor_settings == {
        "max_attention_window_size": (4096,), "gpu_device_ids": "1", "participant_ids": "2"
    }  # fmt: skip
    assert (found.instances, found.participants) == (((1,),), ((2,),))


def test_an_engine_whose_sinks_are_lost_is_packaged_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packaged(tmp_path, tp2(tmp_path, "1.1.0"), sink_token_length=4)
    assert "sink tokens are not kept" in caplog.text


def test_windows_that_differ_and_reuse_have_a_known_issue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = engine_config(version="1.2.1")
    config["pretrained_config"] |= {"sliding_window": 16, "sliding_window_layers": [0, 2]}
    engine = write_engine(tmp_path / "engine", config)
    package(PackageConfig(), engine, DEMO_MODEL, tmp_path / "out")
    assert "issue #13123" in caplog.text
    caplog.clear()
    package(PackageConfig(kv_reuse=False), engine, DEMO_MODEL, tmp_path / "other")
    assert "issue #13123" not in caplog.text


def test_guided_decoding_gets_the_tokenizer(tmp_path: Path) -> None:
    repository = packaged(tmp_path, tp2(tmp_path, "1.2.1"), guided_decoding_backend="xgrammar")
    found = read_parameters(model_config(repository, "tensorrt_llm"))
    path = Path(found["xgrammar_tokenizer_info_path"])
    assert path == Path("/models/tensorrt_llm/1/xgrammar_tokenizer_info.json")
    info = json.loads((repository / path.relative_to("/models")).read_text())
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    assert info["encoded_vocab"] == [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    assert json.loads(info["tokenizer_str"]) == json.loads(tokenizer.to_str())
    assert info["stop_token_ids"] == list(read_tokenizer(DEMO_MODEL, 2048).end_ids)
    assert set(info) == {"encoded_vocab", "tokenizer_str", "stop_token_ids"}


def test_the_repository_says_that_a_server_leads_its_instances(tmp_path: Path) -> None:
    several = facts_of(packaged(tmp_path, tp2(tmp_path, "1.2.1"), gpu_device_ids="0,1;2,3", participant_ids="1,2;3,4"))
    assert (several.instances, several.participants, several.orchestrated) == (2, ((1, 2), (3, 4)), True)
    assert (several.gpus, several.gpu_count) == (((0, 1), (2, 3)), 4)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineFacts]:
    """An engine of each release, with LoRA, on two ranks."""
    found = {}
    for version in RELEASES:
        directory = tp2(tmp_path_factory.mktemp(version), version, lora={"max_rank": 16})
        found[version] = read_engine(directory, engine_manifest(directory))
    return found


windows = st.integers(1, 1 << 20).map(lambda one: [one]) | st.lists(st.integers(1, 1 << 20), min_size=4, max_size=4)
legal = st.fixed_dictionaries(
    {},
    optional={
        "max_attention_window_size": windows,
        "sink_token_length": st.integers(0, 64),
        "kv_cache_host_memory_bytes": st.integers(1, 1 << 44),
        "cuda_graph_mode": st.booleans(),
        "cuda_graph_cache_size": st.integers(0, 1000),
        "enable_trt_overlap": st.booleans(),
        "normalize_log_probs": st.booleans(),
        "lora_prefetch_dir": st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), min_size=1, max_size=9),
        "guided_decoding_backend": st.just("xgrammar"),
        "gpu_device_ids": st.sampled_from(["0,1", "3,2", "0,1;2,3"]),
        "participant_ids": st.sampled_from(["1,2", "1,2;3,4"]),
        "num_nodes": st.integers(1, 2),
        "speculative_decoding_fast_logits": st.booleans(),
        "kv_cache_tokens": st.integers(1, 1 << 30),
        "kv_cache_fraction": st.floats(0.01, 1),
    },
)


def read_back(key: str, text: str) -> Any:
    """A parameter's text as the C++ backend reads it."""
    if key in ("cuda_graph_mode", "enable_trt_overlap", "normalize_log_probs", "speculative_decoding_fast_logits"):
        return {"true": True, "false": False}[text]
    if key == "max_attention_window_size":
        return [int(part) for part in text.split(",")]
    texts = ("lora_prefetch_dir", "guided_decoding_backend", "gpu_device_ids", "participant_ids")
    return text if key in texts else int(text)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=legal, version=st.sampled_from(RELEASES))
def test_random_settings_round_trip_or_are_refused_by_name(
    values: dict[str, Any], version: str, engines: dict[str, EngineFacts]
) -> None:
    from google.protobuf import text_format  # type: ignore[import-untyped]
    from tritonclient.grpc import model_config_pb2

    from trtforge.core.assets import asset_directory

    serving, facts = ServingConfig.parse(values, "serving"), engines[version]
    config = PackageConfig(serving=serving)
    lacks = set(serving.executor_settings) - had(version)
    try:
        list(require_servable(config, facts))
    except ForgeError as error:
        named = error.message.removeprefix("serving.")
        assert any(key in named for key in serving.executor_settings)
        return
    assert not lacks
    assets = read_tokenizer(DEMO_MODEL, facts.vocab_size)
    assert set(engine_parameters(config, facts, repository_facts(config, facts), assets)) <= {
        parameter.key for parameter in parameters("tensorrt_llm", facts.release)
    }
    spec = next(spec for spec in model_specs(config, facts, assets) if spec.role == "tensorrt_llm")
    text = render_config(asset_directory("model_repo_templates"), spec)
    read = read_parameters(text_format.Parse(text, model_config_pb2.ModelConfig()))
    for key in serving.executor_settings:
        assert read_back(key, read[key]) == values[key]


@pytest.mark.parametrize(
    ("engine", "block"),
    [
        (lambda at: tensorrt_engine(at, tp=2, features=built()), 4 * 2 * 1 * 32 * 2 * 16),
        (lambda at: torch_engine(at), 4 * 2 * 2 * 32 * 4 * 16),  # float32
    ],
    ids=["tensorrt_llm", "torch"],
)
def test_host_memory_of_less_than_a_block_is_refused(
    engine: Callable[[Path], Path], block: int, tmp_path: Path
) -> None:
    made = engine(tmp_path / "engine")
    with pytest.raises(ForgeError, match=f"is {block - 1:,}, less than the {block:,} bytes of a rank's KV block"):
        packaged(tmp_path, made, kv_cache_host_memory_bytes=block - 1)
    packaged(tmp_path, made, kv_cache_host_memory_bytes=block)


def test_a_block_whose_size_is_not_known_refuses_nothing(tmp_path: Path) -> None:
    config = engine_config()
    config["pretrained_config"] |= {"kv_lora_rank": 8}
    packaged(tmp_path, write_engine(tmp_path / "engine", config, features=built()), kv_cache_host_memory_bytes=1)
