"""From a quantised checkpoint to logits: those of a dense float32 model with the weights that the source means."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.modelopt import dense, export_for_hugging_face, format_of, quantized_by_modelopt
from tests.quantized import (
    AWQ,
    GPTQ,
    INT8_INPUTS,
    LINEARS,
    NVFP4_INPUTS,
    SCHEMES,
    Pack,
    awq,
    compressed,
    fp8_one_scale,
    fp8_rows,
    fp8_static,
    gptq,
    int8_static,
    nvfp4_divided,
    pack_quantized,
    pack_quantized_by_output,
    write_quantized,
)
from tests.runtime.checkpoints import write_engine
from tests.runtime.converted import computed
from trtforge.convert.stage import ConvertConfig, convert

TOKENS = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(3)).tolist()
STATIC = compressed("float-quantized", "tensor", "tensor")
ROWS = compressed("float-quantized", "channel", "token")
ONE_SCALE = compressed("float-quantized", "tensor", "token")
INT4 = compressed("pack-quantized", "group", None)
INT4_BY_OUTPUT = compressed("pack-quantized", "channel", None)
INT8 = compressed("int-quantized", "channel", "tensor")
NVFP4 = compressed("nvfp4-pack-quantized", "tensor_group", "tensor_group")
LAYOUTS = pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 2, "pp": 2}], ids=["tp1", "tp2", "tp2pp2"])
Round = Callable[[str, Tensor], Tensor]
"""What becomes of the inputs of a module before its matrix."""


def logits(model: torch.nn.Module, round_inputs: Round | None = None) -> Tensor:
    for name, module in model.named_modules():
        if round_inputs and name.endswith(LINEARS):
            module.register_forward_pre_hook(lambda _, inputs, name=name: (round_inputs(name, inputs[0]),))
    with torch.no_grad():
        found: Tensor = model(torch.tensor([TOKENS])).logits[0]  # type: ignore[operator]
        return found


def relative(made: Tensor, reference: Tensor) -> float:
    return float((made - reference).norm() / reference.norm())


def to_e4m3(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def by_token(tp: int) -> Round:
    """Of a row-parallel layer each rank scales its own share of a token."""

    def rounded(name: str, values: Tensor) -> Tensor:
        shares = values.chunk(tp if name.endswith(("o_proj", "down_proj")) else 1, dim=-1)
        return torch.cat([to_e4m3(part, part.abs().amax(dim=-1, keepdim=True) / 448) for part in shares], dim=-1)

    return rounded


def by_tensor(name: str, values: Tensor) -> Tensor:
    group = (0, 0, 0, 1, 2, 2, 3)[LINEARS.index(name.rpartition(".")[2])]
    return to_e4m3(values, torch.tensor(0.03125 * (1 + group / 9)))


@LAYOUTS
@pytest.mark.parametrize(
    ("pack", "values"),
    [(awq(), AWQ), (gptq(), GPTQ), (pack_quantized, INT4)],
    ids=["awq", "gptq", "pack_quantized"],
)
def test_int4(pack: Pack, values: dict[str, Any], layout: dict[str, int], tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "hf", pack, values)
    out = convert(ConvertConfig(**layout), source.directory, tmp_path / "out").path
    (made,) = computed(out, TOKENS)
    assert relative(made, logits(source.model)) < 1e-5


@pytest.mark.parametrize(
    ("pack", "values"),
    [
        (awq(by_output=True), AWQ | {"group_size": -1}),
        (gptq(by_output=True), GPTQ | {"group_size": -1, "desc_act": True}),
        (pack_quantized_by_output, INT4_BY_OUTPUT),
    ],
    ids=["awq", "gptq", "pack_quantized"],
)
def test_int4_with_a_scale_for_each_output(pack: Pack, values: dict[str, Any], tmp_path: Path) -> None:
    """Every group of 128 inputs gets it. The order of quantisation (desc_act) moves no input out of the one group."""
    source = write_quantized(tmp_path / "hf", pack, values, hidden_size=256, intermediate_size=512)
    for tp in (1, 2):
        out = convert(ConvertConfig(tp=tp), source.directory, tmp_path / f"tp{tp}").path
        (made,) = computed(out, TOKENS)
        assert relative(made, logits(source.model)) < 1e-5


@LAYOUTS
def test_fp8_with_static_scales(layout: dict[str, int], tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "hf", fp8_static(), STATIC, dtype=torch.bfloat16)
    out = convert(ConvertConfig(**layout), source.directory, tmp_path / "out").path
    (made,) = computed(out, TOKENS)
    assert relative(made, logits(source.model, by_tensor)) < 5e-3  # sums in another order round a few inputs otherwise


@LAYOUTS
@pytest.mark.parametrize(("pack", "values"), [(fp8_rows, ROWS), (fp8_one_scale, ONE_SCALE)], ids=["rows", "one_scale"])
def test_fp8_with_a_scale_for_each_token(
    pack: Pack, values: dict[str, Any], layout: dict[str, int], tmp_path: Path
) -> None:
    source = write_quantized(tmp_path / "hf", pack, values, dtype=torch.bfloat16)
    out = convert(ConvertConfig(**layout), source.directory, tmp_path / "out").path
    (made,) = computed(out, TOKENS)
    expected = logits(source.model, by_token(layout.get("tp", 1)))
    assert relative(made[:1], expected[:1]) < 1e-4
    assert float(((made - expected).norm(dim=-1) / expected.norm(dim=-1)).median()) < 1e-4
    assert relative(made, expected) < 3e-2  # sums in another order round a few inputs otherwise, by up to a sixteenth


@pytest.mark.parametrize(
    ("pack", "values"),
    [
        (fp8_static(), STATIC),
        (fp8_rows, ROWS),
        (pack_quantized, INT4),
        (pack_quantized_by_output, INT4_BY_OUTPUT),
        (int8_static, INT8),
    ],
    ids=["tensor", "rows", "pack_quantized", "pack_quantized_by_output", "int8"],
)
def test_compressed_tensors_own_reading(pack: Pack, values: dict[str, Any], tmp_path: Path) -> None:
    """The package that defines the format computes the same logits from the same files."""
    from transformers import AutoModelForCausalLM

    source = write_quantized(tmp_path / "hf", pack, values, dtype=torch.float16)
    out = convert(ConvertConfig(), source.directory, tmp_path / "out").path
    (made,) = computed(out, TOKENS)
    model = AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32)
    assert relative(made, logits(model)) < 5e-3


@LAYOUTS
def test_int8_with_static_scales(layout: dict[str, int], tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "hf", int8_static, INT8, dtype=torch.bfloat16)
    out = convert(ConvertConfig(**layout), source.directory, tmp_path / "out").path
    (made,) = computed(out, TOKENS)
    expected = logits(source.model, lambda _, values: (values / INT8_INPUTS).round().clamp(-128, 127) * INT8_INPUTS)
    assert relative(made, expected) < 5e-3  # sums in another order round a few inputs otherwise


@LAYOUTS
def test_nvfp4_with_scales_that_divide(layout: dict[str, int], tmp_path: Path) -> None:
    source = write_quantized(tmp_path / "hf", nvfp4_divided, NVFP4, dtype=torch.bfloat16)
    out = convert(ConvertConfig(**layout), source.directory, tmp_path / "out").path
    (made,) = computed(out, TOKENS)
    expected = logits(source.model, lambda _, values: rounded_to_nvfp4(values, torch.tensor(1 / NVFP4_INPUTS)))
    assert float(((made - expected).norm(dim=-1) / expected.norm(dim=-1)).median()) < 1e-5
    assert relative(made, expected) < 2e-2  # sums in another order round a few inputs otherwise


def test_compressed_tensors_own_reading_of_nvfp4() -> None:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * 0.1
    stored, meant = nvfp4_divided("q_proj", weight)
    scheme = QuantizationScheme(targets=["Linear"], **SCHEMES["nvfp4-pack-quantized"])
    read = NVFP4PackedCompressor.decompress(stored, scheme)["weight"]
    assert torch.allclose(read.float(), meant, rtol=2**-7, atol=0)


def rounded_to_nvfp4(values: Tensor, step: Tensor) -> Tensor:
    """By ModelOpt's own class of such tensors."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    packed, blocks, _ = NVFP4QTensor.quantize(values.flatten(0, -2), 16, None, step)
    restored = packed.dequantize(torch.float32, scale=blocks, double_scale=step, block_sizes={-1: 16})
    return restored.reshape(values.shape)


def rounded_as_stored(stored: dict[str, Tensor]) -> Round:
    """What each module of ModelOpt's checkpoint does to its inputs."""

    def rounded(module: str, values: Tensor) -> Tensor:
        found, step = format_of(stored, module), stored.get(f"{module}.input_scale", torch.ones(1))
        values = values * (stored.get(f"{module}.pre_quant_scale", torch.ones(1)) / step)
        match found:
            case "fp8" | "w4a8_awq":
                return to_e4m3(values, torch.ones(1)) * step
            case "int8_sq":
                return values.round().clamp(-128, 127) * step
            case "nvfp4":
                return rounded_to_nvfp4(values * step, step)
            case _:
                return values

    return rounded


def assert_computes(directory: Path, out: Path, tp: int) -> Path:
    """The converted checkpoint computes what the export means."""
    stored = load_file(directory / "model.safetensors")
    unscaled = {name: tensor for name, tensor in stored.items() if not name.endswith("pre_quant_scale")}
    reference = logits(dense(unscaled), rounded_as_stored(stored))
    path = convert(ConvertConfig(dtype="float32", tp=tp), directory, out).path
    (made,) = computed(path, TOKENS)
    assert float(((made - reference).norm(dim=-1) / reference.norm(dim=-1)).median()) < 1e-5
    assert relative(made, reference) < 2e-2  # sums in another order round a few inputs otherwise
    return path


@pytest.mark.parametrize("format_", ["fp8", "int4_awq", "w4a8_awq", "int8_sq", "nvfp4"])
def test_modelopts_checkpoints(format_: str, tmp_path: Path) -> None:
    export_for_hugging_face(quantized_by_modelopt(format_), tmp_path / "hf")
    for tp in (1, 2):
        assert_computes(tmp_path / "hf", tmp_path / f"tp{tp}", tp)


@pytest.mark.parametrize(("format_", "close"), [("fp8_pc_pt", 5e-3), ("nvfp4", 1e-6)])
def test_an_engine_computes_what_its_checkpoint_does(format_: str, close: float, tmp_path: Path) -> None:
    """Inputs that are rounded to E4M3 may be rounded to the next number, where sums differ in their order."""
    export_for_hugging_face(quantized_by_modelopt(format_), tmp_path / "hf")
    out = convert(ConvertConfig(dtype="float32"), tmp_path / "hf", tmp_path / "out").path
    engine = write_engine(out, tmp_path / "engine")
    assert relative(computed(engine, TOKENS)[0], computed(out, TOKENS)[0]) < close
