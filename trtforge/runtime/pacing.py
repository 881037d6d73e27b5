"""How many tokens of prompts a step may compute beside running sequences, whose next tokens wait for the whole step.

The number goes up and down in a few sizes, so that what steps of one size take is soon known.
"""

import statistics
from bisect import bisect_left, bisect_right
from collections import deque

_TIMES, _MOST_TIMES = 1.7, 2.0
"""Such a step is planned to take at most so many times as long as one without prompts; fewer tokens are taken if it
takes more than the second. Between them, tokens may cost more in a larger size than was expected."""
_ALONE = 2.0
"""How many times as much a token costs beside running sequences, of which steps without any tell: in small chunks."""
_SIZES = (4, 8, *(tokens << power for power in range(16) for tokens in (12, 16)))
_RECENT = 5  # steps
_ENOUGH = 3  # steps
_BETWEEN = 24
"""Steps with prompts after which one without tells how long these take now."""
_AGAIN = 4 * _BETWEEN
"""Steps with prompts after which a size that was too large at once is tried again."""
_ALIKE = 1.5
"""Durations of steps without prompts that differ by less are of steps with as many sequences."""
_FASTER = 0.9
"""Two successive steps with prompts that take a smaller share of the time of one without show that this is wrong."""


class Pace:
    """Learns from the durations of steps. Medians, because other work on the machine makes single steps slow."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_RECENT)  # seconds of steps without prompts
        self._unconfirmed: float | None = None  # of the last one, if it took much longer or shorter than the others
        self._alone: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._beside = 0  # steps since the last one without prompts
        self._faster = 0  # of these, the last ones that took less time than one without prompts
        self._size: int | None = None
        self._per_token: deque[float] = deque(maxlen=_RECENT)  # seconds that tokens added to steps of this size
        self._grown = False  # whether the size is larger than the one before, and nothing is known of it yet
        self._largest = _SIZES[-1]
        self._since_too_long = 0  # steps with prompts

    def observe(self, seconds: float, context: int, *, alone: bool) -> None:
        """A step of that many context tokens took so long. `alone`: no sequence of it was in the generation phase."""
        if not context:
            self._learn_usual(seconds)
            return
        self._unconfirmed = None
        if alone:
            self._alone.append((_ALONE * seconds, context))
        elif self._usual:
            self._beside += 1
            self._since_too_long += 1
            usual = statistics.median(self._usual)
            self._faster = self._faster + 1 if seconds < _FASTER * usual else 0
            self._learn(max(0.0, seconds - usual) / context, context)

    @property
    def most_context(self) -> int | None:
        """Context tokens beside running sequences; None as long as nothing is known."""
        if self._beside >= _BETWEEN or self._faster >= 2 or self._unconfirmed is not None:
            return 0
        if self._size is not None or not self._usual or not self._alone:
            return self._size
        seconds, tokens = (statistics.median(values) for values in zip(*self._alone, strict=True))
        return self._fitting(seconds / tokens)

    def _fitting(self, seconds: float) -> int:
        """The largest size that fits if a token takes so long."""
        tokens = self._longer(_TIMES) / seconds if seconds else _SIZES[-1]
        return _SIZES[max(0, bisect_right(_SIZES, tokens) - 1)]

    def _longer(self, times: float) -> float:
        """How many seconds longer a step takes that takes so many times as long as one without prompts."""
        return (times - 1) * statistics.median(self._usual)

    def _learn_usual(self, seconds: float) -> None:
        """A step without prompts took so long. If that is unusual the next step tells whether it is usual now."""
        self._beside = self._faster = 0
        if not self._usual or _alike(seconds, statistics.median(self._usual)):
            self._usual.append(seconds)
            self._unconfirmed = None
        elif self._unconfirmed is None:
            self._unconfirmed = seconds
        else:
            if _alike(seconds, self._unconfirmed):
                self._usual = deque((self._unconfirmed, seconds), maxlen=_RECENT)
                self._largest = _SIZES[-1]
                self._shrink()
            self._unconfirmed = None

    def _learn(self, per_token: float, context: int) -> None:
        """So many tokens added so many seconds each to a step: choose a size, another after a few steps of one."""
        if self._size is None:
            self._size = self.most_context or self._fitting(per_token)
        if not self._size < 2 * context <= 2 * self._size:  # the end of a prompt, or steps that are not paced
            return
        self._per_token.append(per_token)
        if len(self._per_token) < _ENOUGH:
            return
        if self._since_too_long >= _AGAIN:
            self._largest = _SIZES[-1]
        cost = statistics.median(self._per_token)
        if self._size * cost > self._longer(_MOST_TIMES):
            if self._grown:
                self._largest, self._since_too_long = _SIZES[bisect_left(_SIZES, self._size) - 1], 0
            self._shrink()
            return
        self._grown = False
        larger = min(self._fitting(cost), 2 * self._size, self._largest)
        if larger > self._size:
            self._take(larger)
            self._grown = True

    def _shrink(self) -> None:
        """Take fewer tokens if fewer fit now."""
        if self._size is None or not self._per_token:
            return
        size = self._fitting(statistics.median(self._per_token))
        if size < self._size:
            self._take(size)

    def _take(self, size: int) -> None:
        self._size = size
        self._per_token.clear()
        self._grown = False


def _alike(a: float, b: float) -> bool:
    return max(a, b) <= _ALIKE * min(a, b)
