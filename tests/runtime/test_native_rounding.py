"""The kernels of compensated rounding against their definition, column by column in float64."""

import pytest
import torch
from torch import Tensor

from trtforge.calibrate.compensation import Factor, _round_block, _Work, compensate
from trtforge.calibrate.grids import INT4_RATIOS, Int4Grid, Nvfp4Grid
from trtforge.runtime.linears.nvfp4_linear import round_to_e2m1
from trtforge.runtime.native.bindings import Native
from trtforge.runtime.native.compiler import VARIABLE
from trtforge.runtime.native.rounding import LONGEST, Levels, RoundingKernels, rounding_kernels


@pytest.fixture(scope="module")
def kernels(level: Native) -> RoundingKernels:
    found = rounding_kernels(torch.device("cpu"))
    assert found is not None, "these machines have a C++ compiler"
    return found


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def nearest(levels: Levels, values: Tensor) -> Tensor:
    return values.round().clamp(-8, 7) if levels == "int4" else round_to_e2m1(values.float()).double()


@pytest.mark.parametrize("levels", ["int4", "e2m1"])
@pytest.mark.parametrize(("block", "outputs"), [(1, 1), (6, 63), (LONGEST, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block(kernels: RoundingKernels, levels: Levels, block: int, outputs: int, dtype: torch.dtype) -> None:
    """Each column, the last one first, less the product and the shares of the errors behind it; ends stay."""
    columns, product = seeded(block, outputs), seeded(block, outputs, seed=1).mul(0.1).to(dtype)
    shares, quanta = seeded(block, block, seed=2) * 0.1, seeded(block, outputs, seed=3).abs() * 0.1 + 0.2
    ends = (torch.arange(block * outputs).view(block, outputs) % 9 == 0).to(torch.int8) * 6
    errors, residuals = torch.empty(2, block, outputs, dtype=dtype)
    found = kernels.round_block(levels, columns, product, shares, quanta, ends, errors, residuals)
    unit = 0.5 if levels == "e2m1" else 1.0
    assert found.dtype is torch.int8
    done: list[Tensor] = []
    for place in range(block):
        at = block - 1 - place
        target = columns[at].double() - product[at].double()
        for share, error in zip(shares[place, :place], done, strict=True):
            target -= share.double() * error
        level = found[at].double() * unit
        expected = nearest(levels, target / quanta[at])
        free = ends[at] == 0
        assert torch.equal(level[~free], ends[at][~free].double())
        close = (level - target / quanta[at]).abs() <= (expected - target / quanta[at]).abs() + 1e-5
        assert bool(close[free].all())
        done.append(level * quanta[at] - columns[at].double())
        assert torch.allclose(errors[at].double(), done[-1], rtol=2**-8, atol=1e-5)
        assert torch.allclose(residuals[at].double(), level * quanta[at] - target, rtol=2**-8, atol=1e-5)


def test_torch_computes_the_same_block(kernels: RoundingKernels) -> None:
    columns, product = seeded(40, 70), seeded(40, 70, seed=1) * 0.1
    given = columns, product, seeded(40, 40, seed=2) * 0.1, seeded(40, 70, seed=3).abs() * 0.1 + 0.2, None
    made = [torch.empty(2, 40, 70) for _ in range(2)]
    found = [
        kernels.round_block("int4", *given, *made[0]),
        _round_block(Int4Grid(64), *given, *made[1]),
    ]
    same = (found[0] == found[1]).all(dim=0)  # an output with a tie goes its own way from there
    assert same.float().mean() > 0.95
    assert torch.allclose(made[0][:, :, same], made[1][:, :, same], atol=1e-4)


@pytest.mark.parametrize("levels", ["int4", "e2m1"])
def test_the_best_step(kernels: RoundingKernels, levels: Levels) -> None:
    """The first of the candidates on a tie."""
    columns, weights = seeded(32, 70), seeded(32, seed=1).abs()
    columns[:, 3] = 0
    candidates = columns.abs().amax(dim=0) * torch.tensor(INT4_RATIOS).unsqueeze(1) / 7
    candidates[:, 3] = torch.arange(1.0, len(INT4_RATIOS) + 1)
    steps = candidates.double().unsqueeze(1)
    losses = ((nearest(levels, columns / steps) * steps - columns).square() * weights.unsqueeze(1)).sum(dim=1)
    found = kernels.best_steps(levels, columns, weights, candidates)
    assert torch.equal(found, candidates.gather(0, losses.argmin(dim=0, keepdim=True))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("levels", ["int4", "e2m1"])
def test_refinement_reaches_what_no_single_change_improves(
    kernels: RoundingKernels, levels: Levels, dtype: torch.dtype
) -> None:
    """From levels that were rounded to the nearest; limited ones stay."""
    width, outputs, unit = 50, 9, 0.5 if levels == "e2m1" else 1.0
    inputs, weight = (
        seeded(200, 10) @ seeded(10, width, seed=1) + 0.3 * seeded(200, width, seed=2),
        seeded(outputs, width),
    )
    gram, groups = (inputs.T @ inputs).double(), torch.arange(width) // 25
    steps, scales = torch.full((outputs, 2), 0.4), torch.linspace(0.8, 1.2, width)
    quanta = steps[:, groups] * scales
    start = nearest(levels, weight.double() / quanta)
    ends = (torch.arange(outputs * width).view(outputs, width) % 10 == 0).to(torch.int8)
    found = (start / unit).to(torch.int8)

    def error(rounded: Tensor) -> Tensor:
        difference = rounded.double() * unit * quanta - weight
        return ((difference @ gram) * difference).sum(dim=1)

    before = error(found)
    gradients = ((start * quanta - weight) @ gram).to(dtype)
    given = gradients, gram.to(dtype), gram.diagonal().float().contiguous(), scales, groups, steps, ends
    kernels.refine_(levels, found, *given, 50)
    assert torch.equal(found[ends != 0].double() * unit, start[ends != 0])
    assert bool((error(found) < 0.6 * before).all())
    if dtype is torch.float32:
        gradient = (found.double() * unit * quanta - weight) @ gram
        best = nearest(levels, found * unit - gradient / (gram.diagonal() * quanta))
        assert torch.equal(best[ends == 0], found[ends == 0].double() * unit)


def test_gradients_follow_from_the_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtforge.calibrate.compensation.search_dtype", lambda device: "float32")
    inputs, weight = seeded(400, 40) @ seeded(40, 160, seed=1), seeded(20, 160, seed=2)
    factor = Factor.of(inputs.T @ inputs, 400)
    assert factor is not None
    work = _Work(weight.T.contiguous(), torch.ones(160), torch.full((5, 20), 0.3), factor, Int4Grid(32))
    work.round()
    difference = work.levels.T * 0.3 - weight[:, factor.order]
    expected = difference @ factor.gram
    assert torch.allclose(work._gradients(), expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("grid", [Int4Grid(32), Nvfp4Grid(torch.full((48,), 0.002))])
def test_without_kernels_the_error_is_about_the_same(
    grid: Int4Grid | Nvfp4Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, weight = seeded(600, 48) @ seeded(48, 192, seed=1) + seeded(600, 192, seed=2), seeded(48, 192, seed=3)
    factor = Factor.of(inputs.T @ inputs, 600)
    assert factor is not None
    errors = []
    for way in ("", "torch"):
        monkeypatch.setenv(VARIABLE, way)
        found = compensate(weight, torch.ones(192), factor, grid)
        errors.append(float(factor.errors(found.values - weight).sum()))
    assert errors[0] <= 1.005 * errors[1]
    assert errors[0] >= 0.9 * errors[1]
