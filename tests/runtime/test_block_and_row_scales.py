"""FP8 scaled by rows and NVFP4 against the formats' definitions, element by element."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.runtime.checkpoints import Layout, dense_reference, tiny_llama, write_checkpoint
from tests.runtime.converted import LONG
from tests.runtime.converted import computed as computed_logits
from trtforge.runtime.linears.fp8_rowwise_linear import Fp8RowwiseDense, token_scales
from trtforge.runtime.linears.linear import Kernel, Placement, Stored, merged
from trtforge.runtime.linears.nvfp4_linear import Nvfp4Dense, from_e2m1, round_to_e2m1, round_to_nvfp4
from trtforge.runtime.linears.weights import Weights

TOLERANCES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)]
)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def computed(kernel: Kernel, stored: Stored, x: Tensor, out: int) -> Tensor:
    packed = kernel.pack(stored, x.dtype)
    weights = Weights.of({f"m.{name}": tensor for name, tensor in packed.items()})
    linear = kernel.load(weights, "m", (out, x.shape[1]), Placement(torch.device("cpu"), x.dtype), bias=True)
    weights.finish()
    return linear(x)


def relative(made: Tensor, reference: Tensor) -> float:
    return float((made.float() - reference).norm() / reference.norm())


@TOLERANCES
def test_fp8_rows_scale_each_token_and_each_output(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(32, 64, generator=generator) * 100).to(torch.float8_e4m3fn)
    scales, bias = torch.rand(32, generator=generator) * 0.01, torch.randn(32, generator=generator)
    x = (torch.randn(5, 64, generator=generator) * torch.tensor([[0.01], [1.0], [3.0], [9.0], [50.0]])).to(dtype)
    amax = x.float().abs().amax(dim=1, keepdim=True)
    quantised = (x.float() / (amax / 448)).to(torch.float8_e4m3fn).float() * (amax / 448)
    reference = quantised @ (weight.float() * scales[:, None]).t() + bias
    made = computed(Fp8RowwiseDense(), Stored(weight, bias, weights_scale=scales), x, 32)
    assert made.dtype is dtype
    assert relative(made, reference) < tolerance


def test_a_token_of_zeros_has_a_scale() -> None:
    assert token_scales(torch.zeros(1, 4)).item() == pytest.approx(1 / (448 * 512))


def nvfp4_layer() -> tuple[Stored, Tensor]:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (32, 64), generator=generator)
    block = (torch.rand(32, 4, generator=generator) * 400).to(torch.float8_e4m3fn)
    values = torch.where(codes < 8, 1.0, -1.0) * E2M1[codes & 7]
    scale, activation = torch.tensor([3e-5]), torch.tensor([1.7e-3])
    matrix = values * block.float().repeat_interleave(16, dim=1) * scale
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    bias = torch.randn(32, generator=generator)
    return Stored(packed, bias, block, activation, weights_scale_2=scale), matrix


@TOLERANCES
def test_nvfp4_rounds_activations_in_blocks(dtype: torch.dtype, tolerance: float) -> None:
    stored, matrix = nvfp4_layer()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert stored.activation_scale is not None
    reference = nvfp4(x.float(), stored.activation_scale.item()) @ matrix.t() + stored.bias
    assert relative(computed(Nvfp4Dense(), stored, x, 32), reference) < tolerance


def nvfp4(x: Tensor, scale: float) -> Tensor:
    """The values that x is rounded to, by search among all E2M1 values."""
    out = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], 16):
            block = x[row, first : first + 16]
            step = (block.abs().max() / (6 * scale)).to(torch.float8_e4m3fn).float() * scale
            if step > 0:
                nearest = (block.abs()[:, None] / step - E2M1).abs().argmin(dim=1)
                out[row, first : first + 16] = block.sign() * E2M1[nearest] * step
    return out


def test_e2m1_rounds_halves_to_even_and_saturates() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 7.0, 0.2, 0.3])
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 0.0, 0.5]
    assert round_to_e2m1(values).tolist() == expected
    assert round_to_e2m1(-values).tolist() == [-value for value in expected]


def test_e2m1_codes_low_nibble_first() -> None:
    assert from_e2m1(torch.tensor([[0x71, 0x9F]], dtype=torch.uint8)).tolist() == [[0.5, 6.0, -6.0, -0.5]]


def test_a_block_of_zeros_stays_zero() -> None:
    assert torch.equal(round_to_nvfp4(torch.zeros(1, 32), torch.tensor([1e-3])), torch.zeros(1, 32))


def test_nvfp4_layers_are_merged_where_they_share_the_tensor_scale() -> None:
    stored, _ = nvfp4_layer()
    both = merged((stored, stored))
    assert both is not None
    assert both.weights_scale is not None
    assert both.weights_scale.shape == (64, 4)
    other = Stored(stored.weight, stored.bias, stored.weights_scale, stored.activation_scale)
    assert merged((stored, other)) is None


@pytest.mark.parametrize("quant", ["FP8_PER_CHANNEL_PER_TOKEN", "NVFP4"])
def test_the_logits_are_those_of_the_dense_model(quant: str, tmp_path: Path) -> None:
    """Sums in another order round an activation otherwise now and then."""
    model, layout = tiny_llama(num_hidden_layers=1), Layout(quant=quant)
    (made,) = computed_logits(write_checkpoint(model, tmp_path / "checkpoint", layout), LONG)
    with torch.no_grad():
        expected, plain = (each(torch.tensor([LONG])).logits[0] for each in (dense_reference(model, layout), model))
    errors = (made - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 3e-6
    assert errors.max() < 0.1
    assert relative(expected, plain) > 0.02
