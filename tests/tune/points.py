"""Measured loads, as short as tests need them."""

from trtforge.tune.goal import Point


def point(load: int, tokens: float = 100.0, first: float = 10.0, each: float = 1.0, answer: float = 50.0) -> Point:
    """A measured load of 16 requests."""
    return Point(
        concurrency=load,
        requests=16,
        tokens_per_second=tokens,
        first_text_ms=first,
        next_token_ms=each,
        answer_ms=answer,
    )
