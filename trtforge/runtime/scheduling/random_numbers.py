"""Random numbers as functions of a seed and a position, so that batching and pauses do not change them.

Needs no torch.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_STREAM = 0xD1342543DE82EF95  # between the seeds of streams: odd, and far from differences between users' seeds


def random_bits(places: Sequence[tuple[int, int]], stream: int = 0) -> npt.NDArray[np.uint64]:
    """64 random bits for each (seed, position): SplitMix64 (Steele et al. 2014), counter-based.

    Streams are independent of one another.
    """
    x = np.array([(seed + stream * _STREAM) & 0xFFFFFFFFFFFFFFFF for seed, _ in places], dtype=np.uint64)
    positions = np.array([position for _, position in places], dtype=np.uint64)
    with np.errstate(over="ignore"):
        for counter in (np.zeros_like(positions), positions):
            x = x + (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
    return x


def shares_of(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) from the upper 53 bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform(places: Sequence[tuple[int, int]], stream: int = 0) -> npt.NDArray[np.float64]:
    """A random number in [0, 1) for each (seed, position)."""
    return shares_of(random_bits(places, stream))
