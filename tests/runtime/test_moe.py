import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.runtime.checkpoints import write_engine
from tests.runtime.converted import TOKENS, Families, computed, edited, error
from tests.runtime.quantised import quantised as quantised_linear
from tests.runtime.quantised import weight_only
from trtforge.core.errors import ForgeError
from trtforge.formats.trtllm import UNQUANTIZED_MODULES, Quantization, read_checkpoint_config
from trtforge.runtime.architecture.layout import LinearSlot
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.decoder.moe import route
from trtforge.runtime.linears.kernels import kernel_of, reference_kernels
from trtforge.runtime.linears.linear import Placement
from trtforge.runtime.linears.stored import take_experts
from trtforge.runtime.linears.weights import Weights

GROUP = 8


def int4_awq(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Codes packed along the outputs, scales of groups, a scale of inputs; and the matrix they stand for."""
    prequant = torch.rand(*weight.shape[:-2], weight.shape[-1], generator=generator) + 0.5
    blocks = (weight / prequant.unsqueeze(-2)).unflatten(-1, (-1, GROUP))
    scales = blocks.abs().amax(-1) / 7
    codes = (blocks / scales.unsqueeze(-1)).round().clamp(-8, 7)
    values = (codes * scales.unsqueeze(-1)).flatten(-2) * prequant.unsqueeze(-2)
    rows = codes.to(torch.int8).flatten(-2)
    packed = (rows[..., 0::2, :] & 15) | (rows[..., 1::2, :] << 4)
    return {"weight": packed, "weights_scaling_factor": scales, "prequant_scaling_factor": prequant}, values


def fp8(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """E4M3 with a scale for each expert, and the matrices that the codes stand for."""
    scales = weight.abs().amax((-2, -1), keepdim=True) / 448
    codes = (weight / scales).to(torch.float8_e4m3fn)
    stored = {
        "weight": codes,
        "weights_scaling_factor": scales.flatten(1) if weight.dim() == 3 else scales.flatten(),
        "activation_scaling_factor": torch.rand(1, generator=generator) * 0.01 + 0.01,
    }
    return stored, codes.float() * scales


def int8(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Plain weights, which the loader quantises."""
    return {"weight": weight}, weight_only(weight, 8, weight.dtype)


def int4(weight: Tensor, _: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Plain weights, which the loader quantises."""
    return {"weight": weight}, weight_only(weight, 4, weight.dtype)


FORMATS = {"W4A16_AWQ": int4_awq, "FP8": fp8, "W8A16": int8, "W4A16": int4}


def quantised(checkpoint: Path, directory: Path, algorithm: str) -> tuple[Path, Path]:
    """The checkpoint with its MLPs quantised, and one with the values that their codes stand for."""
    codes, plain = directory / "codes", directory / "plain"
    quantization = {
        "quant_algo": algorithm,
        "group_size": GROUP,
        "exclude_modules": [*UNQUANTIZED_MODULES, "*attention*"],
    }
    generator = torch.Generator().manual_seed(0)
    quantise = FORMATS[algorithm]
    for out in (codes, plain):
        out.mkdir()
        values = json.loads((checkpoint / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(values | ({"quantization": quantization} if out == codes else {})))
    for path in checkpoint.glob("rank*.safetensors"):
        packed, expanded = {}, {}
        for name, tensor in load_file(path).items():
            packed[name] = expanded[name] = tensor
            if ".mlp." in name and not name.endswith(("router.weight", "_gate.weight")):
                parts, expanded[name] = quantise(tensor, generator)
                packed |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
        save_file({name: tensor.contiguous() for name, tensor in packed.items()}, codes / path.name)
        save_file({name: tensor.contiguous() for name, tensor in expanded.items()}, plain / path.name)
    return codes, plain


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "W8A16", "W4A16"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v2"])
def test_experts_compute_what_their_codes_stand_for(
    families: Families, tmp_path: Path, name: str, algorithm: str
) -> None:
    codes, plain = quantised(families(name).checkpoint(tp=2, ep=2), tmp_path, algorithm)
    expected = computed(plain, TOKENS)[0]
    assert error(computed(codes, TOKENS)[0], expected) < 1e-4
    assert error(computed(write_engine(codes, tmp_path / "engine"), TOKENS)[0], expected) < 1e-4


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v2"])
def test_fp8_experts_keep_their_own_scales(families: Families, tmp_path: Path, name: str) -> None:
    """Of logits only the order of magnitude: rounded activations make tokens choose other experts."""
    codes, plain = quantised(families(name).checkpoint(tp=2, ep=2), tmp_path, "FP8")
    engine, expected = write_engine(codes, tmp_path / "engine"), computed(plain, TOKENS)[0]
    assert float((computed(engine, TOKENS)[0] - expected).norm() / expected.norm()) < 0.3
    for rank in ("rank0.safetensors", "rank1.safetensors"):
        packed, reference = load_file(engine / rank), load_file(plain / rank)
        for module in ("transformer.layers.2.mlp.fc", "transformer.layers.2.mlp.proj"):
            for expert, values in enumerate(reference[f"{module}.weight"]):
                name = f"{module}.{expert}"
                weight, scale = packed[f"{name}.weight"].float(), packed[f"{name}.weights_scaling_factor"]
                torch.testing.assert_close(weight * scale, values)


@pytest.mark.parametrize("algorithm", ["W4A8_AWQ", "W8A8_SQ_PER_CHANNEL"])
def test_experts_with_rounded_inputs(families: Families, algorithm: str) -> None:
    """One scale for what all experts read, the other scales are an expert's own."""
    checkpoint = families("mixtral").checkpoint()
    config = read_checkpoint_config(checkpoint)
    config = config.model_copy(update={"quantization": Quantization(quant_algo=algorithm, group_size=GROUP)})
    spec = DecoderSpec.of(config, 0)
    assert spec.moe is not None
    slot = LinearSlot("transformer.layers.2.mlp.fc", 2 * spec.moe.expert_size, spec.hidden_size, experts=spec.moe.local)
    weights = load_file(checkpoint / "rank0.safetensors")[f"{slot.module}.weight"]
    experts = [
        quantised_linear(weight * (1 + index), algorithm, GROUP, torch.float32, 1)
        for index, weight in enumerate(weights)
    ]
    parts = [expert.part(torch.arange(slot.out), slice(0, slot.inputs)) for expert in experts]
    stored = {f"{slot.module}.{name}": torch.stack([part[name] for part in parts]) for name in parts[0]}
    stored[f"{slot.module}.activation_scaling_factor"] = parts[0]["activation_scaling_factor"]
    source = Weights.of(stored)
    kernel = kernel_of(spec, reference_kernels(spec.algorithm), slot.module)
    x = torch.randn(5, slot.inputs)
    for expert, taken in zip(experts, take_experts(spec, source, slot), strict=True):
        packed = Weights.of({f"m.{name}": tensor for name, tensor in kernel.pack(taken, torch.float32).items()})
        place = Placement(torch.device("cpu"), torch.float32)
        made = kernel.load(packed, "m", (slot.out, slot.inputs), place, bias=True)(x)
        torch.testing.assert_close(made, expert.rounded(x) @ expert.values.t(), rtol=1e-5, atol=1e-4)
    source.finish()


def test_a_layout_that_does_not_divide_the_experts_is_an_error(families: Families, tmp_path: Path) -> None:
    checkpoint = families("mixtral").checkpoint()
    values = json.loads((checkpoint / "config.json").read_text())
    config = read_checkpoint_config(edited(checkpoint, tmp_path, {"moe": values["moe"] | {"normalization_mode": 2}}))
    with pytest.raises(ForgeError, match="4 experts of 96 inner units over 1 x 1 ranks, normalization_mode 2"):
        DecoderSpec.of(config, 0)


def test_only_the_ranks_that_share_an_expert_must_divide_it(families: Families, tmp_path: Path) -> None:
    """4 experts of 130 inner units at tp 4 and ep 2: 65 for each of the two ranks that share an expert."""
    mapping = {"world_size": 4, "tp_size": 4, "pp_size": 1, "moe_tp_size": 2, "moe_ep_size": 2}
    changes = {"intermediate_size": 130, "num_key_value_heads": 2, "mapping": mapping}
    config = read_checkpoint_config(edited(families("mixtral").checkpoint(), tmp_path, changes))
    moe = DecoderSpec.of(config, 0).moe
    assert moe is not None
    assert (moe.local, moe.expert_size) == (2, 65)


@pytest.mark.parametrize(("mode", "scaling"), [(3, 2.5), (4, 1.0)])
def test_normalised_weights_of_softmax_scores_are_not_scaled(
    families: Families, tmp_path: Path, mode: int, scaling: float
) -> None:
    """TensorRT-LLM (tensorrt_llm/layers/moe.py) scales the scores, then divides by their sum; DeepSeek's code does
    either. `transformers` does not read norm_topk_prob."""
    checkpoint = families("deepseek_v2").checkpoint()
    moe = json.loads((checkpoint / "config.json").read_text())["moe"]
    given = {"normalization_mode": mode, "device_limited_routed_scaling_factor": 2.5}
    spec = DecoderSpec.of(read_checkpoint_config(edited(checkpoint, tmp_path, {"moe": moe | given})), 0).moe
    assert spec is not None
    weights, chosen = route(spec, torch.randn(5, spec.num_experts, generator=torch.Generator().manual_seed(0)))
    assert chosen.shape == (5, spec.top_k)
    assert spec.scaling == scaling
    if mode == 4:
        torch.testing.assert_close(weights.sum(dim=1), torch.ones(5))


def test_more_experts_a_token_than_there_are_is_an_error(families: Families, tmp_path: Path) -> None:
    """A kernel would read behind a token's scores."""
    checkpoint = families("mixtral").checkpoint()
    values = json.loads((checkpoint / "config.json").read_text())
    config = read_checkpoint_config(edited(checkpoint, tmp_path, {"moe": values["moe"] | {"top_k": 5}}))
    with pytest.raises(ForgeError, match=r"config\.json: a token cannot get 5 of 4 experts"):
        DecoderSpec.of(config, 0)


def test_groups_that_have_no_two_experts_are_an_error(families: Families, tmp_path: Path) -> None:
    """The sum of the two best of a group is its score; transformers cannot compute such a model either."""
    checkpoint = families("deepseek_v3").checkpoint()
    moe = json.loads((checkpoint / "config.json").read_text())["moe"]
    groups = {"device_limited_n_group": 8, "device_limited_topk_group": 4}
    config = read_checkpoint_config(edited(checkpoint, tmp_path, {"moe": moe | groups}))
    with pytest.raises(ForgeError, match=r"config\.json: 8 groups of 1 experts: the two best of a group are its score"):
        DecoderSpec.of(config, 0)


def test_a_rank_lacking_an_expert_is_an_error(families: Families, tmp_path: Path) -> None:
    checkpoint = families("mixtral").checkpoint()
    tensors = load_file(checkpoint / "rank0.safetensors")
    name = "transformer.layers.2.mlp.fc.weight"
    tensors[name] = tensors[name][:3]
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    save_file(tensors, tmp_path / "rank0.safetensors")
    with pytest.raises(ForgeError, match=rf"{name} has shape \(3, 192, 64\), \(4, 192, 64\) is expected"):
        computed(tmp_path, TOKENS)
