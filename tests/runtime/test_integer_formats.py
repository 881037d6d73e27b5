"""Checkpoints in the integer formats against a dense float32 model with the same weights and rounded activations."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from tests.modelopt import export_for_tensorrt_llm
from tests.quantized import tiny_llama as small_llama
from tests.runtime.checkpoints import Layout, dense_reference, tiny_llama, write_checkpoint, write_engine
from tests.runtime.converted import computed
from trtforge.core.errors import ForgeError
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.decoder.kv_capacity import block_bytes
from trtforge.runtime.linears import kernels
from trtforge.runtime.linears.kernels import Kernels, choose_kernels
from trtforge.runtime.ranks.source import open_model

_generator = torch.Generator().manual_seed(5)
SEQUENCES = [torch.randint(0, 131, (length,), generator=_generator).tolist() for length in (3, 5, 8, 8, 9, 12, 17)]
STATIC = ("W4A8_AWQ", "W8A8_SQ_PER_CHANNEL")
WEIGHT_ONLY = ("W8A16", "W4A16")
ALGORITHMS = pytest.mark.parametrize("quant", [*STATIC, *WEIGHT_ONLY])


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """With biases; every parameter fits float16."""
    model = tiny_llama(seed=2, attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    return model


def logits(model: LlamaForCausalLM, scale: float | None = None) -> list[Tensor]:
    """Of every sequence; with `scale`, keys and values are rounded to its multiples."""
    found = []
    for tokens in SEQUENCES:
        cache = DynamicCache(config=model.config) if scale is None else _IntegerCache(model, scale)
        with torch.no_grad():
            found.append(model(torch.tensor([tokens]), past_key_values=cache).logits[0])
    return found


class _IntegerCache(DynamicCache):
    def __init__(self, model: LlamaForCausalLM, scale: float) -> None:
        super().__init__(config=model.config)
        self.scale = scale

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rounded = [(part / self.scale).round().clamp(-128, 127) * self.scale for part in (key_states, value_states)]
        return super().update(*rounded, *args, **kwargs)


def errors(made: list[Tensor], expected: list[Tensor]) -> Tensor:
    return torch.tensor([(a - b).norm() / b.norm() for a, b in zip(made, expected, strict=True)])


def assert_same(made: list[Tensor], expected: list[Tensor]) -> None:
    """Sums in another order round an activation otherwise now and then, which spoils the rest of its sequence."""
    found = errors(made, expected)
    assert found.median() < 3e-6
    assert found.max() < 0.1


@ALGORITHMS
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_logits_are_those_of_the_dense_model(
    model: LlamaForCausalLM, tmp_path: Path, quant: str, tp: int, dtype: str
) -> None:
    layout = Layout(tp=tp, quant=quant, dtype=dtype)
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", layout)
    expected = logits(dense_reference(model, layout))
    made = computed(checkpoint, *SEQUENCES)
    assert_same(made, expected)
    assert_same(computed(write_engine(checkpoint, tmp_path / "engine"), *SEQUENCES), expected)
    if quant in WEIGHT_ONLY:  # nothing rounds activations
        assert errors(made, expected).max() < 3e-6
    assert errors(made, logits(model)).min() > 0.01  # the tolerance tells what was rounded


@ALGORITHMS
def test_ranks_that_outnumber_kv_heads_and_pipeline_stages(model: LlamaForCausalLM, tmp_path: Path, quant: str) -> None:
    layout = Layout(tp=4, pp=2, quant=quant, group_size=16)
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", layout)
    assert_same(computed(checkpoint, *SEQUENCES), logits(dense_reference(model, layout)))


@pytest.mark.parametrize(
    ("quant", "tolerance"), [("W4A8_AWQ", 0.2), ("W8A8_SQ_PER_CHANNEL", 0.15), ("W8A16", 0.04), ("W4A16", 0.04)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_engines_of_narrow_types_stay_near(
    model: LlamaForCausalLM, tmp_path: Path, quant: str, tolerance: float, dtype: str
) -> None:
    """By the kernels chosen for this machine; what activations are rounded to makes differences of types larger."""
    layout = Layout(quant=quant, dtype="float16")
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", layout)
    engine = write_engine(checkpoint, tmp_path / "engine", dtype=dtype)
    assert errors(computed(engine, *SEQUENCES), logits(dense_reference(model, layout))).max() < tolerance


@pytest.mark.parametrize("scale", [0.05, 0.015])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_int8_cache_rounds_keys_and_values(model: LlamaForCausalLM, tmp_path: Path, tp: int, scale: float) -> None:
    """The smaller scale saturates."""
    layout = Layout(tp=tp, kv="INT8", kv_scale=scale)
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", layout)
    made, expected = computed(checkpoint, *SEQUENCES), logits(model, scale)
    assert_same(made, expected)
    assert_same(computed(write_engine(checkpoint, tmp_path / "engine"), *SEQUENCES), expected)
    assert errors(made, logits(model)).max() > 0.01


def test_weights_and_cache_are_quantised_together(model: LlamaForCausalLM, tmp_path: Path) -> None:
    layout = Layout(tp=2, quant="W8A8_SQ_PER_CHANNEL", kv="INT8")
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", layout)
    assert_same(computed(checkpoint, *SEQUENCES), logits(dense_reference(model, layout), layout.kv_scale))


@pytest.mark.parametrize("tp", [1, 2])
def test_modelopts_own_smoothquant_checkpoint(tmp_path: Path, tp: int) -> None:
    """Near the model that it simulates the format with: the checkpoint has one smoothing for queries, keys, values."""
    import modelopt.torch.quantization as mtq

    original = small_llama(torch.float16, hidden_size=256, intermediate_size=512)
    ids = torch.randint(0, 97, (4, 32), generator=torch.Generator().manual_seed(0))
    simulated = mtq.quantize(copy.deepcopy(original), copy.deepcopy(mtq.INT8_SMOOTHQUANT_CFG), lambda model: model(ids))
    tokens = torch.randint(0, 97, (1, 20), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        expected, before = simulated(tokens).logits[0].clone(), original(tokens).logits[0]
    export_for_tensorrt_llm(simulated, tmp_path / "checkpoint", tp)
    made = computed(tmp_path / "checkpoint", tokens[0].tolist())
    assert errors(made, [expected]).item() < 0.05
    assert errors([before], [expected]).item() > 0.2


def test_a_value_of_an_int8_cache_takes_a_byte(model: LlamaForCausalLM, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", Layout(kv="INT8"))
    spec = DecoderSpec.of(read_checkpoint_config(checkpoint), 0)
    assert block_bytes(spec, torch.float32, 16) == 4 * 16 * 2 * 2 * 16


@pytest.mark.parametrize("quant", WEIGHT_ONLY)
def test_weight_only_leaves_what_tensorrt_llm_leaves(model: LlamaForCausalLM, tmp_path: Path, quant: str) -> None:
    """Whatever exclude_modules says."""
    extra = {"quantization": {"quant_algo": quant, "exclude_modules": ["*layers.1.mlp*"]}}
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", Layout(extra=extra))
    spec = DecoderSpec.of(read_checkpoint_config(checkpoint), 0)
    assert not spec.quantized("lm_head")
    assert not spec.quantized("transformer.layers.0.attention.fused_a")
    assert not spec.quantized("transformer.layers.1.mlp.fc")
    for module in ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj", "mlp.shared_expert.fc"):
        assert spec.quantized(f"transformer.layers.0.{module}")


def test_kernels_are_chosen_by_format_and_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "multiplies_int8", lambda: True)
    monkeypatch.setattr(kernels, "native_for", lambda device, dtype: None)
    assert choose_kernels("int8_sq", 128, "cpu", "float32").quantized == "int8_sq_cpu"
    assert choose_kernels("int8_sq", 128, "cuda", "float32").quantized == "int8_sq_dense"
    assert choose_kernels("int8_wo", 128, "cpu", "bfloat16").quantized == "int8_dense"
    assert choose_kernels("int4_wo", 48, "cpu", "bfloat16").quantized == "int4_packed_cpu"
    assert choose_kernels("int4_wo", 128, "cpu", "float32").quantized == "int4_dense"
    assert choose_kernels("w4a8_awq", 128, "cpu", "bfloat16").quantized == "w4a8_packed_cpu"
    assert choose_kernels("w4a8_awq", 48, "cpu", "bfloat16").quantized == "w4a8_dense"
    monkeypatch.setattr(kernels, "multiplies_int8", lambda: False)
    assert choose_kernels("int8_sq", 128, "cpu", "float32").quantized == "int8_sq_dense"


def test_kernels_of_a_cpu_are_chosen_without_starting_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def sm_of(index: int) -> int:
        asked.append(index)
        return 90

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(kernels, "sm_of", sm_of)
    assert choose_kernels("fp8", 128, "cpu", "float16").quantized == "fp8_dense"
    assert asked == []
    assert choose_kernels("fp8", 128, "cuda", "float16").quantized == "fp8_scaled_mm"
    assert asked == [1]


def test_an_engine_for_int8_instructions_needs_them_or_a_compiler(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", Layout(quant="W8A8_SQ_PER_CHANNEL"))
    engine = write_engine(checkpoint, tmp_path / "engine", kernels=Kernels(quantized="int8_sq_cpu"))
    monkeypatch.setattr(kernels, "multiplies_int8", lambda: False)
    open_model(engine)
    monkeypatch.setattr(kernels, "native", lambda: None)
    with pytest.raises(
        ForgeError, match=r"a CPU with INT8 instructions \(VNNI\) or a C\+\+ compiler, and this machine has neither"
    ):
        open_model(engine)


@pytest.mark.parametrize(
    "missing", ["weights_scaling_factor_2", "activation_scaling_factor", "prequant_scaling_factor"]
)
def test_a_scale_that_is_missing_is_an_error(model: LlamaForCausalLM, tmp_path: Path, missing: str) -> None:
    from safetensors.torch import load_file, save_file

    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", Layout(quant="W4A8_AWQ"))
    tensors = load_file(checkpoint / "rank0.safetensors")
    del tensors[f"transformer.layers.0.attention.qkv.{missing}"]
    save_file(tensors, checkpoint / "rank0.safetensors")
    with pytest.raises(ForgeError, match=f"layers.0.attention.qkv.{missing} is missing"):
        computed(checkpoint, SEQUENCES[0])
