"""Progress within a unit of work, such as a decoder layer: a callback after each part of a computation."""

from collections.abc import Callable

Share = Callable[[float], object]
"""Called with the share of a unit that was finished; all shares of a unit add up to 1."""


def not_shown(share: float) -> None:
    """For computations without a progress bar."""
