"""A step as one array of integers, which rank 0 broadcasts to all ranks."""

from itertools import pairwise

import numpy as np

from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.integers import Ints

HEADER = 17
_QUESTION = 2
_NO_STEP = -1  # instead of the number of table columns


def encode(step: Step) -> Ints:
    """The step as int64: its length, table columns and other numbers, the lengths of all fields, then the fields."""
    fields = [step.starts, step.counts, step.wanted, step.tables.reshape(-1), step.tokens, step.copies]
    fields += [step.adapters, step.window_tables.reshape(-1), step.window_copies]
    fields += [step.embeddings.reshape(-1), step.draws, step.filled, step.contents.reshape(-1), step.seen]
    sizes = [len(each) for each in fields[2:]]  # as many starts and counts as are wanted
    total = HEADER + 2 * len(step.starts) + sum(sizes)
    numbers = total, step.tables.shape[1], step.length, step.candidates, len(step.embeddings)
    return np.concatenate([np.array([*numbers, *sizes], dtype=np.int64), *fields])


def decode(values: Ints) -> Step:
    """The inverse of `encode`; `values` may be longer than the step."""
    _, columns, length, candidates, virtual, *sizes = (int(value) for value in values[:HEADER])
    ends = np.cumsum([HEADER, sizes[0], sizes[0], *sizes])
    fields = [values[a:b] for a, b in pairwise(ends)]
    starts, counts, wanted, tables, tokens, copies, adapters, windows, pairs, embeddings, *others = fields
    draws, filled, words, seen = others
    tables, windows = tables.reshape(-1, columns), windows.reshape(-1, columns)
    rows = embeddings.reshape(virtual, -1) if virtual else embeddings.reshape(0, 0)
    contents = words.reshape(len(filled), -1) if len(filled) else words.reshape(0, 0)
    packed = starts, counts, wanted, tables, tokens
    return Step(*packed, length, copies, adapters, windows, pairs, candidates, draws, rows, filled, contents, seen)


def encode_question(block: int) -> Ints:
    """A message instead of a step: send the content of `block` to rank 0."""
    return np.array([_QUESTION, block], dtype=np.int64)


def encode_moves(pairs: Ints) -> Ints:
    """A message instead of a step: KV cache slots to copy, as pairs (from, to) one after another."""
    return np.concatenate([np.array([_QUESTION + len(pairs), _NO_STEP], dtype=np.int64), pairs])


def asked_moves(values: Ints) -> Ints | None:
    """The pairs of slots to copy; None for other messages."""
    return values[_QUESTION : values[0]] if values[0] > _QUESTION and values[1] == _NO_STEP else None


def asked_block(values: Ints) -> int | None:
    """The block whose content is requested; None for other messages."""
    return int(values[1]) if values[0] == _QUESTION else None
