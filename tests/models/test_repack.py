"""Codes survive the way from each tool's packing, written here from the tools' definitions, into TensorRT-LLM's."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trtforge.models.repack import repack_awq, repack_gptq, rescale_fp8
from trtforge.models.transforms import pack_int4, unpack_int4

SHAPES = {"eights": st.integers(1, 5), "others": st.integers(1, 9), "seed": st.integers(0, 1000)}


def unsigned(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(seed))


def packed(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """(rows, columns / 8) int32: nibble n of a word holds code order[n] of its eight."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for nibble, code in enumerate(order):
        words |= codes[:, code::8] << (4 * nibble)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@given(**SHAPES)
def test_awq_words_hold_eight_outputs_interleaved(eights: int, others: int, seed: int) -> None:
    codes = unsigned(others, 8 * eights, seed)  # (in, out), as AutoAWQ packs
    words = packed(codes, (0, 2, 4, 6, 1, 3, 5, 7))
    assert torch.equal(repack_awq(words.T), pack_int4((codes.T - 8).to(torch.int8)))


@given(**SHAPES)
def test_gptq_words_hold_eight_inputs_in_order(eights: int, others: int, seed: int) -> None:
    codes = unsigned(2 * others, 8 * eights, seed)  # (out, in)
    words = packed(codes, tuple(range(8)))
    assert torch.equal(repack_gptq(words), pack_int4((codes - 8).to(torch.int8)))
    assert torch.equal(unpack_int4(repack_gptq(words)), (codes - 8).to(torch.int8))


@given(seed=st.integers(0, 1000), scale=st.floats(1e-4, 10))
def test_an_equal_scale_changes_no_byte(seed: int, scale: float) -> None:
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)
    kept = rescale_fp8(weight, torch.tensor([scale]), torch.tensor([scale]))
    assert torch.equal(kept.view(torch.uint8), weight.view(torch.uint8))


@given(seed=st.integers(0, 1000), scale=st.floats(1e-4, 10), power=st.integers(1, 3))
def test_a_power_of_two_is_exact_above_the_subnormals(seed: int, scale: float, power: int) -> None:
    values = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    weight = (values.abs() + 0.5).to(torch.float8_e4m3fn)
    larger = rescale_fp8(weight, torch.tensor([scale]), torch.tensor([scale]) * 2.0**power)
    assert torch.equal(larger.float() * 2.0**power, weight.float())


@given(seed=st.integers(0, 1000), ratio=st.floats(1, 8))
def test_a_larger_scale_rounds_to_the_nearest_value(seed: int, ratio: float) -> None:
    weight = (torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) * 100).to(torch.float8_e4m3fn)
    old, new = torch.tensor([0.01]), torch.tensor([0.01 * ratio])
    error = (rescale_fp8(weight, old, new).float() * new - weight.float() * old).abs()
    half_step = (weight.float() * old).abs() / 16 + new * 2.0**-10
    assert bool((error <= half_step * 1.0001).all())
