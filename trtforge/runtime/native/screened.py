"""Products of which only the largest of each row need be right (source/screened.cpp), as those of an LM head.

Codes of 8 bits tell which tokens may be the most likely ones, so that a step reads half as many bytes of a large
vocabulary; only these tokens are computed, as in Chen et al. 2019 ("Learning to screen for fast softmax inference on
large vocabulary neural networks", arXiv:1810.12406). Here limits of the codes' errors prove that it is no other token.
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
    """y = x W^T + b of weights in 16 bits, with what screens the products: W in 8 bits, and its errors.

    `by_products`: whether `Native.linear` computes the layer, else `linear_expanded`. `valid`: its first outputs, among
    which the largest products are looked for; the others only fill the last tiles. `first`: the token of the first.
    `farthest`: where one of the largest products is farther from 0, all of them are right; not beside draws.
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
        """How many of the largest products of a row must be right, 0 for all. Recorded calls follow it too.

        Of a row with a factor above 0 only the largest sum of a product, times the factor, and the noise of its key
        (candidates.gumbel_noise) must be; of one with a distance above 0 the largest product and those that are at most
        so far below it. keys, factors, distances: (rows,), at most MOST_DRAWN, or none at all.
        """
        self._most[0] = most
        self._factors.fill(0.0)
        self._distances.fill(0.0)
        self._distances[: len(distances)] = distances
        self._keys[: len(keys)], self._factors[: len(factors)] = keys, factors

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, out) for x (rows, in), in its dtype. The largest products of a row, and what equals them, are those of
        the layer; all others are smaller, and may be off."""
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
