"""Tokens that would repeat an n-gram of their sequence, prompt included: TensorRT-LLM's `no_repeat_ngram_size`.

As `ban_repeat_ngram` there (cpp/tensorrt_llm/kernels/banRepeatNgram.cu, 1.3.0rc3), which compares with all n-grams each
time. Here each n-gram is looked at once.
"""

from dataclasses import dataclass, field

from trtforge.runtime.scheduling.sequence import Sequence
from trtforge.runtime.scheduling.virtual_tokens import VIRTUAL


@dataclass(eq=False, slots=True)
class _Seen:
    """The tokens that followed each n - 1 tokens of a list, up to its first `length` tokens."""

    of: list[int]
    length: int = 0
    followers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class RepeatedNgrams:
    """What the tokens of unfinished sequences rule out; call `forget` when one ends."""

    def __init__(self) -> None:
        self._seen: dict[Sequence, _Seen] = {}

    def banned(self, row: Sequence) -> list[int]:
        """Tokens that would complete an n-gram that the sequence has already; none if it may repeat them."""
        size = row.request.sampling.no_repeat_ngram_size
        if not size:
            return []
        seen = self._seen.get(row)
        if seen is None or seen.of is not row.tokens:  # a beam may have got the tokens of another one
            seen = self._seen[row] = _Seen(row.tokens)
        for end in range(max(seen.length, size - 1), len(row.tokens)):
            if row.tokens[end] < VIRTUAL:  # rows of a prompt table have no logit
                seen.followers.setdefault(tuple(row.tokens[end + 1 - size : end]), []).append(row.tokens[end])
        seen.length = len(row.tokens)
        return seen.followers.get(tuple(row.tokens[len(row.tokens) + 1 - size :]), [])

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a finished sequence."""
        self._seen.pop(sequence, None)
