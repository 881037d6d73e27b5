"""The damage of each linear layer, against the same model with that layer's weights replaced by what its codes mean."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.convert.test_quantized_families import FAMILIES
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import GateConfig
from trtforge.models.transforms import dequantize_int4, unpack_int4
from trtforge.verify.result import Damage
from trtforge.verify.sensitivity import rank_linears

IDS = torch.randint(3, 97, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def gate(tmp_path: Path) -> GateConfig:
    save_file({"input_ids": IDS}, tmp_path / "ids.safetensors")
    return GateConfig(data=str(tmp_path / "ids.safetensors"), samples=3, sequence_length=24)


def ranked(name: str, tmp_path: Path, gate: GateConfig) -> tuple[PreTrainedModel, dict[str, Tensor], list[Damage]]:
    """The model, the rank file in INT4-AWQ, and the ranking."""
    torch.manual_seed(0)
    source = tmp_path / "hf"
    model = AutoModelForCausalLM.from_config(FAMILIES[name](), attn_implementation="eager").float().eval()
    model.save_pretrained(source)
    config = CalibrateConfig.parse({"format": "int4_awq", "data": {"data": gate.data}}, "test")
    calibration = calibrate(config, source, tmp_path / "calibration").path
    settings = ConvertConfig(quant="int4_awq", dtype="float32")
    out = convert(settings, source, tmp_path / "out", calibration=calibration).path
    return model, load_file(out / "rank0.safetensors"), list(rank_linears(out, source, gate))


def meant(rank: dict[str, Tensor], matrix: str) -> Tensor:
    """(out, in) float32 that a matrix stands for."""
    codes = unpack_int4(rank[f"{matrix}.weight"])
    weight = dequantize_int4(codes, rank[f"{matrix}.weights_scaling_factor"].float())
    return weight * rank[f"{matrix}.prequant_scaling_factor"].float()


@torch.no_grad()
def expected(model: PreTrainedModel, layers: torch.nn.ModuleList, layer: int, replaced: dict[str, Tensor]) -> float:
    """Relative change of the layer's output, inputs being those of the whole model."""
    kept: dict[str, Tensor] = {}
    difference = energy = 0.0
    for window in IDS:
        seen: list[tuple[tuple[Tensor, ...], dict[str, object], Tensor]] = []

        def first(output: object) -> Tensor:
            return output[0] if isinstance(output, tuple) else output

        hook = layers[layer].register_forward_hook(
            lambda _, args, kwargs, output, seen=seen: seen.append((args, kwargs, first(output))), with_kwargs=True
        )
        model(window.unsqueeze(0), use_cache=False)
        hook.remove()
        for name, weight in replaced.items():
            module = layers[layer].get_submodule(name)
            kept[name] = module.weight.data
            module.weight.data = weight.T if isinstance(module, Conv1D) else weight
        args, kwargs, before = seen[0]
        after = first(layers[layer](*args, **kwargs))
        for name, weight in kept.items():
            layers[layer].get_submodule(name).weight.data = weight
        difference += float((after - before).square().sum())
        energy += float(before.square().sum())
    return (difference / energy) ** 0.5


def test_damage_is_that_of_the_weights_alone(tmp_path: Path, gate: GateConfig) -> None:
    model, rank, found = ranked("qwen2", tmp_path, gate)
    errors = {damage.modules: damage.error for damage in found}
    assert [damage.error for damage in found] == sorted(errors.values(), reverse=True)
    assert len(errors) == 8
    for layer in range(2):
        prefix, matrix = f"model.layers.{layer}.", f"transformer.layers.{layer}."
        q, k, v = meant(rank, f"{matrix}attention.qkv").split([128, 64, 64])
        for replaced in (
            {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v},
            {"self_attn.o_proj": meant(rank, f"{matrix}attention.dense")},
            {"mlp.gate_proj": meant(rank, f"{matrix}mlp.fc"), "mlp.up_proj": meant(rank, f"{matrix}mlp.gate")},
            {"mlp.down_proj": meant(rank, f"{matrix}mlp.proj")},
        ):
            damage = errors[tuple(prefix + name for name in replaced)]
            assert damage == pytest.approx(expected(model, model.model.layers, layer, replaced), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "layers", "module", "matrix"),
    [
        ("gpt_neox", "gpt_neox.layers", "attention.query_key_value", "attention.qkv"),
        ("falcon_40b", "transformer.h", "self_attention.query_key_value", "attention.qkv"),
        ("gpt2", "transformer.h", "attn.c_attn", "attention.qkv"),
    ],
)
def test_fused_matrices_are_taken_apart(
    name: str, layers: str, module: str, matrix: str, tmp_path: Path, gate: GateConfig
) -> None:
    """The checkpoint has queries, keys and values below one another, these families have them in other orders."""
    model, rank, found = ranked(name, tmp_path, gate)
    weight = meant(rank, f"transformer.layers.1.{matrix}")
    size, heads = 32, 4
    if name == "gpt_neox":
        weight = weight.view(3, heads, size, -1).transpose(0, 1).flatten(0, 2)
    if name == "falcon_40b":
        q, k, v = weight.split([heads * size, 2 * size, 2 * size])
        weight = torch.cat((q.view(2, 2, size, -1), k.view(2, 1, size, -1), v.view(2, 1, size, -1)), 1).flatten(0, 2)
    damage = next(damage.error for damage in found if damage.modules == (f"{layers}.1.{module}",))
    assert damage == pytest.approx(expected(model, model.get_submodule(layers), 1, {module: weight}), rel=1e-3)
