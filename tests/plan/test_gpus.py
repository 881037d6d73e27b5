"""Which number formats run on which GPU."""

import pytest

from trtforge.core.errors import ForgeError
from trtforge.formats.trtllm import Quantization
from trtforge.plan.gpus import gpu_named, require_formats


@pytest.mark.parametrize(
    ("gpu", "algorithm", "cache"),
    [("a100-80gb", "FP8", None), ("rtx-a6000", None, "FP8"), ("a10g", "W4A16_AWQ", "FP8"), ("b200", "W4A16_AWQ", None)],
)
def test_format_is_refused(gpu: str, algorithm: str | None, cache: str | None) -> None:
    with pytest.raises(ForgeError, match=f"{gpu} has compute capability"):
        require_formats(gpu_named(gpu), Quantization(quant_algo=algorithm, kv_cache_quant_algo=cache))


@pytest.mark.parametrize(
    ("gpu", "algorithm", "cache"),
    [("l40s", "FP8", "FP8"), ("H100-80GB", "FP8", "FP8"), ("a100-80gb", "W4A16_AWQ", None), ("b200", "FP8", "FP8")],
)
def test_format_is_accepted(gpu: str, algorithm: str | None, cache: str | None) -> None:
    require_formats(gpu_named(gpu), Quantization(quant_algo=algorithm, kv_cache_quant_algo=cache))


def test_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(ForgeError, match="GPU h100 is not known") as caught:
        gpu_named("h100")
    assert "Did you mean h100" in caught.value.hint
