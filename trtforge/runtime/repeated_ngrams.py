"""Tokens that would repeat an n-gram of their sequence, prompt included: TensorRT-LLM's `no_repeat_ngram_size`.

Like its `ban_repeat_ngram` (cpp/tensorrt_llm/kernels/banRepeatNgram.cu, 1.3.0rc3), but that compares with all n-grams
each time; here each n-gram is processed once.
"""

from dataclasses import dataclass, field

from trtforge.runtime.scheduling.sequence import Sequence
from trtforge.runtime.scheduling.virtual_tokens import VIRTUAL

_PRIME = (1 << 61) - 1
_BASE = 0x1B873593CC9E2D51


@dataclass(eq=False, slots=True)
class _Seen:
    """For each (n - 1)-gram in a list's first `length` tokens, the tokens that followed it.

    An (n - 1)-gram is identified by a rolling hash, its polynomial in _BASE modulo _PRIME (Karp and Rabin 1987), as n
    may be half of a long prompt. `last`: hash of the last n - 1 tokens; `first_weight`: weight of an n-gram's first
    token; `first`: the token that followed first; `more`: other tokens that followed later, for the few that have any.
    Rows of a prompt table have no logit and are left out.
    """

    of: list[int]
    first_weight: int
    length: int = 0
    last: int = 0
    first: dict[int, int] = field(default_factory=dict)
    more: dict[int, dict[int, None]] = field(default_factory=dict)

    def add_new(self, size: int) -> None:
        """Process the added tokens, in n-grams of `size`."""
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
    """The n-grams of unfinished sequences; call `forget` when a sequence ends."""

    def __init__(self) -> None:
        self._seen: dict[Sequence, _Seen] = {}

    def banned(self, row: Sequence) -> list[int]:
        """Tokens that would complete an n-gram that the sequence already has; none if repeats are allowed."""
        size = int(row.request.sampling.no_repeat_ngram_size)
        if not size:
            return []
        seen = self._seen.get(row)
        if seen is None or seen.of is not row.tokens:  # a beam may have got another beam's tokens
            seen = self._seen[row] = _Seen(row.tokens, pow(_BASE, size - 1, _PRIME))
        seen.add_new(size)
        first = seen.first.get(seen.last)
        return [] if first is None else [first, *seen.more.get(seen.last, ())]

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a finished sequence."""
        self._seen.pop(sequence, None)
