"""What is kept of the inputs of linears while data flows: largest and mean magnitudes, and the Gram matrix."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_ROWS = 1024  # tokens that are looked at at once
_BLOCK = 1024  # columns of the Gram matrix that are added at once: the lower triangle follows from the upper


@dataclass
class InputStatistics:
    """Of one input that one or more linears read. All float32, on the device that computes.

    `channel_amax` and `absolute_sum` (in,); `gram` (in, in) = the sum of x xᵀ over `tokens`, None where no search
    needs it.
    """

    channel_amax: Tensor
    absolute_sum: Tensor
    gram: Tensor | None
    tokens: int = field(default=0)

    @classmethod
    def empty(cls, features: int, device: torch.device, *, gram: bool) -> "InputStatistics":
        """Before any data."""
        return cls(
            channel_amax=torch.zeros(features, device=device),
            absolute_sum=torch.zeros(features, device=device),
            gram=torch.zeros(features, features, device=device) if gram else None,
        )

    def update(self, inputs: Tensor) -> None:
        """Add activations (..., in)."""
        for rows in inputs.detach().flatten(0, -2).split(_ROWS):
            rows = rows.float()
            magnitudes = rows.abs()
            torch.maximum(self.channel_amax, magnitudes.amax(dim=0), out=self.channel_amax)
            if self.gram is not None:
                self.absolute_sum += magnitudes.sum(dim=0)
                self._add_products(rows, self.gram)
            self.tokens += len(rows)

    @staticmethod
    def _add_products(rows: Tensor, gram: Tensor) -> None:
        """Add xᵀx to the upper triangle, a block of rows of it at a time."""
        with fast_products():
            for first in range(0, rows.shape[1], _BLOCK):
                gram[first : first + _BLOCK, first:].addmm_(rows[:, first : first + _BLOCK].T, rows[:, first:])

    def finish(self) -> None:
        """No more data comes: complete the Gram matrix."""
        if self.gram is not None:
            for first in range(0, len(self.gram), _BLOCK):
                block = self.gram[first : first + _BLOCK, first : first + _BLOCK]
                block.copy_(block.triu() + block.triu(1).T)
                self.gram[first + _BLOCK :, first : first + _BLOCK] = self.gram[
                    first : first + _BLOCK, first + _BLOCK :
                ].T

    @property
    def amax(self) -> Tensor:
        """(1,) largest magnitude."""
        return self.channel_amax.amax().reshape(1)

    @property
    def mean_magnitude(self) -> Tensor:
        """(in,) mean of |x| over the tokens."""
        return self.absolute_sum / max(1, self.tokens)


def output_error(difference: Tensor, gram: Tensor) -> Tensor:
    """Sum of squared output errors of a weight error D (out, in) over all tokens: ‖X Dᵀ‖² = tr(D (XᵀX) Dᵀ)."""
    with fast_products():
        product = difference @ gram
    return torch.dot(product.view(-1), difference.view(-1))


@contextmanager
def fast_products() -> Iterator[None]:
    """Matrix products of float32 by bfloat16 units with float32 sums, where a CPU has them (AMX, AVX512-BF16).

    Errors are compared with one another here: what rounding of the factors adds (3e-4 relative) decides nothing.
    """
    matmul: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009 (torch does not declare it)
    before = matmul.fp32_precision
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
