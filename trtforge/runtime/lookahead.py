"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): drafts are n-grams from the model's own Jacobi iterations.

Sizes, the pool and its contents are those of TensorRT-LLM (cpp/tensorrt_llm/layers/lookaheadAlgorithm.cpp and
lookaheadPoolManager.cpp). TensorRT-LLM computes all n-grams and the window side by side, each with its own mask. In
this engine draft tokens form a chain, so n-grams continue each other and the window comes after them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from torch import Tensor

from trtforge.core.features import LookaheadFeature
from trtforge.engine_process.requests import LookaheadSizes
from trtforge.runtime.decoder.logits import most_likely_tokens
from trtforge.runtime.scheduling.rows import Row
from trtforge.runtime.scheduling.sequence import Draft, Sequence
from trtforge.runtime.scheduling.virtual_tokens import VIRTUAL, before_virtual

Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class _Pool:
    """The latest n-grams, at most `most` for each first token, the newest last."""

    most: int
    found: dict[int, list[Tokens]] = field(default_factory=dict)

    def add(self, ngram: Tokens) -> None:
        """Add an n-gram, or make it the newest."""
        known = self.found.setdefault(ngram[0], [])
        if ngram in known:
            known.remove(ngram)
        known.append(ngram)
        del known[: -self.most]

    def following(self, token: int, ngrams: int) -> Tokens:
        """The tokens after `token` by its newest n-gram, then by the newest n-gram of that one's last token, etc."""
        made: Tokens = (token,)
        for _ in range(ngrams):
            known = self.found.get(made[-1])
            if not known:
                break
            made += known[-1][1:]
        return made[1:]


@dataclass(eq=False, slots=True)
class _Search:
    """The lookahead state of one sequence. `read`: number of its tokens whose n-grams are in the pool. `guesses`: for
    each position, the trail of tokens up to the latest guess there; the model predicted each token after the previous.

    For the next step: `start`, the position of its first token, and `trails`, the trail up to each of its tokens.
    `ngrams`: number to propose; `drafted`: tokens of n-grams; `accepted`: the sequence's count before the step.
    """

    sizes: LookaheadSizes
    random: Random
    pool: _Pool
    ngrams: int
    read: int = 0
    guesses: dict[int, Tokens] = field(default_factory=dict)
    start: int = -1
    trails: list[Tokens] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, sizes: LookaheadSizes, sequence: Sequence) -> "_Search":
        """The initial state of a sequence."""
        seed = sequence.request.sampling.seed or 0
        return cls(sizes, Random(seed), _Pool(sizes.verification), sizes.verification)

    def proposed(self, sequence: Sequence) -> Tokens:
        """The draft of a step: n-grams from the pool, then the window."""
        tokens, size, window = sequence.tokens, self.sizes.ngram, self.sizes.window
        if self.sizes.verification:
            for end in range(max(self.read, size), len(tokens) + 1):
                self.pool.add(tuple(tokens[end - size : end]))
        self.read = len(tokens) + 1
        self._adjust(sequence.accepted)
        ngrams = self.pool.following(tokens[-1], self.ngrams)
        self.drafted, self.accepted, self.start = len(ngrams), sequence.accepted, len(tokens) - 1
        self.trails = [tuple(tokens[1 - size :])]
        for token in ngrams:
            self.trails.append((*self.trails[-1], token)[1 - size :])
        first = len(tokens) + len(ngrams)
        for position in range(first, first + window - 1):
            self.trails.append(self.guesses.get(position) or (self._guess(sequence),))
        self.guesses = {position: trail for position, trail in self.guesses.items() if position >= len(tokens)}
        return before_virtual([trail[-1] for trail in self.trails[1:]])

    def _guess(self, sequence: Sequence) -> int:
        """A random token of the prompt; 0 for a row of a prompt table."""
        token = self.random.choice(sequence.tokens[: len(sequence.request.prompt)])
        return token if token < VIRTUAL else 0

    def advance(self, made: Iterable[int]) -> None:
        """One Jacobi iteration; `made`: the most likely token after each token of the step."""
        size = self.sizes.ngram
        for position, (trail, token) in enumerate(zip(self.trails, made, strict=False), self.start + 1):
            ngram = (*trail, token)
            if len(ngram) == size and self.sizes.verification:
                self.pool.add(ngram)
            self.guesses[position] = ngram[1 - size :]

    def _adjust(self, accepted: int) -> None:
        """Propose fewer n-grams after a wrong token, as it costs as much as any other, and more if all were right."""
        if self.drafted:
            right = accepted - self.accepted
            some = right // (self.sizes.ngram - 1)
            self.ngrams = min(self.sizes.verification, 2 * some if right >= self.drafted else some + 1)


class LookaheadDrafter:
    """Proposes n-grams and a window of guesses, which every step improves."""

    worker_pids: tuple[int, ...] = ()

    def __init__(self, feature: LookaheadFeature) -> None:
        self._sizes = LookaheadSizes(feature.window, feature.ngram, feature.verification)
        self._searches: dict[Sequence, _Search] = {}

    def draft(self, sequences: list[Sequence]) -> None:
        """See Drafter."""
        for sequence in sequences:
            sizes = sequence.request.lookahead or self._sizes
            if sizes.ngram < 2:
                sequence.draft = Draft()
                continue
            search = self._searches.get(sequence)
            if search is None:
                search = self._searches[sequence] = _Search.of(sizes, sequence)
            sequence.draft = Draft(search.proposed(sequence))

    def observe(self, rows: list[Row], logits: Tensor | None) -> None:
        """See Drafter."""
        if logits is None:
            return
        end = 0
        for row in rows:
            end += row.wanted
            search = self._searches.get(row.sequence)
            if search is None or not row.samples or row.count > 1 or row.start != search.start:
                continue
            if row.drafts == tuple(trail[-1] for trail in search.trails[1 : 1 + len(row.drafts)]):
                search.advance(most_likely_tokens(logits[end - 1 - len(row.drafts) : end]))
            else:  # the client's draft tokens, not its own
                search.drafted = 0

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._searches.pop(sequence, None)

    def close(self) -> None:
        """See Drafter."""
