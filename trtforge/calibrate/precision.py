"""The dtypes that calibration computes in."""

from functools import cache

from trtforge.core.dtypes import ModelDtype, model_dtype


def forward_dtype(source: str, device: str, *, means_only: bool) -> ModelDtype:
    """Dtype of the forward pass of a model in `source`: the model's own on a GPU, as in other tools; float32 on a CPU.

    `means_only` (INT4-AWQ): only mean activations are kept, in which rounding averages out; an amax would become a
    scaling factor directly. Then a bfloat16 model runs in bfloat16 on a CPU too, if that is faster.
    """
    if device != "cpu":
        return model_dtype("auto", source)
    return "bfloat16" if means_only and source == "bfloat16" and _multiplies_bfloat16_faster() else "float32"


def search_dtype(device: str) -> ModelDtype:
    """Dtype of the factors of the matrix products in the AWQ search.

    The rounding of their elements averages out in the sums (relative error 3e-4, tested against float64).
    """
    return "bfloat16" if device == "cpu" and _multiplies_bfloat16_faster() else "float32"


@cache
def _multiplies_bfloat16_faster() -> bool:
    """Whether this CPU has bfloat16 matrix products, at least twice as fast as float32 (AVX512-BF16, AMX)."""
    import torch

    return torch.backends.mkldnn.is_available() and bool(torch.cpu._is_avx512_bf16_supported())
