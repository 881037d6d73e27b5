"""How many tokens of prompts a step may compute beside running sequences, whose next tokens wait for the whole step."""

import statistics
from collections import deque

_TIMES = 1.9
"""Such a step is to take so many times as long as one without prompts."""
_ALONE = 2.0
"""How many times as much a token costs beside running sequences, of which steps without any tell: in small chunks."""
_LEAST = 4  # tokens
_RECENT = 16  # steps


class Pace:
    """Learns from the durations of steps. Medians, because other work on the machine makes single steps slow."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._beside: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._alone: deque[tuple[float, int]] = deque(maxlen=_RECENT)

    def observe(self, seconds: float, context: int, *, alone: bool) -> None:
        """A step of that many context tokens took so long. `alone`: no sequence of it was in the generation phase."""
        if not context:
            self._steps.append(seconds)
        elif alone:
            self._alone.append((_ALONE * seconds, context))
        elif self._steps:
            self._beside.append((max(0.0, seconds - statistics.median(self._steps)), context))

    @property
    def most_context(self) -> int | None:
        """Context tokens beside running sequences; None as long as nothing is known."""
        known = self._beside or self._alone
        if not self._steps or not known:
            return None
        added, tokens = (statistics.median(values) for values in zip(*known, strict=True))
        return max(_LEAST, int((_TIMES - 1) * statistics.median(self._steps) * tokens / added)) if added else None
