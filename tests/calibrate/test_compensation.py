"""Compensated rounding against its definition: the output error on the data, column by column and as a whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trtforge.calibrate.compensation import DAMPING, Factor, compensate
from trtforge.calibrate.grids import Int4Grid, Nvfp4Grid
from trtforge.calibrate.rounding import Input, round_linears
from trtforge.calibrate.statistics import InputStatistics
from trtforge.formats.calibration import LEAST_TOKENS
from trtforge.models.transforms import (
    dequantize_int4,
    int4_scales,
    nvfp4_block_scales,
    nvfp4_global_scale,
    quantize_int4,
    quantize_nvfp4,
    unpack_int4,
)
from trtforge.runtime.linears.nvfp4_linear import from_e2m1, round_to_nvfp4


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
    factor = factor_of(inputs)
    assert torch.equal(factor.lower, factor.lower.tril())
    expected = gram + DAMPING * gram.diagonal().mean() * torch.eye(64)
    expected = expected[factor.order][:, factor.order]
    assert torch.equal(factor.gram.diagonal(), factor.gram.diagonal().sort().values)
    assert torch.allclose(factor.gram, expected, rtol=1e-4, atol=1e-2)
    assert torch.allclose(factor.lower @ factor.lower.T, expected, rtol=1e-4, atol=1e-2)


def test_few_tokens_are_damped_more() -> None:
    inputs = correlated(0, 16, 64)
    gram = inputs.T @ inputs
    expected = gram + 4 * DAMPING * gram.diagonal().mean() * torch.eye(64)
    factor = factor_of(inputs)
    expected = expected[factor.order][:, factor.order]
    assert torch.allclose(factor.lower @ factor.lower.T, expected, rtol=1e-4, atol=1e-3)


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
    found = compensate(weight, scale, factor_of(inputs), Int4Grid(64))
    assert found.levels.dtype is torch.int8
    assert found.levels.shape == (48, 128)
    assert found.steps.shape == (48, 2)
    restored = found.values * scale
    steps = int4_scales(weight / scale, 64)
    nearest = dequantize_int4(quantize_int4(weight / scale, steps), steps) * scale
    assert error(weight, restored, inputs) < 0.5 * error(weight, nearest, inputs)


def test_the_reported_errors_are_those_of_the_damped_matrix() -> None:
    inputs, weight = correlated(3, 400, 64), torch.randn(10, 64, generator=torch.Generator().manual_seed(3))
    factor = factor_of(inputs)
    found = compensate(weight, torch.ones(64), factor, Int4Grid(32))
    difference = found.values - weight
    ordered = difference[:, factor.order]
    assert torch.allclose(factor.errors(difference), ((ordered @ factor.gram) * ordered).sum(1), rtol=1e-3)
    assert torch.allclose(factor.errors(difference), (ordered @ factor.lower).square().sum(1), rtol=1e-5)
    undamped = float(factor.undamped_errors(difference).sum())
    assert undamped == pytest.approx(error(weight, found.values, inputs), rel=1e-3)


def test_rows_do_not_depend_on_one_another() -> None:
    """So weights may be rounded some rows at a time."""
    inputs, weight = correlated(4, 400, 64), torch.randn(12, 64, generator=torch.Generator().manual_seed(4))
    factor = factor_of(inputs)
    whole, part = (compensate(rows, torch.ones(64), factor, Int4Grid(32)) for rows in (weight, weight[4:8]))
    assert (whole.levels[4:8] == part.levels).float().mean() > 0.99
    assert torch.allclose(whole.steps[4:8], part.steps, rtol=1e-5)


def test_uncorrelated_inputs_are_rounded_to_the_nearest() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(5))
    found = compensate(weight, torch.ones(32), factor_of(torch.eye(32)), Int4Grid(32))
    assert torch.equal(found.levels, quantize_int4(weight, found.steps))


def test_a_group_of_zeros_has_a_scale() -> None:
    found = compensate(torch.zeros(2, 64), torch.ones(64), factor_of(correlated(6, 100, 64)), Int4Grid(32))
    assert torch.equal(found.steps, torch.ones(2, 2))
    assert not found.levels.any()


def test_a_step_leaves_out_what_is_rare() -> None:
    """One large element among many whose errors weigh more: the range shrinks; alone it does not."""
    columns = torch.full((64, 1), 0.31)
    columns[0] = 1.0
    weights = torch.ones(64)
    weights[0] = 1e-6
    assert float(Int4Grid(64).best_steps(columns, weights)) < 0.95 / 7
    assert float(Int4Grid(1).best_steps(columns[:1], weights[:1])) == pytest.approx(1 / 7)


def observed(inputs: Tensor) -> InputStatistics:
    found = InputStatistics.empty(inputs.shape[1], torch.device("cpu"), gram=True)
    for rows in inputs.split(50) if len(inputs) else ():
        found.update(rows)
    return found


def test_linears_of_one_input_share_a_scale_that_every_dtype_holds() -> None:
    inputs, weight = correlated(7, 600, 64), torch.randn(24, 64, generator=torch.Generator().manual_seed(7))
    found = round_linears([Input(observed(inputs), ("q", "k"), (16, 8), weight.clone, Int4Grid(32))], columns=True)
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
        Input(observed(correlated(8, 400, 64)[:tokens]), (f"w{number}",), (8,), weights[number].clone, Int4Grid(32))
        for number, tokens in enumerate(counts)
    ]
    found = round_linears(inputs)
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
        rounded = compensate(weight, torch.ones(64), factor, Int4Grid(32))
        errors.append(error(weight, rounded.values, inputs))
    assert errors[0] < 1.1 * errors[1]


def test_a_gram_matrix_of_bfloat16_tokens_is_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where entries are large beside the smallest eigenvalues, as with a mean that all tokens have."""
    monkeypatch.setattr("trtforge.calibrate.statistics.search_dtype", lambda device: "bfloat16")
    inputs = (correlated(13, 2000, 256) + 3).bfloat16()
    found = InputStatistics.empty(256, torch.device("cpu"), gram=True)
    for rows in inputs.split(500):
        found.update(rows)
    exact = inputs.double().T @ inputs.double()
    difference = found.take_gram() - exact
    assert torch.linalg.matrix_norm(difference, 2) < 0.2 * DAMPING * exact.diagonal().mean()
    rounded = sum((part.T @ part).double() for part in inputs.split(500)) - exact
    assert torch.linalg.matrix_norm(rounded, 2) > 2 * torch.linalg.matrix_norm(difference, 2)


def nvfp4_grid(weight: Tensor) -> Nvfp4Grid:
    return Nvfp4Grid(nvfp4_global_scale(weight.abs().amax().reshape(1)).expand(len(weight)))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_nvfp4_is_compensated_on_its_own_values(seed: int) -> None:
    """What is stored are the values with which errors were made up for; nearest is what conversion does."""
    inputs, weight = correlated(seed, 512, 128), torch.randn(24, 128, generator=torch.Generator().manual_seed(seed))
    grid, glob = nvfp4_grid(weight), nvfp4_global_scale(weight.abs().amax())
    found = compensate(weight, torch.ones(128), factor_of(inputs), grid)
    codes, scales = grid.stored(found.levels, found.steps)
    assert (codes.shape, codes.dtype) == ((24, 64), torch.uint8)
    assert (scales.shape, scales.dtype) == ((24, 8), torch.float8_e4m3fn)
    assert torch.allclose(from_nvfp4(codes, scales, glob), found.values, rtol=1e-6)
    blocks = nvfp4_block_scales(weight, glob)
    nearest = from_nvfp4(quantize_nvfp4(weight, blocks, glob), blocks, glob)
    assert torch.allclose(grid.nearest(weight), nearest, rtol=1e-6)
    assert error(weight, found.values, inputs) < 0.6 * error(weight, nearest, inputs)


def from_nvfp4(codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
    values: Tensor = from_e2m1(codes).unflatten(1, (-1, 16)) * (scales.float() * tensor_scale).unsqueeze(2)
    return values.flatten(1)


def test_an_nvfp4_block_of_zeros_has_a_scale() -> None:
    weight = torch.randn(2, 32, generator=torch.Generator().manual_seed(6))
    weight[:, :16] = 0
    grid = nvfp4_grid(weight)
    found = compensate(weight, torch.ones(32), factor_of(torch.eye(32)), grid)
    assert not found.levels[:, :16].any()
    assert torch.equal(grid.stored(found.levels, found.steps)[1][:, 0].float(), torch.ones(2))


def test_weights_are_adapted_to_rounded_inputs() -> None:
    """The outputs of rounded inputs come closer to those of the original weights and inputs."""
    inputs, weight = correlated(16, 500, 64), torch.randn(16, 64, generator=torch.Generator().manual_seed(16))
    inputs[:, ::16] *= 20  # the others of a block are rounded coarsely
    weight[:, ::16] /= 20
    inputs[0, 0] = 1.01 * inputs.abs().max()  # so that all tokens are rounded with the scale of the first ones
    seen = InputStatistics.empty(64, torch.device("cpu"), gram=True, noise=True)
    for rows in inputs.split(100):
        seen.update(rows)
    scale = nvfp4_global_scale(inputs.abs().amax())
    rounded = round_to_nvfp4(inputs, scale) * scale
    factor = Factor.of(seen.take_gram(), len(inputs))
    assert factor is not None
    adapted, wanted = factor.adapted(weight, seen.take_cross()), inputs @ weight.T
    assert seen.cross is None
    left = [float((rounded @ each.T - wanted).square().sum()) for each in (adapted, weight)]
    damped = rounded.T @ rounded + factor.damping * torch.eye(64)
    expected = weight @ inputs.T @ rounded @ torch.linalg.inv(damped) + factor.damping * weight @ torch.linalg.inv(
        damped
    )
    assert torch.allclose(adapted, expected, atol=0.02 * float(expected.abs().max()))
    assert left[0] < 0.9 * left[1]


def test_the_noise_of_nvfp4_inputs_is_what_rounding_leaves() -> None:
    inputs = correlated(18, 2000, 64)
    inputs[0, 0] = 1.01 * inputs.abs().max()  # so that all tokens are rounded with the scale of the first ones
    seen = InputStatistics.empty(64, torch.device("cpu"), sketch=True, noise=True)
    exact = InputStatistics.empty(64, torch.device("cpu"), gram=True, noise=True)
    for rows in inputs.split(250):
        seen.update(rows)
        exact.update(rows)
    scale = nvfp4_global_scale(inputs.abs().amax())
    rounded = round_to_nvfp4(inputs, scale) * scale
    errors = rounded - inputs
    assert seen.noise is not None
    assert torch.allclose(seen.noise, errors.square().sum(dim=0), rtol=0.15)
    cross, expected = exact.take_cross(), errors.T @ rounded
    assert exact.noise is None
    assert float((cross - expected).norm()) < 0.01 * float(expected.norm())


def test_linears_without_a_scale_for_their_inputs() -> None:
    """NVFP4: no pre-quantisation scale, and codes for each linear."""
    inputs, weight = correlated(15, 600, 64), torch.randn(24, 64, generator=torch.Generator().manual_seed(15))
    own = Input(observed(inputs), ("q", "k"), (16, 8), weight.clone, nvfp4_grid(weight))
    found = round_linears([own], smoothed=False)
    assert not [name for name in found.tensors if name.endswith((".pre_quant_scale", ".alpha"))]
    assert found.tensors["k.inputs"].item() == 64
    glob = nvfp4_global_scale(weight.abs().amax())
    for name, rows in (("q", slice(0, 16)), ("k", slice(16, 24))):
        restored = from_nvfp4(found.codes[f"{name}.codes"], found.codes[f"{name}.scales"], glob)
        measured = error(weight[rows], restored, inputs) / float((inputs @ weight[rows].T).square().sum())
        assert found.tensors[f"{name}.output_error"].item() == pytest.approx(measured, rel=0.02)
        assert found.tensors[f"{name}.output_error"] < 0.6 * found.tensors[f"{name}.nearest_error"]
