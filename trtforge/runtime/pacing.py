"""How many tokens of prompts a step may compute beside running sequences, whose next tokens wait for the whole step."""

import statistics
from collections import deque

_TIMES = 2.5
"""Such a step is to take so many times as long as one without prompts."""
_LEAST = 8  # tokens
_RECENT_STEPS, _RECENT_CONTEXTS = 16, 4


class Pace:
    """Learns from the durations of steps. Medians, because other work on the machine makes single steps slow."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._per_token: deque[float] = deque(maxlen=_RECENT_CONTEXTS)

    def observe(self, seconds: float, context: int, *, alone: bool) -> None:
        """A step of that many context tokens took so long. `alone`: no sequence of it was in the generation phase."""
        if not context:
            self._steps.append(seconds)
        elif alone or self._steps:
            usual = 0.0 if alone else statistics.median(self._steps)
            self._per_token.append(max(0.0, seconds - usual) / context)

    @property
    def most_context(self) -> int | None:
        """Context tokens beside running sequences; None as long as nothing is known."""
        if not self._steps or not self._per_token:
            return None
        per_token = statistics.median(self._per_token)
        return max(_LEAST, int((_TIMES - 1) * statistics.median(self._steps) / per_token)) if per_token else None
