"""What is kept of the inputs of linears while data flows: magnitudes, and a sketch that output errors follow from."""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from trtforge.calibrate.precision import search_dtype
from trtforge.models.transforms import TORCH
from trtforge.plan.peaks import SKETCH_ROWS

_TOKENS = 1024  # that are looked at at once


@dataclass
class InputStatistics:
    """Of one input that one or more linears read. All float32, on the device that computes.

    `channel_amax` and `absolute_sum` (in,). Where a search needs it `sketch` S (up to SKETCH_ROWS, in):
    token i with a random sign is added to row i mod SKETCH_ROWS. The expectation of SᵀS is the Gram matrix XᵀX of all
    tokens, so ‖S Dᵀ‖² is the output error ‖X Dᵀ‖² of a weight error D (out, in): exactly until rows are shared, and a
    few per cent off after that, nearly the same for every D (count sketch: Charikar, Chen and Farach-Colton, 2002; of
    matrices: Clarkson and Woodruff, 2013). It takes no product to keep, and memory that is linear in the width where a
    Gram matrix's is quadratic.
    """

    channel_amax: Tensor
    absolute_sum: Tensor
    sketch: Tensor | None
    tokens: int = field(default=0)

    @classmethod
    def empty(cls, features: int, device: torch.device, *, sketch: bool) -> "InputStatistics":
        """Before any data."""
        return cls(
            channel_amax=torch.zeros(features, device=device),
            absolute_sum=torch.zeros(features, device=device),
            sketch=torch.zeros(0, features, device=device) if sketch else None,
        )

    def update(self, inputs: Tensor) -> None:
        """Add activations (..., in)."""
        for rows in inputs.detach().flatten(0, -2).split(_TOKENS):
            rows = rows.float()
            magnitudes = rows.abs()
            torch.maximum(self.channel_amax, magnitudes.amax(dim=0), out=self.channel_amax)
            if self.sketch is not None:
                self.absolute_sum += magnitudes.sum(dim=0)
                self.sketch = _grown(self.sketch, self.tokens + len(rows))
                _add_signed(self.sketch, rows, self.tokens)
            self.tokens += len(rows)

    @property
    def amax(self) -> Tensor:
        """(1,) largest magnitude."""
        return self.channel_amax.amax().reshape(1)

    @property
    def mean_magnitude(self) -> Tensor:
        """(in,) mean of |x| over the tokens."""
        return self.absolute_sum / max(1, self.tokens)

    @property
    def rows(self) -> Tensor:
        """(min(tokens, SKETCH_ROWS), in) the sketch without what no token has reached."""
        assert self.sketch is not None, "the format needs no sketch"
        return self.sketch[: self.tokens]

    def output_errors(self, difference: Tensor) -> Tensor:
        """(..., out) squared output errors of a weight error (..., out, in), sums over all tokens."""
        product = (_factor_of(difference) @ self._products).float()
        return product.mul_(difference if self._products.shape[0] == self._products.shape[1] else product).sum(dim=-1)

    def independent_errors(self, difference: Tensor) -> Tensor:
        """(..., out) the same if the errors of a row's elements were uncorrelated, as those of rounding nearly are.

        Overwrites `difference`.
        """
        return difference.square_() @ self.square_sum

    @cached_property
    def square_sum(self) -> Tensor:
        """(in,) Σx², by the sketch."""
        return self.rows.square().sum(dim=0)

    @cached_property
    def _products(self) -> Tensor:
        """SᵀS (in, in) where the sketch has more rows than that, else Sᵀ (in, rows)."""
        rows = _factor_of(self.rows)
        return _factor_of(rows.T @ rows) if len(rows) >= rows.shape[1] else rows.T


def _factor_of(matrix: Tensor) -> Tensor:
    return matrix.to(TORCH[search_dtype(matrix.device.type)])


def _grown(sketch: Tensor, tokens: int) -> Tensor:
    """The sketch with room for so many tokens: an expert that few of them reach needs few rows."""
    wanted = min(SKETCH_ROWS, tokens)
    if len(sketch) >= wanted:
        return sketch
    grown = sketch.new_zeros(min(SKETCH_ROWS, max(wanted, 2 * len(sketch))), sketch.shape[1])
    grown[: len(sketch)] = sketch
    return grown


def _add_signed(sketch: Tensor, rows: Tensor, seen: int) -> None:
    signs = _signs(seen, len(rows), rows.device)
    done = 0
    while done < len(rows):
        place = (seen + done) % SKETCH_ROWS
        count = min(len(rows) - done, SKETCH_ROWS - place)
        sketch[place : place + count].addcmul_(rows[done : done + count], signs[done : done + count])
        done += count


@lru_cache(maxsize=8)  # the inputs of all linears of a layer take the same tokens
def _signs(seed: int, count: int, device: torch.device) -> Tensor:
    """(count, 1) float32 of 1 and -1, the same in every run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (count, 1), generator=generator).mul_(2).sub_(1).float().to(device)
