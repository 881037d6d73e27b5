"""Compensated rounding against its definition: the output error on the data, column by column and as a whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trtforge.calibrate.compensation import DAMPING, Factor, best_steps, compensate
from trtforge.calibrate.rounding import Input, round_linears
from trtforge.calibrate.statistics import InputStatistics
from trtforge.formats.calibration import LEAST_TOKENS
from trtforge.models.transforms import dequantize_int4, int4_scales, quantize_int4, unpack_int4


def correlated(seed: int, tokens: int, width: int) -> Tensor:
    """(tokens, width) inputs of a few directions and some noise, as hidden states are."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(width // 4, width, generator=generator)
    inputs = torch.randn(tokens, width // 4, generator=generator) @ directions
    return inputs / (width // 4) ** 0.5 + 0.2 * torch.randn(tokens, width, generator=generator)


def error(weight: Tensor, restored: Tensor, inputs: Tensor) -> float:
    return float((inputs @ (restored - weight).T).square().sum())


def factor_of(inputs: Tensor) -> Factor:
    found = Factor.of(inputs.T @ inputs, len(inputs))
    assert found is not None
    return found


def test_the_factor_is_that_of_the_damped_gram_matrix() -> None:
    inputs = correlated(0, 300, 64)
    gram = inputs.T @ inputs
    triangle = factor_of(inputs).triangle
    assert torch.equal(triangle, triangle.triu())
    expected = gram + DAMPING * gram.diagonal().mean() * torch.eye(64)
    assert torch.allclose(triangle @ triangle.T, expected, rtol=1e-4, atol=1e-2)


def test_few_tokens_are_damped_more() -> None:
    inputs = correlated(0, 16, 64)
    gram = inputs.T @ inputs
    expected = gram + 4 * DAMPING * gram.diagonal().mean() * torch.eye(64)
    triangle = factor_of(inputs).triangle
    assert torch.allclose(triangle @ triangle.T, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("gram", [torch.zeros(4, 4), torch.full((4, 4), torch.nan), torch.full((4, 4), torch.inf)])
def test_no_factor_without_numbers(gram: Tensor) -> None:
    assert Factor.of(gram, 10) is None


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), outliers=st.floats(0, 2))
def test_less_than_half_of_the_error_is_left(seed: int, outliers: float) -> None:
    """On the data itself, with and without channels that dominate, at a scale that another search chose."""
    generator = torch.Generator().manual_seed(seed)
    inputs = correlated(seed, 512, 128) * torch.rand(128, generator=generator).mul(outliers).exp()
    weight, scale = torch.randn(48, 128, generator=generator), torch.rand(128, generator=generator) + 0.5
    found = compensate(weight, scale, factor_of(inputs), 64)
    assert found.codes.dtype is torch.int8
    assert found.codes.shape == (48, 128)
    assert found.scales.shape == (48, 2)
    restored = dequantize_int4(found.codes, found.scales) * scale
    steps = int4_scales(weight / scale, 64)
    nearest = dequantize_int4(quantize_int4(weight / scale, steps), steps) * scale
    assert error(weight, restored, inputs) < 0.5 * error(weight, nearest, inputs)


def test_the_reported_errors_are_those_of_the_damped_matrix() -> None:
    inputs, weight = correlated(3, 400, 64), torch.randn(10, 64, generator=torch.Generator().manual_seed(3))
    factor = factor_of(inputs)
    found = compensate(weight, torch.ones(64), factor, 32)
    difference = dequantize_int4(found.codes, found.scales) - weight
    assert torch.allclose(found.errors, factor.errors(difference), rtol=1e-3)
    assert torch.allclose(factor.errors(difference), (difference @ factor.triangle).square().sum(1), rtol=1e-5)


def test_rows_do_not_depend_on_one_another() -> None:
    """So weights may be rounded some rows at a time."""
    inputs, weight = correlated(4, 400, 64), torch.randn(12, 64, generator=torch.Generator().manual_seed(4))
    factor = factor_of(inputs)
    whole, part = (compensate(rows, torch.ones(64), factor, 32) for rows in (weight, weight[4:8]))
    assert (whole.codes[4:8] == part.codes).float().mean() > 0.99
    assert torch.allclose(whole.scales[4:8], part.scales, rtol=1e-5)


def test_uncorrelated_inputs_are_rounded_to_the_nearest() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(5))
    found = compensate(weight, torch.ones(32), factor_of(torch.eye(32)), 32)
    assert torch.equal(found.codes, quantize_int4(weight, found.scales))


def test_a_group_of_zeros_has_a_scale() -> None:
    found = compensate(torch.zeros(2, 64), torch.ones(64), factor_of(correlated(6, 100, 64)), 32)
    assert torch.equal(found.scales, torch.ones(2, 2))
    assert not found.codes.any()


def test_a_step_leaves_out_what_is_rare() -> None:
    """One large element among many whose errors weigh more: the range shrinks; alone it does not."""
    columns = torch.full((64, 1), 0.31)
    columns[0] = 1.0
    weights = torch.ones(64)
    weights[0] = 1e-6
    assert float(best_steps(columns, weights)) < 0.95 / 7
    assert float(best_steps(columns[:1], weights[:1])) == pytest.approx(1 / 7)


def observed(inputs: Tensor) -> InputStatistics:
    found = InputStatistics.empty(inputs.shape[1], torch.device("cpu"), gram=True)
    for rows in inputs.split(50) if len(inputs) else ():
        found.update(rows)
    return found


def test_linears_of_one_input_share_a_scale_that_every_dtype_holds() -> None:
    inputs, weight = correlated(7, 600, 64), torch.randn(24, 64, generator=torch.Generator().manual_seed(7))
    found = round_linears([Input(observed(inputs), ("q", "k"), (16, 8), weight.clone)], 32)
    scale = found.tensors["q.pre_quant_scale"]
    assert torch.equal(scale, found.tensors["k.pre_quant_scale"])
    assert torch.equal(scale, scale.half().float())
    assert torch.equal(scale, scale.bfloat16().float())
    for name, rows in (("q", slice(0, 16)), ("k", slice(16, 24))):
        codes = unpack_int4(found.codes[f"{name}.codes"])
        restored = dequantize_int4(codes, found.codes[f"{name}.scales"]) * scale
        energy = float((inputs @ weight[rows].T).square().sum())
        measured = error(weight[rows], restored, inputs) / energy
        assert found.tensors[f"{name}.output_error"].item() == pytest.approx(measured, rel=0.02)
        assert found.tensors[f"{name}.output_error"] < 0.5 * found.tensors[f"{name}.nearest_error"]
        assert torch.equal(found.tensors[f"{name}.weight_column_amax"], restored.abs().amax(0))
        assert found.tensors[f"{name}.tokens"].item() == 600


def test_experts_with_few_tokens_are_left_to_the_nearest() -> None:
    """They share the scale of the others; one that no token reached does not count for it."""
    weights = [torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    counts = (LEAST_TOKENS, LEAST_TOKENS - 1, 0)
    inputs = [
        Input(observed(correlated(8, 400, 64)[:tokens]), (f"w{number}",), (8,), weights[number].clone)
        for number, tokens in enumerate(counts)
    ]
    found = round_linears(inputs, 32)
    assert {name.removesuffix(".codes") for name in found.codes if name.endswith(".codes")} == {"w0"}
    for name in ("w1", "w2"):
        assert torch.equal(found.tensors[f"{name}.pre_quant_scale"], found.tensors["w0.pre_quant_scale"])
        assert found.tensors[f"{name}.output_error"] == found.tensors[f"{name}.nearest_error"]
    assert not torch.equal(found.tensors["w0.pre_quant_scale"], torch.ones(64))


@pytest.mark.parametrize("width", [6, 32])
def test_a_gram_matrix_of_few_tokens_is_exact(width: int) -> None:
    inputs = correlated(9, 4 * width, width) if width > 6 else torch.randn(24, 6)
    found = InputStatistics.empty(width, torch.device("cpu"), gram=True)
    for rows in inputs.split(7):
        found.update(rows)
    expected = inputs.T @ inputs
    assert torch.allclose(found.square_sum, expected.diagonal(), rtol=1e-4)
    assert torch.allclose(found.take_gram(), expected, rtol=1e-4, atol=1e-3)


def test_a_gram_matrix_of_many_tokens_is_close_whatever_recurs() -> None:
    """Every 512th token is large and the same, as the first of each sequence often is."""
    inputs = correlated(10, 40_000, 64)
    inputs[::512] = 30 * torch.randn(64, generator=torch.Generator().manual_seed(10))
    found = InputStatistics.empty(64, torch.device("cpu"), gram=True)
    for rows in inputs.split(1000):
        found.update(rows)
    assert found.tokens == len(inputs)
    gram = found.take_gram()
    assert torch.equal(gram, gram.T)
    assert bool((torch.linalg.eigvalsh(gram) > 0).all())
    difference = torch.randn(64, 64, generator=torch.Generator().manual_seed(11))
    expected = float((inputs @ difference.T).square().sum())
    assert float(((difference @ gram) * difference).sum()) == pytest.approx(expected, rel=0.03)
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(12))
    errors = []
    for each in (gram, inputs.T @ inputs):
        factor = Factor.of(each, len(inputs))
        assert factor is not None
        rounded = compensate(weight, torch.ones(64), factor, 32)
        errors.append(error(weight, dequantize_int4(rounded.codes, rounded.scales), inputs))
    assert errors[0] < 1.1 * errors[1]
