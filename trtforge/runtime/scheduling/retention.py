"""What a request's retention setting says of each of its KV blocks."""

from bisect import bisect_right
from dataclasses import dataclass

from trtforge.engine_process.retention import DEFAULT_RETENTION, KvCacheRetention


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a block's content is kept.

    `priority`: from 0 to 100. `seconds`: after which it is the default, from when no request uses the block any more;
    `until`: when that is, by the clock of an `EvictionOrder`; None while a request uses the block.
    """

    priority: int = DEFAULT_RETENTION
    seconds: float | None = None
    until: float | None = None


@dataclass(frozen=True, slots=True)
class SequenceRetention:
    """What a request says of its blocks. `prompt`: number of its prompt's tokens."""

    prompt: int
    starts: tuple[int, ...]
    ends: tuple[int | None, ...]
    ranges: tuple[Retention, ...]
    generated: Retention

    @classmethod
    def of(cls, given: KvCacheRetention, prompt: int) -> "SequenceRetention":
        """Of a valid setting, whose ranges may have any order."""
        ranges = sorted(given.ranges, key=lambda each: each.start)
        return cls(
            prompt,
            tuple(each.start for each in ranges),
            tuple(each.end for each in ranges),
            tuple(_retention(each.priority, each.duration_ms) for each in ranges),
            _retention(given.decode_priority, given.decode_duration_ms),
        )

    def of_block(self, first: int) -> Retention | None:
        """Of the block whose first token is the `first` of the sequence; None: nothing is said.

        The range that holds the block's first token counts (`getPerBlockRetentionPriorityDuration`). A block that
        begins in the prompt is the prompt's.
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
