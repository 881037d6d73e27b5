"""Draft tokens for speculative decoding: where they come from. The engine verifies them, so they may be wrong."""

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
"""Features that a drafter is made of."""
_SHORTEST = 2
"""Tokens of the shortest n-gram that is looked up: single tokens recur by chance."""


class Drafter(Protocol):
    """Proposes tokens. Used by the engine's thread only."""

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Processes that compute for it."""

    def draft(self, sequences: list[Sequence]) -> None:
        """Set `draft` of these sequences, of which all tokens but the last are computed."""

    def observe(self, rows: list[Row], logits: "Tensor | None") -> None:
        """Take note of a step's unmodified logits (wanted rows, vocabulary), in the order of `rows`; None: no row wants
        any. The step is not yet recorded in the sequences."""

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""

    def close(self) -> None:
        """End its processes. May be called again."""


@dataclass(slots=True)
class _Seen:
    """Where each n-gram of a sequence's first `length` tokens ended last, by its tokens.

    `most`: draft tokens of the next step; `drafted` and `accepted`: the sequence's counts before the last one.
    """

    most: int
    length: int = 0
    drafted: int = 0
    accepted: int = 0
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter:
    """Proposes the tokens that followed the latest earlier occurrence of the last n-gram, the longest that occurred.

    Prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding), TensorRT-LLM's `NGram`. A
    rejected token costs as much as any other: drafts get shorter when some are rejected, and longer when none is.
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
        for end in range(seen.length, len(tokens)):  # n-grams that end before the last token: something follows them
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
    """The tokens from `start` on; a repetition that reaches the end goes on in a circle."""
    period = len(tokens) - start
    return tuple(tokens[start + index % period] for index in range(count))
