"""Searches the scale of a layer's KV cache with the smallest error of its attention, instead of using the amax.

A smaller scale clips the few largest keys and values and rounds all others less (INT8), or moves more of them out of
E4M3's subnormal numbers (FP8). Each candidate is tried on some of the samples: the layer computes with keys and values
rounded as in the cache.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from trtforge.core.number_limits import INT8_MAX
from trtforge.core.recipe import KvCacheFormat
from trtforge.models.formats import CACHE_BOUNDS
from trtforge.models.transforms import quantize_fp8
from trtforge.reference.streaming import CacheObserver, LoadedLayer

PROBED_BATCHES = 4
_SHARES = tuple(round(1 - 0.05 * step, 2) for step in range(1, 13))  # of the amax, candidates for INT8's range
_PATIENCE = 2  # consecutive ranges that are worse than the best
_HEADROOM = (2.0, 2.5, 3.2, 8.0, 32.0)  # times the amax, candidates for FP8's range, which must not clip
_LEAST_GAIN = 0.02  # of the squared error; with a smaller gain the scale of the largest magnitude is kept


def largest_scale(amax: Tensor, quant: KvCacheFormat) -> Tensor:
    """(1,) the scale for the largest magnitude `amax` (1,); for FP8 at least 1, as in ModelOpt."""
    scale = amax / CACHE_BOUNDS[quant]
    return scale.clamp(min=1.0) if quant == "fp8" else scale


def search_scale(
    layer: LoadedLayer,
    attention: nn.Module,
    inputs: Sequence[Tensor],
    cache: CacheObserver,
    amax: Tensor,
    quant: KvCacheFormat,
) -> Tensor:
    """(1,) float32: the candidate with the smallest squared error of the attention's output.

    `attention`: the module of the layer whose output is compared. `inputs`: hidden states of the first batches before
    the layer. `amax`: largest key or value of all batches.
    """
    plain = largest_scale(amax, quant)
    expected = [_output(layer, attention, batch, hidden) for batch, hidden in enumerate(inputs)]

    def error(scale: Tensor) -> float:
        cache.rounded = lambda values: _rounded(values, scale, quant)
        try:
            found = [_output(layer, attention, batch, hidden) for batch, hidden in enumerate(inputs)]
        finally:
            cache.rounded = None
        return sum(float((one - other).float().square().sum()) for one, other in zip(found, expected, strict=True))

    least, best = error(plain), plain
    limit, worse = (1 - _LEAST_GAIN) * least, 0
    for factor in _SHARES if quant == "int8" else _HEADROOM:
        scale = amax * factor / CACHE_BOUNDS[quant]
        found = error(scale)
        worse = worse + 1 if found > least else 0
        if found < least and found < limit:
            least, best = found, scale
        if worse == _PATIENCE and quant == "int8":  # clipping only grows from here
            break
    cache.take()  # discards the amax of the candidates' rounded values
    return best.clone()


class _Computed(BaseException):
    """Ends a layer's forward pass after the attention. Not an Exception, so that no handler catches it."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


def _output(layer: LoadedLayer, attention: nn.Module, batch: int, hidden: Tensor) -> Tensor:
    def stop(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        raise _Computed(output[0] if isinstance(output, tuple) else output)

    hook = attention.register_forward_hook(stop)
    try:
        layer.compute(batch, hidden)
    except _Computed as computed:
        return computed.output
    finally:
        hook.remove()
    raise AssertionError("a layer computes its attention")


def _rounded(values: Tensor, scale: Tensor, quant: KvCacheFormat) -> Tensor:
    scale = scale.to(values.device)
    if quant == "fp8":
        return (quantize_fp8(values, scale).float() * scale).to(values.dtype)
    codes = (values.float() / scale).round_().clamp_(-INT8_MAX - 1, INT8_MAX)
    return (codes * scale).to(values.dtype)
