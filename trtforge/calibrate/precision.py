"""Which types calibration computes in."""

from functools import cache

from trtforge.core.dtypes import ModelDtype, model_dtype


def forward_dtype(source: str, device: str, *, means_only: bool) -> ModelDtype:
    """Of the forward pass of a model in `source`: the model's own on a GPU, as tools there have it; float32 on a CPU.

    `means_only`: of the activations only means are kept (INT4-AWQ), whose rounding averages out, and no largest
    magnitudes, which become scales as they are. Then a bfloat16 model is computed in bfloat16 on a CPU too, where that
    is faster.
    """
    if device != "cpu":
        return model_dtype("auto", source)
    return "bfloat16" if means_only and source == "bfloat16" and _multiplies_bfloat16_faster() else "float32"


def search_dtype(device: str) -> ModelDtype:
    """Of the factors of products that AWQ's search compares with one another.

    Rounding of their elements averages out over a sum of so many (3e-4 relative, held against float64 in tests).
    """
    return "bfloat16" if device == "cpu" and _multiplies_bfloat16_faster() else "float32"


@cache
def _multiplies_bfloat16_faster() -> bool:
    """Whether this CPU has products of bfloat16, at least twice as fast as float32's (AVX512-BF16, AMX)."""
    import torch

    return torch.backends.mkldnn.is_available() and bool(torch.cpu._is_avx512_bf16_supported())
