"""The base class of CPU and CUDA kernels that write RMS norms to given memory."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class RmsNorms(ABC):
    """RMS norm kernels."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x / rms(x) * weight over the last dimension of x (..., size)."""
        x = x.contiguous()
        y = torch.empty_like(x)
        size = x.shape[-1]
        self.rms_norm_into(x.view(-1, size), weight, epsilon, y.view(-1, size))
        return y

    @abstractmethod
    def rms_norm_into(self, x: Tensor, weight: Tensor, epsilon: float, y: Tensor) -> None:
        """y = `rms_norm` of x, both (rows, size); they may be columns of wider tensors."""
