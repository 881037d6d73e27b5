"""Formats of weights and of the KV cache: contexts and single tokens on the GPU give the reference's logits.

test_calibration.py has those whose checkpoints the converter writes.
"""

from pathlib import Path

import pytest
import torch

from tests.gpu.engines import DEVICE, checkpoint_of, is_as_near_as_the_cpu
from trtforge.core.dtypes import ModelDtype
from trtforge.models.kernels import KernelName
from trtforge.runtime.cuda import fused, product_kernels, products, step_kernels, tile_kernels
from trtforge.runtime.cuda.launcher import launcher_for
from trtforge.runtime.cuda.triton_support import processors_of

pytestmark = pytest.mark.gpu

FORMATS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "NVFP4",
    "W8A8_SQ_PER_CHANNEL",
    "W8A16",
    "W4A16",
    "W4A16_AWQ",
    "W4A8_AWQ",
)
DTYPES: tuple[ModelDtype, ...] = ("float32", "bfloat16", "float16")


def is_near(directory: Path, dtype: ModelDtype, kernel: KernelName | None = None, **layout: object) -> bool:
    """See `is_as_near_as_the_cpu`, of a checkpoint in a layout."""
    return is_as_near_as_the_cpu(checkpoint_of(directory, **layout), directory / "gpu", dtype, kernel)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv", [None, "FP8", "INT8"])
def test_plain_weights_with_every_cache(dtype: ModelDtype, kv: str | None, tmp_path: Path) -> None:
    assert is_near(tmp_path, dtype, kv=kv)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("quant", FORMATS)
def test_every_weight_format(quant: str, dtype: ModelDtype, tmp_path: Path) -> None:
    assert is_near(tmp_path, dtype, quant=quant)


@pytest.mark.parametrize("quant", ["FP8", "W4A16_AWQ"])
@pytest.mark.parametrize("kv", ["FP8", "INT8"])
def test_quantised_weights_with_quantised_caches(quant: str, kv: str, tmp_path: Path) -> None:
    assert is_near(tmp_path, "bfloat16", quant=quant, kv=kv)


@pytest.mark.parametrize("kv", [None, "FP8"])
def test_fp8_on_gpus_that_do_not_convert_e4m3(kv: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SM 8.0 computes it: no kernel converts E4M3, and torch's product of it is not called."""
    launch, device = launcher_for(0), torch.device(DEVICE, 0)
    between = fused.FusedKernels(step_kernels, launch, e4m3=False)
    of_codes = products.Products(product_kernels, tile_kernels, launch, processors_of(0), device, e4m3=False)
    monkeypatch.setattr(fused, "_on_gpu", lambda index: between)
    monkeypatch.setattr(products, "_on_gpu", lambda index: of_codes)
    assert is_near(tmp_path, "bfloat16", "fp8_codes_cuda", quant="FP8", kv=kv)
