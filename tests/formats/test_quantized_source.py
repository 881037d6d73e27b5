"""What each tool writes about a quantisation is understood, or refused with what it is and the way out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfConfig
from trtforge.formats.quantization_config import quantization_method, read_quantized_source
from trtforge.formats.quantization_values import without_quantization
from trtforge.formats.quantized_source import QuantizedSource

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
IN_TEXT_CONFIG = {"text_config": {"quantization_config": AWQ}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
MODELOPT_FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
INT4_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
Q_PROJ = "model.layers.11.self_attn.q_proj"


def compressed(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    base = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return {**base, "config_groups": {"group_0": group}, **more}


def read(values: object, directory: Path, files: Mapping[str, object] | None = None) -> QuantizedSource | None:
    for name, content in (files or {}).items():
        (directory / name).write_text(json.dumps(content))
    config = {} if values is None else {"quantization_config": values}
    return read_quantized_source(HfConfig(config, directory / "config.json"))


def found(values: object, directory: Path, files: Mapping[str, object] | None = None) -> QuantizedSource:
    source = read(values, directory, files)
    assert source is not None
    return source


def test_an_unquantised_checkpoint_has_none(tmp_path: Path) -> None:
    assert read(None, tmp_path) is None
    assert quantization_method(HfConfig({}, tmp_path / "config.json")) == "none"


def test_awq(tmp_path: Path) -> None:
    source = found(AWQ | {"group_size": 64, "modules_to_not_convert": ["mlp.gate"]}, tmp_path)
    assert (source.packing, source.format, source.group_size, source.stored_zero) == ("awq", "int4_awq", 64, 8)
    assert source.quantizes(Q_PROJ)
    assert not source.quantizes("model.layers.0.mlp.gate")
    assert not source.quantizes("lm_head")


@pytest.mark.parametrize(("form", "zero"), [(None, 7), ("gptq", 7), ("gptq_v2", 8)])
def test_gptq_stores_zero_points_minus_one_in_its_first_format(tmp_path: Path, form: str | None, zero: int) -> None:
    source = found(GPTQ | {"checkpoint_format": form}, tmp_path)
    assert (source.packing, source.stored_zero) == ("gptq", zero)


def test_gptqs_act_order_may_keep_the_groups(tmp_path: Path) -> None:
    """AutoGPTQ's static_groups: g_idx, which conversion checks, is in order."""
    assert found(GPTQ | {"desc_act": True, "static_groups": True}, tmp_path).packing == "gptq"


def test_gptq_names_the_modules_of_a_block(tmp_path: Path) -> None:
    blocks = [["self_attn.k_proj", "self_attn.q_proj"], ["self_attn.o_proj"]]
    source = found(GPTQ | {"modules_in_block_to_quantize": blocks}, tmp_path)
    assert source.quantizes(Q_PROJ)
    assert not source.quantizes("model.layers.0.mlp.up_proj")


def test_gptqmodel_leaves_single_modules(tmp_path: Path) -> None:
    source = found(GPTQ | {"dynamic": {r"-:model\.layers\.1\..*": {}}}, tmp_path)
    assert source.quantizes(Q_PROJ)
    assert not source.quantizes("model.layers.1.self_attn.q_proj")


@pytest.mark.parametrize("base", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_the_first_of_gptqmodels_rules_that_matches_applies(tmp_path: Path, base: dict[str, Any]) -> None:
    same = {"bits": 4, "group_size": 128, "desc_act": False, "damp_percent": 0.1}
    rules = {r"+:.*layers\.1\.mlp": same, r"-:.*layers\.1\.": {}, r".*layers\.1\.self_attn": {}, r"-:lm_head": {}}
    source = found(base | {"dynamic": rules}, tmp_path)
    names = ("layers.1.mlp.up_proj", "layers.1.self_attn.q_proj", "layers.11.self_attn.q_proj", "layers.0.mlp.up_proj")
    assert [source.quantizes(f"model.{name}") for name in names] == [True, False, True, True]


@pytest.mark.parametrize(
    ("name", "content", "packing"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "awq"),
    ],
)
def test_old_tools_wrote_a_file_of_their_own(tmp_path: Path, name: str, content: object, packing: str) -> None:
    assert found(None, tmp_path, {name: content}).packing == packing
    assert quantization_method(HfConfig({}, tmp_path / "config.json")) == packing


def test_modelopt(tmp_path: Path) -> None:
    source = found(None, tmp_path, {"hf_quant_config.json": {"quantization": MODELOPT_FP8}})
    assert (source.format, source.fp8_kv_cache) == ("fp8", True)
    assert quantization_method(HfConfig({}, tmp_path / "config.json")) == "modelopt"


@pytest.mark.parametrize(
    ("pattern", "module", "left"),
    [
        ("model.layers.1*", "model.layers.11.self_attn.q_proj", True),
        ("model.layers.1.*", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1.*", "model.layers.11.self_attn.q_proj", False),
        ("model.layers.1.self_attn", "model.layers.1.self_attn.q_proj", True),
        ("model.layers.1.self_attn", "model.layers.1.self_attn2.q_proj", False),
        ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj", True),
    ],
)
def test_modelopts_wildcards(tmp_path: Path, pattern: str, module: str, left: bool) -> None:
    quantization = MODELOPT_FP8 | {"exclude_modules": ["lm_head", pattern]}
    source = found(None, tmp_path, {"hf_quant_config.json": {"quantization": quantization}})
    assert source.quantizes(module) is not left


def test_modules_of_a_model_with_vision_may_have_either_name(tmp_path: Path) -> None:
    prefixes = ("model.language_model", "language_model.model", "model")
    ignored = [f"{prefix}.layers.{layer}.mlp.up_proj" for layer, prefix in enumerate(prefixes)]
    source = found(compressed(FP8_WEIGHTS, FP8_INPUTS, ignore=ignored), tmp_path)
    modules = [f"language_model.model.layers.{layer}.mlp.up_proj" for layer in range(4)]
    assert [source.quantizes(module) for module in modules] == [False, False, False, True]


@pytest.mark.parametrize(
    "config",
    [{"compression_config": AWQ}, IN_TEXT_CONFIG, {"quantization_config": None} | IN_TEXT_CONFIG],
    ids=["compression_config", "text_config", "null"],
)
def test_places_of_a_description(tmp_path: Path, config: dict[str, Any]) -> None:
    hf = HfConfig(config, tmp_path / "config.json")
    source = read_quantized_source(hf)
    assert source is not None
    assert (source.packing, quantization_method(hf)) == ("awq", "awq")
    assert without_quantization(config) == ({"text_config": {}} if "text_config" in config else {})


def test_modelopts_file_inside_config_json(tmp_path: Path) -> None:
    values = {"quant_method": "modelopt", "quantization": MODELOPT_FP8 | {"exclude_modules": [Q_PROJ]}}
    source = found(values, tmp_path)
    assert (source.packing, source.fp8_kv_cache, source.quantizes(Q_PROJ)) == ("fp8", True, False)


def test_modelopt_in_config_json_alone(tmp_path: Path) -> None:
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    source = found(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "kv_cache_scheme": scheme}, tmp_path
    )
    assert (source.format, source.group_size, source.fp8_kv_cache) == ("nvfp4", 16, True)


def test_modelopts_config_json_of_2025_names_no_method(tmp_path: Path) -> None:
    """ModelOpt 0.31 wrote it so, which Qwen3-32B in FP8 with one scale a tensor was made with."""
    values = {
        "config_groups": {"group_0": {"input_activations": FP8_INPUTS, "weights": FP8_WEIGHTS}},
        "ignore": ["lm_head"],
        "quant_algo": "FP8",
        "kv_cache_scheme": "FP8",
        "producer": {"name": "modelopt", "version": "0.31.0"},
    }
    source = found(values, tmp_path)
    assert (source.tool, source.format, source.fp8_kv_cache) == ("ModelOpt", "fp8", True)
    assert quantization_method(HfConfig({"quantization_config": values}, tmp_path / "config.json")) == "modelopt"


def test_autofp8(tmp_path: Path) -> None:
    values = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head", "model.layers.1"]}
    source = found(values | {"kv_cache_scheme": "static"}, tmp_path)
    assert (source.packing, source.fp8_kv_cache) == ("fp8", True)
    assert source.quantizes(Q_PROJ)
    assert not source.quantizes("model.layers.1.mlp.up_proj")


INT8_WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True}
NVFP4_BLOCKS = {"num_bits": 4, "type": "float", "group_size": 16}
IN_FP8 = {"targets": ["Linear"], "weights": FP8_WEIGHTS, "input_activations": FP8_INPUTS, "format": "float-quantized"}
IN_INT4 = {"targets": [r"re:.*up_proj"], "weights": INT4_WEIGHTS, "format": "pack-quantized"}
IN_INT8 = {"targets": ["x"], "weights": INT8_WEIGHTS, "input_activations": INT8_INPUTS, "format": "int-quantized"}


def groups(*found: Mapping[str, object]) -> dict[str, Any]:
    """compressed-tensors' mixed precision."""
    config_groups = {f"group_{number}": group for number, group in enumerate(found)}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["lm_head", "model.layers.1.mlp.up_proj"],
        "config_groups": config_groups,
    }


FP8, NVFP4 = {"quant_algo": "FP8"}, {"quant_algo": "NVFP4", "group_size": 16}
INT4_AWQ = {"quant_algo": "W4A16_AWQ", "group_size": 128, "has_zero_point": False, "pre_quant_scale": True}


def mixed(layers: Mapping[str, object]) -> dict[str, Any]:
    """ModelOpt's mixed precision."""
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def test_layers_of_mixed_precision_have_their_formats(tmp_path: Path) -> None:
    """FP8 comes last: what has groups of inputs decides the group size of the checkpoint."""
    source = found(mixed({Q_PROJ: FP8, "model.layers.0.mlp.up_proj": INT4_AWQ}), tmp_path)
    assert (source.formats, source.described, source.group_size) == (("int4_awq", "fp8"), "int4_awq and fp8", 128)
    names = (Q_PROJ, "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head")
    formats = [each and each.format for each in map(source.of, names)]
    assert formats == ["fp8", "int4_awq", None, None]


def test_mixed_precision_of_one_format_is_that_format(tmp_path: Path) -> None:
    source = found(mixed({Q_PROJ: FP8, "model.layers.0.mlp.up_proj": FP8}), tmp_path)
    assert (source.format, source.mixed, source.quantizes("model.layers.1.mlp.up_proj")) == ("fp8", False, False)


SPARSE = {"format": "sparse-24-bitmask"}
OUTPUTS = compressed(FP8_WEIGHTS, FP8_INPUTS)
OUTPUTS["config_groups"]["group_0"]["output_activations"] = FP8_INPUTS | {"dynamic": True}
GROUP_INPUTS = FP8_INPUTS | {"strategy": "group", "dynamic": True}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method bitsandbytes is not converted: TensorRT-LLM has no NF4"),
        ({"load_in_4bit": True}, "quant_method bitsandbytes is not converted"),
        ({"quant_method": "gguf"}, "quant_method gguf is not converted: GGUF's block formats"),
        ({"quant_method": "exl2"}, "quant_method exl2 is not converted: EXL2 mixes bit widths"),
        ({"quant_method": "marlin"}, "quant_method marlin is not converted: its weights are interleaved"),
        ({"quant_method": "fbgemm_fp8"}, "quant_method fbgemm_fp8 is not converted: it clips activations"),
        ({"quant_method": "mxfp4"}, "quant_method mxfp4 is not converted: TensorRT-LLM engines have no MXFP4"),
        ({"quant_method": "hqq"}, "quant_method hqq is not converted: its packing is not known"),
        ({}, "quant_method unknown is not converted"),
        ("awq", 'an object is expected, not "awq"'),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128, not rows and columns"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "activation_scheme is not static"),
        (AWQ | {"version": "gemv"}, "AWQ version gemv is not converted, only gemm is"),
        (AWQ | {"version": "marlin"}, "AWQ version marlin is not converted"),
        (AWQ | {"backend": "llm-awq"}, "AWQ backend llm-awq is not converted"),
        (AWQ | {"bits": 8}, "bits is 8: only 4-bit codes"),
        (AWQ | {"group_size": -2}, "group_size is -2: TensorRT-LLM's W4A16_AWQ has groups of 64 or 128"),
        (AWQ | {"modules_to_not_convert": "gate"}, 'modules_to_not_convert is "gate", a list of names'),
        (GPTQ | {"desc_act": True}, "desc_act is true: act-order permutes the inputs"),
        (GPTQ | {"bits": 3}, "bits is 3: only 4-bit codes"),
        (GPTQ | {"group_size": 32}, "group_size is 32"),
        (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ checkpoint_format marlin is not converted"),
        (GPTQ | {"is_marlin_format": True}, "GPTQ checkpoint_format marlin is not converted"),
        (GPTQ | {"lm_head": True}, "lm_head is quantised"),
        (GPTQ | {"rotation": "hadamard"}, 'rotation is "hadamard": the inputs of down_proj are rotated'),
        (GPTQ | {"dynamic": {"+:.*up_proj": {"bits": 8}}}, r"dynamic gives .* a different format \(bits\)"),
        (GPTQ | {"dynamic": {".*up_proj": {"bits": 4, "group_size": 64}}}, r"different format \(group_size\)"),
        (AWQ | {"dynamic": {".*up_proj": {"bits": 8}}}, r"dynamic gives .* a different format \(bits\)"),
        (GPTQ | {"dynamic": {".*up_proj": 3}}, "an object is expected, not 3"),
        (GPTQ | {"dynamic": {"-:(": {}}}, "is not a regular expression"),
        (GPTQ | {"modules_in_block_to_quantize": [[3]]}, "modules_in_block_to_quantize is .* names are expected"),
        (mixed({}), "no layer is quantised"),
        (mixed({"a": {"quant_algo": "W8A16"}}), r"quantized_layers\.a: ModelOpt's W8A16 is not converted"),
        (mixed({"a": NVFP4, "b": INT4_AWQ, "c": FP8}), "layers in nvfp4, int4_awq, fp8: a checkpoint has one format"),
        (mixed({"a": INT4_AWQ, "b": INT4_AWQ | {"group_size": 64}}), "int4_awq layers have groups of 64 and 128"),
        ({"quant_method": "modelopt", "quant_algo": "W8A16"}, "W8A16 is not converted: .* build rounds INT8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ is not .* pre-quantisation scale"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}, "NVFP4_SVD is not .* no low-rank part"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "W4A16_NVFP4 is not .* quantise inputs"),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, "fp8_pb_wo is not converted: .* no such layers"),
        ({"quant_method": "modelopt", "quant_algo": "W3A3"}, "W3A3 is not converted: W4A16_AWQ, .* are"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ", "group_size": 32}, "W4A8_AWQ has groups of 64 or 128"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4_AFFINE"}, "only an FP8 KV"),
        ({"quant_method": "modelopt", "quant_algo": None}, "quant_algo is null: no weight is quantised"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "kv_cache.* is NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "NVFP4 blocks are of 16"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "has_zero_point": True}, "has_zero_point is true"),
        (compressed(FP8_WEIGHTS, FP8_INPUTS | {"dynamic": True}), "dynamic per-tensor activation scales"),
        (compressed(FP8_WEIGHTS | {"strategy": "channel"}, FP8_INPUTS), "channel weight and static tensor activation"),
        (compressed(FP8_WEIGHTS | {"strategy": "block"}, GROUP_INPUTS), "no block-scaled FP8 layers"),
        (compressed(FP8_WEIGHTS | {"type": "int"}, FP8_INPUTS), "8-bit floats are expected"),
        (compressed(FP8_WEIGHTS, FP8_INPUTS, format="marlin-24"), "format marlin-24 is not converted"),
        (compressed(FP8_WEIGHTS, FP8_INPUTS, format="int-quantized"), "8-bit integers are expected"),
        (compressed(INT8_WEIGHTS, None, format="int-quantized"), "build rounds INT8 weights itself"),
        (compressed(INT8_WEIGHTS | {"strategy": "tensor"}, INT8_INPUTS, format="int-quantized"), "strategy is tensor"),
        (compressed(INT8_WEIGHTS | {"symmetric": False}, INT8_INPUTS, format="int-quantized"), "no zero points"),
        (compressed(INT8_WEIGHTS, INT8_INPUTS | {"dynamic": True}, format="int-quantized"), "scales by token"),
        (compressed(NVFP4_BLOCKS, None, format="nvfp4-pack-quantized"), "FP4 layers quantise them"),
        (
            compressed(NVFP4_BLOCKS | {"group_size": 32}, NVFP4_BLOCKS, format="nvfp4-pack-quantized"),
            "blocks are of 16",
        ),
        (compressed(FP8_WEIGHTS, FP8_INPUTS, sparsity_config=SPARSE), "sparsity_config is not empty"),
        (compressed(FP8_WEIGHTS, None), "input_activations are not quantised: TensorRT-LLM's FP8 layers quantise them"),
        (OUTPUTS, "output_activations are quantised: TensorRT-LLM's layers quantise inputs alone"),
        (compressed(FP8_WEIGHTS, FP8_INPUTS, config_groups={}), "no layer is quantised"),
        (groups(IN_FP8, IN_INT4 | {"targets": ["Linear"]}), "2 different groups have the target Linear"),
        (
            groups(IN_FP8 | {"targets": [r"re:.*up_proj"]}, IN_INT4),
            r"2 different groups have the target re:\.\*up_proj",
        ),
        (groups(IN_FP8, IN_INT4, IN_INT8), "layers in int4_awq, int8_sq, fp8: a checkpoint has one format"),
        (compressed(FP8_WEIGHTS, FP8_INPUTS, kv_cache_scheme={"num_bits": 4, "type": "float"}), "8-bit float KV"),
        (compressed(INT4_WEIGHTS | {"symmetric": False}, None, format="pack-quantized"), "symmetric is false"),
        (compressed(INT4_WEIGHTS | {"actorder": "group"}, None, format="pack-quantized"), "actorder permutes"),
        (compressed(INT4_WEIGHTS | {"num_bits": 8}, None, format="pack-quantized"), "4-bit integer weights"),
        (compressed(INT4_WEIGHTS, FP8_INPUTS, format="pack-quantized"), "input_activations are quantised"),
    ],
)
def test_what_cannot_be_stored_exactly_is_refused(tmp_path: Path, values: object, message: str) -> None:
    with pytest.raises(ForgeError, match=message) as caught:
        read(values, tmp_path)
    assert str(tmp_path / "config.json") in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("text", ["{", "[]", '{"quantization": 3}'])
def test_a_damaged_modelopt_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(ForgeError, match=r"hf_quant_config\.json"):
        read(None, tmp_path)
