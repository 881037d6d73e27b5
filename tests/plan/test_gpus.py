"""Which number formats run on which GPU."""

import pytest

from trtforge.core.errors import ForgeError
from trtforge.formats.trtllm import Quantization
from trtforge.plan.gpus import ALIASES, GPUS, gpu_named, product_of, require_formats


@pytest.mark.parametrize(
    ("gpu", "algorithm", "cache"),
    [("a100-80gb", "FP8", None), ("rtx-a6000", None, "FP8"), ("a10g", "W4A16_AWQ", "FP8"), ("b200", "W4A16_AWQ", None)],
)
def test_format_is_refused(gpu: str, algorithm: str | None, cache: str | None) -> None:
    with pytest.raises(ForgeError, match=f"{gpu} has compute capability"):
        require_formats(gpu_named(gpu), Quantization(quant_algo=algorithm, kv_cache_quant_algo=cache))


@pytest.mark.parametrize(
    ("gpu", "algorithm", "cache"),
    [("l40s", "FP8", "FP8"), ("H100-80GB", "FP8", "FP8"), ("a100-80gb", "W4A16_AWQ", None), ("b200", "FP8", "FP8")]
    + [(gpu, "NVFP4", "FP8") for gpu in ("b300", "gb300", "gb10", "rtx-pro-6000")],
)
def test_format_is_accepted(gpu: str, algorithm: str | None, cache: str | None) -> None:
    require_formats(gpu_named(gpu), Quantization(quant_algo=algorithm, kv_cache_quant_algo=cache))


def test_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(ForgeError, match="GPU h100-64gb is not known") as caught:
        gpu_named("h100-64gb")
    assert "Did you mean h100" in caught.value.hint
    with pytest.raises(ForgeError, match="GPU  is not known"):
        gpu_named("")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("h100", "h100-80gb"),
        ("H100", "h100-80gb"),
        ("a100", "a100-80gb"),
        ("v100", "v100-16gb"),
        ("gh200", "gh200-96gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx_a6000", "rtx-a6000"),
        ("H100 NVL", "h100-nvl"),
        ("t4", "t4"),
        ("B300", "b300"),
        ("GH200 144GB", "gh200-144gb"),
        ("RTX PRO 6000", "rtx-pro-6000"),
    ],
)
def test_short_names_mean_the_usual_variant(given: str, name: str) -> None:
    assert gpu_named(given).name == name


def test_aliases_are_no_names_and_lead_to_names() -> None:
    names = {gpu.name for gpu in GPUS}
    assert not names & ALIASES.keys()
    assert set(ALIASES.values()) <= names


@pytest.mark.parametrize(
    ("driver_name", "gib", "product"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80gb"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA H100 NVL", 93.1, "h100-nvl"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA GH200 480GB", 94.5, "gh200-96gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 79.1, "a100-80gb"),
        ("NVIDIA A10", 22.0, "a10"),
        ("NVIDIA A10G", 22.0, "a10g"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA L40S", 44.5, "l40s"),
        ("Tesla V100-SXM2-16GB", 15.7, "v100-16gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.9, "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 5090", 31.3, "rtx-5090"),
        ("NVIDIA B300 SXM6 AC", 268.0, "b300"),
        ("NVIDIA GB300", 276.5, "gb300"),
        ("NVIDIA H20", 95.1, "h20"),
        ("NVIDIA GH200 144G HBM3e", 140.0, "gh200-144gb"),
        ("NVIDIA GB10", 119.6, "gb10"),
        ("NVIDIA L20", 44.5, "l20"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", 23.9, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.75, None),
        ("NVIDIA GeForce GTX 1080", 7.9, None),
    ],
)
def test_products_by_the_drivers_name(driver_name: str, gib: float, product: str | None) -> None:
    found = product_of(driver_name, gib * 2**30)
    assert (found.name if found is not None else None) == product
