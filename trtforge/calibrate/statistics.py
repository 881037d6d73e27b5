"""What is kept of the inputs of linears while data flows: magnitudes, the Gram matrix and a sketch of it."""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

_ROWS = 1024  # tokens that are looked at at once
_BLOCK = 512  # columns of the Gram matrix that are added at once: the lower triangle follows from the upper
SKETCHED = 256  # rows of a sketch


@dataclass
class InputStatistics:
    """Of one input that one or more linears read. All float32, on the device that computes.

    `channel_amax` and `absolute_sum` (in,). Where a search needs them: `gram` (in, in) = the sum of x xᵀ over
    `tokens`, and `sketch` S (SKETCHED, in), sums of the tokens with random signs: the expectation of SᵀS / SKETCHED is
    the Gram matrix.
    """

    channel_amax: Tensor
    absolute_sum: Tensor
    gram: Tensor | None
    sketch: Tensor | None
    tokens: int = field(default=0)

    @classmethod
    def empty(cls, features: int, device: torch.device, *, gram: bool) -> "InputStatistics":
        """Before any data."""
        return cls(
            channel_amax=torch.zeros(features, device=device),
            absolute_sum=torch.zeros(features, device=device),
            gram=torch.zeros(features, features, device=device) if gram else None,
            sketch=torch.zeros(SKETCHED, features, device=device) if gram else None,
        )

    def update(self, inputs: Tensor) -> None:
        """Add activations (..., in)."""
        for rows in inputs.detach().flatten(0, -2).split(_ROWS):
            rows = rows.float()
            magnitudes = rows.abs()
            torch.maximum(self.channel_amax, magnitudes.amax(dim=0), out=self.channel_amax)
            if self.gram is not None and self.sketch is not None:
                self.absolute_sum += magnitudes.sum(dim=0)
                self._add_products(_factor(rows), self.gram, self.sketch)
            self.tokens += len(rows)

    def _add_products(self, rows: Tensor, gram: Tensor, sketch: Tensor) -> None:
        """Add xᵀx to the upper triangle, a block of rows of it at a time, and signed tokens to the sketch."""
        for first in range(0, rows.shape[1], _BLOCK):
            gram[first : first + _BLOCK, first:] += rows[:, first : first + _BLOCK].T @ rows[:, first:]
        sketch += _signs(self.tokens, len(rows), rows.device).to(rows.dtype) @ rows

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
    product = _factor(difference) @ _factor(gram)
    return torch.dot(product.float().view(-1), difference.reshape(-1))


def estimated_error(difference: Tensor, sketch: Tensor) -> Tensor:
    """`output_error` as the sketch gives it: a small part of the work, a few per cent off.

    The same sketch judges all candidates, so what it is off by is nearly the same for each.
    """
    return (_factor(difference) @ _factor(sketch.T)).float().square().sum() / SKETCHED


def _signs(seed: int, tokens: int, device: torch.device) -> Tensor:
    """(SKETCHED, tokens) of 1 and -1, the same in every run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (SKETCHED, tokens), generator=generator).mul_(2).sub_(1).to(device)


def _factor(matrix: Tensor) -> Tensor:
    """A factor of a product that is compared with others: bfloat16 where a CPU multiplies it faster (AMX, AVX512-BF16).

    Rounding of its elements averages out over a sum of so many (3e-4 relative, held against float64 in tests).
    """
    return matrix.bfloat16() if matrix.device.type == "cpu" and _has_bfloat16_products() else matrix


@cache
def _has_bfloat16_products() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
