"""Features for the LLM API: from a recipe's keys to the values that TensorRT-LLM's own classes of a release take."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.compile.checkpoints import engine, llama
from tests.conftest import DEMO_MODEL
from tests.package.llm_args import VERSIONS, classes, installed
from trtforge.compile.llmapi import LlmapiPlan, plan_for_checkpoint, plan_for_hugging_face
from trtforge.compile.stage import CompileOptions, compile_engine
from trtforge.core.assets import asset_directory
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import load_recipe
from trtforge.formats.releases import read_release_data
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package

MOE = {"moe": {"num_experts": 8, "top_k": 2}}
LATER = ("1.1.0", "1.2.1", "1.3.0")


def planned(features: dict[str, Any], version: str = "1.3.0", **settings: Any) -> LlmapiPlan:
    """The plan for a mixture of experts over two GPUs."""
    config = engine(backend="llmapi", features=features, target={"tensorrt_llm": version}, **settings)
    return plan_for_checkpoint(llama(mapping=Parallel(tp=2).mapping(), **MOE), config)


def accepted(plan: LlmapiPlan, version: str) -> Any:
    """The plan's model.yaml as TensorRT-LLM's own classes read it, in the way the engine process gives it to them."""
    sys.path.insert(0, str(asset_directory("model_repo_templates") / "lib"))
    saved = dict(sys.modules)
    sys.modules.update(installed(version))
    try:
        from llmapi_arguments import llm_arguments  # type: ignore[import-not-found]

        values = llm_arguments(yaml.safe_load(plan.args.to_yaml()))
    finally:
        sys.path.pop(0)
        for name in installed(version):
            sys.modules.pop(name)
        sys.modules.update({name: module for name, module in saved.items() if name.startswith("tensorrt_llm")})
    speculation = values.pop("speculative_config", None)
    found = classes(version)["TorchLlmArgs"].model_validate(values)
    return found if speculation is None else found.model_copy(update={"speculative_config": speculation})


def test_keys_of_a_recipe_are_the_releases_values(tmp_path: Path) -> None:
    features = {
        "moe": {"backend": "TRTLLM", "max_num_tokens": 4096},
        "attention_dp": {"balance": True, "timeout_iters": 20},
        "cuda_graphs": {"batch_sizes": [1, 2, 4], "padding": True},
        "ngram": {"draft_tokens": 4, "matching": 3, "max_requests": 16},
        "generation_logits": True,
    }
    recipe = {"name": "x", "model": {"source": "m"}, "engine": {"backend": "llmapi", "features": features}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    config = load_recipe(tmp_path / "recipe.yaml", ("engine.target.tensorrt_llm=1.3.0",)).engine
    plan = plan_for_checkpoint(llama(mapping=Parallel(tp=2).mapping(), **MOE), config)
    written = plan.as_json()["model_yaml"]
    assert written["moe_config"] == {"backend": "TRTLLM", "max_num_tokens": 4096}
    assert written["enable_attention_dp"] is True
    assert written["attention_dp_config"] == {"enable_balance": True, "timeout_iters": 20}
    assert written["cuda_graph_config"] == {"batch_sizes": [1, 2, 4], "enable_padding": True}
    assert written["speculative_config"] == {
        **{"decoding_type": "NGram", "max_draft_len": 4},
        **{"max_matching_ngram_size": 3, "max_concurrency": 16},
    }
    assert written["gather_generation_logits"] is True
    assert written["trust_remote_code"] is False
    read = accepted(plan, "1.3.0")
    assert (read.moe_config.backend, read.attention_dp_config.timeout_iters) == ("TRTLLM", 20)
    assert (read.cuda_graph_config.batch_sizes, read.speculative_config.max_matching_ngram_size) == ([1, 2, 4], 3)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("features", "older", "since_1_3"),
    [
        ({"draft": {"model": "org/small", "tokens": 4}}, "DraftTarget", "Draft_Target"),
        ({"eagle3": {"model": "org/net", "draft_tokens": 4}}, "Eagle", "Eagle3"),
        ({"ngram": {"draft_tokens": 4}}, "NGram", "NGram"),
    ],
)
def test_each_release_is_given_its_own_names(
    features: dict[str, Any], older: str, since_1_3: str, version: str
) -> None:
    plan = planned(features, version)
    written = plan.as_json()["model_yaml"]["speculative_config"]
    assert written["decoding_type"] == (since_1_3 if version == "1.3.0" else older)
    assert written["max_draft_len"] == 4
    key = "speculative_model" if version == "1.3.0" else "speculative_model_dir"
    assert written.get(key) == (None if "ngram" in features else "draft")
    made = accepted(plan, version).speculative_config
    assert made.max_draft_len == 4
    row = next(row for row in read_release_data("llmapi")["speculation"] if row["class"] == type(made).__name__)
    assert row["method"] in features


@pytest.mark.parametrize(
    ("features", "older"),
    [
        ({}, {"enable_trtllm_sampler": True}),
        ({"ngram": {"draft_tokens": 4}}, {"enable_mixed_sampler": True}),
        ({"eagle3": {"model": "org/net"}}, {}),
    ],
)
def test_answers_of_1_0_are_sampled_as_requests_say(features: dict[str, Any], older: dict[str, Any]) -> None:
    """Its default sampler takes the likeliest token whatever a request says; later releases have no such argument."""
    for version in VERSIONS:
        plan = planned(features, version)
        written = plan.as_json()["model_yaml"]
        found = {key: value for key, value in written.items() if key.endswith("_sampler")}
        assert found == (older if version == "1.0.0" else {})
        read = accepted(plan, version)
        assert all(getattr(read, key) is True for key in found)
        if version == "1.3.0" and features:
            assert read.speculative_config.allow_advanced_sampling is ("eagle3" in features)


@pytest.mark.parametrize("version", VERSIONS)
def test_mtp_needs_a_model_with_its_layers(version: str, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"engine\.features\.mtp: the model has no MTP layers") as caught:
        planned({"mtp": True}, version)
    assert "engine.features.ngram" in caught.value.hint
    values = {**json.loads((DEMO_MODEL / "config.json").read_text()), "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": ["DeepseekV3ForCausalLM"]}))
    config = engine(backend="llmapi", features={"mtp": {"draft_tokens": 3}}, target={"tensorrt_llm": version})
    plan = plan_for_hugging_face(tmp_path, Parallel(), config)
    assert plan.as_json()["model_yaml"]["speculative_config"] == {
        "decoding_type": "MTP",
        "num_nextn_predict_layers": 3,
        **({"allow_advanced_sampling": True} if version == "1.3.0" else {}),
    }
    assert accepted(plan, version).speculative_config.num_nextn_predict_layers == 3


@pytest.mark.parametrize("version", VERSIONS)
def test_cuda_graphs_are_off_only_where_the_recipe_says_so(version: str) -> None:
    assert "cuda_graph_config" not in planned({}, version).as_json()["model_yaml"]
    assert accepted(planned({"cuda_graphs": True}, version), version).cuda_graph_config.batch_sizes is None
    off = planned({"cuda_graphs": False}, version)
    assert "cuda_graph_config: null" in off.args.to_yaml()
    assert accepted(off, version).cuda_graph_config is None


def test_adapters_set_rank_modules_and_caches() -> None:
    lora = {"max_rank": 16, "modules": ["attn_q"], "gpu_fraction": 0.1, "host_memory": 1 << 20}
    read = accepted(planned({"lora": lora}), "1.3.0")
    assert (read.enable_lora, read.lora_config.max_lora_rank) == (True, 16)
    assert read.lora_config.lora_target_modules == ["attn_q", "attn_k", "attn_v"]
    assert (read.peft_cache_config.device_cache_percent, read.peft_cache_config.host_cache_size) == (0.1, 1 << 20)


def test_blocks_have_a_size_where_the_release_takes_one() -> None:
    assert planned({}, "1.0.0").args.kv_cache_config.tokens_per_block is None
    assert planned({}, "1.1.0").args.kv_cache_config.tokens_per_block == 32
    with pytest.raises(ForgeError, match=r"1\.0\.0 has no LLM argument kv_cache_config\.tokens_per_block"):
        planned({}, "1.0.0", tokens_per_block=64)


@pytest.mark.parametrize(
    ("features", "version", "message"),
    [
        ({"medusa": True}, "1.3.0", r"engine\.features\.medusa: not supported by the llmapi backend"),
        ({"lookahead": True}, "1.3.0", r"engine\.features\.lookahead: not supported by the llmapi backend"),
        ({"weights_on_gpu": 0.5}, "1.3.0", r"engine\.features\.weights_on_gpu: not supported by the llmapi backend"),
        ({"draft": True}, "1.3.0", r"draft\.model is not set"),
        ({"moe": {"backend": "TRITON"}}, "1.0.0", r"TensorRT-LLM 1\.0\.0: moe_config\.backend cannot be TRITON"),
        ({"moe": {"backend": "AUTO"}}, "1.2.1", r"1\.2\.1: moe_config\.backend cannot be AUTO"),
        ({"ngram": {"max_requests": 4}}, "1.1.0", r"has no LLM argument speculative_config\.max_concurrency"),
        ({"attention_dp": {"balance": True}}, "1.0.0", r"has no LLM argument attention_dp_config\.enable_balance"),
    ],
)
def test_what_a_release_lacks_is_refused_by_name(features: dict[str, Any], version: str, message: str) -> None:
    with pytest.raises(ForgeError, match=message) as caught:
        planned(features, version)
    assert caught.value.hint


def test_settings_without_effect_are_refused_or_said() -> None:
    config = engine(backend="llmapi", features={"moe": {"max_num_tokens": 8}})
    with pytest.raises(ForgeError, match=r"engine\.features\.moe: the model has no experts"):
        plan_for_checkpoint(llama(), config)
    with pytest.raises(ForgeError, match=r"engine\.features\.attention_dp: tp is 1"):
        plan_for_checkpoint(llama(), engine(backend="llmapi", features={"attention_dp": True}))
    warned = planned({"cuda_graphs": {"batch_sizes": [1, 999]}}, max_batch_size=64).as_json()["warnings"]
    assert any("batch size 999 exceeds engine.max_batch_size" in text for text in warned)
    assert any("2 graphs take up to 400 MB" in text for text in warned)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"cuda_graphs": {"batch_sizes": [1], "max_batch_size": 8}}, "exclude each other"),
        ({"cuda_graphs": {"enabled": False, "padding": True}}, "CUDA graphs are off"),
        ({"cuda_graphs": {"batch_sizes": [2, 2]}}, "distinct sizes"),
        ({"attention_dp": {"timeout_iters": 3}}, "need balance: true"),
        ({"ngram": True, "lookahead": True}, "lookahead and ngram: an engine has only one"),
        ({"moe": {"backend": "CUTLAS"}}, r"moe\.backend"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(features: dict[str, Any], message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        engine(features=features)


COUNTS = st.integers(1, 64)
MOST = st.none() | COUNTS
METHODS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"draft": st.fixed_dictionaries({"model": st.just("org/small"), "tokens": COUNTS})}),
    st.fixed_dictionaries({"eagle3": st.fixed_dictionaries({"model": st.just("org/net"), "draft_tokens": COUNTS})}),
    st.fixed_dictionaries({"ngram": st.fixed_dictionaries({"draft_tokens": COUNTS, "matching": COUNTS})}),
)
GRAPHS = st.one_of(
    st.none(),
    st.booleans(),
    st.fixed_dictionaries({"max_batch_size": COUNTS, "padding": st.none() | st.booleans()}),
    st.fixed_dictionaries({"batch_sizes": st.lists(COUNTS, min_size=1, max_size=8, unique=True)}),
)


@st.composite
def legal(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A release and features that it has."""
    version = draw(st.sampled_from(VERSIONS))
    backends = next(
        entry["values"][version[:3]]
        for entry in read_release_data("llmapi")["arguments"]
        if entry["key"] == "moe_config.backend"
    )
    moe = st.fixed_dictionaries({"backend": st.none() | st.sampled_from(backends), "max_num_tokens": MOST})
    balance = st.fixed_dictionaries({"balance": st.just(True), "timeout_iters": MOST, "batching_wait_iters": MOST})
    attention = st.none() | st.just(True)
    graphs = draw(GRAPHS)
    lora = st.none() | st.fixed_dictionaries({"max_rank": COUNTS, "gpu_fraction": st.floats(0.01, 0.5)})
    if graphs not in (None, False) and version != "1.3.0":
        lora = st.none()  # graphs hold no adapters there
    features = {
        **draw(METHODS),
        "cuda_graphs": graphs,
        "moe": draw(st.none() | moe),
        "attention_dp": draw(attention | balance if version in LATER else attention),
        "lora": draw(lora),
        "generation_logits": draw(st.booleans()),
    }
    return version, features


@settings(max_examples=40, deadline=None)
@given(legal())
def test_every_legal_setting_is_accepted_with_its_value(given: tuple[str, dict[str, Any]]) -> None:
    version, features = given
    plan = planned(features, version)
    read = accepted(plan, version)
    asked = plan.args.to_json()
    for key, value in asked.items():
        found = getattr(read, key)
        if not isinstance(value, dict):
            assert found == value
            continue
        for inner, each in value.items():
            if inner != "decoding_type":
                assert getattr(found, inner) == each
    moe, attention = features["moe"] or {}, features["attention_dp"]
    assert asked.get("moe_config", {}).get("backend") == moe.get("backend")
    assert asked.get("enable_attention_dp", False) is bool(attention)
    assert asked.get("gather_generation_logits", False) is features["generation_logits"]


@pytest.mark.parametrize("version", VERSIONS)
def test_adapters_answer_without_cuda_graphs_in_releases_whose_graphs_hold_none(version: str) -> None:
    """CUDA graphs are on by default; before 1.3 their answers are the model's own."""
    for features in ({"lora": True}, {"lora": True, "cuda_graphs": False}):
        off = version != "1.3.0" or "cuda_graphs" in features
        plan = planned(features, version)
        assert ("cuda_graph_config: null" in plan.args.to_yaml()) is off
        assert (accepted(plan, version).cuda_graph_config is None) is off
    asked = {"lora": True, "cuda_graphs": {"padding": True}}
    if version == "1.3.0":
        assert accepted(planned(asked, version), version).cuda_graph_config.enable_padding is True
        return
    with pytest.raises(ForgeError, match=rf"cuda_graphs: in TensorRT-LLM {version} they ignore LoRA adapters"):
        planned(asked, version)


def adapter(directory: Path, rank: int, name: str = "self_attn.q_proj", **values: object) -> Path:
    directory.mkdir()
    config = {"peft_type": "LORA", "r": rank, "target_modules": [name.rpartition(".")[2], "v_proj"], **values}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    layer = f"base_model.model.model.layers.0.{name}"
    matrices = {f"{layer}.lora_A.weight": torch.zeros(rank, 192), f"{layer}.lora_B.weight": torch.zeros(192, rank)}
    save_file(matrices, directory / "adapter_model.safetensors")
    return directory


def test_draft_model_and_adapters_become_part_of_engine_and_repository(tmp_path: Path) -> None:
    adapters = [str(adapter(tmp_path / f"a{rank}", rank)) for rank in (4, 8)]
    features = {"draft": {"model": str(DEMO_MODEL)}, "lora": {"adapters": adapters}}
    config = engine(backend="llmapi", max_seq_len=64, features=features, target={"tensorrt_llm": "1.2.1"})
    made = compile_engine(config, DEMO_MODEL, tmp_path / "engine", CompileOptions())
    assert made.manifest.identity.inputs["draft/config.json"] == made.manifest.identity.inputs["config.json"]
    assert (tmp_path / "engine" / "draft" / "model.safetensors").is_file()
    weights = "adapter_model.safetensors"
    assert (tmp_path / "engine" / "adapters" / "2" / weights).read_bytes() == (tmp_path / "a8" / weights).read_bytes()
    adapter(tmp_path / "other", 8, "self_attn.v_proj")
    (tmp_path / "a8" / weights).write_bytes((tmp_path / "other" / weights).read_bytes())
    again = compile_engine(config, DEMO_MODEL, tmp_path / "again", CompileOptions())
    assert again.manifest.digest != made.manifest.digest

    serving = {"serving": {"guided_decoding_backend": "llguidance"}}
    repository = package(PackageConfig.parse(serving, "test"), made.path, None, tmp_path / "repository").path
    model = repository / "tensorrt_llm" / "1"
    written = yaml.safe_load((model / "model.yaml").read_text())
    assert written["speculative_config"]["speculative_model_dir"] == "engine/draft"
    assert written["guided_decoding_backend"] == "llguidance"
    assert (model / "engine" / "draft" / "config.json").is_file()
    assert (model / "engine" / "adapters" / "1" / "adapter_config.json").is_file()
    assert not (model / "xgrammar_tokenizer_info.json").exists()
    config_text = (repository / "ensemble" / "config.pbtxt").read_text()
    assert 'key: "lora_task_ids"' in config_text.replace("'", '"')


def compiled(tmp_path: Path, directory: Path) -> None:
    config = engine(backend="llmapi", max_seq_len=64, features={"lora": {"adapters": [str(directory)]}})
    compile_engine(config, DEMO_MODEL, tmp_path / "engine", CompileOptions())


@pytest.mark.parametrize("name", ["self_attn.qkv_proj", "mlp.gate_up_proj"])
def test_adapters_of_fused_layers_are_refused(tmp_path: Path, name: str) -> None:
    """`LoraManager.load_from_hf` skips modules that its release does not map, with a warning in its log."""
    with pytest.raises(
        ForgeError, match=f"a changes {name.rpartition('.')[2]}, which the LLM API's releases"
    ) as caught:
        compiled(tmp_path, adapter(tmp_path / "a", 4, name))
    assert caught.value.hint == "Merge it into the model (`merge_and_unload` of PEFT) and build that."
    assert not (tmp_path / "engine").exists()


def test_an_adapter_that_contradicts_its_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="its layers have rank 4, but its tensors have 8"):
        compiled(tmp_path, adapter(tmp_path / "a", 8, r=4))
    other = adapter(tmp_path / "b", 4)
    save_file({"base_model.model.model.embed_tokens.weight": torch.zeros(4, 4)}, other / "adapter_model.safetensors")
    with pytest.raises(ForgeError, match=r"model\.embed_tokens\.weight is not a LoRA matrix of a decoder layer"):
        compiled(tmp_path, other)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    halves = {f"{layer}.lora_A.weight": torch.zeros(4, 192), f"{layer}.lora_B.weight": torch.zeros(192, 5)}
    save_file(halves, other / "adapter_model.safetensors")
    with pytest.raises(ForgeError, match=r"attn_q of layer 0 has A \(4, 192\) and B \(192, 5\)"):
        compiled(tmp_path, other)


def test_an_adapter_without_weights_is_named(tmp_path: Path) -> None:
    directory = adapter(tmp_path / "a", 4)
    (directory / "adapter_model.safetensors").unlink()
    config = engine(backend="llmapi", max_seq_len=64, features={"lora": {"adapters": [str(directory)]}})
    with pytest.raises(ForgeError, match=r"has no adapter_model\.safetensors"):
        compile_engine(config, DEMO_MODEL, tmp_path / "engine", CompileOptions())
