"""How many tokens of prompts a step may compute beside running sequences, whose next tokens wait for the whole step.

The number goes up and down in a few sizes: steps of as many tokens are recorded, and a recording takes a while.
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
"""Steps with prompts after which a size that took too long is tried again."""
_OTHER_TIMES = 1.5
"""Two successive steps without prompts that took so many times as long as those before, or as short, are counted
instead of them: other sequences run now."""


class Pace:
    """Learns from the durations of steps. Medians, because other work on the machine makes single steps slow."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._other: float | None = None
        """The last step without prompts, if it took another time than those before."""
        self._alone: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._beside = 0  # steps since the last one without prompts
        self._size: int | None = None
        self._added: deque[float] = deque(maxlen=_RECENT)  # seconds, by as many tokens as `_size`
        self._per_token: float | None = None  # seconds, of the size that was learned last
        self._largest = _SIZES[-1]
        self._since = 0  # steps with prompts since a size took too long

    def observe(self, seconds: float, context: int, *, alone: bool) -> None:
        """A step of that many context tokens took so long. `alone`: no sequence of it was in the generation phase."""
        if not context:
            self._learn_usual(seconds)
        elif alone:
            self._alone.append((_ALONE * seconds, context))
        elif self._steps:
            self._beside += 1
            self._since += 1
            self._learn(max(0.0, seconds - statistics.median(self._steps)), context)

    @property
    def most_context(self) -> int | None:
        """Context tokens beside running sequences; None as long as nothing is known."""
        if self._beside >= _BETWEEN or self._other is not None:
            return 0
        if self._size is not None or not self._steps or not self._alone:
            return self._size
        seconds, tokens = (statistics.median(values) for values in zip(*self._alone, strict=True))
        return self._fitting(seconds / tokens)

    def _fitting(self, seconds: float) -> int:
        """The largest size that fits if a token takes so long."""
        tokens = self._longer(_TIMES) / seconds if seconds else _SIZES[-1]
        return _SIZES[max(0, bisect_right(_SIZES, tokens) - 1)]

    def _longer(self, times: float) -> float:
        """How many seconds longer a step takes that takes so many times as long as one without prompts."""
        return (times - 1) * statistics.median(self._steps)

    def _learn_usual(self, seconds: float) -> None:
        """A step without prompts took so long. If it is the first that took another time, the next one is to tell."""
        self._beside = 0
        before = statistics.median(self._steps) if self._steps else seconds
        if before <= _OTHER_TIMES * seconds and seconds <= _OTHER_TIMES * before:
            self._steps.append(seconds)
            self._other = None
        elif self._other is None:
            self._other = seconds
        else:
            self._steps = deque((self._other, seconds), maxlen=_RECENT)
            self._other = None
            self._largest = _SIZES[-1]
            if self._size is not None and self._per_token is not None:
                self._take(min(self._size, self._fitting(self._per_token)))

    def _learn(self, added: float, context: int) -> None:
        """A step took so much longer for so many tokens: choose a size, another after a few steps of one."""
        if self._size is None:
            self._size = self.most_context or self._fitting(added / context)
        size = self._size
        if not size < 2 * context <= 2 * size:  # the end of a prompt, or steps that are not paced
            return
        self._added.append(added * size / context)
        if len(self._added) < _ENOUGH:
            return
        usual = statistics.median(self._added)
        self._per_token = usual / size
        fitting = self._fitting(self._per_token)
        if self._since >= _AGAIN:
            self._largest = _SIZES[-1]
        if usual > self._longer(_MOST_TIMES):
            self._largest, self._since = _SIZES[max(0, bisect_left(_SIZES, size) - 1)], 0
            self._take(fitting)
        elif size < (larger := min(fitting, 2 * size, self._largest)):
            self._take(larger)

    def _take(self, size: int) -> None:
        self._size = size
        self._added.clear()
