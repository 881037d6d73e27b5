"""Draft tokens that come with requests (TensorRT-LLM's external draft tokens), combined with the engine's drafter."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from trtforge.engine_process.requests import FinishReason
from trtforge.runtime.drafting import Drafter
from trtforge.runtime.scheduling.rows import Row
from trtforge.runtime.scheduling.sequence import Draft, Sequence


class Drafts:
    """Chooses the drafts that each step verifies: a request's own draft tokens as long as its output matches them;
    otherwise those of the engine's drafter, if there is one.

    A request's drafts are first verified in the step that computes the end of its prompt; those that do not fit there
    are verified later. Used by the engine's thread only.
    """

    def __init__(self, own: Drafter | None, device: torch.device, *, keeps_states: bool) -> None:
        """`keeps_states`: linear attention keeps states only after each row, so no draft is verified with a prompt."""
        self.own = own
        self._device = device
        self._keeps_states = keeps_states
        self._offered: dict[Sequence, Draft] = {}

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the engine's own drafter."""
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
        if self.own is not None:  # for all sequences: its state must follow every token, whoever drafts it
            self.own.draft([s for s in running if s.remaining == 1 and s.group is None])
        for sequence in list(self._offered):
            self._offer(sequence)

    def observe(self, rows: list[Row], logits: Tensor | None) -> None:
        """See Drafter."""
        if self.own is not None:
            self.own.observe(rows, logits)

    def finish(self, rows: list[Row], end: Callable[[Sequence, FinishReason], None]) -> None:
        """End requests that only want their drafts verified (`DraftTokens.alone`), once a step has verified them.

        `rows`: rows that sampled, copies of a prompt included.
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
        """Like `close`, and free the drafter's memory, when nothing is drafted any more."""
        self.close()
        self.own = None

    def _offer(self, sequence: Sequence) -> None:
        """Propose the request's next draft tokens, or drop them if the output differs from them."""
        made = sequence.generated
        if made and sequence.tokens[-1] < 0:  # placeholder of a token that the host does not know yet
            sequence.draft = Draft()
        elif self._go_on(sequence):
            waits = self._keeps_states and sequence.remaining > 1
            sequence.draft = Draft() if waits else self._offered[sequence].after(made)
        else:
            del self._offered[sequence]
            if self.own is None or sequence.remaining > 1:
                sequence.draft = Draft()

    def _go_on(self, sequence: Sequence) -> bool:
        """Whether a request's draft tokens start with its output and are longer than it."""
        if sequence not in self._offered:
            return False
        tokens, made = self._offered[sequence].tokens, sequence.generated
        return made < len(tokens) and sequence.tokens[len(sequence.tokens) - made :] == [*tokens[:made]]
