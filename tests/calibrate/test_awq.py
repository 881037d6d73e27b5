"""The Gram-matrix search against its definition: the output error measured on the data itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtforge.calibrate.awq import ALPHAS, quantization_error, search, smoothing_scale
from trtforge.calibrate.statistics import InputStatistics, estimated_error, output_error
from trtforge.models.transforms import dequantize_int4, int4_scales, quantize_int4


def statistics_of(inputs: torch.Tensor) -> InputStatistics:
    found = InputStatistics.empty(inputs.shape[-1], torch.device("cpu"), gram=True)
    for part in inputs.split(7):
        found.update(part)
    found.finish()
    return found


@given(seed=st.integers(0, 1000))
def test_gram_error_is_the_output_error(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs, difference = torch.randn(50, 32, generator=generator), torch.randn(8, 32, generator=generator)
    expected = (inputs @ difference.T).square().sum()
    assert torch.isclose(output_error(difference, statistics_of(inputs).gram), expected, rtol=5e-3)


def test_gram_error_of_a_large_weight_is_that_of_float64() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs, difference = torch.randn(500, 512, generator=generator), torch.randn(256, 512, generator=generator)
    expected = (inputs.double() @ difference.double().T).square().sum()
    found = statistics_of(inputs)
    assert float(output_error(difference, found.gram)) == pytest.approx(float(expected), rel=3e-4)
    assert float(estimated_error(difference, found.sketch)) == pytest.approx(float(expected), rel=0.05)


def test_statistics_are_those_of_all_parts() -> None:
    inputs = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    found = statistics_of(inputs)
    assert found.tokens == 50
    assert torch.equal(found.amax, inputs.abs().max().reshape(1))
    assert torch.allclose(found.mean_magnitude, inputs.abs().mean(0))
    assert torch.allclose(found.gram, inputs.T @ inputs, atol=0.3)  # eight sums in bfloat16


@settings(max_examples=10)
@given(seed=st.integers(0, 1000))
def test_best_alpha_is_the_best_on_the_data(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(200, 128, generator=generator) * torch.rand(128, generator=generator).mul(4).exp()
    weight = torch.randn(64, 128, generator=generator)
    found = search(weight, statistics_of(inputs), 64)

    importance = (
        (weight.abs().unflatten(1, (2, 64)) / weight.abs().unflatten(1, (2, 64)).amax(2, keepdim=True))
        .flatten(1)
        .mean(0)
    )
    errors = {}
    for alpha in ALPHAS:
        scale = smoothing_scale(inputs.abs().mean(0), importance, alpha)
        blocks = int4_scales(weight * scale, 64)
        restored = dequantize_int4(quantize_int4(weight * scale, blocks), blocks)
        errors[alpha] = float(((inputs / scale) @ restored.T - inputs @ weight.T).square().sum())
    best = min(errors.values())
    assert errors[found.alpha] <= best * 1.001
    energy = float((inputs @ weight.T).square().sum())
    assert abs(found.error - errors[found.alpha] / energy) <= 1e-3 * found.error
    assert found.error < errors[0.0] / energy or found.alpha == 0.0


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), outliers=st.floats(0, 4), rank=st.sampled_from([1, 8, 1024]))
def test_screening_loses_less_than_a_hundredth(seed: int, outliers: float, rank: int) -> None:
    """Of the output error, whether inputs have dominant channels, few directions, or neither."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(rank, 1024, generator=generator)
    inputs = torch.randn(400, rank, generator=generator) @ directions / rank**0.5
    inputs = (inputs + 0.3 * torch.randn(400, 1024, generator=generator)) * torch.rand(1024, generator=generator).mul(
        outliers
    ).exp()
    weight = torch.randn(600, 1024, generator=generator)
    found = search(weight, statistics_of(inputs), 128)

    importance = (
        (weight.abs().unflatten(1, (8, 128)) / weight.abs().unflatten(1, (8, 128)).amax(2, keepdim=True))
        .flatten(1)
        .mean(0)
    )
    errors = {}
    for alpha in ALPHAS:
        scale = smoothing_scale(inputs.abs().mean(0), importance, alpha)
        difference = quantization_error(weight, scale, 128, torch.empty_like(weight))
        errors[alpha] = float((inputs @ difference.T).square().sum())
    assert errors[found.alpha] <= 1.01 * min(errors.values())
    assert found.error == pytest.approx(errors[found.alpha] / float((inputs @ weight.T).square().sum()), rel=0.3)


def test_scale_is_balanced() -> None:
    scale = smoothing_scale(torch.tensor([0.1, 1.0, 50.0]), torch.tensor([0.5, 0.2, 0.1]), 0.5)
    assert torch.isclose(scale.max() * scale.min(), torch.tensor(1.0))
