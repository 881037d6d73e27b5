"""Checkpoints that other tools quantised: every code and scale arrives, or the reason why not is said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import FineGrainedFP8Config, LlamaForCausalLM

from tests.convert.test_errors import refuse
from tests.quantized import (
    AWQ,
    GPTQ,
    GROUP,
    Pack,
    Quantized,
    awq,
    compressed,
    fp8_one_scale,
    fp8_rows,
    fp8_static,
    gptq,
    pack_quantized,
    write_quantized,
)
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.formats.trtllm import UNQUANTIZED_MODULES

STATIC = compressed("float-quantized", "tensor", "tensor")
ROWS = compressed("float-quantized", "channel", "token")
ONE_SCALE = compressed("float-quantized", "tensor", "token")
INT4 = compressed("pack-quantized", "group", None)

INT4_SOURCES: list[Any] = [
    pytest.param(awq(), AWQ, id="awq"),
    pytest.param(gptq(7), GPTQ, id="gptq"),
    pytest.param(gptq(8), GPTQ | {"checkpoint_format": "gptq_v2"}, id="gptq_v2"),
    pytest.param(pack_quantized, INT4, id="pack_quantized"),
]
FP8_SOURCES: list[Any] = [
    pytest.param(fp8_static(), STATIC, id="tensor"),
    pytest.param(fp8_rows, ROWS, id="rows"),
    pytest.param(fp8_one_scale, ONE_SCALE, id="one_scale"),
]
LAYOUTS = pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
Ranks = list[dict[str, Tensor]]


def converted(source: Path, out: Path, **options: Any) -> Ranks:
    """The tensors of all ranks, renamed to the layers that they are of: TensorRT-LLM numbers each stage anew."""
    convert(ConvertConfig(**options), source, out)
    config = json.loads((out / "config.json").read_text())
    tp, stages = config["mapping"]["tp_size"], config["mapping"]["pp_size"]
    each = config["num_hidden_layers"] // stages
    ranks: Ranks = [{} for _ in range(tp)]
    for rank in range(tp * stages):
        for name, tensor in load_file(out / f"rank{rank}.safetensors").items():
            words = name.split(".")
            if words[1] == "layers":
                words[2] = str(int(words[2]) + each * (rank // tp))
            ranks[rank % tp][".".join(words)] = tensor
    return ranks


def quantization(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "config.json").read_text())["quantization"]
    return found


def matrix(rank: dict[str, Tensor], module: str) -> Tensor:
    """The float32 (out, in) matrix that a rank's tensors of a module mean, from TensorRT-LLM's layouts."""
    weight = rank[f"{module}.weight"]
    if weight.dtype is torch.int8:
        bytes_ = weight.view(torch.uint8).long()
        codes = torch.empty(2 * weight.shape[0], weight.shape[1])
        for row, nibbles in ((0, bytes_ & 15), (1, bytes_ >> 4)):
            codes[row::2] = torch.where(nibbles > 7, nibbles - 16, nibbles).float()
        scales = rank[f"{module}.weights_scaling_factor"]
        assert scales.dtype is torch.float32
        assert torch.equal(rank[f"{module}.prequant_scaling_factor"], torch.ones(weight.shape[1], dtype=torch.float16))
        return codes * scales.repeat_interleave(GROUP, dim=1)
    if f"{module}.per_channel_scale" in rank:
        return weight.float() * rank[f"{module}.per_channel_scale"][:, None]
    return weight.float() * rank[f"{module}.weights_scaling_factor"]


def assembled(ranks: Ranks, model: torch.nn.Module) -> dict[str, Tensor]:
    """The weights of a Llama's linear layers, put together from all ranks."""
    config: Any = model.config
    queries = config.num_attention_heads * config.hidden_size // config.num_attention_heads
    keys = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    found = {}
    for layer in range(config.num_hidden_layers):
        target, source = f"transformer.layers.{layer}", f"model.layers.{layer}"
        qkv = [matrix(rank, f"{target}.attention.qkv") for rank in ranks]
        shares = [size // len(ranks) for size in (queries, keys, keys)]
        for index, name in enumerate("qkv"):
            found[f"{source}.self_attn.{name}_proj"] = torch.cat([part.split(shares)[index] for part in qkv])
        for module, name, dim in (
            ("attention.dense", "self_attn.o_proj", 1),
            ("mlp.fc", "mlp.gate_proj", 0),
            ("mlp.gate", "mlp.up_proj", 0),
            ("mlp.proj", "mlp.down_proj", 1),
        ):
            found[f"{source}.{name}"] = torch.cat([matrix(rank, f"{target}.{module}") for rank in ranks], dim=dim)
    return found


def assert_every_weight_is_the_sources(ranks: Ranks, source: Quantized) -> None:
    meant = dict(source.model.named_parameters())
    found = assembled(ranks, source.model)
    assert len(found) == 14
    for module, weight in found.items():
        assert torch.equal(weight, meant[f"{module}.weight"]), module


@LAYOUTS
@pytest.mark.parametrize(("pack", "values"), INT4_SOURCES)
def test_int4_codes_and_scales_are_the_sources(
    pack: Pack, values: dict[str, Any], tp: int, pp: int, tmp_path: Path
) -> None:
    source = write_quantized(tmp_path / "hf", pack, values)
    ranks = converted(source.directory, tmp_path / "out", tp=tp, pp=pp)
    assert_every_weight_is_the_sources(ranks, source)
    assert quantization(tmp_path / "out") == {
        "quant_algo": "W4A16_AWQ",
        "kv_cache_quant_algo": None,
        "group_size": GROUP,
        "smoothquant_val": 0.5,
        "clamp_val": None,
        "use_meta_recipe": False,
        "has_zero_point": False,
        "pre_quant_scale": True,
        "exclude_modules": list(UNQUANTIZED_MODULES),
    }


@LAYOUTS
@pytest.mark.parametrize(("pack", "values"), FP8_SOURCES)
def test_fp8_weights_and_scales_are_the_sources(
    pack: Pack, values: dict[str, Any], tp: int, pp: int, tmp_path: Path
) -> None:
    source = write_quantized(tmp_path / "hf", pack, values, dtype=torch.bfloat16)
    ranks = converted(source.directory, tmp_path / "out", tp=tp, pp=pp)
    assert_every_weight_is_the_sources(ranks, source)
    assert quantization(tmp_path / "out")["quant_algo"] == ("FP8" if values is STATIC else "FP8_PER_CHANNEL_PER_TOKEN")


def test_small_slabs_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_quantized(tmp_path / "hf", awq(), AWQ)
    convert(ConvertConfig(tp=2), source.directory, tmp_path / "a")
    monkeypatch.setattr("trtforge.convert.slabs.SLAB_BYTES", 1)
    monkeypatch.setattr("trtforge.convert.repacking._SLAB_BYTES", 7)
    convert(ConvertConfig(tp=2), source.directory, tmp_path / "b")
    for rank in range(2):
        name = f"rank{rank}.safetensors"
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_different_fp8_scales_become_the_largest(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "hf", fp8_static(equal=False), STATIC, dtype=torch.bfloat16)
    (rank,) = converted(source.directory, tmp_path / "out")
    stored = load_file(source.directory / "model.safetensors")
    for target, names in (
        ("attention.qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("mlp.fc", ("mlp.gate_proj",)),
        ("mlp.gate", ("mlp.up_proj",)),
    ):
        shared = names if len(names) > 1 else ("mlp.gate_proj", "mlp.up_proj")
        largest = max(stored[f"model.layers.1.{name}.weight_scale"] for name in shared)
        assert torch.equal(rank[f"transformer.layers.1.{target}.weights_scaling_factor"], largest)
        expected = []
        for name in names:
            weight, scale = stored[f"model.layers.1.{name}.weight"], stored[f"model.layers.1.{name}.weight_scale"]
            expected.append((weight.double() * scale.double() / largest.double()).float().to(torch.float8_e4m3fn))
        made = rank[f"transformer.layers.1.{target}.weight"]
        assert torch.equal(made.view(torch.uint8), torch.cat(expected).view(torch.uint8))
        if len(names) == 3:  # v has the largest scale of the three: its bytes are the source's
            value = stored["model.layers.1.self_attn.v_proj.weight"]
            assert torch.equal(made[-len(value) :].view(torch.uint8), value.view(torch.uint8))


def test_activation_scales_of_one_input_become_the_largest(tmp_path: Path, edit_tensors: Callable[..., None]) -> None:
    source = write_quantized(tmp_path / "hf", fp8_static(), STATIC, dtype=torch.bfloat16)
    name = "model.layers.0.self_attn.k_proj.input_scale"
    edit_tensors(source.directory, lambda tensors: tensors[name].fill_(0.5))
    (rank,) = converted(source.directory, tmp_path / "out")
    assert rank["transformer.layers.0.attention.qkv.activation_scaling_factor"].tolist() == [0.5]
    assert rank["transformer.layers.1.attention.qkv.activation_scaling_factor"].tolist() == [0.03125]


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize(("key", "value", "expected"), [(0.5, 0.25, 1.0), (1.5, 2.5, 2.5), (None, None, 1.0)])
def test_the_kv_caches_scale_is_the_larger_and_at_least_one(
    tmp_path: Path, key: float | None, value: float | None, expected: float
) -> None:
    more = {} if key is None else {f"model.layers.{n}.self_attn.k_scale": torch.tensor([key]) for n in range(2)}
    more |= {} if value is None else {f"model.layers.{n}.self_attn.v_scale": torch.tensor([value]) for n in range(2)}
    values = STATIC | {"kv_cache_scheme": KV_SCHEME}
    source = write_quantized(tmp_path / "hf", fp8_static(), values, dtype=torch.bfloat16, more=more)
    (rank,) = converted(source.directory, tmp_path / "out")
    assert rank["transformer.layers.1.attention.kv_cache_scaling_factor"].tolist() == [expected]
    assert quantization(tmp_path / "out")["kv_cache_quant_algo"] == "FP8"


@pytest.mark.parametrize("names", [("k_proj.output_scale", "v_proj.output_scale"), ("kv_scale",)], ids=len)
def test_autofp8s_scales_of_the_kv_cache_are_read(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Of two releases: a scale of each projection's output, and one for both."""
    more = {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(1.25 + index)
        for layer in range(2)
        for index, name in enumerate(names)
    }
    values = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
    source = write_quantized(tmp_path / "hf", fp8_static(), values, dtype=torch.bfloat16, more=more)
    (rank,) = converted(source.directory, tmp_path / "out")
    assert rank["transformer.layers.1.attention.kv_cache_scaling_factor"].tolist() == [0.25 + len(names)]


def test_transformers_fp8_with_one_scale_a_tensor(tmp_path: Path) -> None:
    """As the Ministral 3 models have it."""

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, meant = fp8_static()(module, weight)
        names = {"weight": "weight", "weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
        return {names[name]: value.squeeze() for name, value in stored.items()}, meant

    values = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    source = write_quantized(tmp_path / "hf", pack, values, dtype=torch.bfloat16)
    ranks = converted(source.directory, tmp_path / "out", tp=2)
    assert_every_weight_is_the_sources(ranks, source)
    assert ranks[0]["transformer.layers.1.mlp.fc.activation_scaling_factor"].tolist() == [
        pytest.approx(0.03125 * 11 / 9)
    ]
    dequantize = FineGrainedFP8Config(dequantize=True, **values)
    read = LlamaForCausalLM.from_pretrained(source.directory, quantization_config=dequantize)
    for name, parameter in read.named_parameters():
        assert torch.allclose(parameter.float(), source.model.get_parameter(name), rtol=2**-8, atol=0), name


def test_layers_that_the_source_left_unquantised_are_named(tmp_path: Path) -> None:
    values = STATIC | {"ignore": ["lm_head", r"re:model\.layers\.1\.mlp.*"]}
    source = write_quantized(
        tmp_path / "hf", fp8_static(), values, dtype=torch.bfloat16, left=lambda module: "layers.1.mlp" in module
    )
    (rank,) = converted(source.directory, tmp_path / "out")
    left = [f"transformer.layers.1.mlp.{name}" for name in ("fc", "gate", "proj")]
    assert quantization(tmp_path / "out")["exclude_modules"] == [*UNQUANTIZED_MODULES, *left]
    original = source.model.model.layers[1].mlp.down_proj.weight
    assert torch.equal(rank["transformer.layers.1.mlp.proj.weight"], original.bfloat16())
    assert "transformer.layers.1.mlp.proj.weights_scaling_factor" not in rank
    refuse(source.directory, tmp_path, "leaves different layers unquantised in the 2 pipeline stages", pp=2)


def test_autogptqs_biases_of_zeros_are_dropped(tmp_path: Path) -> None:
    def with_bias(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, meant = gptq()(module, weight)
        return stored | {"bias": torch.zeros(len(weight), dtype=torch.float16)}, meant

    source = write_quantized(tmp_path / "hf", with_bias, GPTQ)
    ranks = converted(source.directory, tmp_path / "out")
    assert_every_weight_is_the_sources(ranks, source)
    assert not any(name.endswith("bias") for name in ranks[0])


def test_biases_are_kept(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "hf", awq(), AWQ, attention_bias=True)
    (rank,) = converted(source.directory, tmp_path / "out")
    attention = source.model.model.layers[0].self_attn
    expected = torch.cat([getattr(attention, f"{name}_proj").bias for name in "qkv"]).half()
    assert torch.equal(rank["transformer.layers.0.attention.qkv.bias"], expected)


def test_the_sources_format_may_be_repeated(tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "hf", awq(), AWQ)
    first = convert(ConvertConfig(), source.directory, tmp_path / "out")
    second = convert(ConvertConfig(quant="int4_awq"), source.directory, tmp_path / "out")
    assert (first.cached, second.cached) == (False, True)


# What is refused, with the tensor and the reason.
