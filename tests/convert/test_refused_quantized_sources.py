"""Quantised checkpoints that cannot be stored exactly are refused before anything is written, with the cause."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import Edit
from tests.convert.test_errors import refuse
from tests.convert.test_quantized_sources import KV_SCHEME, ROWS, STATIC, converted, quantization
from tests.quantized import (
    AWQ,
    GPTQ,
    GROUP,
    Pack,
    awq,
    compressed,
    fp8_rows,
    fp8_static,
    gptq,
    int8_static,
    nvfp4_divided,
    write_quantized,
)
from trtforge.convert.stage import ConvertConfig, convert

Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(("pack", "values"), [(awq(7), AWQ), (gptq(6), GPTQ)], ids=["awq", "gptq"])
def test_zero_points_are_refused(pack: Pack, values: dict[str, Any], tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "hf", pack, values)
    error = refuse(source.directory, tmp_path, r"model\.layers\.0\.self_attn\.q_proj\.qzeros holds the zero point 7")
    assert "symmetrically" in error.hint


def test_one_other_zero_point_is_found(tmp_path: Path, edit_tensors: Edit) -> None:
    source = write_quantized(tmp_path / "hf", awq(), AWQ)
    edit_tensors(source.directory, lambda tensors: tensors[f"{Q}.qzeros"].view(-1)[-1:].bitwise_xor_(0x100))
    refuse(source.directory, tmp_path, rf"{Q}\.qzeros holds the zero point 9")


def test_permuted_inputs_are_refused(tmp_path: Path, edit_tensors: Edit) -> None:
    source = write_quantized(tmp_path / "hf", gptq(), GPTQ)
    edit_tensors(source.directory, lambda tensors: tensors[f"{Q}.g_idx"].copy_(tensors[f"{Q}.g_idx"].flip(0)))
    refuse(source.directory, tmp_path, rf"{Q}\.g_idx is not i // {GROUP}: act-order")


def test_a_bias_that_the_model_lacks_is_refused(tmp_path: Path, edit_tensors: Edit) -> None:
    source = write_quantized(tmp_path / "hf", gptq(), GPTQ)
    edit_tensors(source.directory, lambda tensors: tensors.update({f"{Q}.bias": torch.ones(128).half()}))
    refuse(source.directory, tmp_path, rf"{Q}\.bias is a non-zero bias that config\.json does not declare")


def test_a_scale_that_is_none_is_refused(tmp_path: Path, edit_tensors: Edit) -> None:
    source = write_quantized(tmp_path / "hf", fp8_static(), STATIC, dtype=torch.bfloat16)
    edit_tensors(source.directory, lambda tensors: tensors[f"{Q}.input_scale"].fill_(float("nan")))
    refuse(source.directory, tmp_path, rf"{Q}\.input_scale is nan: a scaling factor must be finite")


def test_a_divisor_of_zero_is_refused(tmp_path: Path, edit_tensors: Edit) -> None:
    values = compressed("nvfp4-pack-quantized", "tensor_group", "tensor_group")
    source = write_quantized(tmp_path / "hf", nvfp4_divided, values, dtype=torch.bfloat16)
    edit_tensors(source.directory, lambda tensors: tensors[f"{Q}.input_global_scale"].zero_())
    refuse(source.directory, tmp_path, rf"{Q}\.input_global_scale is 0\.0: a divisor must be finite and above zero")


NVFP4 = compressed("nvfp4-pack-quantized", "tensor_group", "tensor_group")
INT8 = compressed("int-quantized", "channel", "tensor")
DOWN = "model.layers.0.mlp.down_proj"
OF_INPUTS, NEGATIVE = "a scaling factor of inputs must be above zero", "a scaling factor must not be negative"
INVERSE = "a divisor must be finite and above zero, and so must its inverse"


@pytest.mark.parametrize(
    ("pack", "values", "suffix", "value", "message"),
    [
        (fp8_static(), STATIC, "input_scale", 0.0, f"is 0\\.0: {OF_INPUTS}"),
        (fp8_static(), STATIC, "input_scale", 1e-45, f"is 1.4.*e-45: {OF_INPUTS}"),  # its inverse is infinite
        (fp8_static(), STATIC, "input_scale", -1.0, r"is -1\.0: .* not negative"),
        (fp8_static(), STATIC, "weight_scale", -1.0, r"is -1\.0: .* not negative"),
        (int8_static, INT8, "input_scale", 0.0, f"is 0\\.0: {OF_INPUTS}"),
        (int8_static, INT8, "weight_scale", -1.0, rf"holds -1\.0: {NEGATIVE}"),
        (fp8_rows, ROWS, "weight_scale", -1.0, rf"holds -1\.0: {NEGATIVE}"),
        (nvfp4_divided, NVFP4, "weight_scale", -1.0, f"holds a negative number: {NEGATIVE}"),
        (
            nvfp4_divided,
            NVFP4,
            "weight_global_scale",
            1e-45,
            INVERSE,
        ),
        (nvfp4_divided, NVFP4, "input_global_scale", 1e-45, INVERSE),
    ],
)
def test_scales_that_nothing_can_be_divided_by_are_refused(
    tmp_path: Path, edit_tensors: Edit, pack: Pack, values: dict[str, Any], suffix: str, value: float, message: str
) -> None:
    source = write_quantized(tmp_path / "hf", pack, values, dtype=torch.bfloat16)
    edit_tensors(source.directory, lambda tensors: tensors[f"{DOWN}.{suffix}"].view(-1)[-1:].fill_(value))
    refuse(source.directory, tmp_path, rf"{DOWN}\.{suffix} .*{message}")


@pytest.mark.parametrize(("pack", "values"), [(fp8_static(), STATIC), (int8_static, INT8), (nvfp4_divided, NVFP4)])
def test_weights_of_zero_may_have_a_scale_of_zero(
    tmp_path: Path, edit_tensors: Edit, pack: Pack, values: dict[str, Any]
) -> None:
    source = write_quantized(tmp_path / "hf", pack, values, dtype=torch.bfloat16)
    edit_tensors(source.directory, lambda tensors: tensors[f"{DOWN}.weight_scale"].zero_())
    (rank,) = converted(source.directory, tmp_path / "out")
    assert not rank["transformer.layers.0.mlp.proj.weights_scaling_factor"].float().count_nonzero()


def test_half_of_a_joined_matrix_is_refused(tmp_path: Path) -> None:
    values = AWQ | {"modules_to_not_convert": ["k_proj"]}
    source = write_quantized(tmp_path / "hf", awq(), values, left=lambda module: module.endswith("k_proj"))
    refuse(source.directory, tmp_path, r"q_proj is quantised and model\.layers\.0\.self_attn\.k_proj is not")


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path, edit_tensors: Edit) -> None:
    source = write_quantized(tmp_path / "hf", gptq(), GPTQ)
    edit_tensors(source.directory, lambda tensors: tensors.pop(f"{Q}.qzeros"))
    refuse(source.directory, tmp_path, rf"lacks {Q}\.qzeros")
    wrong = {f"{Q}.qzeros": torch.zeros(3, 16, dtype=torch.int32)}
    edit_tensors(source.directory, lambda tensors: tensors.update(wrong))
    refuse(source.directory, tmp_path, rf"{Q}\.qzeros has shape \[3, 16\], config\.json says \[2, 16\]")


def test_another_group_size_than_config_json_says_is_refused(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "hf", awq(), AWQ | {"group_size": 128})
    refuse(source.directory, tmp_path, r"down_proj\.qzeros has shape \[4, 16\], config\.json says \[2, 16\]")


def test_a_quantised_head_is_refused(tmp_path: Path, edit_tensors: Edit) -> None:
    source = write_quantized(tmp_path / "hf", awq(), AWQ)
    words = torch.zeros(128, 12, dtype=torch.int32)
    edit_tensors(source.directory, lambda tensors: tensors.update({"lm_head.qweight": words}))
    refuse(source.directory, tmp_path, r"lm_head is quantised \(lm_head\.qweight\)")


def test_a_quantised_embedding_is_refused(tmp_path: Path, edit_tensors: Edit) -> None:
    source = write_quantized(tmp_path / "hf", fp8_rows, ROWS, dtype=torch.bfloat16).directory
    table = "model.embed_tokens"
    edit_tensors(source, lambda tensors: tensors.update({f"{table}.weight_scale": torch.ones(97, 1)}))
    hint = refuse(source, tmp_path, rf"{table} is quantised \({table}\.weight_scale\), which is not supported").hint
    assert hint.startswith(f"Quantise with {table} excluded")


def test_autoawqs_scaled_activations_are_named(tmp_path: Path, edit_tensors: Edit) -> None:
    source = write_quantized(tmp_path / "hf", awq(), AWQ).directory
    edit_tensors(source, lambda tensors: tensors.update({"model.layers.0.mlp.act.scales": torch.rand(256)}))
    message = r"holds scales of activations \(AutoAWQ's ScaledActivation\), which TensorRT-LLM's checkpoints lack: "
    hint = refuse(source, tmp_path, message + r"model\.layers\.0\.mlp\.act\.scales").hint
    assert hint.startswith("Export it again without them")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (STATIC, "describes a checkpoint of ModelOpt, and config.json one of compressed-tensors"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "says NVFP4, and config.json FP8"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, "says NVFP4, and config.json FP8"),
    ],
)
def test_two_descriptions_of_a_quantisation_that_differ_are_named(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    source = write_quantized(tmp_path / "hf", fp8_static(), values, dtype=torch.bfloat16).directory
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    hint = refuse(source, tmp_path, r"lacks model\.layers\.0\.mlp\.down_proj\.weight_scale_2").hint
    assert hint == f"hf_quant_config.json, which is read, {said}. Correct the wrong file, or fetch both again."
    quantization["quant_algo"] = "FP8"  # which may have two descriptions
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    convert(ConvertConfig(), source, tmp_path / "out")


def test_another_format_than_the_sources_is_refused(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "hf", awq(), AWQ)
    refuse(source.directory, tmp_path, "is already quantised: AutoAWQ made it int4_awq, not fp8", quant="fp8")


def test_another_kv_cache_than_the_sources_is_refused(tmp_path: Path) -> None:
    values = STATIC | {"kv_cache_scheme": KV_SCHEME}
    source = write_quantized(tmp_path / "hf", fp8_static(), values, dtype=torch.bfloat16).directory
    refuse(source, tmp_path, "compressed-tensors made its KV cache fp8, not int8", kv_cache="int8")
    convert(ConvertConfig(kv_cache="fp8"), source, tmp_path / "out")
    assert quantization(tmp_path / "out")["kv_cache_quant_algo"] == "FP8"


def test_an_int8_kv_cache_is_refused(tmp_path: Path) -> None:
    """Its scales need a calibration, which a quantised source cannot have; those of an FP8 cache may be 1."""
    source = write_quantized(tmp_path / "hf", awq(), AWQ).directory
    refuse(source, tmp_path, r"quantised \(AutoAWQ\): an int8 KV cache needs a calibration", kv_cache="int8")
    (rank,) = converted(source, tmp_path / "out", kv_cache="fp8")
    assert rank["transformer.layers.1.attention.kv_cache_scaling_factor"].tolist() == [1.0]


def test_a_calibration_has_no_use(tmp_path: Path) -> None:
    from trtforge.core.errors import ForgeError

    source = write_quantized(tmp_path / "hf", awq(), AWQ)
    with pytest.raises(ForgeError, match=r"already quantised \(AutoAWQ\): --calibration applies only to unquantised"):
        convert(ConvertConfig(), source.directory, tmp_path / "out", calibration=tmp_path / "calibration")


def test_it_is_not_calibrated(tmp_path: Path) -> None:
    from trtforge.calibrate.stage import CalibrateConfig, calibrate
    from trtforge.core.errors import ForgeError

    source = write_quantized(tmp_path / "hf", awq(), AWQ)
    with pytest.raises(ForgeError, match=r"already quantised \(awq\): its scales are fixed") as caught:
        calibrate(CalibrateConfig(format="int4_awq"), source.directory, tmp_path / "out")
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


def test_groups_that_do_not_fit_a_rank_are_refused(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "hf", awq(), AWQ, num_key_value_heads=4)
    refuse(source.directory, tmp_path, "32 inputs a rank at tp 4 are not a multiple of the AWQ group size 64", tp=4)


def test_words_that_a_rank_would_cut_are_refused(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "hf", awq(), AWQ, num_attention_heads=32)
    refuse(source.directory, tmp_path, "k_proj: a rank's outputs are not a multiple of 8, the AutoAWQ packing", tp=2)


def test_the_whole_file_says_no_more_than_it_can(tmp_path: Path) -> None:
    """An unknown method names itself whatever its tensors are."""
    source = write_quantized(tmp_path / "hf", awq(), {"quant_method": "exl2", "bits": 4.0})
    path = source.directory / "model.safetensors"
    save_file({"model.embed_tokens.weight": load_file(path)["model.embed_tokens.weight"]}, path, {"format": "pt"})
    refuse(source.directory, tmp_path, "quant_method exl2 is not converted: EXL2 mixes bit widths")
