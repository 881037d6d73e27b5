"""What kernels that compute RMS norms into given memory have in common, on the CPU and on CUDA."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class RmsNorms(ABC):
    """Kernels of RMS norms."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x / rms(x) * weight over the last dimension of (..., size)."""
        x = x.contiguous()
        y = torch.empty_like(x)
        size = x.shape[-1]
        self.rms_norm_into(x.view(-1, size), weight, epsilon, y.view(-1, size))
        return y

    @abstractmethod
    def rms_norm_into(self, x: Tensor, weight: Tensor, epsilon: float, y: Tensor) -> None:
        """`rms_norm` of (rows, size), where x and y may be columns of wider tensors."""
