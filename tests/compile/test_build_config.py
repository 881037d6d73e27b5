from dataclasses import replace
from typing import Any

import pytest

from tests.compile.checkpoints import engine, llama
from trtforge.compile.build_config import BuildPlan, build_config, in_flight_batching
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import EngineConfig
from trtforge.formats.releases import Section, read_release_data, release
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.plan.limits import derive_limits

VERSIONS = ("0.17.0", "0.18.2", "0.19.0", "0.20.0", "0.21.0", "1.0.0", "1.1.0", "1.2.0", "1.2.1")
MODELS = {
    "float16": llama(dtype="float16"),
    "bfloat16": llama(),
    "fp8": llama("FP8"),
    "fp8 with fp8 cache": llama("FP8", "FP8"),
    "int4_awq": llama("W4A16_AWQ", dtype="float16"),
}
NO_FEATURES = {"kv_reuse": False, "chunked_context": False}


def plan(version: str, checkpoint: CheckpointConfig, wanted: EngineConfig | None = None) -> BuildPlan:
    target, wanted = release(version), wanted or engine()
    block = target.field("plugin_config", "tokens_per_block").default
    assert isinstance(block, int)
    return build_config(checkpoint, wanted, derive_limits(checkpoint, wanted, block), target)


def plugins(version: str, checkpoint: CheckpointConfig, **values: Any) -> dict[str, Any]:
    found = plan(version, checkpoint, engine(**values)).to_json()["plugin_config"]
    assert isinstance(found, dict)
    return found


def of_type(value: Any, declared: str) -> bool:
    """Whether a JSON value is what the data declares, such as `int|null` or `list[str]`."""
    kinds = {"int": int, "bool": bool, "str": str, "null": type(None), "list": list, "dict": dict}
    names = [name.split("[")[0] for name in declared.split("|")]
    objects = {"LoraConfig": dict, "PluginConfig": dict, "KVCacheType": str, "SpeculativeDecodingMode": int}
    return any(type(value) is (kinds | objects)[name] for name in names)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MODELS)
def test_every_key_is_one_that_the_release_has(version: str, name: str) -> None:
    target, found = release(version), plan(version, MODELS[name])
    values: dict[str, Any] = found.to_json()
    sections: tuple[tuple[Section, dict[str, Any]], ...] = (
        ("build_config", values),
        ("plugin_config", values["plugin_config"]),
        ("lora_config", values["lora_config"]),
    )
    for section, keys in sections:
        fields = target.fields(section)
        for key, value in keys.items():
            assert key in fields, f"{section}.{key}"
            assert of_type(value, fields[key].type), f"{section}.{key} = {value!r}, declared {fields[key].type}"
            choices = fields[key].choices
            assert choices is None or value in choices, f"{section}.{key}"
    known = {key for key, field in target.fields("plugin_config").items() if field.default_known}
    assert values["plugin_config"].keys() == known
    assert in_flight_batching(found)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_the_loader_of_the_release_requires_is_there(version: str) -> None:
    values = plan(version, llama()).to_json()
    rules = read_release_data("build-config")["loading_rules"]["build_config_json"]
    for rule in rules:
        if release(version).line in rule["versions"]:
            assert values.keys() >= set(rule["required_keys"])
    assert values["kv_cache_type"] == "PAGED"


@pytest.mark.parametrize(("version", "block"), [("0.17.0", 64), ("0.19.0", 32), ("0.20.0", 32), ("1.2.1", 32)])
def test_tokens_per_block_is_the_releases_unless_given(version: str, block: int) -> None:
    assert plugins(version, llama())["tokens_per_block"] == block
    assert plugins(version, llama(), tokens_per_block=128)["tokens_per_block"] == 128


@pytest.mark.parametrize("version", ["0.17.0", "0.20.0", "1.0.0", "1.1.0", "1.2.1"])
@pytest.mark.parametrize(
    ("name", "gemm", "fp8_context", "fused_mlp", "dtype"),
    [
        ("float16", "auto", False, True, "float16"),
        ("bfloat16", "auto", False, True, "bfloat16"),
        ("fp8", None, False, True, "bfloat16"),
        ("fp8 with fp8 cache", None, True, True, "bfloat16"),
        ("int4_awq", "auto", False, False, "float16"),
    ],
)
def test_plugins_of_a_llama(
    version: str, name: str, gemm: str | None, fp8_context: bool, fused_mlp: bool, dtype: str
) -> None:
    found = plugins(version, MODELS[name])
    assert found["gemm_plugin"] == gemm
    assert found["use_fp8_context_fmha"] is fp8_context
    assert found["use_fused_mlp"] is fused_mlp
    assert found["dtype"] == dtype
    assert found["gpt_attention_plugin"] == "auto"
    assert found["remove_input_padding"] is found["paged_kv_cache"] is found["context_fmha"] is True
    assert found["use_paged_context_fmha"] is True
    assert plan(version, MODELS[name]).warnings == ()


def test_the_whole_configuration_for_1_2_1() -> None:
    values = plan("1.2.1", llama(), engine(max_batch_size=8, max_seq_len=4096)).to_json()
    del values["plugin_config"]
    assert values == {
        "max_input_len": 4095,
        "max_seq_len": 4096,
        "opt_batch_size": 8,
        "max_batch_size": 8,
        "max_beam_width": 1,
        "max_num_tokens": 8192,
        "opt_num_tokens": None,
        "max_prompt_embedding_table_size": 0,
        "kv_cache_type": "PAGED",
        "gather_context_logits": False,
        "gather_generation_logits": False,
        "strongly_typed": True,
        "force_num_profiles": None,
        "profiling_verbosity": "layer_names_only",
        "enable_debug_output": False,
        "max_draft_len": 0,
        "speculative_decoding_mode": 1,
        "use_refit": False,
        "input_timing_cache": None,
        "output_timing_cache": "model.cache",
        "lora_config": {
            "lora_dir": [],
            "lora_ckpt_source": "hf",
            "max_lora_rank": 64,
            "lora_target_modules": [],
            "trtllm_modules_to_hf_modules": {},
            "max_loras": None,
            "max_cpu_loras": None,
            "swap_gate_up_proj_lora_b_weight": True,
        },
        "weight_sparsity": False,
        "weight_streaming": False,
        "use_strip_plan": False,
        "max_encoder_input_len": 1024,
        "monitor_memory": False,
        "use_mrope": False,
    }


def test_a_default_that_nobody_saw_is_not_written() -> None:
    lora = plan("1.0.0", llama()).to_json()["lora_config"]
    assert isinstance(lora, dict)
    assert "max_loras" not in lora
    assert plan("0.21.0", llama()).to_json()["lora_config"] == {**lora, "max_loras": 4, "max_cpu_loras": 4}


@pytest.mark.parametrize(
    ("version", "quant", "on"),
    [
        ("0.17.0", ("FP8", "FP8"), False),
        ("1.2.1", ("FP8", "FP8"), True),
        ("1.2.1", ("FP8", None), True),
        ("1.2.1", (None, None), False),
    ],
)
def test_fp8_context_attention_without_paged_context_is_the_releases_default(
    version: str, quant: tuple[str | None, str | None], on: bool
) -> None:
    found = plugins(version, llama(*quant), features=NO_FEATURES)
    assert found["use_paged_context_fmha"] is False
    assert found["use_fp8_context_fmha"] is on


def test_switches_are_explained() -> None:
    assert plan("1.2.1", MODELS["fp8"]).notes == (
        "use_fp8_context_fmha is off: with paged context it requires an FP8 KV cache (quantization.kv_cache: fp8).",
    )
    assert plan("1.2.1", MODELS["fp8 with fp8 cache"]).notes[0].startswith("use_fp8_context_fmha is on")
    assert plan("0.17.0", MODELS["float16"]).notes == ()
    assert plan("1.2.1", MODELS["int4_awq"]).notes == (
        "use_fp8_context_fmha is off: it applies only to FP8 models.",
        "use_fused_mlp is off: TensorRT-LLM fuses only unquantised and FP8 MLPs, not W4A16_AWQ.",
    )


@pytest.mark.parametrize(
    ("quant", "why"),
    [
        (("W4A16_AWQ", "FP8"), "for W4A16_AWQ linear layers with an FP8 KV cache"),
        ((None, "FP8"), "for unquantised linear layers with an FP8 KV cache"),
        (("FP8", "INT8"), "for FP8 linear layers with an INT8 KV cache"),
    ],
)
def test_features_that_tensorrt_llm_would_drop_in_silence(quant: tuple[str | None, str], why: str) -> None:
    checkpoint = llama(*quant, max_position_embeddings=131072)
    found = plan("1.2.1", checkpoint)
    assert (found.features.kv_reuse, found.features.chunked_context) == (False, False)
    assert found.plugins.use_paged_context_fmha is False
    assert f"kv_reuse and chunked_context are off: TensorRT-LLM has no paged context FMHA {why}." in found.warnings
    assert found.limits.longest_prompt == found.limits.max_num_tokens == 8192
    for feature in NO_FEATURES:
        with pytest.raises(ForgeError, match=f"engine.features.{feature} is not available: .* {why}") as caught:
            plan("1.2.1", checkpoint, engine(features={feature: True}))
        assert f"engine.features.{feature}: false" in caught.value.hint
    assert plan("1.2.1", llama(*quant), engine(features=NO_FEATURES)).warnings == ()


def test_one_feature_is_enough_for_paged_context() -> None:
    assert plugins("0.17.0", llama(), features={"kv_reuse": False})["use_paged_context_fmha"] is True
    assert plugins("0.17.0", llama(), features={"chunked_context": False})["use_paged_context_fmha"] is True
    assert plugins("1.2.1", llama(), features=NO_FEATURES)["use_paged_context_fmha"] is False


@pytest.mark.parametrize(
    ("version", "checkpoint", "message"),
    [
        ("0.17.0", llama("NVFP4_AWQ"), r"0\.17\.0: quant_algo: NVFP4_AWQ was added in 1\.2\.1"),
        ("1.2.1", llama("INT3"), r"1\.2\.1: quant_algo: INT3 is not known"),
        ("0.17.0", llama(mapping={"tp_size": 1, "attn_tp_size": 1}), "mapping: attn_tp_size was added in 1.0.0"),
        ("0.17.0", llama(moe={"num_experts": 8, "topk_method": 0}), "moe: topk_method is not known"),
    ],
)
def test_what_a_release_was_seen_not_to_have_is_refused(
    version: str, checkpoint: CheckpointConfig, message: str
) -> None:
    with pytest.raises(ForgeError, match=message):
        plan(version, checkpoint)


@pytest.mark.parametrize(
    ("version", "checkpoint", "message"),
    [
        ("0.20.0", llama(architecture="MptForCausalLM"), "architectures: MptForCausalLM was added in 1.0.0"),
        ("1.0.0", llama("NVFP4_AWQ"), "quant_algo: NVFP4_AWQ was added in 1.2.1"),
        ("1.2.1", llama(mapping={"tp_size": 1, "auto_parallel": 0}), "mapping: auto_parallel was removed after 1.1.0"),
        ("1.2.1", llama(logits_dtype="bfloat16"), "--logits_dtype cannot be bfloat16"),
    ],
)
def test_what_is_only_inferred_warns(version: str, checkpoint: CheckpointConfig, message: str) -> None:
    warning = plan(version, checkpoint).warnings[0]
    assert message in warning
    assert "inferred" in warning


def test_a_large_step_warns() -> None:
    found = plan("1.2.1", llama(), engine(max_num_tokens=32768))
    assert found.warnings[0].startswith("max_num_tokens 32768 is above 16384")


def test_in_flight_batching_needs_the_plugin_packed_input_and_a_paged_cache() -> None:
    found = plan("1.2.1", llama())
    assert in_flight_batching(found)
    assert not in_flight_batching(replace(found, kv_cache_type="CONTINUOUS"))
    assert not in_flight_batching(replace(found, plugins=replace(found.plugins, gpt_attention_plugin=None)))
    assert not in_flight_batching(replace(found, plugins=replace(found.plugins, remove_input_padding=False)))


def leaving_out(*modules: str, kv_cache: str | None) -> CheckpointConfig:
    """An FP8 model in which some linear layers stay as they are."""
    checkpoint = llama("FP8", kv_cache)
    quantization = checkpoint.quantization.model_copy(update={"exclude_modules": ["*lm_head", *modules]})
    return checkpoint.model_copy(update={"quantization": quantization})


def test_fp8_attention_needs_the_scale_of_its_output() -> None:
    dense = "transformer.layers.1.attention.dense"
    with pytest.raises(ForgeError, match=r"attention\.dense is not quantised in some layers: with an FP8 KV cache"):
        plan("1.2.1", leaving_out(dense, kv_cache="FP8"))
    without = {"features": {"kv_reuse": False, "chunked_context": False}}
    assert not plugins("1.2.1", leaving_out(dense, kv_cache="FP8"), **without)["use_fp8_context_fmha"]
    assert not plugins("1.2.1", leaving_out(dense, kv_cache=None))["use_fp8_context_fmha"]
    assert plugins("1.2.1", leaving_out("transformer.layers.1.mlp.proj", kv_cache="FP8"))["use_fp8_context_fmha"]


def test_the_fused_mlp_needs_the_scales_of_its_halves() -> None:
    halves = ("transformer.layers.0.mlp.fc", "transformer.layers.0.mlp.gate")
    assert not plugins("1.2.1", leaving_out(*halves, kv_cache="FP8"))["use_fused_mlp"]
    assert plan("1.2.1", leaving_out(*halves, kv_cache="FP8")).notes[-1].startswith("use_fused_mlp is off: some")
    assert plugins("1.2.1", leaving_out("transformer.layers.0.mlp.proj", kv_cache="FP8"))["use_fused_mlp"]
