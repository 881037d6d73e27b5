"""Splits a step into micro-batches: while a pipeline stage computes one, the previous stage computes the next.

With p stages of equal speed and m parts, a step takes (m + p - 1) / m times as long as one stage needs for all of it,
instead of p times (GPipe, Huang et al. 2019, arXiv 1811.06965, section 2.3). Every part reads all weights once, so only
steps of many tokens, whose products take longer than reading the weights, are split.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.integers import Ints

_PER_STAGE = 2  # parts
_LEAST_ROW = 2  # tokens; the rest of a cut row must not look like a row of the generation phase


@dataclass
class _Part:
    """Rows of a part: their indices in the step, and the range [begin, end) of the tokens of each."""

    rows: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, row: int, begin: int, end: int) -> None:
        self.rows.append(row)
        self.begins.append(begin)
        self.ends.append(end)


def micro_batches(step: Step, stages: int, least: int) -> list[Step]:
    """Split the step into steps to compute in this order: up to two per stage, of at least about `least` tokens each.

    Rows keep their order. A row of several tokens may be cut; the rest becomes a later chunk of it. The parts have no
    block copies, because the step's copies come before all of them.
    """
    count = min(_PER_STAGE * stages, len(step.tokens) // least)
    if stages == 1 or count < 2:
        return [step]
    parts = _cut(step.counts.tolist(), max(_LEAST_ROW, -(-len(step.tokens) // count)))
    firsts = step.counts.cumsum() - step.counts
    return [_of_part(step, part, firsts) for part in parts] if len(parts) > 1 else [step]


def _cut(counts: list[int], size: int) -> list[_Part]:
    parts, room = [_Part()], size
    for row, count in enumerate(counts):
        begin = 0
        while begin < count:
            left = count - begin
            if room < min(left, _LEAST_ROW):
                parts.append(_Part())
                room = size
            taken = left if left < room + _LEAST_ROW else room
            parts[-1].add(row, begin, begin + taken)
            begin += taken
            room -= taken
    return parts


def _of_part(step: Step, part: _Part, firsts: Ints) -> Step:
    rows, begins, ends = (np.array(values, dtype=np.int64) for values in (part.rows, part.begins, part.ends))
    not_wanted = step.counts[rows] - step.wanted[rows]
    return replace(
        step,
        starts=step.starts[rows] + begins,
        counts=ends - begins,
        wanted=np.maximum(0, ends - np.maximum(begins, not_wanted)),
        tables=step.tables[rows],
        tokens=step.tokens[firsts[rows[0]] + begins[0] : firsts[rows[-1]] + ends[-1]],
        copies=step.copies[:0],
        adapters=step.adapters[rows] if len(step.adapters) else step.adapters,
        window_tables=step.window_tables[rows] if len(step.window_tables) else step.window_tables,
        window_copies=step.window_copies[:0],
        candidates=0 if len(step.draws) else step.candidates,
        draws=step.draws[:0],
    )
