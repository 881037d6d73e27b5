"""What ModelOpt exports for Hugging Face, converted, against what it exports for TensorRT-LLM from the same model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.convert.test_errors import refuse
from tests.modelopt import FORMATS, export_for_hugging_face, export_for_tensorrt_llm, quantized_by_modelopt
from trtforge.convert.stage import ConvertConfig, convert

TP = 2
INT4_TENSORS = ("weight", "weights_scaling_factor", "prequant_scaling_factor")
W4A8_TENSORS = (*INT4_TENSORS, "weights_scaling_factor_2", "activation_scaling_factor")
Exports = dict[str, Path]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """For each format a directory with `hf` and `trtllm`, of one Llama."""
    made = {}
    for format_ in FORMATS:
        model = quantized_by_modelopt(format_, fp8_kv_cache=format_ in ("fp8", "nvfp4", "int8_sq"))
        made[format_] = tmp_path_factory.mktemp(format_)
        export_for_tensorrt_llm(model, made[format_] / "trtllm", TP)
        export_for_hugging_face(model, made[format_] / "hf")
    return made


def converted(directory: Path, out: Path) -> list[dict[str, Tensor]]:
    convert(ConvertConfig(dtype="float16", tp=TP, parallel_embedding=True), directory / "hf", out)
    return ranks_of(out)


def ranks_of(directory: Path) -> list[dict[str, Tensor]]:
    return [load_file(directory / f"rank{rank}.safetensors") for rank in range(TP)]


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """ModelOpt writes some scalars without a dimension, where TensorRT-LLM's parameters have one of 1."""
    return a.dtype is b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("format_", ["fp8", "fp8_pc_pt", "int8_sq", "nvfp4"])
def test_bytes_are_modelopts(exports: Exports, format_: str, tmp_path: Path) -> None:
    separate = (
        "attention.k_cache_scaling_factor",
        "attention.v_cache_scaling_factor",
    )  # merged into one in every release
    for made, theirs in zip(
        converted(exports[format_], tmp_path / "out"), ranks_of(exports[format_] / "trtllm"), strict=True
    ):
        expected = {name: tensor for name, tensor in theirs.items() if not name.endswith(separate)}
        assert set(made) == set(expected)
        for name in made:
            assert same_bytes(made[name], expected[name]), name
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    exported = json.loads((exports[format_] / "trtllm" / "config.json").read_text())["quantization"]
    for key in ("quant_algo", "kv_cache_quant_algo"):
        assert quantization[key] == exported[key]


@pytest.mark.parametrize(("format_", "suffixes"), [("int4_awq", INT4_TENSORS), ("w4a8_awq", W4A8_TENSORS)])
def test_int4_awq_is_the_same_network(
    exports: Exports, format_: str, suffixes: tuple[str, ...], tmp_path: Path
) -> None:
    """ModelOpt folds what scales the norms' outputs into the norms for Hugging Face, and not for TensorRT-LLM."""
    stored = load_file(exports[format_] / "hf" / "model.safetensors")
    for made, expected in zip(
        converted(exports[format_], tmp_path / "out"), ranks_of(exports[format_] / "trtllm"), strict=True
    ):
        ones = torch.ones(256, dtype=torch.float16)
        for layer in range(2):
            layer_name = f"transformer.layers.{layer}"
            same = [f"{name}.{suffix}" for name in ("attention.dense", "mlp.proj") for suffix in suffixes]
            same += [f"attention.qkv.{suffix}" for suffix in suffixes if suffix != "prequant_scaling_factor"]
            for name in same:
                assert same_bytes(made[f"{layer_name}.{name}"], expected[f"{layer_name}.{name}"]), name
            for name in ("attention.qkv", "mlp.fc", "mlp.gate"):
                assert torch.equal(made[f"{layer_name}.{name}.prequant_scaling_factor"], ones)
            scale = expected[f"{layer_name}.attention.qkv.prequant_scaling_factor"]
            folded = expected[f"{layer_name}.input_layernorm.weight"].float() * scale.float()
            assert torch.allclose(made[f"{layer_name}.input_layernorm.weight"].float(), folded, rtol=2e-3)
    last = made["transformer.layers.1.mlp.gate.weight"].view(torch.uint8)
    weight = stored["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(last, weight[len(weight) // 2 :])


@pytest.fixture
def copy_of(exports: Exports, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a Hugging Face export, to be changed."""

    def copied(format_: str) -> Path:
        shutil.copytree(exports[format_] / "hf", tmp_path / "hf")
        return tmp_path / "hf"

    return copied


def test_nvfp4_with_two_scales_for_one_matrix_is_refused(
    copy_of: Callable[[str], Path], tmp_path: Path, edit_tensors: Callable[..., None]
) -> None:
    source = copy_of("nvfp4")
    name = "model.layers.0.self_attn.v_proj.weight_scale_2"
    edit_tensors(source, lambda tensors: tensors[name].mul_(2))
    refuse(source, tmp_path, r"q_proj\.weight_scale_2 and model\.layers\.0\.self_attn\.v_proj\.weight_scale_2 differ")


def test_pre_quant_scales_that_differ_are_refused(
    copy_of: Callable[[str], Path], tmp_path: Path, edit_tensors: Callable[..., None]
) -> None:
    source = copy_of("int4_awq")
    scales = {f"model.layers.0.self_attn.{n}_proj.pre_quant_scale": torch.ones(256) for n in "qkv"}
    edit_tensors(source, lambda tensors: tensors.update(scales))
    convert(ConvertConfig(), source, tmp_path / "out")
    edit_tensors(source, lambda tensors: tensors["model.layers.0.self_attn.k_proj.pre_quant_scale"].mul_(2))
    refuse(source, tmp_path, r"q_proj\.pre_quant_scale and .*k_proj\.pre_quant_scale differ")
    edit_tensors(source, lambda tensors: tensors.pop("model.layers.0.self_attn.k_proj.pre_quant_scale"))
    refuse(source, tmp_path, r"q_proj\.pre_quant_scale exists, .*k_proj\.pre_quant_scale does not")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.1.self_attn.k_proj.k_bias", "the offsets of an affine KV cache"),
        ("model.layers.1.mlp.down_proj.pre_quant_scale", "a pre-quantisation scale of a layer that has none"),
        ("model.layers.1.mlp.down_proj.svdquant_lora_a", "the low-rank part of SVDQuant"),
        ("model.layers.1.mlp.down_proj.weight_zero_point", "zero points"),
    ],
)
def test_what_layers_of_a_format_do_not_compute_is_named(
    copy_of: Callable[[str], Path], tmp_path: Path, edit_tensors: Callable[..., None], name: str, reason: str
) -> None:
    source = copy_of("fp8")
    edit_tensors(source, lambda tensors: tensors.update({name: torch.ones(2)}))
    error = refuse(source, tmp_path, f"holds {reason}.* lack: {name}")
    assert error.hint.startswith("Export it again without")
    assert not (tmp_path / "out").exists()


def test_integers_without_smoothing_have_scales_of_one(
    copy_of: Callable[[str], Path], tmp_path: Path, edit_tensors: Callable[..., None]
) -> None:
    """As ModelOpt's INT8_DEFAULT_CFG exports them."""
    source = copy_of("int8_sq")
    vector = "pre_quant_scale"
    edit_tensors(source, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(vector)])
    for rank in converted(tmp_path, tmp_path / "out"):
        assert torch.equal(rank["transformer.layers.1.attention.qkv.prequant_scaling_factor"], torch.ones(256).half())
        assert torch.equal(rank["transformer.layers.1.mlp.proj.prequant_scaling_factor"], torch.ones(256).half())


def test_what_modelopt_excludes_is_excluded(exports: Exports, tmp_path: Path) -> None:
    converted(exports["nvfp4"], tmp_path / "out")
    excluded = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["exclude_modules"]
    assert excluded == [
        "*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding", "*shared_expert_gate",
    ]  # fmt: skip
