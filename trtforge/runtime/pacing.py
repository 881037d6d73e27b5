"""Limits the prompt tokens of a step that also generates, and the KV blocks that it restores from host memory or
files: running sequences wait for the whole step.

The limit of tokens takes few values, so that a few steps are enough to measure each.
"""

import statistics
from bisect import bisect_left, bisect_right
from collections import deque

_TIMES, _MOST_TIMES = 1.7, 2.0
"""Planned ratio of the durations of steps with and without prompts, and the measured ratio above which the limit is
lowered. The gap allows for tokens that cost more in larger steps than expected."""
_ALONE = 2.0
"""Approximate cost of a prompt token in a small chunk beside running sequences, relative to its cost in a step without
running sequences."""
_UNKNOWN = 12
"""Prompt tokens of a step before a prompt was computed without running sequences."""
_FIRST_BLOCKS = 4
"""Blocks that the first such step restores; the following ones restore at most twice as many as the one before."""
_SIZES = (4, 8, *(tokens << power for power in range(16) for tokens in (12, 16)))
_RECENT = 5  # steps
_ENOUGH = 3  # steps
_BETWEEN = 24
"""Steps with prompts after which one without prompts is measured again."""
_AGAIN = 4 * _BETWEEN
"""Steps with prompts after which a size that was too large when first tried is tried again."""
_ALIKE = 1.5
"""Steps without prompts whose durations differ by less are taken to have the same number of sequences."""
_FASTER = 0.9
"""If two successive steps with prompts take less than this share of the time of a step without, that time is
measured again."""


class Pace:
    """Learns from the median durations of steps, because other work on the machine slows single steps."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_RECENT)  # seconds of steps without prompts
        self._unconfirmed: float | None = None  # the last one's, if it was much longer or shorter than the others
        self._alone: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._beside = 0  # steps since the last one without prompts
        self._faster = 0  # number of latest such steps faster than one without prompts
        self._size: int | None = None
        self._per_token: deque[float] = deque(maxlen=_RECENT)  # seconds that each token added to steps of this size
        self._grown = False  # whether the size has just been raised and is not measured yet
        self._largest = _SIZES[-1]
        self._since_too_long = 0  # steps with prompts
        self._restored: deque[tuple[float, int]] = deque(maxlen=_RECENT)  # seconds added to steps, and blocks
        self._blocks = _FIRST_BLOCKS

    def observe(self, seconds: float, context: int, *, alone: bool, restored: int = 0) -> None:
        """Record the duration of a step with `context` prompt tokens and `restored` blocks.

        `alone`: without running sequences.
        """
        if not context and not restored:
            self._learn_usual(seconds)
            return
        self._unconfirmed = None
        if alone and not restored:
            self._alone.append((_ALONE * seconds, context))
        if alone or not self._usual:
            return
        self._beside += 1
        usual = statistics.median(self._usual)
        if restored:
            self._learn_blocks(seconds - usual, context, restored)
            return
        self._since_too_long += 1
        self._faster = self._faster + 1 if seconds < _FASTER * usual else 0
        self._learn(max(0.0, seconds - usual) / context, context)

    @property
    def most_context(self) -> int | None:
        """Limit of prompt tokens beside running sequences; None until something is measured."""
        if self._measures_usual:
            return 0
        if self._size is not None or not self._usual:
            return self._size
        return self._size_alone() or _UNKNOWN

    @property
    def most_restored(self) -> int:
        """Limit of restored blocks beside running sequences."""
        return 0 if self._measures_usual else self._blocks

    @property
    def _measures_usual(self) -> bool:
        """Whether the next step should have no prompts."""
        return self._beside >= _BETWEEN or self._faster >= 2 or self._unconfirmed is not None

    def _size_alone(self) -> int | None:
        """The size that should fit by what prompts took alone; None before the first one."""
        if not self._alone:
            return None
        seconds, tokens = (statistics.median(values) for values in zip(*self._alone, strict=True))
        return self._fitting(seconds / tokens)

    def _fitting(self, per_token: float) -> int:
        """The largest size that fits if a prompt token takes `per_token` seconds."""
        tokens = self._longer(_TIMES) / per_token if per_token else _SIZES[-1]
        return _SIZES[max(0, bisect_right(_SIZES, tokens) - 1)]

    def _longer(self, times: float) -> float:
        """Seconds by which a step that takes `times` as long as one without prompts exceeds it."""
        return (times - 1) * statistics.median(self._usual)

    def _learn_usual(self, seconds: float) -> None:
        """Record the duration of a step without prompts. An unusual one counts only if the next step confirms it."""
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
        """Record the seconds that each of `context` prompt tokens added to a step; choose a size after a few steps."""
        if self._size is None:
            self._size = self._size_alone() or self._fitting(per_token)
        if not self._size < 2 * context <= 2 * self._size:  # the end of a prompt, or a step that is not paced
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

    def _learn_blocks(self, added: float, context: int, restored: int) -> None:
        """Record the seconds that restoring blocks added to a step; adapt their number."""
        if context or 2 * restored <= self._blocks:  # the end of a prefix
            return
        self._restored.append((max(0.0, added), restored))
        seconds, blocks = (sum(values) for values in zip(*self._restored, strict=True))  # some are the first in a page
        most = 2 * self._blocks
        self._blocks = max(1, min(most, int(self._longer(_TIMES) * blocks / seconds))) if seconds else most

    def _shrink(self) -> None:
        """Lower the size if only a smaller one fits now."""
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
