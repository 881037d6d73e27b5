"""Next tokens from logits, for all rows of a step at once.

The order is TensorRT-LLM's (guidedDecoder.cpp, penaltyKernels.cu, samplingTopKKernels.cu): guide, bias, temperature,
penalties over prompt and output, minimum length, bad words, repeated n-grams; then min_p, top_k, and top_p within the
top_k tokens. Log probabilities are normalised before min_p, over the whole vocabulary or what the guide left of it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trtforge.core.errors import RequestError
from trtforge.engine_process.requests import TopLogProbs
from trtforge.runtime.candidates import chosen_places, drawn_of_all, most_likely_kept, nucleus
from trtforge.runtime.cuda.pinned import sent, sent_column
from trtforge.runtime.decoder.logits import most_likely, most_likely_tokens
from trtforge.runtime.guidance.guides import Guides
from trtforge.runtime.logits_processors import process_beams, process_logits
from trtforge.runtime.native.bindings import native_for
from trtforge.runtime.native.sampling import Limits, draw_tokens, kept_weights
from trtforge.runtime.penalties import LARGEST, Penalties
from trtforge.runtime.prompt_scores import log_sums_of, top_log_probs
from trtforge.runtime.repeated_ngrams import RepeatedNgrams
from trtforge.runtime.scheduling.random_numbers import random_bits, shares_of, uniform
from trtforge.runtime.scheduling.sequence import Sequence

_MINUS_INFINITY = float("-inf")
_SORTED = 16  # rows sorted at once; with 128,000 tokens they take 50 MB


@dataclass(frozen=True)
class Sampled:
    """One token per row; `log_probs` and `top` are set if any row asked for them.

    `stuck`: rows whose guide, logits processors or other options leave no token; their token has no meaning.
    """

    tokens: list[int]
    log_probs: list[float] | None = None
    top: list[TopLogProbs] | None = None
    stuck: frozenset[int] = frozenset()


class Sampler:
    """Samples tokens. Keeps penalty and bias state of unfinished sequences; call `forget` when a sequence ends."""

    def __init__(self, vocab_size: int, device: torch.device, guides: Guides | None = None) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._guides = guides
        self._sorts = device.type == "cuda"
        self._kernels = native_for(device, torch.float32)
        self._penalties, self._ngrams = Penalties(device), RepeatedNgrams()
        self._biases: dict[Sequence, Tensor] = {}

    def sample(self, rows: list[Sequence], logits: Tensor, depth: int = 0) -> Sampled:
        """The next token of each row from its float32 logits (rows, vocabulary), which are changed in place.

        `depth`: index of the draft token proposed for this position, if the row has that many.
        """
        process_logits(rows, logits)
        guided = self._guides.rows(rows) if self._guides is not None else []
        if self._guides is not None and guided:
            self._guides.mask(rows, guided, logits)
        if all(row.plain for row in rows):
            plain = most_likely_tokens(logits)
            return Sampled(plain, stuck=_stuck(rows, guided, logits, plain))
        tokens = self.choose(rows, logits, depth)
        chosen: list[int] = tokens.tolist()
        stuck = _stuck(rows, [index for index, row in enumerate(rows) if _restricted(row)], logits, chosen)
        if not any(row.request.sampling.return_log_probs for row in rows):
            return Sampled(chosen, stuck=stuck)
        picked, sums = logits.gather(1, tokens.unsqueeze(1)).squeeze(1), log_sums_of(logits)
        return Sampled(chosen, (picked - sums).tolist(), self._top(rows, logits, sums), stuck)

    def choose(self, rows: list[Sequence], logits: Tensor, depth: int = 0) -> Tensor:
        """`sample` without guides: int64 (rows,). The host does not wait for them if all rows have `follows_logits`."""
        if all(row.plain for row in rows):
            return most_likely(logits)
        self._change(rows, logits)
        sampled = [index for index, row in enumerate(rows) if not row.request.sampling.greedy]
        proposed = [index for index in sampled if _was_drawn(rows[index], depth)]
        drawn = [index for index in sampled if index not in proposed] if proposed else sampled
        if len(drawn) == len(rows):
            return self._draw(rows, logits, drawn)
        tokens = most_likely(logits)
        if drawn:
            tokens[self._index(drawn)] = self._draw([rows[index] for index in drawn], logits, drawn)
        for index in proposed:
            tokens[index] = self._verified(rows[index], logits[index], depth)
        return tokens

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""
        self._penalties.forget(sequence)
        self._ngrams.forget(sequence)
        self._biases.pop(sequence, None)
        if self._guides is not None:
            self._guides.forget(sequence)

    def _top(self, rows: list[Sequence], logits: Tensor, sums: Tensor) -> list[TopLogProbs] | None:
        """The most likely tokens of the rows that ask for them, with their log probabilities."""
        counts = [row.request.sampling.top_log_probs for row in rows]
        most = int(max(counts))
        if most == 0:
            return None
        top = top_log_probs(logits, sums, most)
        return [_possible(found[:count]) for found, count in zip(top, counts, strict=True)]

    def _change(self, rows: list[Sequence], logits: Tensor) -> None:
        params = [row.request.sampling for row in rows]
        biased = [index for index, p in enumerate(params) if len(p.embedding_bias)]
        for index in biased:
            logits[index] += self._bias(rows[index])
        biased += [index for index, row in enumerate(rows) if row.request.logits_processors]
        if any(p.temperature for p in params):
            logits.div_(sent_column([p.temperature or 1.0 for p in params], self._device))
        penalised = [index for index, p in enumerate(params) if p.penalises]
        if penalised:
            self._penalties.apply([rows[index] for index in penalised], logits, penalised)
        for index, row in enumerate(rows):
            if row.generated < row.request.sampling.min_tokens:
                ends = [token for token in row.request.end_ids if 0 <= token < self._vocab_size]
                logits[index, ends] = _MINUS_INFINITY
            if banned := [*_banned(row), *self._ngrams.banned(row)]:
                logits[index, self._index(banned)] = _MINUS_INFINITY
        for index in biased:
            logits[index].clamp_(max=LARGEST)

    def log_probs(self, rows: list[Sequence], logits: Tensor) -> Tensor:
        """Log probabilities (rows, vocabulary) of a request's beams after bias, temperature, penalties and bans.

        Changes `logits`. A row without possible tokens gets minus infinity for all tokens.
        """
        process_beams(rows, logits)
        self._change(rows, logits)
        if bool(logits.isnan().any()):
            rows[0].failure = rows[0].failure or no_numbers()
        sums = log_sums_of(logits)
        return logits.sub_(sums.masked_fill_(sums == _MINUS_INFINITY, 0.0).unsqueeze(1))

    def distribution(self, row: Sequence, logits: Tensor) -> Tensor:
        """Probabilities (vocabulary,) that the next token is drawn from. Changes `logits` (vocabulary,).

        NaN if no token is left.
        """
        self._change([row], logits.unsqueeze(0))
        return self._probabilities(row, logits)

    def _draw(self, rows: list[Sequence], logits: Tensor, places: list[int]) -> Tensor:
        """Draw from the tokens that top_k and top_p keep, by inverse transform sampling. `places`: rows of the logits.

        If they keep all tokens, draw the argmax of logits plus Gumbel noise instead: it needs neither the sum of all
        weights nor the logits of tokens that cannot win.
        """
        bits = random_bits([row.draws_at for row in rows])
        top_k, top_p = [self._top_k(row) for row in rows], [_top_p(row) for row in rows]
        keys = sent(bits.view(np.int64), self._device)
        min_p = [row.request.sampling.min_p for row in rows]
        if self._kernels is not None:
            return draw_tokens(self._kernels, logits, places, Limits(top_k, top_p, min_p if any(min_p) else None), keys)
        logits, shares = self._at(places, logits), sent(shares_of(bits), self._device)
        if any(min_p):
            logits = self._likely_enough(min_p, logits)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        whole = [k == self._vocab_size and p >= 1.0 for k, p in zip(top_k, top_p, strict=True)]
        limited = [index for index, is_whole in enumerate(whole) if not is_whole]
        for indices, candidates, weights in self._kept(rows, logits, limited):
            at = self._index(indices)
            choice = chosen_places(weights, shares[at])
            tokens[at] = candidates.gather(1, choice.unsqueeze(1)).squeeze(1)
        for indices in _parts([index for index, is_whole in enumerate(whole) if is_whole]):
            at = self._index(indices)
            tokens[at] = drawn_of_all(self._at(indices, logits), keys[at])
        return tokens

    def _verified(self, row: Sequence, logits: Tensor, depth: int) -> int:
        """Verify draft token `depth`, which was drawn from a distribution; returns the token to use."""
        draft = row.draft
        assert draft.distributions is not None
        wanted = self._probabilities(row, logits)
        return verified_token(draft.tokens[depth], draft.distributions[depth], wanted, row.draws_at, draft.threshold)

    def _probabilities(self, row: Sequence, logits: Tensor) -> Tensor:
        """Probabilities of logits (vocabulary,), 0 for tokens that min_p, top_k and top_p exclude."""
        min_p = row.request.sampling.min_p
        if self._kernels is not None:
            weights = kept_weights(self._kernels, logits, self._top_k(row), _top_p(row), min_p)
            return weights / weights.sum()
        if min_p:
            logits = self._likely_enough([min_p], logits.unsqueeze(0))[0]
        _, candidates, kept = next(self._kept([row], logits.unsqueeze(0), [0]))
        dense = kept.new_zeros(self._vocab_size)
        return dense.scatter_(0, candidates[0], kept[0] / kept[0].sum())

    def _kept(
        self, rows: list[Sequence], logits: Tensor, wanted: list[int]
    ) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Yield the `wanted` rows in groups: their indices, candidate tokens (rows, candidates) and weights, 0 for
        excluded tokens.

        Rows with top_k form one group; on a GPU, rows with top_p are grouped too, as it sorts all tokens faster than
        the host finds the likely ones. A row's result does not depend on the other rows.
        """
        bounds = [self._top_k(row) for row in rows]
        bounded = [index for index in wanted if bounds[index] < self._vocab_size]
        others = [index for index in wanted if bounds[index] == self._vocab_size]
        shares = [_top_p(row) for row in rows]
        likely = [index for index in others if self._sorts and shares[index] < 1.0]
        alone = [index for index in others if not self._sorts or shares[index] >= 1.0]
        for indices in filter(None, (bounded, *_parts(likely))):
            top_k = sent_column([bounds[index] for index in indices], self._device)
            top_p = sent_column([shares[index] for index in indices], self._device)
            most = max(bounds[index] for index in indices)
            yield indices, *most_likely_kept(self._at(indices, logits), top_k, top_p, most)
        for index in alone:
            candidates, weights = nucleus(logits[index], shares[index])
            yield [index], candidates.unsqueeze(0), weights.unsqueeze(0)

    def _likely_enough(self, min_p: list[float], logits: Tensor) -> Tensor:
        """A copy of logits (rows, vocabulary) with minus infinity for tokens that the row's min_p excludes."""
        beside = logits - logits.amax(dim=1, keepdim=True)
        return logits.masked_fill(beside < sent_column(min_p, self._device).log(), _MINUS_INFINITY)

    def _top_k(self, row: Sequence) -> int:
        """The row's top_k; the vocabulary size if not set."""
        return min(row.request.sampling.top_k or self._vocab_size, self._vocab_size)

    def _at(self, places: list[int], logits: Tensor) -> Tensor:
        """These rows of the logits."""
        return logits if len(places) == len(logits) else logits[self._index(places)]

    def _bias(self, row: Sequence) -> Tensor:
        if row not in self._biases:
            bias = np.asarray(row.request.sampling.embedding_bias, dtype=np.float32)
            self._biases[row] = torch.from_numpy(bias).to(self._device)
        return self._biases[row]

    def _index(self, values: list[int]) -> Tensor:
        return sent(np.array(values, dtype=np.int64), self._device)


def _parts(indices: list[int]) -> list[list[int]]:
    """The indices in parts of at most _SORTED."""
    return [indices[first : first + _SORTED] for first in range(0, len(indices), _SORTED)]


def _possible(top: TopLogProbs) -> TopLogProbs:
    """`top` without tokens that a guide or bad words exclude."""
    return top if not top or top[-1][1] > _MINUS_INFINITY else [each for each in top if each[1] > _MINUS_INFINITY]


def _was_drawn(row: Sequence, depth: int) -> bool:
    """Whether the row has a draft token for this position that was drawn from a distribution."""
    return row.draft.distributions is not None and depth < len(row.draft.tokens)


def _restricted(row: Sequence) -> bool:
    """Whether tokens may be excluded, possibly all."""
    request = row.request
    return (
        request.guide is not None
        or bool(request.bad_words)
        or bool(request.logits_processors)
        or request.sampling.no_repeat_ngram_size > 0
        or len(request.sampling.embedding_bias) > 0
        or row.generated < request.sampling.min_tokens
    )


def _stuck(rows: list[Sequence], restricted: list[int], logits: Tensor, tokens: list[int]) -> frozenset[int]:
    """The rows without a valid token: `restricted` rows whose chosen token has a logit of minus infinity, and checked
    rows whose logit is NaN. On a CPU all rows are checked, on a GPU only restricted ones, as the host must wait."""
    on_cpu = logits.device.type == "cpu"
    asked = range(len(rows)) if on_cpu else restricted
    if not asked:
        return frozenset()
    if on_cpu:
        item = logits.numpy().item  # faster than indexing several at once
        chosen = [item(index, tokens[index]) for index in asked]
    else:
        chosen = logits[list(asked), [tokens[index] for index in asked]].tolist()
    if math.isfinite(sum(chosen)):
        return frozenset()
    found = dict(zip(asked, chosen, strict=True))
    wrong = [index for index, logit in found.items() if math.isnan(logit)]
    for index in wrong:
        rows[index].failure = rows[index].failure or no_numbers()
    return frozenset([*wrong, *(index for index in restricted if found[index] == _MINUS_INFINITY)])


def no_numbers() -> RequestError:
    """The error of a request whose logits are NaN."""
    return RequestError(
        "the model's logits are NaN: its computations overflow, or it has weights that are not finite",
        hint="`trtforge verify` compares the checkpoint with the model; bfloat16 has a larger range than float16.",
    )


def _top_p(row: Sequence) -> float:
    """top_p at this position; it depends on the tokens only."""
    params = row.request.sampling
    if not params.top_p or params.top_p_decay == 1.0:
        return params.top_p or 1.0
    made = row.tokens[len(row.request.prompt) :]
    since = next((n for n, token in enumerate(reversed(made)) if token == params.top_p_reset_id), len(made))
    return max(params.top_p * params.top_p_decay**since, params.top_p_min) if since else params.top_p


def verified_token(
    proposed: int, drawn_from: Tensor, wanted: Tensor, at: tuple[int, int], threshold: float = 0.0
) -> int:
    """A token with the distribution `wanted`: the one `proposed` from `drawn_from` as often as possible.

    Rejection sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1). Distributions are (vocabulary,). `at`:
    seed and position, for random numbers that nothing else uses. A `threshold` above 0 replaces the random number that
    decides on acceptance, as in TensorRT-LLM's acceptDraftTokensKernel (externalDraftTokensKernels.cu); tokens then no
    longer have the distribution `wanted`. A token of probability 0 in `wanted` is never accepted.
    """
    before, possible = float(drawn_from[proposed]), float(wanted[proposed])
    least = before * (threshold or float(uniform([at], stream=1)[0]))
    accepts = 0.0 < possible >= least if threshold else least < possible
    if accepts:
        return proposed
    rest = (wanted.double() - drawn_from.double()).clamp_(min=0.0)
    if float(rest.sum()) == 0.0:  # equal distributions
        if possible > 0.0:
            return proposed
        rest = wanted.double()
    return _chosen(rest, uniform([at], stream=2))


def drawn(distribution: Tensor, seed: int, step: int) -> int:
    """Draw a draft token from its distribution (vocabulary,)."""
    return _chosen(distribution, uniform([(seed, step)], stream=3))


def _chosen(weights: Tensor, share: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int:
    """The token at this share of the cumulative weights (vocabulary,)."""
    return int(chosen_places(weights.unsqueeze(0), torch.from_numpy(share).to(weights.device)))


def _banned(row: Sequence) -> list[int]:
    """Tokens that would complete a bad word."""
    tokens = row.tokens
    return [
        word[-1]
        for word in row.request.bad_words
        if word and len(word) <= len(tokens) + 1 and tuple(tokens[len(tokens) + 1 - len(word) :]) == word[:-1]
    ]
