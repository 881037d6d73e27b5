"""Drafters: sources of draft tokens for speculative decoding. The engine verifies drafts, so they may be wrong."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from trtforge.core.features import DraftFeature, EagleFeature, LookaheadFeature, MedusaFeature
from trtforge.core.llm_api_features import Eagle3Feature, NgramFeature
from trtforge.runtime.scheduling.rows import Row
from trtforge.runtime.scheduling.sequence import Draft, Sequence
from trtforge.runtime.scheduling.virtual_tokens import before_virtual

if TYPE_CHECKING:
    from torch import Tensor

Speculation = NgramFeature | DraftFeature | LookaheadFeature | MedusaFeature | EagleFeature | Eagle3Feature
"""The recipe features that have a drafter."""
_SHORTEST = 2
"""Length of the shortest n-gram that is looked up: single tokens recur by chance."""


class Drafter(Protocol):
    """Proposes tokens. Used by the engine's thread only."""

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Ids of the drafter's processes."""

    def draft(self, sequences: list[Sequence]) -> None:
        """Set `draft` of these sequences. All their tokens except the last are computed."""

    def observe(self, rows: list[Row], logits: "Tensor | None") -> None:
        """Receive a step's unmodified logits (wanted rows, vocabulary), in the order of `rows`; None if no row wants
        any. The step is not yet recorded in the sequences."""

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""

    def close(self) -> None:
        """End its processes. May be called again."""


@dataclass(slots=True)
class _Seen:
    """The latest end of each n-gram in a sequence's first `length` tokens, by the n-gram's tokens.

    `most`: draft tokens of the next step; `drafted` and `accepted`: the sequence's counts before the last step.
    """

    most: int
    length: int = 0
    drafted: int = 0
    accepted: int = 0
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter:
    """Proposes the tokens after the latest earlier occurrence of the sequence's last n-gram, the longest that occurs.

    Prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding), TensorRT-LLM's `NGram`. Drafts
    get shorter after a rejected token, because it costs as much as any other, and longer if all were accepted.
    """

    worker_pids: tuple[int, ...] = ()

    def __init__(self, feature: NgramFeature) -> None:
        self._tokens, self._most = feature.draft_tokens, feature.max_requests
        self._sizes = range(feature.matching, min(feature.matching, _SHORTEST) - 1, -1)
        self._seen: dict[Sequence, _Seen] = {}

    def draft(self, sequences: list[Sequence]) -> None:
        """See Drafter."""
        too_many = self._most is not None and len(sequences) > self._most
        for sequence in sequences:
            sequence.draft = Draft(() if too_many else self._following(sequence))

    def observe(self, rows: list[Row], logits: "Tensor | None") -> None:
        """See Drafter."""

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._seen.pop(sequence, None)

    def close(self) -> None:
        """See Drafter."""

    def _following(self, sequence: Sequence) -> tuple[int, ...]:
        tokens = sequence.tokens
        seen = self._seen.get(sequence)
        if seen is None:
            seen = self._seen[sequence] = _Seen(self._tokens, drafted=sequence.drafted, accepted=sequence.accepted)
        seen.most = self._next_length(seen, sequence)
        seen.drafted, seen.accepted = sequence.drafted, sequence.accepted
        for end in range(seen.length, len(tokens)):  # n-grams that end before the last token, so that a token follows
            for size in self._sizes:
                if size <= end:
                    seen.ends[tuple(tokens[end - size : end])] = end
        seen.length = len(tokens)
        for size in self._sizes:
            found = seen.ends.get(tuple(tokens[-size:]))
            if found is not None and size <= len(tokens):
                return before_virtual(_repeated(tokens, found, seen.most))
        return ()

    def _next_length(self, seen: _Seen, sequence: Sequence) -> int:
        drafted, accepted = sequence.drafted - seen.drafted, sequence.accepted - seen.accepted
        if drafted == 0:
            return seen.most
        return min(self._tokens, 2 * accepted) if accepted == drafted else accepted + 1


def _repeated(tokens: list[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; after the last token, start over at `start`."""
    period = len(tokens) - start
    return tuple(tokens[start + index % period] for index in range(count))
