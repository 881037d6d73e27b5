"""Draft tokens that come with requests, beside the engine's own drafter: TensorRT-LLM's external draft tokens."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from trtforge.engine_process.requests import FinishReason
from trtforge.runtime.drafting import Drafter
from trtforge.runtime.scheduling.rows import Row
from trtforge.runtime.scheduling.sequence import Draft, Sequence


class Drafts:
    """What each step verifies: of a request with draft tokens these, while its output is what they begin with; after
    them, and for other requests, what the engine's own drafter proposes, if there is one.

    The first ones are verified behind the prompt, in the step that computes its end; those for which it has no room
    later. Used by the engine's thread only.
    """

    def __init__(self, own: Drafter | None, device: torch.device, *, keeps_states: bool) -> None:
        """`keeps_states`: of linear attention, after each row of a step: none within a prompt is known."""
        self.own = own
        self._device = device
        self._keeps_states = keeps_states
        self._offered: dict[Sequence, Draft] = {}

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Processes that compute for the engine's own drafter."""
        return () if self.own is None else self.own.worker_pids

    def add(self, sequence: Sequence) -> None:
        """Take the draft tokens of a new request."""
        drafts = sequence.request.drafts
        if drafts is None:
            return
        found = None
        if drafts.logits and not sequence.request.sampling.greedy:
            logits = torch.frombuffer(bytearray(drafts.logits), dtype=torch.float32)
            found = logits.view(len(drafts.tokens), -1).to(self._device).softmax(dim=1)
        self._offered[sequence] = Draft(drafts.tokens, found, drafts.threshold)

    def draft(self, running: Iterable[Sequence]) -> None:
        """Set `draft` of the sequences that may have one in the next step."""
        if self.own is not None:  # for all: its state follows every token, whoever drafts it
            self.own.draft([s for s in running if s.remaining == 1 and s.group is None])
        for sequence in list(self._offered):
            self._offer(sequence)

    def observe(self, rows: list[Row], logits: Tensor | None) -> None:
        """See Drafter."""
        if self.own is not None:
            self.own.observe(rows, logits)

    def finish(self, rows: list[Row], end: Callable[[Sequence, FinishReason], None]) -> None:
        """End those requests whose drafts a step has verified and that ask for no more; see `DraftTokens`.

        `rows`: those that sampled, copies of a prompt included.
        """
        for row in rows if self._offered else ():
            sequence, drafts = row.sequence, row.sequence.request.drafts
            if drafts is None or not drafts.alone or sequence.finish_reason is not None:
                continue
            if row.drafts or not self._go_on(sequence):
                end(sequence, "length")

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""
        self._offered.pop(sequence, None)
        if self.own is not None:
            self.own.forget(sequence)

    def close(self) -> None:
        """End the processes of the engine's own drafter. May be called again."""
        if self.own is not None:
            self.own.close()

    def end(self) -> None:
        """As `close`, when nothing is drafted any more: the drafter's memory is freed too."""
        self.close()
        self.own = None

    def _offer(self, sequence: Sequence) -> None:
        """Propose the tokens of a request that come next, or drop them if the output has gone on otherwise."""
        made = sequence.generated
        if made and sequence.tokens[-1] < 0:  # stands for a token that the host does not know yet
            sequence.draft = Draft()
        elif self._go_on(sequence):
            waits = self._keeps_states and sequence.remaining > 1
            sequence.draft = Draft() if waits else self._offered[sequence].after(made)
        else:
            del self._offered[sequence]
            if self.own is None or sequence.remaining > 1:
                sequence.draft = Draft()

    def _go_on(self, sequence: Sequence) -> bool:
        """Whether a request's draft tokens begin with its output, and more follow."""
        if sequence not in self._offered:
            return False
        tokens, made = self._offered[sequence].tokens, sequence.generated
        return made < len(tokens) and sequence.tokens[len(sequence.tokens) - made :] == [*tokens[:made]]
