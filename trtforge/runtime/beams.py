"""Beam search: which continuations of a request's beams go on, which are finished, and when the search ends.

The rules are those of `transformers` (`GenerationMixin._beam_search`). They agree with the documented rules of
TensorRT-LLM (cpp/tensorrt_llm/kernels/beamSearchKernels): candidates of all beams compete by cumulative log
probability; those of the best `width` that end are finished, and the best others go on. A `diversity_rate` changes only
the comparison, as in `beamStage3Kernel`; TensorRT-LLM's kernels for more than 8 beams also add it to the scores.
"""

from dataclasses import dataclass, field, replace
from math import inf

import torch
from torch import Tensor

from trtforge.engine_process.requests import Beam, BeamParams, FinishReason, Output
from trtforge.runtime.guidance.guides import no_token_left
from trtforge.runtime.sampler import Sampler
from trtforge.runtime.scheduling.scheduler import Scheduler
from trtforge.runtime.scheduling.sequence import Group, Sequence


@dataclass(frozen=True, slots=True)
class _Continuation:
    """A beam with one more token."""

    parent: int
    token: int
    score: float
    log_probs: tuple[float, ...]
    ends: FinishReason | None


@dataclass(eq=False, slots=True)
class BeamSearch(Group):
    """The state of one request's search. `scores` and `log_probs` belong to the members."""

    scores: list[float] = field(default_factory=lambda: [0.0])
    log_probs: list[tuple[float, ...]] = field(default_factory=lambda: [()])
    finished: list[tuple[float, Beam]] = field(default_factory=list)

    @classmethod
    def of(cls, params: BeamParams, first: Sequence) -> "BeamSearch":
        """A search that begins with the request's only sequence."""
        return cls(params.width, [first])

    @property
    def params(self) -> BeamParams:
        """The request's beam search parameters."""
        found = self.members[0].request.beams
        assert found is not None, "only a beam search has beams"
        return found

    def advance(self, log_probs: Tensor) -> list[int] | None:
        """Take a step, given the members' log probabilities (members, vocabulary).

        Appends a token to each member. Returns the former index of each member's parent, or None if the search ended.
        """
        candidates = self._candidates(log_probs)
        going_on = [each for each in candidates if each.ends is None][: self.width]
        if not (self.params.early_stopping and len(self.finished) == self.width):
            for each in candidates[: self.width]:
                if each.ends is not None:
                    self._finish(each)
        if self._is_over(going_on):
            return None
        first = self.members[0]
        tokens = [[*self.members[each.parent].tokens, each.token] for each in going_on]
        while not self.formed:
            self.members.append(
                replace(
                    first, tokens=[], computed=0, table=first.table.empty_copy(), reused_blocks=0, allocated_blocks=0
                )
            )
        for member, own in zip(self.members, tokens, strict=True):
            member.tokens = own
        self.scores = [each.score for each in going_on]
        self.log_probs = [each.log_probs for each in going_on]
        return [each.parent for each in going_on]

    def output(self) -> Output:
        """The request's only output; an error if a logits processor failed or no beam had a possible token."""
        failure = self.members[0].failure
        if failure is not None or not self.finished:
            return self.members[0].output("error", error=failure or no_token_left())
        beams = tuple(beam for _, beam in self.finished[: self.params.returned])
        request = self.members[0].request
        if not request.sampling.return_log_probs:
            beams = tuple(replace(beam, log_probs=()) for beam in beams)
        return Output(
            request.request_id,
            finish_reason=beams[0].finish_reason,
            cumulative_log_prob=beams[0].cumulative_log_prob,
            reused_blocks=sum(member.reused_blocks for member in self.members),
            allocated_blocks=sum(member.allocated_blocks for member in self.members),
            cached_tokens=self.members[0].cached_tokens,
            beams=beams,
            scheduled_ns=self.members[0].scheduled_ns,
        )

    def _candidates(self, log_probs: Tensor) -> list[_Continuation]:
        """The best continuations, enough that `width` of them go on even if every beam ends with every end id."""
        vocabulary = log_probs.shape[1]
        total = log_probs + log_probs.new_tensor(self.scores).unsqueeze(1)
        ranked = total
        if self.params.diversity_rate:
            places = torch.arange(len(total), dtype=torch.float64, device=total.device)
            ranked = total + self.params.diversity_rate * places.unsqueeze(1)
        ends = len(self.members[0].request.end_ids) + len(self.members[0].request.stop_words)
        indices = ranked.flatten().topk(min(max(2, 1 + ends) * self.width, total.numel())).indices
        scores, own = total.flatten()[indices].tolist(), log_probs.flatten()[indices].tolist()
        found = []
        for score, index, log_prob in zip(scores, indices.tolist(), own, strict=True):
            parent, token = divmod(index, vocabulary)
            ends_by = self.members[parent].why_ends(token)
            found.append(_Continuation(parent, token, score, (*self.log_probs[parent], log_prob), ends_by))
        return found

    def _finish(self, ended: _Continuation) -> None:
        """Keep a finished beam if it is among the best and has no token of probability 0."""
        if ended.score == -inf:
            return
        parent = self.members[ended.parent]
        with_token = ended.ends != "end_id"
        made = parent.tokens[len(parent.request.prompt) :]
        log_probs = ended.log_probs if with_token else ended.log_probs[:-1]
        beam = Beam((*made, ended.token) if with_token else tuple(made), log_probs, ended.score, ended.ends or "length")
        self.finished.append((self._normalised(ended.score, len(made) + 1), beam))
        self.finished.sort(key=lambda each: -each[0])
        del self.finished[self.width :]

    def _is_over(self, going_on: list[_Continuation]) -> bool:
        best = max(going_on, key=lambda each: each.score, default=None)
        if best is None or len(going_on) < self.width or best.score == -inf:
            return True
        if len(self.finished) < self.width:
            return False
        best_score = self._normalised(best.score, len(best.log_probs))
        return self.params.early_stopping or best_score <= self.finished[-1][0]

    def _normalised(self, score: float, length: int) -> float:
        return float(score / length**self.params.length_penalty)


def advance_searches(
    rows: dict[Sequence, int], logits: Tensor, sampler: Sampler, scheduler: Scheduler
) -> list[BeamSearch]:
    """Advance the searches of these sequences, given the index of each one's logits; returns the ended searches."""
    ended = []
    for search in dict.fromkeys(sequence.group for sequence in rows):
        assert isinstance(search, BeamSearch), "only beams are sampled together"
        members = list(search.members)
        parents = search.advance(sampler.log_probs(members, logits[[rows[member] for member in members]]))
        for member in members:
            sampler.forget(member)  # its tokens are now those of another beam
        if parents is None:
            ended.append(search)
        elif len(members) < search.width:
            scheduler.fork(members[0], search.members[1:])
        else:
            scheduler.blocks.fork([member.table for member in members], parents)
    return ended
