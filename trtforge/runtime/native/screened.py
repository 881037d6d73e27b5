"""Linear layers of which only the largest outputs of each row must be exact (source/screened.cpp), such as an LM head.

Products with 8-bit codes show which tokens may be among the most likely ones; only these are computed exactly, so a
step reads half as many bytes of a large vocabulary. This follows Chen et al. 2019 ("Learning to screen for fast softmax
inference on large vocabulary neural networks", arXiv:1810.12406). Here, bounds of the codes' errors exclude all others.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trtforge.models.kernels import MOST_DRAWN
from trtforge.runtime.native.bindings import TYPES, Native
from trtforge.runtime.native.expanded import ExpandedLayer
from trtforge.runtime.native.pages import shared_pages
from trtforge.runtime.native.structures import FORMATS, ScreenedLinear

_NO_KEYS, _NO_FACTORS = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.float64)


class Screened:
    """y = x W^T + b of 16-bit weights, screened by a copy of W in 8 bits and bounds of its errors.

    `by_products`: whether `Native.linear` computes the layer, else `linear_expanded`. `valid`: number of outputs among
    which to find the largest; later ones only pad the last tiles. `first`: the token of the first output.
    `farthest`: if one of the largest outputs is farther from 0, all outputs are exact; not supported with `factors`.
    """

    def __init__(
        self,
        kernels: Native,
        layer: ExpandedLayer,
        inputs: int,
        *,
        by_products: bool,
        valid: int,
        first: int = 0,
        farthest: float = math.inf,
    ) -> None:
        self._kernels = kernels
        self._layer = layer
        self._by_products, self._farthest = by_products, farthest
        self._codes = shared_pages((layer.outputs, inputs), torch.int8)
        self._scales, self._errors = torch.empty(layer.outputs), torch.empty(layer.outputs)
        self._most = np.zeros(1, dtype=np.int64)
        self._pause = np.zeros(2, dtype=np.int64)
        self._keys, self._factors = np.zeros(MOST_DRAWN, dtype=np.uint64), np.zeros(MOST_DRAWN, dtype=np.float32)
        self._distances = np.zeros(MOST_DRAWN, dtype=np.float32)
        self._first = first
        pointers = (tensor.data_ptr() for tensor in (layer.weight, self._codes, self._scales, self._errors))
        kernels.run("screen", FORMATS.index(layer.format), *pointers, inputs, layer.outputs)
        self._errors[valid:] = torch.nan

    def need(
        self,
        most: int,
        keys: npt.NDArray[np.uint64] = _NO_KEYS,
        factors: npt.NDArray[np.float64] = _NO_FACTORS,
        distances: npt.NDArray[np.float64] = _NO_FACTORS,
    ) -> None:
        """Set how many of the largest outputs of a row must be exact, 0 for all; also applies to recorded calls.

        For a row with a factor above 0, only the largest value of output x factor + noise of the row's key must be
        exact (candidates.gumbel_noise). For a row with a distance above 0, the largest output and those at most
        `distance` below it must be. keys, factors, distances: (rows,), at most MOST_DRAWN rows, or empty.
        """
        self._most[0] = most
        self._factors.fill(0.0)
        self._distances.fill(0.0)
        self._distances[: len(distances)] = distances
        self._keys[: len(keys)], self._factors[: len(factors)] = keys, factors

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs (rows, out) for x (rows, in), in its dtype. The largest outputs of a row, ties included, are
        exactly those of the layer; all others are smaller, and may be inexact."""
        x = x.contiguous()
        layer = self._layer
        y = x.new_empty(len(x), layer.outputs)
        given = ScreenedLinear(
            x=x.data_ptr(),
            weight=layer.weight.data_ptr(),
            bias=None if layer.bias is None else layer.bias.data_ptr(),
            codes=self._codes.data_ptr(),
            scales=self._scales.data_ptr(),
            errors=self._errors.data_ptr(),
            y=y.data_ptr(),
            most=self._most.ctypes.data,
            pause=self._pause.ctypes.data,
            keys=self._keys.ctypes.data,
            factors=self._factors.ctypes.data,
            distances=self._distances.ctypes.data,
            rows=len(x),
            inputs=x.shape[1],
            outputs=layer.outputs,
            format=FORMATS.index(layer.format),
            by_products=self._by_products,
            first=self._first,
            farthest=self._farthest,
        )
        self._kernels.run("linear_screened", TYPES[x.dtype], given)
        return y
