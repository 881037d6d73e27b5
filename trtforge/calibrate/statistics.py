"""Statistics of the inputs of linears: magnitudes, and a sketch from which output errors are computed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from trtforge.calibrate.precision import search_dtype
from trtforge.core.number_limits import E2M1_MAX, NVFP4_BLOCK
from trtforge.models.transforms import TORCH, nvfp4_global_scale
from trtforge.plan.peaks import SKETCH_ROWS
from trtforge.runtime.linears.nvfp4_linear import round_to_e2m1, round_to_nvfp4

_TOKENS = 1024  # processed at once
_FIRST = 256  # tokens whose products are computed in float32, before those in bfloat16 (`_add_bfloat16_products`)
_EXACT = 4  # tokens for each input that go into a Gram matrix one by one
_MOST_FOLDED = 8  # tokens that later become one row
_BLOCKS = 8  # of columns, in which the upper half of a Gram matrix is computed


@dataclass
class InputStatistics:
    """Statistics of an input that one or more linears read, float32 on the computing device.

    `channel_amax` and `absolute_sum` (in,). For the AWQ search also `sketch` S (up to SKETCH_ROWS, in): token i, with a
    random sign, is added to row i mod SKETCH_ROWS. The expectation of SᵀS is the Gram matrix XᵀX of all tokens, so ‖S
    Dᵀ‖² estimates the output error ‖X Dᵀ‖² of a weight error D (out, in): exact until rows are shared, then a few per
    cent off, nearly the same for every D (count sketch: Charikar, Chen and Farach-Colton, 2002; of matrices: Clarkson
    and Woodruff, 2013). Updating it takes no matrix product, and its memory is linear in the width, while a Gram
    matrix's is quadratic. Compensated rounding takes a Gram matrix `gram` (in, in) instead, of which only the blocks on
    and above the diagonal are up to date: a sketch with fewer rows than inputs has directions of zero error. It is
    exact for the first _EXACT tokens per input; later ones are sketched (`_folded`). For NVFP4 also `noise` (in,): the
    squared errors of rounding the input to NVFP4. If there is a Gram matrix, it is that of the rounded inputs X + N,
    and `cross` (in, in) Nᵀ(X + N) replaces `noise`.
    """

    channel_amax: Tensor
    absolute_sum: Tensor
    sketch: Tensor | None
    gram: Tensor | None = None
    noise: Tensor | None = None
    cross: Tensor | None = None
    tokens: int = field(default=0)

    @classmethod
    def empty(
        cls,
        features: int,
        device: torch.device,
        *,
        sketch: bool = False,
        gram: bool = False,
        noise: bool = False,
    ) -> "InputStatistics":
        """Statistics before any data."""
        return cls(
            channel_amax=torch.zeros(features, device=device),
            absolute_sum=torch.zeros(features, device=device),
            sketch=torch.zeros(0, features, device=device) if sketch else None,
            gram=torch.zeros(features, features, device=device) if gram else None,
            noise=torch.zeros(features, device=device) if noise and not gram else None,
            cross=torch.zeros(features, features, device=device) if noise and gram else None,
        )

    def update(self, inputs: Tensor) -> None:
        """Add activations (..., in)."""
        half = inputs.dtype is torch.bfloat16 and search_dtype(inputs.device.type) == "bfloat16"
        for rows in inputs.detach().flatten(0, -2).split(_TOKENS):
            rows = rows.float()
            magnitudes = rows.abs()
            torch.maximum(self.channel_amax, magnitudes.amax(dim=0), out=self.channel_amax)
            if self.sketch is not None or self.gram is not None:
                self.absolute_sum += magnitudes.sum(dim=0)
            if self.gram is not None:
                seen = rows if self.cross is None else self._rounded(self.cross, rows)
                self._add_to_gram(self.gram, seen, half=half)
            if self.noise is not None:
                self.noise += nvfp4_errors(rows).square_().sum(dim=0)
            if self.sketch is not None:
                self.sketch = _grown(self.sketch, self.tokens + len(rows))
                _add_signed(self.sketch, rows, self.tokens)
            self.tokens += len(rows)

    def _rounded(self, cross: Tensor, rows: Tensor) -> Tensor:
        """Inputs in NVFP4, with the scale for the largest magnitude so far; adds their errors to `cross`."""
        scale = nvfp4_global_scale(self.channel_amax.amax())
        rounded: Tensor = round_to_nvfp4(rows, scale).mul_(scale)
        cross += _to_search_dtype(rounded - rows).T @ _to_search_dtype(rounded)  # small beside a sketch's errors
        return rounded

    def _add_to_gram(self, gram: Tensor, rows: Tensor, *, half: bool) -> None:
        first = 0 if self.tokens else _FIRST
        if not half or first:
            _add_products(gram, _folded(rows[:first] if half else rows, self.tokens))
        if half and len(rows) > first:
            folded = _folded(rows[first:], self.tokens)
            _add_bfloat16_products(gram, folded.bfloat16(), (len(rows) - first) / (self.tokens or first))

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
        """(min(tokens, SKETCH_ROWS), in) the sketch without unused rows."""
        assert self.sketch is not None, "the format needs no sketch"
        return self.sketch[: self.tokens]

    def output_errors(self, difference: Tensor) -> Tensor:
        """(..., out) squared output errors of a weight error (..., out, in), summed over all tokens."""
        product = (_to_search_dtype(difference) @ self._products).float()
        return product.mul_(difference if self._products.shape[0] == self._products.shape[1] else product).sum(dim=-1)

    def independent_errors(self, difference: Tensor) -> Tensor:
        """(..., out) the same if the errors of a row's elements are uncorrelated, as rounding errors nearly are.

        Overwrites `difference`.
        """
        return difference.square_() @ self.square_sum

    def take_gram(self) -> Tensor:
        """Release the Gram matrix to the caller, who may overwrite it; errors can no longer be computed."""
        assert self.gram is not None, "the format needs no Gram matrix"
        _mirror(self.gram)
        gram, self.gram = self.gram, None
        self.__dict__.pop("_products", None)
        return gram

    def take_cross(self) -> Tensor:
        """Release `cross` to the caller."""
        assert self.cross is not None, "the inputs are not rounded"
        cross, self.cross = self.cross, None
        return cross

    @cached_property
    def square_sum(self) -> Tensor:
        """(in,) Σx², estimated from the sketch if there is no Gram matrix."""
        if self.gram is not None:
            return self.gram.diagonal().clone()
        return self.rows.square().sum(dim=0)

    @cached_property
    def _products(self) -> Tensor:
        """XᵀX, or SᵀS (in, in) if the sketch has at least `in` rows, else Sᵀ (in, rows)."""
        if self.gram is not None:
            _mirror(self.gram)
            return _to_search_dtype(self.gram)
        rows = _to_search_dtype(self.rows)
        return _to_search_dtype(rows.T @ rows) if len(rows) >= rows.shape[1] else rows.T


def nvfp4_errors(rows: Tensor) -> Tensor:
    """(tokens, in) the errors of inputs in NVFP4, without the rounding of their block scales to E4M3."""
    blocks = rows.unflatten(1, (-1, NVFP4_BLOCK))
    steps = (blocks.abs().amax(dim=2, keepdim=True) / E2M1_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
    errors: Tensor = round_to_e2m1(blocks / steps).mul_(steps).sub_(blocks).flatten(1)
    return errors


def _folded(rows: Tensor, seen: int) -> Tensor:
    """Signed sums of rows, fewer than `rows`, with the same expected Gram matrix, if `seen` tokens are many for the
    width.

    So the cost of a Gram matrix's products grows with the logarithm of the tokens.
    """
    count = min(_MOST_FOLDED, seen // (_EXACT * rows.shape[1]))
    height = len(rows) // count if count > 1 else 0
    if height == 0:
        return rows
    together = (rows * _signs(seen, len(rows), rows.device))[: count * height].unflatten(0, (count, height))
    return torch.cat((together.sum(dim=0), rows[count * height :]))


def _add_products(gram: Tensor, rows: Tensor) -> None:
    """Add rowsᵀ rows on and above the diagonal blocks."""
    for start, stop in _column_blocks(rows.shape[1]):
        gram[:stop, start:stop].addmm_(rows[:, :stop].T, rows[:, start:stop])


def _add_bfloat16_products(gram: Tensor, rows: Tensor, share: float) -> None:
    """The same in half the time, given bfloat16 rows.

    The result of such a product is rounded to bfloat16. To keep the rounding small, the expected contribution of the
    rows (`share` of the matrix so far) is subtracted within the product and added in float32.
    """
    for start, stop in _column_blocks(rows.shape[1]):
        sums = gram[:stop, start:stop]
        expected = (sums * share).bfloat16()
        sums.add_(torch.addmm(expected, rows[:, :stop].T, rows[:, start:stop], beta=-1)).add_(expected)


def _column_blocks(width: int) -> Iterator[tuple[int, int]]:
    for columns in torch.arange(width).chunk(_BLOCKS):
        yield int(columns[0]), int(columns[-1]) + 1


def _mirror(gram: Tensor) -> None:
    """Copy the upper triangle of blocks to the lower one."""
    for start, stop in _column_blocks(len(gram)):
        gram[start:stop, :start] = gram[:start, start:stop].T


def _to_search_dtype(matrix: Tensor) -> Tensor:
    return matrix.to(TORCH[search_dtype(matrix.device.type)])


def _grown(sketch: Tensor, tokens: int) -> Tensor:
    """The sketch with rows for `tokens` tokens; grown on demand, because a rarely chosen expert needs few."""
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
        row = (seen + done) % SKETCH_ROWS
        count = min(len(rows) - done, SKETCH_ROWS - row)
        sketch[row : row + count].addcmul_(rows[done : done + count], signs[done : done + count])
        done += count


@lru_cache(maxsize=8)  # all linears of a layer see the same tokens
def _signs(seed: int, count: int, device: torch.device) -> Tensor:
    """(count, 1) float32 of 1 and -1, the same in every run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (count, 1), generator=generator).mul_(2).sub_(1).float().to(device)
