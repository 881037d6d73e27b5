"""LayerNorm, norms with float32 weights and activations by kernels, against torch's operations in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from trtforge.runtime.architecture.activations import NATIVE_ACTIVATIONS
from trtforge.runtime.decoder.norms import LayerNorm, zero_centred
from trtforge.runtime.native.activations import activate
from trtforge.runtime.native.bindings import ACTIVATIONS, Native
from trtforge.runtime.native.compiler import VARIABLE
from trtforge.runtime.native.norms import norm, norm_heads

EXACT = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


@pytest.fixture(scope="module")
def kernels(level: Native) -> Native:
    return level


def near(made: Tensor, expected: Tensor, dtype: torch.dtype, condition: float = 1.0) -> None:
    """`condition`: how many times as large as that of a float32 intermediate result the relative error may be."""
    assert made.dtype is dtype
    assert made.shape == expected.shape
    error = float((made - expected).abs().max() / expected.abs().max())
    assert error <= EXACT[dtype] + (condition - 1) * 2**-23, f"relative error {error}"


def cancellation(x: Tensor) -> float:
    """How much larger than their distance from the mean of their row values are, in the worst row."""
    x = x.double()
    return max(1.0, float((x.abs().amax(-1) / (x.var(-1, correction=0) + 1e-3).sqrt()).max()))


def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, *, centred: bool) -> Tensor:
    x, size = x.double(), x.shape[-1:]
    normed = functional.layer_norm(x, size, eps=epsilon) if centred else functional.rms_norm(x, size, eps=epsilon)
    return normed * weight.double() + (0.0 if bias is None else bias.double())


@settings(max_examples=25)
@given(
    rows=st.integers(1, 20),
    heads=st.integers(0, 5),
    size=st.integers(2, 80) | st.sampled_from([96, 128, 1024]),
    types=st.sampled_from(
        [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
    ),
    centred=st.booleans(),
    biased=st.booleans(),
    mean=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 9),
)
def test_norms(
    rows: int,
    heads: int,
    size: int,
    types: tuple[torch.dtype, torch.dtype],
    centred: bool,
    biased: bool,
    mean: float,
    seed: int,
    kernels: Native,
) -> None:
    """Of rows with one weight, and of heads with a weight each, which may be a slice of more heads."""
    torch.manual_seed(seed)
    dtype, of_weights = types
    shape = (heads, size) if heads else (size,)
    weight, bias = torch.randn(shape).to(of_weights), torch.randn(shape).to(of_weights) if biased else None
    x = (torch.randn(rows, *shape) + mean).to(dtype)
    made, expected = (
        norm(kernels, x, weight, bias, 1e-3, centred=centred),
        by_torch(x, weight, bias, 1e-3, centred=centred),
    )
    near(made, expected, dtype, cancellation(x) if centred else 1.0)
    whole = torch.randn(rows, max(1, heads) + 3, size).to(dtype)
    part, others = whole[:, 1:-2], whole[:, -2:].clone()
    expected = by_torch(part, weight, bias, 1e-3, centred=centred)
    condition = cancellation(part) if centred else 1.0
    norm_heads(kernels, part, weight, bias, 1e-3, centred=centred)
    near(part, expected, dtype, condition)
    assert torch.equal(whole[:, -2:], others)


def test_a_large_mean_leaves_the_deviations(kernels: Native) -> None:
    x, ones = torch.randn(3, 256) + 1000, torch.ones(256)
    expected = by_torch(x, ones, None, 1e-5, centred=True)
    assert (norm(kernels, x, ones, None, 1e-5, centred=True) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("function", NATIVE_ACTIVATIONS)
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("shape", [(3, 5), (7, 33), (2, 16, 64), (40, 1024)])
def test_activations(kernels: Native, function: object, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape) * 4).to(dtype)
    x.view(-1)[:4] = torch.tensor([0.0, -0.0, 60.0, -60.0])
    near(activate(kernels, x, NATIVE_ACTIVATIONS[function]), function(x.double()), dtype)  # type: ignore[index, operator]


def test_gelu_is_exact_everywhere(kernels: Native) -> None:
    """To the precision of float32 where it is large, and in the tail, where 1 + erf would cancel."""
    x = torch.cat((torch.linspace(-12, 12, 200_003), torch.linspace(-1e-3, 1e-3, 1001), torch.tensor([-1e30, 1e30])))
    exact = x.double() * torch.special.erfc(-x.double() * 0.5**0.5) / 2
    error = (activate(kernels, x, "gelu") - exact).abs()
    assert (error <= 2.5e-7 * x.double().clamp(min=1)).all()
    tail = (x < -3) & (x > -9)
    assert (error[tail] <= 2e-3 * exact[tail].abs()).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_hide_no_wrong_numbers(kernels: Native, name: str) -> None:
    """Not-a-number stays one, in whole vectors and behind them."""
    x = torch.zeros(19)
    x[[2, 17]] = float("nan")
    assert activate(kernels, x, name).isnan().nonzero().flatten().tolist() == [2, 17]


@pytest.mark.parametrize("dtype", EXACT)
def test_torch_computes_the_same_norms(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    x, weight, rows = torch.randn(4, 3, 40).to(dtype), torch.randn(40).to(dtype), torch.randn(3, 40).to(dtype)
    made = []
    for kind in ("", "torch"):
        monkeypatch.setenv(VARIABLE, kind)
        norms = LayerNorm(weight, weight, 1e-5), LayerNorm(rows, None, 1e-5), zero_centred(weight, 1e-6)
        made.append([each(x).double() for each in norms])
        heads = x.clone()
        assert [each.in_place(heads) for each in norms] == [kind == ""] * 3
    for by_kernels, wanted in zip(*made, strict=True):
        assert (by_kernels - wanted).abs().max() <= 2 * EXACT[dtype] * wanted.abs().max()
