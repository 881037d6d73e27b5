"""What is kept of the inputs of linears while data flows: largest and mean magnitudes, and the Gram matrix."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class InputStatistics:
    """Of one input that one or more linears read. All float32, on the device that computes.

    `amax` (1,), `absolute_sum` (in,), `gram` (in, in) = the sum of x xᵀ over `tokens`, None where no search needs it.
    """

    amax: Tensor
    absolute_sum: Tensor
    gram: Tensor | None
    tokens: int = field(default=0)

    @classmethod
    def empty(cls, features: int, device: torch.device, *, gram: bool) -> "InputStatistics":
        """Before any data."""
        return cls(
            amax=torch.zeros(1, device=device),
            absolute_sum=torch.zeros(features, device=device),
            gram=torch.zeros(features, features, device=device) if gram else None,
        )

    def update(self, inputs: Tensor) -> None:
        """Add activations (..., in)."""
        rows = inputs.detach().flatten(0, -2).float()
        magnitudes = rows.abs()
        self.amax = torch.maximum(self.amax, magnitudes.amax().reshape(1))
        self.absolute_sum += magnitudes.sum(dim=0)
        if self.gram is not None:
            self.gram.addmm_(rows.T, rows)
        self.tokens += rows.shape[0]

    @property
    def mean_magnitude(self) -> Tensor:
        """(in,) mean of |x| over the tokens."""
        return self.absolute_sum / self.tokens


def output_error(difference: Tensor, gram: Tensor) -> Tensor:
    """Sum of squared output errors of a weight error D (out, in) over all tokens: ‖X Dᵀ‖² = tr(D (XᵀX) Dᵀ)."""
    return ((difference @ gram) * difference).sum()
