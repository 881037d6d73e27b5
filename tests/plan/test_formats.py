"""Bytes of a weight in each format, and the GPUs that run it."""

import pytest

from trtforge.plan.formats import CACHES, WEIGHTS


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("none", 2 * 512 * 256),
        ("fp8", 512 * 256 + 4 + 4),
        ("fp8_rowwise", 512 * 256 + 4 * 512),
        ("int8_wo", 512 * 256 + 2 * 512),
        ("int4_wo", 512 * 256 // 2 + 2 * 512),
        ("int8_sq", 512 * 256 + 4 + 4 * 512 + 2 * 256),
        ("int4_awq", 512 * 256 // 2 + 4 * 512 * 2 + 2 * 256),
        ("w4a8_awq", 512 * 256 // 2 + 4 * 512 * 2 + 2 * 256 + 4 + 4),
        ("nvfp4", 512 * 256 // 2 + 512 * 16 + 4 + 4),
    ],
)
def test_bytes_of_a_matrix_of_512_outputs_and_256_inputs(name: str, nbytes: int) -> None:
    assert WEIGHTS[name].nbytes(1, 512, 256, 2, 128) == nbytes


def test_experts_share_the_scale_of_their_inputs() -> None:
    fp8 = WEIGHTS["fp8"]
    assert fp8.nbytes(8, 512, 256, 2, 128) == 8 * (512 * 256 + 4) + 4


def test_smaller_groups_have_more_scales() -> None:
    awq = WEIGHTS["int4_awq"]
    assert awq.nbytes(1, 512, 256, 2, 64) - awq.nbytes(1, 512, 256, 2, 128) == 4 * 512 * 2
    assert WEIGHTS["nvfp4"].nbytes(1, 512, 256, 2, 64) == WEIGHTS["nvfp4"].nbytes(1, 512, 256, 2, 128)


@pytest.mark.parametrize(
    ("name", "sms"),
    [
        ("none", {70, 75, 80, 86, 89, 90, 100, 120}),
        ("fp8", {89, 90, 100, 120}),
        ("fp8_rowwise", {89, 90, 120}),
        ("w4a8_awq", {89, 90, 120}),
        ("int4_awq", {70, 75, 80, 86, 89, 90, 120}),
        ("int8_sq", {70, 75, 80, 86, 89, 90, 120}),
        ("nvfp4", {100, 120}),
    ],
)
def test_where_a_format_runs(name: str, sms: set[int]) -> None:
    assert {sm for sm in (70, 75, 80, 86, 89, 90, 100, 120) if WEIGHTS[name].runs_on(sm)} == sms


def test_an_fp8_cache_needs_fp8_and_an_int8_one_nothing() -> None:
    assert not CACHES["fp8"].runs_on(86)
    assert CACHES["fp8"].runs_on(89)
    assert CACHES["int8"].runs_on(70)


def test_only_an_int8_cache_must_be_calibrated() -> None:
    assert {name for name, cache in CACHES.items() if cache.calibrated} == {"int8"}
