"""The result of evaluating one request for a deployment."""

from dataclasses import dataclass

from trtforge.plan.embedded import Embedded
from trtforge.plan.legality import Problem
from trtforge.plan.limits import EngineLimits
from trtforge.plan.memory import Held, Memory
from trtforge.plan.model import Model
from trtforge.plan.request import Request
from trtforge.plan.roofline import Roofline, Workload


@dataclass(frozen=True)
class Evaluation:
    """Problems, limits and memory of a request. `memory`: None for an illegal layout; `limits`: None if impossible.

    `typical`: the typical request, clamped to the engine's limits. `embedded`: how the embedded engine computes; None
    for another backend.
    """

    request: Request
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    limits: EngineLimits | None = None
    memory: Memory | None = None
    held: Held | None = None
    typical: Workload | None = None
    embedded: Embedded | None = None

    @property
    def legal(self) -> bool:
        """Whether the request has no problems."""
        return not self.problems

    @property
    def full_length_requests(self) -> int | None:
        """Requests of max_seq_len tokens that fit the KV pool at once."""
        return self._requests(self.limits.max_seq_len) if self.limits else None

    @property
    def typical_requests(self) -> int | None:
        """Requests of typical length that fit the KV pool at once."""
        return self._requests(self.typical.length) if self.typical else None

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt: prompt and answer must fit the engine's limits and the KV pool."""
        if self.limits is None or self.memory is None:
            return None if self.limits is None else self.limits.longest_prompt
        return max(0, min(self.limits.longest_prompt, self.memory.longest(self.limits.tokens_per_block) - 1))

    def roofline(self, model: Model) -> Roofline | None:
        """The time model; None without a GPU or for an illegal request."""
        gpu = self.request.gpu
        if not self.legal or gpu is None or self.held is None or self.limits is None or self.memory is None:
            return None
        return Roofline(model.facts, self.held, self.memory.parallel, gpu, self.limits.max_num_tokens)

    def _requests(self, length: int) -> int | None:
        if self.limits is None or self.memory is None:
            return None
        return self.memory.requests(length + self.limits.spare_tokens, self.limits.tokens_per_block)
