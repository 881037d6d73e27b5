"""Mixtures of experts that other tools quantised: the stacks of every layout mean the source's weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from tests.conftest import Edit
from tests.convert.test_errors import refuse
from tests.modelopt import export_for_hugging_face
from tests.plan.models import asked
from tests.quantized import (
    AWQ,
    FP8,
    GPTQ,
    Pack,
    Quantized,
    awq,
    compressed,
    fp8_rows,
    gptq,
    pack_quantized,
    pack_quantized_by_output,
    tiny_moe,
    write_quantized,
)
from tests.reference.streamed import assert_streams
from tests.runtime.converted import computed
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.parallel import Parallel
from trtforge.formats.hf import HfConfig
from trtforge.formats.shards import read_header
from trtforge.models.checkpoint_plan import Layout, checkpoint_plan
from trtforge.models.content import PreQuantScale
from trtforge.models.registry import family_of_config
from trtforge.plan.evaluate import evaluate
from trtforge.plan.model import find_model

TOKENS = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(3)).tolist()
STATIC = compressed("float-quantized", "tensor", "tensor") | {"ignore": ["lm_head", r"re:.*mlp\.gate$"]}
INT4 = compressed("pack-quantized", "group", None) | {"ignore": ["lm_head", r"re:.*mlp\.gate$"]}
LEFT = {"modules_to_not_convert": ["mlp.gate"]}
LAYOUTS = [{}, {"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "pp": 2}]
INPUT_SCALE = 0.03125


def is_router(module: str) -> bool:
    return module.endswith("mlp.gate")


def moe(directory: Path, pack: Pack, values: dict[str, Any], **options: Any) -> Quantized:
    return write_quantized(directory, pack, values, model=tiny_moe(), left=is_router, **options)


def fp8(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Of every matrix the same scales, so that none is rounded again."""
    scale = torch.tensor(2.0**-9)
    codes = (weight / scale).clamp(-448, 448).to(FP8)
    stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(INPUT_SCALE)}
    return stored, codes.float() * scale


def tiny_glm() -> Glm4MoeForCausalLM:
    """A layer with a dense FFN, then one with four experts and one that all tokens get."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 97,
        "max_position_embeddings": 128, "tie_word_embeddings": False, "architectures": ["Glm4MoeForCausalLM"],
    }  # fmt: skip
    return Glm4MoeForCausalLM(Glm4MoeConfig(**sizes)).eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.tensor([TOKENS])).logits[0]
        return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "".join(f"{k}{v}" for k, v in layout.items()) or "one")
@pytest.mark.parametrize(
    ("pack", "values"),
    [(awq(), AWQ | LEFT), (gptq(), GPTQ | {"dynamic": {r"-:.*mlp\.gate$": {}}}), (pack_quantized, INT4)],
    ids=["awq", "gptq", "pack_quantized"],
)
def test_int4(pack: Pack, values: dict[str, Any], layout: dict[str, int], tmp_path: Path) -> None:
    source = moe(tmp_path / "hf", pack, values)
    out = convert(ConvertConfig(**layout), source.directory, tmp_path / "out").path
    (made,) = computed(out, TOKENS)
    expected = logits(source.model)
    assert float((made - expected).norm() / expected.norm()) < 1e-5
    rank = load_file(out / "rank0.safetensors")
    prefix, experts = "transformer.layers.0.mlp.fc", 4 // layout.get("ep", 1)
    assert torch.equal(rank[f"{prefix}.prequant_scaling_factor"], torch.ones(experts, 128).half())
    assert rank[f"{prefix}.weight"].shape[0] == rank[f"{prefix}.weights_scaling_factor"].shape[0] == experts


def test_an_expert_that_no_sample_reached_may_have_an_input_scale_of_zero(tmp_path: Path, edit_tensors: Edit) -> None:
    """All experts of a layer get the largest."""
    source = moe(tmp_path / "hf", fp8, STATIC).directory

    def without(experts: range) -> None:
        names = [f"model.layers.0.mlp.experts.{expert}.down_proj.input_scale" for expert in experts]
        edit_tensors(source, lambda tensors: [tensors[name].zero_() for name in names])

    without(range(3))
    convert(ConvertConfig(), source, tmp_path / "out")
    rank = load_file(tmp_path / "out" / "rank0.safetensors")
    assert rank["transformer.layers.0.mlp.proj.activation_scaling_factor"].tolist() == [INPUT_SCALE]
    without(range(4))
    message = r"experts\.0\.down_proj\.input_scale is 0\.0, and 3 others are not larger: .* must be above zero"
    refuse(source, tmp_path, message)


def test_int4_with_a_scale_for_each_output(tmp_path: Path) -> None:
    values = compressed("pack-quantized", "channel", None) | {"ignore": INT4["ignore"]}
    source = moe(tmp_path / "hf", pack_quantized_by_output, values)
    assert_streams(source.directory, source.model, torch.tensor([TOKENS]))
    out = convert(ConvertConfig(), source.directory, tmp_path / "out").path
    (made,) = computed(out, TOKENS)
    expected = logits(source.model)
    assert float((made - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "".join(f"{k}{v}" for k, v in layout.items()) or "one")
def test_fp8(layout: dict[str, int], tmp_path: Path) -> None:
    """Weights are the source's bytes; an expert's scales are its largest, and all share the largest of inputs."""
    source = moe(tmp_path / "hf", fp8, STATIC, dtype=torch.bfloat16)
    out = convert(ConvertConfig(**layout), source.directory, tmp_path / "out").path
    stored, rank = load_file(source.directory / "model.safetensors"), load_file(out / "rank0.safetensors")
    ep, tp = layout.get("ep", 1), layout.get("tp", 1)
    for expert in range(4 // ep):
        parts = [stored[f"model.layers.0.mlp.experts.{expert}.{name}.weight"] for name in ("up_proj", "gate_proj")]
        expected = torch.cat([part[: len(part) * ep // tp].view(torch.uint8) for part in parts])
        assert torch.equal(rank["transformer.layers.0.mlp.fc.weight"][expert].view(torch.uint8), expected)
    assert rank["transformer.layers.0.mlp.fc.weights_scaling_factor"].tolist() == [[2.0**-9]] * (4 // ep)
    assert rank["transformer.layers.0.mlp.proj.activation_scaling_factor"].tolist() == [INPUT_SCALE]


def test_different_scales_of_an_expert_become_its_largest(tmp_path: Path, edit_tensors: Any) -> None:
    source = moe(tmp_path / "hf", fp8, STATIC, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.experts.{}.{}.{}"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name.format(2, "gate_proj", "weight_scale")] *= 2
        tensors[name.format(3, "down_proj", "input_scale")] *= 4

    edit_tensors(source.directory, change)
    rank = load_file(convert(ConvertConfig(), source.directory, tmp_path / "out").path / "rank0.safetensors")
    fc = "transformer.layers.0.mlp.fc"
    assert rank[f"{fc}.weights_scaling_factor"].flatten().tolist() == [2.0**-9, 2.0**-9, 2.0**-8, 2.0**-9]
    assert rank[f"{fc}.activation_scaling_factor"].tolist() == [INPUT_SCALE]
    assert rank["transformer.layers.0.mlp.proj.activation_scaling_factor"].tolist() == [4 * INPUT_SCALE]
    up = load_file(source.directory / "model.safetensors")[name.format(2, "up_proj", "weight")]
    expected = (up.float() / 2).to(FP8)
    assert torch.equal(rank[f"{fc}.weight"][2][: len(up)].float(), expected.float())


def test_autogptqs_biases_of_zeros_are_dropped(tmp_path: Path) -> None:
    def with_bias(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, meant = gptq()(module, weight)
        return stored | {"bias": torch.zeros(len(weight), dtype=torch.float16)}, meant

    source = moe(tmp_path / "hf", with_bias, GPTQ | {"dynamic": {r"-:.*mlp\.gate$": {}}})
    out = convert(ConvertConfig(), source.directory, tmp_path / "out").path
    assert not any(name.endswith("bias") for name in load_file(out / "rank0.safetensors"))


@pytest.mark.parametrize(("tp", "ep"), [(4, 2), (4, 1), (4, 4)])
def test_input_scales_are_cut_as_the_experts_of_a_rank_are(tp: int, ep: int) -> None:
    """Also on ranks that do not have the first expert."""
    values = tiny_moe().config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    config = HfConfig(values, Path("config.json"))
    family = family_of_config(config)
    layout = Layout(Parallel(tp=tp, ep=ep), "float16", quant="int4_awq", group_size=32)
    name = "transformer.layers.0.mlp.proj.prequant_scaling_factor"
    targets = checkpoint_plan(family, family.facts(config), layout).targets
    (content,) = [target.content for target in targets if target.spec.name == name]
    assert isinstance(content, PreQuantScale)
    width = 128 * ep // tp
    assert [cut.cols for cut in content.cuts] == [
        range(rank // ep * width, (rank // ep + 1) * width) for rank in range(tp)
    ]


@pytest.mark.parametrize(("pack", "values"), [(awq(), AWQ | LEFT), (fp8, STATIC)], ids=["awq", "fp8"])
def test_the_reference_and_the_plan_read_them(pack: Pack, values: dict[str, Any], tmp_path: Path) -> None:
    source = moe(tmp_path / "hf", pack, values)
    assert_streams(source.directory, source.model, torch.tensor([TOKENS]))
    model = find_model(str(source.directory))
    found = evaluate(model, asked(model, tp=2, ep=2))
    assert found.problems == ()
    out = convert(ConvertConfig(tp=2, ep=2), source.directory, tmp_path / "out").path
    assert found.memory is not None
    written = sum(tensor.spec.nbytes for tensor in read_header(out / "rank0.safetensors"))
    assert [stage.weights for stage in found.memory.stages] == [written]


def test_formats_that_mixtures_of_experts_lack_are_refused(tmp_path: Path) -> None:
    values = compressed("float-quantized", "channel", "token") | {"ignore": ["lm_head", r"re:.*mlp\.gate$"]}
    source = moe(tmp_path / "hf", fp8_rows, values, dtype=torch.bfloat16)
    error = refuse(source.directory, tmp_path, r"mixture of experts \(qwen3_moe\) does not support fp8_rowwise")
    assert error.hint.startswith(
        "Compile the Hugging Face checkpoint itself for backend llmapi, or convert the original"
    )


@pytest.mark.parametrize(
    ("left", "message"),
    [
        (r"re:.*experts.*", r"experts\.0\.up_proj and the other experts are not quantised, and other layers are"),
        (r"re:.*experts\.3\..*", r"experts\.0\.up_proj is quantised and .*experts\.3\.up_proj is not"),
    ],
)
def test_experts_are_quantised_together(left: str, message: str, tmp_path: Path) -> None:
    source = moe(tmp_path / "hf", fp8, STATIC | {"ignore": [*STATIC["ignore"], left]}, dtype=torch.bfloat16)
    refuse(source.directory, tmp_path, message)


def test_experts_in_mixed_precision_are_refused(tmp_path: Path) -> None:
    source = moe(tmp_path / "hf", fp8, STATIC)
    names = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo"]
    layers = {name: {"quant_algo": "FP8"} for name in names}
    layers["model.layers.0.mlp.experts.0.up_proj"] = {"quant_algo": "W4A16_AWQ"}
    described = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    (source.directory / "hf_quant_config.json").write_text(json.dumps(described))
    refuse(source.directory, tmp_path, r"\(ModelOpt\) qwen3_moe model with experts in mixed precision is not converted")


def test_nvfp4_experts_of_modelopt_keep_their_bytes(tmp_path: Path) -> None:
    """Of a family that the LLM API serves; TensorRT engines have no such experts."""
    import modelopt.torch.quantization as mtq

    ids = torch.tensor([TOKENS])
    model = mtq.quantize(tiny_glm(), mtq.NVFP4_DEFAULT_CFG, lambda model: model(ids))
    export_for_hugging_face(model, tmp_path / "hf")
    out = convert(ConvertConfig(tp=2, ep=2), tmp_path / "hf", tmp_path / "out").path
    stored, rank = load_file(tmp_path / "hf" / "model.safetensors"), load_file(out / "rank1.safetensors")
    names = ("up_proj", "gate_proj")
    for place, expert in enumerate((2, 3)):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        for target, suffix in (("weight", "weight"), ("weights_scaling_factor", "weight_scale")):
            expected = torch.cat([stored[f"{prefix}.{name}.{suffix}"].view(torch.uint8) for name in names])
            assert torch.equal(rank[f"transformer.layers.1.mlp.fc.{target}"][place].view(torch.uint8), expected)
        scale = rank["transformer.layers.1.mlp.fc.weights_scaling_factor_2"][place]
        assert torch.equal(scale, stored[f"{prefix}.gate_proj.weight_scale_2"].reshape(1))
    inputs = [stored[f"model.layers.1.mlp.experts.{expert}.down_proj.input_scale"] for expert in range(4)]
    assert rank["transformer.layers.1.mlp.proj.activation_scaling_factor"].tolist() == [float(max(inputs))]
