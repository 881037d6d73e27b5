"""Tokens that would repeat an n-gram of their sequence, prompt included: TensorRT-LLM's `no_repeat_ngram_size`.

As `ban_repeat_ngram` there (cpp/tensorrt_llm/kernels/banRepeatNgram.cu, 1.3.0rc3), which compares with all n-grams each
time. Here each n-gram is looked at once.
"""

from dataclasses import dataclass, field

from trtforge.runtime.scheduling.sequence import Sequence
from trtforge.runtime.scheduling.virtual_tokens import VIRTUAL

_PRIME = (1 << 61) - 1
_BASE = 0x1B873593CC9E2D51


@dataclass(eq=False, slots=True)
class _Seen:
    """The tokens that followed each n - 1 tokens of a list, up to its first `length` tokens.

    So many tokens are told from others by a number, their polynomial in _BASE modulo _PRIME (Karp and Rabin 1987), as n
    may be half of a long prompt. `last`: that of the last n - 1 tokens; `first_weight`: of the first one of n; `first`:
    the token that followed first, `more`: others that followed later, which few have. Rows of a prompt table have no
    logit, and follow nothing.
    """

    of: list[int]
    first_weight: int
    length: int = 0
    last: int = 0
    first: dict[int, int] = field(default_factory=dict)
    more: dict[int, dict[int, None]] = field(default_factory=dict)

    def add_new(self, size: int) -> None:
        """Take note of the tokens that were added, in n-grams of `size`."""
        for end in range(self.length, len(self.of)):
            token = self.of[end]
            number = self.last * _BASE + token + 1
            if end + 1 >= size:
                if token < VIRTUAL and self.first.setdefault(self.last, token) != token:
                    self.more.setdefault(self.last, {})[token] = None
                number -= (self.of[end + 1 - size] + 1) * self.first_weight
            self.last = number % _PRIME
        self.length = len(self.of)


class RepeatedNgrams:
    """What the tokens of unfinished sequences rule out; call `forget` when one ends."""

    def __init__(self) -> None:
        self._seen: dict[Sequence, _Seen] = {}

    def banned(self, row: Sequence) -> list[int]:
        """Tokens that would complete an n-gram that the sequence has already; none if it may repeat them."""
        size = int(row.request.sampling.no_repeat_ngram_size)
        if not size:
            return []
        seen = self._seen.get(row)
        if seen is None or seen.of is not row.tokens:  # a beam may have got the tokens of another one
            seen = self._seen[row] = _Seen(row.tokens, pow(_BASE, size - 1, _PRIME))
        seen.add_new(size)
        first = seen.first.get(seen.last)
        return [] if first is None else [first, *seen.more.get(seen.last, ())]

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a finished sequence."""
        self._seen.pop(sequence, None)
