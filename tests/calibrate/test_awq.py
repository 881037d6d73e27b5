"""The search against its definition: the output error measured on the data itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtforge.calibrate.awq import ALPHAS, AwqChoice, clip_ratios, quantization_error, search, smoothing_scales
from trtforge.calibrate.statistics import InputStatistics
from trtforge.models.transforms import dequantize_int4, int4_scales, quantize_int4
from trtforge.plan.peaks import SKETCH_ROWS


def statistics_of(inputs: torch.Tensor, part: int = 7) -> InputStatistics:
    found = InputStatistics.empty(inputs.shape[-1], torch.device("cpu"), sketch=True)
    for rows in inputs.split(part):
        found.update(rows)
    return found


@given(seed=st.integers(0, 1000), width=st.sampled_from([32, 64]), tokens=st.sampled_from([1, 50, 64]))
def test_sketched_error_of_few_tokens_is_the_output_error(seed: int, width: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(rows, width, generator=generator) for rows in (tokens, 8))
    inputs, difference = (values.bfloat16().float() for values in drawn)  # the search may compute in bfloat16
    expected = (inputs @ difference.T).square().sum(0)
    found = statistics_of(inputs).output_errors(difference)
    assert torch.allclose(found.sum(), expected.sum(), rtol=1e-2)
    assert torch.allclose(found, expected, rtol=0.1, atol=0.1)


def test_sketched_error_of_a_large_weight_is_that_of_float64() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs, difference = torch.randn(500, 512, generator=generator), torch.randn(256, 512, generator=generator)
    expected = (inputs.double() @ difference.double().T).square().sum()
    assert float(statistics_of(inputs).output_errors(difference).sum()) == pytest.approx(float(expected), rel=3e-4)


@pytest.mark.parametrize("width", [256, SKETCH_ROWS + 9])
def test_sketched_error_of_many_tokens_is_close_whatever_recurs(width: int) -> None:
    """Every 512th token is large and the same, as the first of each sequence often is."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(4 * SKETCH_ROWS, width, generator=generator)
    inputs[::512] = 30 * torch.randn(width, generator=generator)
    difference = torch.randn(64, width, generator=generator)
    expected = float((inputs @ difference.T).square().sum())
    found = statistics_of(inputs, 1000)
    assert found.rows.shape == (SKETCH_ROWS, width)
    assert float(found.output_errors(difference).sum()) == pytest.approx(expected, rel=0.03)


def test_statistics_are_those_of_all_parts() -> None:
    inputs = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    found = statistics_of(inputs)
    assert found.tokens == 50
    assert torch.equal(found.amax, inputs.abs().max().reshape(1))
    assert torch.allclose(found.mean_magnitude, inputs.abs().mean(0))
    assert torch.allclose(found.square_sum, inputs.square().sum(0))
    assert torch.equal(found.rows.abs(), inputs.abs())
    assert found.sketch is not None
    assert 50 <= len(found.sketch) < 100  # as many rows as tokens need, whatever they may grow to
    difference = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    expected = (difference.unsqueeze(1) * inputs).square().sum(dim=(1, 2))
    assert torch.allclose(found.independent_errors(difference), expected)


def errors_on_the_data(weight: torch.Tensor, inputs: torch.Tensor, group: int) -> dict[float, float]:
    """Of every exponent, through the code that conversion quantises by."""
    blocks = weight.abs().unflatten(1, (-1, group))
    importance = (blocks / blocks.amax(2, keepdim=True)).flatten(1).mean(0)
    errors = {}
    for alpha, scale in zip(ALPHAS, smoothing_scales(inputs.abs().mean(0), importance), strict=True):
        steps = int4_scales(weight * scale, group)
        restored = dequantize_int4(quantize_int4(weight * scale, steps), steps) / scale
        errors[alpha] = float((inputs @ (restored - weight).T).square().sum())
    return errors


def assert_good(
    found: AwqChoice, weight: torch.Tensor, inputs: torch.Tensor, group: int, off: float, worse: float = 1.01
) -> None:
    """Within 1 % of the best, or `worse`; `off`: times that the reported error, of at most 256 rows, may differ."""
    errors = errors_on_the_data(weight, inputs, group)
    assert errors[found.alpha] <= worse * min(errors.values())
    expected = errors[found.alpha] / float((inputs @ weight.T).square().sum())
    assert expected / off <= found.error <= expected * off


@settings(max_examples=10)
@given(seed=st.integers(0, 1000))
def test_chosen_alpha_is_within_a_hundredth_of_the_best(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(200, 128, generator=generator) * torch.rand(128, generator=generator).mul(4).exp()
    weight = torch.randn(64, 128, generator=generator)
    assert_good(search(weight, statistics_of(inputs), 64), weight, inputs, 64, 1.01)


@pytest.mark.parametrize("seed", range(10))
def test_narrow_weights_are_judged_closely(seed: int) -> None:
    """Candidates often differ by less than a hundredth; where a race ends early, one of them is the best.

    The sketch misjudges one layer in thousands by more than 0.4 %: these seeds are none of those.
    """
    generator = torch.Generator().manual_seed(seed)
    outliers = torch.rand(256, generator=generator) * seed / 5
    inputs = torch.randn(400, 256, generator=generator) * outliers.exp()
    weight = torch.randn(900, 256, generator=generator)
    assert_good(search(weight, statistics_of(inputs), 128), weight, inputs, 128, 1.2, worse=1.004)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), outliers=st.floats(0, 4), rank=st.sampled_from([1, 8, 1024]))
def test_guessing_loses_less_than_a_hundredth(seed: int, outliers: float, rank: int) -> None:
    """Whether inputs have dominant channels, few directions, or neither, and rows of the weight differ or not."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(rank, 1024, generator=generator)
    inputs = torch.randn(400, rank, generator=generator) @ directions / rank**0.5
    channels = torch.rand(1024, generator=generator).mul(outliers).exp()
    inputs = (inputs + 0.3 * torch.randn(400, 1024, generator=generator)) * channels
    weight = torch.randn(600, 1024, generator=generator) * torch.rand(600, 1, generator=generator).mul(outliers).exp()
    assert_good(search(weight, statistics_of(inputs, 100), 128), weight, inputs, 128, 3.0)


def test_error_of_quantisation_is_that_of_conversion() -> None:
    generator = torch.Generator().manual_seed(5)
    weight, scales = torch.randn(6, 64, generator=generator), torch.rand(3, 64, generator=generator) + 0.5
    found = quantization_error(weight, scales, 32)
    for error, scale in zip(found, scales, strict=True):
        steps = int4_scales(weight * scale, 32)
        restored = dequantize_int4(quantize_int4(weight * scale, steps), steps) / scale
        assert torch.allclose(error, restored - weight, atol=1e-5)


def test_scales_are_those_of_modelopt_and_balanced() -> None:
    """`get_scale` of awq_lite: act_scale.pow(alpha) / (weight_scale.pow(1 - alpha) + tiny), clamped, balanced."""
    magnitude, importance = torch.tensor([0.1, 1.0, 50.0]), torch.tensor([0.5, 0.2, 0.1])
    found = smoothing_scales(magnitude, importance)
    for alpha, scale in zip(ALPHAS, found, strict=True):
        plain = (magnitude**alpha / importance ** (1 - alpha)).clamp(1e-4, 1e4)
        assert torch.allclose(scale, plain / (plain.max() * plain.min()).sqrt())
    assert torch.allclose(found.amax(1) * found.amin(1), torch.ones(len(ALPHAS)))


def test_nothing_is_clipped_where_no_token_came() -> None:
    """As for an expert that no token reached."""
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(6))
    assert torch.equal(clip_ratios(weight, torch.ones(64), torch.zeros(0, 64), 32), torch.ones(4, 2))
