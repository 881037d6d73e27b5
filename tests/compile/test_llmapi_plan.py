"""The arguments that the llmapi backend writes beside the weights, and what it refuses."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.compile.checkpoints import engine, llama
from tests.compile.test_llmapi import Models, taken_apart, tensors_of
from tests.conftest import DEMO_MODEL
from tests.families import TINY
from trtforge.compile.llmapi import plan_for_hugging_face
from trtforge.compile.stage import CompileOptions, compile_engine, engine_plan_for, plan_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.parallel import Parallel
from trtforge.formats.llmapi import LlmArgs, read_llm_args, require_llm_api

NOWHERE = Path("/models/none")


def planned(model: Any, **settings: Any) -> dict[str, Any]:
    config = engine(backend="llmapi", **settings)
    return engine_plan_for(model, config, NOWHERE, NOWHERE, CompileOptions()).as_json()


def test_the_arguments_follow_from_checkpoint_and_limits() -> None:
    mapping = Parallel(tp=4, pp=2, ep=2).mapping()
    found = planned(llama("FP8", "FP8", mapping=mapping), max_input_len=4096, max_seq_len=5120, max_batch_size=32)
    assert found["model_yaml"] == {
        "model": ".",
        "backend": "pytorch",
        "trust_remote_code": False,
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 2,
        "moe_tensor_parallel_size": 2,
        "moe_expert_parallel_size": 2,
        "max_batch_size": 32,
        "max_input_len": 4096,
        "max_seq_len": 5120,
        "max_num_tokens": 8192,
        "max_beam_width": 1,
        "enable_chunked_prefill": True,
        "kv_cache_config": {"enable_block_reuse": True, "dtype": "fp8", "tokens_per_block": 32},
    }
    assert (found["processes"], found["longest_prompt"], len(found["warnings"])) == (8, 5119, 1)


def test_features_that_are_off_are_off_in_the_arguments() -> None:
    found = planned(llama(), features={"kv_reuse": False, "chunked_context": False}, tokens_per_block=64)["model_yaml"]
    assert found["enable_chunked_prefill"] is False
    assert found["kv_cache_config"] == {"enable_block_reuse": False, "dtype": "auto", "tokens_per_block": 64}


@pytest.mark.parametrize("version", ["1.0.0", "1.1.0", "1.2.0", "1.2.1", "1.3.0", "1.3.0rc27"])
def test_releases_with_and_without_engines_are_targets(version: str) -> None:
    assert planned(llama(), target={"tensorrt_llm": version})["tensorrt_llm"] == version


@pytest.mark.parametrize("version", ["0.21.0", "2.0.0"])
def test_releases_whose_llm_api_is_not_known_are_refused(version: str) -> None:
    with pytest.raises(ForgeError, match=f"TensorRT-LLM {version}: its LLM API is not known") as caught:
        planned(llama(), target={"tensorrt_llm": version})
    assert caught.value.hint == "Known releases: 1.0.x, 1.1.x, 1.2.x, 1.3.x."


def test_the_engine_backend_still_ends_with_its_last_release() -> None:
    with pytest.raises(ForgeError, match=r"1\.3\.0 has no TensorRT engines") as caught:
        engine_plan_for(
            llama(),
            engine(backend="tensorrt_llm", target={"tensorrt_llm": "1.3.0"}),
            NOWHERE,
            NOWHERE,
            CompileOptions(),
        )
    assert "llmapi" in caught.value.hint


@pytest.mark.parametrize(
    ("quant", "kv_cache", "said"),
    [
        ("W8A16", None, "W8A16 is not supported in a Hugging Face checkpoint"),
        ("W4A8_AWQ", None, "W4A8_AWQ is not supported in a Hugging Face checkpoint"),
        ("W8A8_SQ_PER_CHANNEL", None, "W8A8_SQ_PER_CHANNEL is not supported in a Hugging Face checkpoint"),
        (None, "INT8", "the INT8 KV cache is not supported in a Hugging Face checkpoint"),
        (None, "NVFP4", "the NVFP4 KV cache is not supported in a Hugging Face checkpoint"),
    ],
)
def test_formats_without_a_place_are_refused(quant: str | None, kv_cache: str | None, said: str) -> None:
    with pytest.raises(ForgeError, match=said):
        planned(llama(quant, kv_cache))


def test_int4_experts_are_refused() -> None:
    with pytest.raises(ForgeError, match="W4A16_AWQ experts are not supported") as caught:
        planned(llama("W4A16_AWQ", moe={"num_experts": 8, "top_k": 2}))
    assert "--quant fp8" in caught.value.hint


@pytest.mark.parametrize("quant", ["W4A16_AWQ", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_scales_that_tensorrt_llms_loaders_do_not_split_are_refused(quant: str) -> None:
    """Those of Phi-3's fused projections, and of KV heads that several ranks repeat."""
    with pytest.raises(ForgeError, match=f"cannot load Phi-3 in {quant}"):
        planned(llama(quant, architecture="Phi3ForCausalLM"))
    assert planned(llama("FP8", architecture="Phi3ForCausalLM"))["backend"] == "llmapi"
    with pytest.raises(ForgeError, match=f"cannot load {quant} with 8 KV heads on tp 16") as caught:
        planned(llama(quant, mapping=Parallel(tp=16).mapping()))
    assert caught.value.hint == "Use tp 8 or less, or --quant fp8, nvfp4 or none."
    assert planned(llama(quant, mapping=Parallel(tp=8).mapping()))["processes"] == 8
    assert planned(llama("NVFP4", mapping=Parallel(tp=16).mapping()))["processes"] == 16


@pytest.mark.parametrize(
    ("architecture", "version", "said"),
    [
        ("FalconForCausalLM", "1.3.0", "TensorRT-LLM's PyTorch backend has no network for FalconForCausalLM"),
        ("GraniteForCausalLM", "1.2.1", "TensorRT-LLM's PyTorch backend has no network for GraniteForCausalLM"),
        ("Gemma2ForCausalLM", "1.2.1", "TensorRT-LLM 1.2.1: its PyTorch backend has no network for Gemma2ForCausalLM"),
        ("Gemma2ForCausalLM", "1.3.0", None),
        ("GptOssForCausalLM", "1.0.0", "TensorRT-LLM 1.0.0: its PyTorch backend has no network for GptOssForCausalLM"),
        ("NemotronForCausalLM", "1.0.0", None),
        ("OfTomorrowForCausalLM", "1.2.1", None),
    ],
)
def test_networks_that_a_releases_pytorch_backend_lacks_are_refused(
    architecture: str, version: str, said: str | None, tmp_path: Path
) -> None:
    """Of checkpoints and Hugging Face directories alike; an architecture that no data judges is taken."""
    target = {"tensorrt_llm": version}
    values = json.loads((DEMO_MODEL / "config.json").read_text()) | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = engine(backend="llmapi", target=target)
    if said is None:
        assert plan_for_hugging_face(tmp_path, Parallel(), config).target == version
        return
    for plan in (
        partial(planned, llama(architecture=architecture), target=target),
        partial(plan_for_hugging_face, tmp_path, Parallel(), config),
    ):
        with pytest.raises(ForgeError, match=re.escape(said)):
            plan()


def test_a_dense_model_that_states_no_experts_is_taken() -> None:
    """Checkpoints of Qwen2 and Qwen3 have `moe` with num_experts 0."""
    dense = llama("W4A16_AWQ", moe={"num_experts": 0, "shared_expert_intermediate_size": 0, "top_k": 0})
    assert planned(dense)["backend"] == "llmapi"


def test_a_gpu_without_the_format_is_refused() -> None:
    with pytest.raises(ForgeError, match="a100"):
        planned(llama("FP8"), target={"gpu": "a100-80gb"})


def test_an_fp8_cache_of_an_unquantised_model_is_an_argument(models: Models) -> None:
    written = models.engine("llama", kv_cache="fp8")
    assert read_llm_args(written).kv_cache_config.dtype == "fp8"
    assert not (written / "hf_quant_config.json").exists()
    assert not any(name.endswith("_scale") for name in tensors_of(written))
    found = plan_engine(
        engine(backend="llmapi"), models.checkpoint("llama", kv_cache="fp8"), NOWHERE, CompileOptions()
    ).as_json()
    assert "scaling factor 1" in found["warnings"][0]
    assert "scaling factor 1" in planned(llama("FP8", "FP8"))["warnings"][0]
    assert planned(llama("FP8"))["warnings"] == []


def test_absorbed_queries_have_no_way_back(tmp_path: Path) -> None:
    TINY["deepseek_v2"]().half().save_pretrained(tmp_path / "hf")
    checkpoint = convert(ConvertConfig(), tmp_path / "hf", tmp_path / "checkpoint").path
    with pytest.raises(ForgeError, match="is a product of several tensors, which cannot be recovered") as caught:
        taken_apart(checkpoint)
    assert "compile HF_DIR OUT --backend llmapi" in caught.value.hint


def test_rows_that_conversion_leaves_out_have_no_way_back(tmp_path: Path) -> None:
    TINY["opt"]().half().save_pretrained(tmp_path / "hf")
    checkpoint = convert(ConvertConfig(), tmp_path / "hf", tmp_path / "checkpoint").path
    with pytest.raises(ForgeError, match=r"embed_positions\.weight is incomplete in a TensorRT-LLM checkpoint"):
        taken_apart(checkpoint)


def test_a_layout_is_not_for_checkpoints(models: Models) -> None:
    with pytest.raises(UsageError, match="apply only to a Hugging Face checkpoint"):
        plan_engine(
            engine(backend="llmapi"), models.checkpoint("llama"), NOWHERE, CompileOptions(parallel=Parallel(tp=2))
        )


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ForgeError, match="holds pickled weights"):
        compile_engine(engine(backend="llmapi"), tmp_path, tmp_path.with_name("engine"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: .\ntensor_paralel_size: 2\n", "unknown key tensor_paralel_size"),
        ("model: [", "not YAML"),
        ("- model", "not a mapping of keys to values"),
        ("model: .\nkv_cache_config: {free_gpu_memory_fraction: 2}\n", r"kv_cache_config\.free_gpu_memory_fraction"),
    ],
)
def test_a_damaged_model_yaml_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "model.yaml").write_text(text)
    with pytest.raises(ForgeError, match=said):
        read_llm_args(tmp_path)


def test_every_argument_is_in_the_releases_table() -> None:
    """A key that the table lacks would fail only when it is used."""
    full = LlmArgs().with_values(
        {
            "dtype": "auto",
            "context_parallel_size": 1,
            "moe_tensor_parallel_size": 1,
            "moe_expert_parallel_size": 1,
            **dict.fromkeys(("max_batch_size", "max_input_len", "max_num_tokens", "max_beam_width"), 2),
            "max_seq_len": 2,
            "enable_chunked_prefill": True,
            "guided_decoding_backend": "xgrammar",
            "gather_generation_logits": True,
            "iter_stats_max_iterations": 1,
            "request_stats_max_iterations": 1,
            "enable_lora": True,
            "lora_config": {"lora_dir": ["x"], "max_lora_rank": 8, "lora_target_modules": ["attn_q"]},
            "kv_cache_config": {
                **{"enable_block_reuse": True, "free_gpu_memory_fraction": 0.5, "max_tokens": 1},
                **{"max_attention_window": [1], "sink_token_length": 1, "host_cache_size": 1},
                **{"dtype": "fp8", "tokens_per_block": 32},
            },
            "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
            "peft_cache_config": {
                **{"optimal_adapter_size": 8, "max_adapter_size": 64},
                **{"device_cache_percent": 0.1, "host_cache_size": 1},
            },
            "enable_attention_dp": True,
            "attention_dp_config": {"enable_balance": True, "timeout_iters": 1, "batching_wait_iters": 1},
            "moe_config": {"backend": "CUTLASS", "max_num_tokens": 1},
            "cuda_graph_config": {"batch_sizes": [1], "max_batch_size": 1, "enable_padding": True},
            "speculative_config": {
                **{"decoding_type": "NGram", "max_draft_len": 1, "num_nextn_predict_layers": 1},
                **{"max_matching_ngram_size": 1, "max_concurrency": 1},
            },
            "triton_config": {},
        },
        "test",
    )
    unset = [key for key, value in full.model_dump().items() if value is None]
    assert unset == ["enable_trtllm_sampler", "enable_mixed_sampler"]  # of 1.0 alone
    require_llm_api("1.0.0", LlmArgs().with_values(dict.fromkeys(unset, True), "test"))
    older, newer = {"speculative_model_dir": "draft"}, {"speculative_model": "draft", "allow_advanced_sampling": True}
    for version, own in (("1.2.1", older), ("1.3.0", newer)):
        values = {f"speculative_config.{key}": value for key, value in own.items()}
        require_llm_api(version, full.with_values(values, "test"))


def test_it_builds_in_no_container() -> None:
    config, options = engine(backend="llmapi"), CompileOptions(container="image")
    with pytest.raises(ForgeError, match="--container applies only to the tensorrt_llm backend, not to llmapi"):
        engine_plan_for(llama(), config, NOWHERE, NOWHERE, options)
    with pytest.raises(ForgeError, match="applies only to the tensorrt_llm backend, not to llmapi") as caught:
        plan_engine(config, DEMO_MODEL, NOWHERE, options)
    assert caught.value.hint == "Add --backend tensorrt_llm, or leave it out."


FP8_SOURCE = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}


def hugging_face_plan(directory: Path, parallel: Parallel | None = None, **target: str) -> dict[str, Any]:
    config = engine(backend="llmapi", target=target)
    return plan_engine(config, directory, NOWHERE, CompileOptions(parallel=parallel)).as_json()


def test_the_gpu_of_a_hugging_face_directory_must_be_known() -> None:
    with pytest.raises(ForgeError, match="GPU nonsense is not known"):
        hugging_face_plan(DEMO_MODEL, gpu="nonsense")


def test_a_directorys_own_quantisation_is_held_against_the_gpu(tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL / "config.json", tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(FP8_SOURCE))
    with pytest.raises(ForgeError, match=r"a100-80gb has compute capability 8\.0: fp8 needs 8\.9"):
        hugging_face_plan(tmp_path, gpu="a100-80gb")
    assert hugging_face_plan(tmp_path, gpu="h100-80gb")["warnings"] == []


def test_a_quantisation_that_only_the_llm_api_reads_is_not_refused(tmp_path: Path) -> None:
    values = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "mxfp8"}}))
    (warning,) = hugging_face_plan(tmp_path, gpu="h100-80gb", tensorrt_llm="1.3.0")["warnings"]
    assert warning.startswith("not checked that h100-80gb supports the checkpoint's quantisation: ")
    assert "mxfp8" in warning
    assert hugging_face_plan(tmp_path, tensorrt_llm="1.3.0")["warnings"] == []
    with pytest.raises(ForgeError, match=r"quantised \(mxfp8\), which TensorRT-LLM 1\.2\.1 is not known to read"):
        hugging_face_plan(tmp_path)


def test_every_format_of_a_directory_is_held_against_the_gpu(tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL / "config.json", tmp_path)
    algorithms = {"model.layers.0.mlp.up_proj": "W4A16_AWQ", "model.layers.0.mlp.down_proj": "FP8"}
    layers = {name: {"quant_algo": algorithm} for name, algorithm in algorithms.items()}
    quantization = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    with pytest.raises(ForgeError, match=r"a100-80gb has compute capability 8\.0: fp8 needs 8\.9"):
        hugging_face_plan(tmp_path, gpu="a100-80gb")
    assert hugging_face_plan(tmp_path, gpu="h100-80gb")["warnings"] == []


def test_integers_that_the_llm_api_does_not_multiply_are_refused(tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL / "config.json", tmp_path)
    quantization = {"quant_algo": "W8A8_SQ_PER_CHANNEL", "kv_cache_quant_algo": None}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    with pytest.raises(ForgeError, match="PyTorch backend has no layers for W8A8_SQ_PER_CHANNEL") as caught:
        hugging_face_plan(tmp_path)
    assert caught.value.hint == "Convert the checkpoint and use engine.backend tensorrt_llm or torch."


def test_mxfp4_is_held_against_the_gpu(tmp_path: Path) -> None:
    values = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert hugging_face_plan(tmp_path, gpu="h100-80gb")["warnings"] == []
    with pytest.raises(ForgeError, match=r"l40s: TensorRT-LLM has no MXFP4 on compute capability 8\.9"):
        hugging_face_plan(tmp_path, gpu="l40s")


@pytest.mark.parametrize("nested", [False, True])
def test_heads_that_the_layout_cannot_split_are_refused(tmp_path: Path, nested: bool) -> None:
    values = json.loads((DEMO_MODEL / "config.json").read_text()) | {"num_attention_heads": 12}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["NewForCausalLM"], "text_config": values} if nested else values)
    )
    with pytest.raises(ForgeError, match="12 attention heads cannot be split over tp 8") as caught:
        hugging_face_plan(tmp_path, Parallel(tp=8))
    assert caught.value.hint == "Choose a --tp that divides 12: 1, 2, 3, 4, 6, 12."
    assert hugging_face_plan(tmp_path, Parallel(tp=4))["processes"] == 4


@pytest.mark.parametrize(
    ("values", "parallel", "message", "hint"),
    [
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            Parallel(tp=6),
            "4 key and value heads can be neither split over tp 6 nor repeated",
            "Choose a --tp that divides 4, or a multiple of it.",
        ),
        ({"num_hidden_layers": 2}, Parallel(pp=3), "2 layers are fewer than pp 3", "Choose a --pp up to 2."),
    ],
)
def test_what_the_llm_api_cannot_split_is_refused(
    tmp_path: Path, values: dict[str, int], parallel: Parallel, message: str, hint: str
) -> None:
    here = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(here | values))
    with pytest.raises(ForgeError) as caught:
        hugging_face_plan(tmp_path, parallel)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_layers_need_not_be_alike_in_every_stage(tmp_path: Path) -> None:
    """The first stages get one more (`pp_layers`)."""
    values = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_key_value_heads": 2}))
    assert hugging_face_plan(tmp_path, Parallel(pp=3))["processes"] == 3
    assert hugging_face_plan(tmp_path, Parallel(tp=8))["processes"] == 8
