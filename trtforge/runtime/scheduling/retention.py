"""The retention of each KV block of a request."""

from bisect import bisect_right
from dataclasses import dataclass

from trtforge.engine_process.retention import DEFAULT_RETENTION, KvCacheRetention


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a block's content is kept.

    `priority`: from 0 to 100. `seconds`: after the block's last use, when the priority falls back to the default;
    `until`: that time by the clock of an `EvictionOrder`; None while a request uses the block.
    """

    priority: int = DEFAULT_RETENTION
    seconds: float | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True)
class SequenceRetention:
    """A request's retention settings. `prompt`: number of prompt tokens."""

    prompt: int
    starts: tuple[int, ...]
    ends: tuple[int | None, ...]
    ranges: tuple[Retention, ...]
    generated: Retention

    @classmethod
    def of(cls, given: KvCacheRetention, prompt: int) -> "SequenceRetention":
        """From a valid setting, whose ranges may be in any order."""
        ranges = sorted(given.ranges, key=lambda each: each.start)
        return cls(
            prompt,
            tuple(each.start for each in ranges),
            tuple(each.end for each in ranges),
            tuple(_retention(each.priority, each.duration_ms) for each in ranges),
            _retention(given.decode_priority, given.decode_duration_ms),
        )

    def of_block(self, first: int) -> Retention | None:
        """Retention of the block that begins at token `first` of the sequence; None if the request sets none.

        The range that contains the block's first token decides (`getPerBlockRetentionPriorityDuration`). A block that
        begins in the prompt counts as prompt.
        """
        if first >= self.prompt:
            return self.generated
        index = bisect_right(self.starts, first) - 1
        if index < 0:
            return None
        end = self.ends[index]
        return self.ranges[index] if end is None or first < end else None


def _retention(priority: int, duration_ms: int | None) -> Retention:
    return Retention(priority, None if duration_ms is None else duration_ms / 1000)
