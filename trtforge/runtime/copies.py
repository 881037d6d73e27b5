"""Several sequences of one prompt: copies wait until the original's prompt is computed, then share its blocks."""

from collections.abc import Mapping
from dataclasses import replace

from trtforge.runtime.scheduling.rows import Row
from trtforge.runtime.scheduling.scheduler import Scheduler
from trtforge.runtime.scheduling.sequence import Draft, Sequence, candidates_of


class Copies:
    """The copies that wait for their originals; the scheduler gets them afterwards.

    `shares`: False if a sequence has state besides its blocks (linear attention), so that each copy computes its own
    prompt.
    """

    def __init__(self, *, shares: bool = True) -> None:
        self._shares = shares
        self._of: dict[Sequence, list[Sequence]] = {}

    def attached(self, copy: Sequence, unfinished: Mapping[str, Sequence]) -> bool:
        """Whether `copy` now waits for its original; False if it must compute its prompt itself.

        `unfinished`: all sequences by their request ids.
        """
        original = unfinished.get(copy.request.copy_of or "")
        if not self._shares or original is None or original is copy or original.generated:
            return False
        if original.tokens != copy.tokens or original.table.salt != copy.table.salt:
            return False
        if any(original in copies for copies in self._of.values()):  # the original is a waiting copy itself
            return False
        alone = any(
            each.request.guide is not None or each.scores_prompt or each.group is not None for each in (original, copy)
        )
        if alone:
            return False
        self._of.setdefault(original, []).append(copy)
        both = original.candidates, copy.candidates
        draws = any(p.draws_from_all or p.draws_near for p in (original.request.sampling, copy.request.sampling))
        original.candidates = max(both) if all(both) and not draws else 0  # its first logits also serve the copies
        return True

    def joined(self, sampling: list[tuple[Row, int]], scheduler: Scheduler) -> list[tuple[Row, int]]:
        """Rows of copies whose originals sample their first token in this step, from the same logits."""
        found = []
        for row, index in sampling if self._of else ():
            copies = scheduler.join(row.sequence, self._of.pop(row.sequence, []))
            row.sequence.candidates = candidates_of(row.sequence.request)
            for copy in copies:
                copy.draft = Draft()  # this first token is sampled, not verified
            found += [(replace(row, sequence=copy, drafts=()), index) for copy in copies]
        return found

    def detached(self, sequence: Sequence, scheduler: Scheduler) -> bool:
        """Whether an ending sequence was a waiting copy. Copies of an ending original compute their prompts."""
        for copy in self._of.pop(sequence, []):
            scheduler.add(copy)
        for copies in self._of.values():
            if sequence in copies:
                copies.remove(sequence)
                return True
        return False

    def has_begun(self, sequence: Sequence) -> bool:
        """Whether a request runs or has run. Paused requests and copies of running ones count."""
        return (self.original_of(sequence) or sequence).begun

    def original_of(self, copy: Sequence) -> Sequence | None:
        """The original of a waiting copy; None for any other sequence."""
        return next((original for original, copies in self._of.items() if copy in copies), None)
