"""The kernels compute the same with every set of instructions: AVX2, AVX-512 and what any x86-64 processor has."""

import pytest
import torch
from torch import Tensor

from tests.runtime.kernel_levels import DOTS, LEVELS, TILES, kernels_at
from trtforge.runtime.native.activations import activate
from trtforge.runtime.native.adapters import Matrices, add_adapters
from trtforge.runtime.native.bindings import ACTIVATIONS, Native, PagedHeads, PagedRows
from trtforge.runtime.native.compiler import NATIVE
from trtforge.runtime.native.float32 import linear
from trtforge.runtime.native.norms import norm, norm_heads
from trtforge.runtime.native.rounding import Levels, RoundingKernels
from trtforge.runtime.native.tiles import pack_float32

BLOCK = 4
CLOSE = {torch.float32: 4e-6, torch.bfloat16: 2**-7}
"""Twice what each may differ from the exact result; a number in bfloat16 may be rounded to either neighbour."""


def rows_by(kernels: Native, dtype: torch.dtype) -> dict[str, Tensor]:
    """Kernels that compute each row by itself."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, change, weight, bias, heads = random(9, 75), random(9, 75), random(75), random(75), random(9, 5, 16)
    cos, sin, halves = random(9, 1, 12), random(9, 1, 12), random(9, 2 * 75) * 4
    found = {
        "rms_norm": kernels.rms_norm(x, weight, 1e-5),
        "add": kernels.add(x, change, 0.5),
        "layer_norm": norm(kernels, x, weight, bias, 1e-5, centred=True),
        "norm_float32": norm(kernels, x, weight.float(), None, 1e-5, centred=False),
    }
    found["sum"], found["normed"] = kernels.add_rms_norm(x, change, weight, 0.5, 1e-5)
    for name in ACTIVATIONS:
        found[name] = activate(kernels, halves, name)
        found[f"gate {name}"] = kernels.gate(halves, name, 1)
    found["rotated"] = heads.clone()
    kernels.rotate(found["rotated"][:, 1:4], cos, sin, interleaved=True)
    found["norm_heads"], found["rms_norm_heads"] = heads.clone(), heads.clone()
    norm_heads(kernels, found["norm_heads"], random(5, 16), random(5, 16), 1e-5, centred=True)
    kernels.rms_norm_heads(found["rms_norm_heads"], random(16), 1e-5)
    found["adapted"] = change.clone()
    owners = torch.tensor([0, 1, -1, 1, 0, 0, -1, 1, 1])
    adapters = Matrices(random(2, 2, 4, 75), random(2, 4, 75), torch.tensor([[4, 3], [1, 4]]))
    add_adapters(kernels, x, adapters, torch.tensor([[0, 25], [25, 50]]), owners, found["adapted"])
    return found


def attended_by(kernels: Native, dtype: torch.dtype) -> dict[str, Tensor]:
    """Attention over each type of cache, and what the caches hold, which is the same to the bit."""
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(6, 8, 48, generator=generator).to(dtype)
    slots = torch.tensor([3, 17, 8, 0, 21, 12])
    tables, lengths = torch.tensor([[2, 0, 5], [1, 3, 4]]), torch.tensor([7, 12])
    found = {}
    for name, of_cache in {"plain": dtype, "int8": torch.int8, "e4m3": torch.uint8}.items():
        storage = torch.zeros(6, BLOCK, 4, 48, dtype=of_cache)
        if name == "plain":
            kernels.write_slots(storage.view(-1, 4, 48), slots, heads[:, 4:])
        else:
            kernels.quantize_slots(storage.view(-1, 4, 48), slots, heads[:, 4:], 0.02)
        out = torch.empty(2, 4 * 48, dtype=dtype)
        how = PagedHeads(4, 2, 48, 4, 48**-0.5, 5.0, 9, torch.tensor([0.5, 0.25, 0.1, 0.0]))
        kernels.attend(heads[:2], PagedRows(tables, lengths, BLOCK), storage, 0.02, how, out)
        found[f"cache {name}"], found[f"attention {name}"] = storage.view(torch.uint8), out
    return found


def rounded_by(kernels: Native, levels: Levels) -> dict[str, Tensor]:
    """Codes are the same but for ties, of which these numbers have none."""
    generator = torch.Generator().manual_seed(2)
    columns, product, weights = (torch.randn(24, 70, generator=generator) for _ in range(3))
    shares, quanta = torch.randn(24, 24, generator=generator) * 0.01, torch.rand(24, 70, generator=generator) + 0.2
    errors, residuals = torch.empty(2, 24, 70)
    rounding, candidates = RoundingKernels(kernels), torch.rand(8, 70, generator=generator) + 0.1
    codes = rounding.round_block(levels, columns, product, shares, quanta, None, errors, residuals)
    best = rounding.best_steps(levels, columns, weights[:, 0].abs(), candidates)
    gram = columns @ columns.t()
    refined, gradients = codes.t().contiguous(), residuals.t() @ gram
    groups, ends = torch.arange(24) // 12, torch.zeros(70, 24, dtype=torch.int8)
    steps, scales = torch.full((70, 2), 0.4), torch.ones(24)
    rounding.refine_(levels, refined, gradients, gram, gram.diagonal().contiguous(), scales, groups, steps, ends, 5)
    return {"cache codes": codes, "cache best": best, "errors": errors, "cache refined": refined}


@pytest.mark.parametrize("level", [level for level in LEVELS if level != NATIVE])
def test_results_of_all_levels_agree(level: str) -> None:
    lower, own = kernels_at(level), kernels_at(NATIVE)
    whole = level in (DOTS, TILES)
    assert lower.multiplies == (own.multiplies and (whole or level == "x86-64-v4"))
    assert lower.multiplies_integers == (own.multiplies_integers and whole)
    made, expected = (
        {
            **{(dtype, name): each for dtype in CLOSE for name, each in rows_by(kernels, dtype).items()},
            **{(dtype, name): each for dtype in CLOSE for name, each in attended_by(kernels, dtype).items()},
            **{
                (levels, name): each
                for levels in ("int4", "e2m1")
                for name, each in rounded_by(kernels, levels).items()
            },
        }
        for kernels in (lower, own)
    )
    for (kind, name), each in made.items():
        wanted = expected[kind, name]
        if name.startswith("cache"):
            assert torch.equal(each, wanted), (kind, name)
        else:
            error = (each.double() - wanted.double()).abs().max() / wanted.double().abs().max()
            assert error <= CLOSE[wanted.dtype], (kind, name)
    x, weight = torch.randn(40, 130), torch.randn(70, 130)
    products = [linear(kernels, x, pack_float32(weight), None, 70) for kernels in (lower, own)]
    assert torch.allclose(*products, atol=1e-4)
