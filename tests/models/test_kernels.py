"""What is known of kernels without torch is what they write: the bytes that each keeps of a layer."""

from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor

from trtforge.core.dtypes import ModelDtype
from trtforge.core.recipe import QuantFormat
from trtforge.models.kernels import (
    CUDA_KERNELS,
    KEPT,
    REFERENCE,
    UNSUITED,
    KernelName,
    kernel_for,
    kernel_of_size,
    plain_kernel,
)
from trtforge.runtime.linears.kernels import DTYPES, KERNELS
from trtforge.runtime.linears.linear import Stored

OUT, INPUTS, GROUP = 192, 256, 64
ONE = torch.ones(1)
BFLOAT16_ONLY = {"int4_packed_cpu", "w4a8_packed_cpu", *CUDA_KERNELS}


def stored(name: KernelName) -> Stored:
    """A layer as a checkpoint has it for the kernel."""
    prequant, rows = torch.ones(INPUTS), torch.ones(OUT)
    match name.split("_")[0]:
        case "fp8":
            weight = torch.zeros(OUT, INPUTS, dtype=torch.float8_e4m3fn)
            return Stored(weight, weights_scale=rows if "rowwise" in name else ONE, activation_scale=ONE)
        case "int4" | "w4a8":
            weight = torch.zeros(OUT // 2, INPUTS, dtype=torch.int8)
            return Stored(weight, None, torch.ones(OUT, INPUTS // GROUP), ONE, prequant, ONE)
        case "int8":
            weight = torch.zeros(OUT, INPUTS, dtype=torch.int8)
            return Stored(weight, weights_scale=rows, activation_scale=ONE, prequant=prequant)
        case "nvfp4":
            scales = torch.zeros(OUT, INPUTS // 16, dtype=torch.float8_e4m3fn)
            return Stored(torch.zeros(OUT, INPUTS // 2, dtype=torch.uint8), None, scales, ONE, None, ONE)
        case "plain":
            return Stored(torch.zeros(OUT, INPUTS, dtype=torch.bfloat16))
        case _:
            return Stored(torch.zeros(OUT, INPUTS))


def sliced(layer: Stored, outputs: int) -> Stored:
    """Its first outputs."""
    rows = outputs * len(layer.weight) // OUT
    assert layer.weights_scale is not None
    return replace(layer, weight=layer.weight[:rows], weights_scale=layer.weights_scale[:outputs])


def kept_by(name: KernelName, dtype: ModelDtype) -> int:
    packed: dict[str, Tensor] = KERNELS[name].pack(stored(name), DTYPES[dtype])
    return sum(tensor.nbytes for tensor in packed.values())


@pytest.mark.parametrize("dtype", get_args(ModelDtype))
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_bytes_of_a_packed_layer(name: KernelName, dtype: ModelDtype) -> None:
    if name in BFLOAT16_ONLY and dtype != "bfloat16":
        assert kernel_for("int4_awq", GROUP, "cpu", dtype, vnni=True, native=False, sm=90) == "int4_dense"
        return
    prescaled = name.startswith(("int4", "w4a8"))
    assert KEPT[name].nbytes(OUT, INPUTS, dtype, GROUP, prescaled=prescaled) == kept_by(name, dtype)


def test_int4_layouts_take_the_same_room_in_bfloat16() -> None:
    """Tiles have no zero points beside the scales."""

    def room(name: KernelName) -> int:
        return KEPT[name].nbytes(OUT, INPUTS, "bfloat16", GROUP, prescaled=True)

    assert room("int4_packed_cpu") == room("int4_native_cpu")
    assert room("int4_packed_cuda") == room("int4_packed_cpu") - OUT * (INPUTS // GROUP) * 2
    assert room("w4a8_packed_cpu") == room("w4a8_native_cpu") == room("w4a8_packed_cuda")


@pytest.mark.parametrize(
    "name", ["int4_native_cpu", "int4_coded_cpu", "int4_packed_cuda", "w4a8_native_cpu", "w4a8_packed_cuda"]
)
def test_int4_layers_of_other_groups_are_stored_as_plan_says(name: KernelName) -> None:
    """Of one group of 192 inputs."""
    other = kernel_of_size(name, OUT, 192, 192)
    assert other == UNSUITED[name]
    layer = replace(
        stored(name),
        weight=torch.zeros(OUT // 2, 192, dtype=torch.int8),
        weights_scale=torch.ones(OUT, 1),
        prequant=torch.ones(192),
    )
    packed, expected = (KERNELS[each].pack(layer, torch.bfloat16) for each in (name, other))
    assert {key: each.shape for key, each in packed.items()} == {key: each.shape for key, each in expected.items()}


@pytest.mark.parametrize("name", sorted(UNSUITED))
def test_layers_of_other_sizes_are_stored_as_plan_says(name: KernelName) -> None:
    """Of 40 outputs, which no kernel takes whose weights lie in tiles."""
    other = kernel_of_size(name, 40, INPUTS, GROUP)
    assert other == UNSUITED[name] != name
    assert kernel_of_size(name, OUT, INPUTS, GROUP) == name
    if name.endswith(("int4_native_cpu", "int4_coded_cpu", "packed_cuda", "w4a8_native_cpu", "nvfp4_native_cpu")):
        layer = sliced(stored(name), 40)
        packed, expected = (KERNELS[each].pack(layer, torch.bfloat16) for each in (name, other))
        assert {key: tensor.nbytes for key, tensor in packed.items()} == {
            key: tensor.nbytes for key, tensor in expected.items()
        }


def test_every_format_has_a_kernel_on_every_machine() -> None:
    assert REFERENCE.keys() == set(get_args(QuantFormat))
    assert KEPT.keys() == KERNELS.keys() == set(get_args(KernelName))


@pytest.mark.parametrize(
    ("format", "group", "device", "dtype", "vnni", "sm", "expected"),
    [
        ("fp8", 128, "cuda", "bfloat16", False, 90, "fp8_scaled_mm"),
        ("fp8", 128, "cuda", "bfloat16", True, 80, "fp8_codes_cuda"),
        ("fp8", 128, "cuda", "float16", True, 80, "fp8_dense"),
        ("fp8_rowwise", 128, "cuda", "bfloat16", True, 90, "fp8_rowwise_codes_cuda"),
        ("fp8_rowwise", 128, "cuda", "float32", True, 90, "fp8_rowwise_dense"),
        ("int8_wo", 128, "cuda", "bfloat16", True, 90, "int8_codes_cuda"),
        ("nvfp4", 128, "cuda", "bfloat16", True, 80, "nvfp4_packed_cuda"),
        ("nvfp4", 128, "cuda", "float16", True, 90, "nvfp4_dense"),
        ("fp8", 128, "cpu", "bfloat16", True, 0, "fp8_dense"),
        ("int4_awq", 128, "cuda", "bfloat16", False, 80, "int4_packed_cuda"),
        ("int4_awq", 128, "cuda", "float16", False, 90, "int4_dense"),
        ("int4_awq", 64, "cpu", "bfloat16", True, 0, "int4_packed_cpu"),
        ("int4_wo", 48, "cpu", "bfloat16", True, 0, "int4_packed_cpu"),
        ("w4a8_awq", 128, "cpu", "bfloat16", True, 0, "w4a8_packed_cpu"),
        ("int4_awq", 48, "cpu", "bfloat16", True, 0, "int4_dense"),
        ("w4a8_awq", 64, "cuda", "bfloat16", True, 90, "w4a8_packed_cuda"),
        ("w4a8_awq", 64, "cuda", "float16", True, 90, "w4a8_dense"),
        ("int8_sq", 128, "cpu", "float32", False, 0, "int8_sq_dense"),
        ("int8_sq", 128, "cpu", "float32", True, 0, "int8_sq_cpu"),
        ("int8_sq", 128, "cuda", "float16", True, 90, "int8_sq_dense"),
        ("int8_sq", 128, "cuda", "bfloat16", False, 90, "int8_sq_codes_cuda"),
        ("none", 128, "cuda", "bfloat16", False, 90, "dense"),
        ("int8_wo", 128, "cuda", "bfloat16", False, 75, "int8_dense"),
        ("int4_awq", 128, "cuda", "bfloat16", False, 75, "int4_dense"),
    ],
)
def test_the_fastest_kernel_is_chosen(
    format: QuantFormat, group: int, device: str, dtype: ModelDtype, vnni: bool, sm: int, expected: str
) -> None:
    choose = partial(kernel_for, format, group, device, dtype, vnni=vnni, sm=sm)  # type: ignore[arg-type]
    assert choose(native=False) == expected
    if device == "cuda":
        assert choose(native=True) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("int4_awq", "int4_native_cpu"),
        ("int4_wo", "int4_native_cpu"),
        ("w4a8_awq", "w4a8_native_cpu"),
        ("int8_sq", "int8_sq_cpu"),
        ("fp8", "fp8_native_cpu"),
        ("fp8_rowwise", "fp8_rowwise_native_cpu"),
        ("int8_wo", "int8_native_cpu"),
        ("nvfp4", "nvfp4_native_cpu"),
    ],
)
def test_the_own_kernels_are_chosen(format: QuantFormat, dtype: ModelDtype, expected: str) -> None:
    choose = partial(kernel_for, format, 128, "cpu", dtype, vnni=False, native=True, sm=0)
    assert choose() == expected


@pytest.mark.parametrize("format", get_args(QuantFormat))
def test_float16_has_no_own_kernels(format: QuantFormat) -> None:
    choose = partial(kernel_for, format, 128, "cpu", "float16", vnni=False, sm=0)
    assert choose(native=True) == choose(native=False) == REFERENCE[format]


def test_weights_of_16_bits_stay_so_where_float32_computes() -> None:
    assert plain_kernel("bfloat16", "cpu", "float32", native=True) == "plain_native_cpu"
    assert plain_kernel("float16", "cpu", "float32", native=True) == "plain_native_cpu"
    assert plain_kernel("float32", "cpu", "float32", native=True) == "dense"
    assert plain_kernel("bfloat16", "cpu", "bfloat16", native=True) == "dense"
    assert plain_kernel("bfloat16", "cpu", "float32", native=False) == "dense"
    assert plain_kernel("bfloat16", "cuda", "float32", native=True) == "dense"
