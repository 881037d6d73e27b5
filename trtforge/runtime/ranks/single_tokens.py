"""Rewrites a step with short prompt chunks as one with single-token rows only, which CPU ranks record."""

from dataclasses import replace

import numpy as np

from trtforge.runtime.scheduling.batch import Step
from trtforge.runtime.scheduling.integers import Ints

MOST_CHUNKED = 64
"""Maximum prompt tokens: the CPU kernels take this many of one sequence at once."""


def single_tokens(step: Step) -> Step:
    """The step with a row for each token, in `logits_first` order.

    Unchanged if prompts have more than MOST_CHUNKED tokens.
    """
    if len(step.tokens) == len(step.counts) or len(step.tokens) - step.generation_rows > MOST_CHUNKED:
        return step
    rows, positions = step.positions()
    order = logits_first(step)
    rows = rows[order]
    return replace(
        step,
        starts=positions[order],
        counts=np.ones(len(rows), dtype=np.int64),
        wanted=(np.arange(len(rows)) < step.wanted.sum()).astype(np.int64),
        tables=step.tables[rows],
        tokens=step.tokens[order],
        adapters=step.adapters[rows] if len(step.adapters) else step.adapters,
        seen=step.seen[rows] if len(step.seen) else step.seen,
        window_tables=step.window_tables[rows] if len(step.window_tables) else step.window_tables,
    )


def logits_first(step: Step) -> Ints:
    """Indices of the packed tokens: those whose logits are wanted, then the others."""
    logit_rows = step.logit_rows()
    return np.concatenate([logit_rows, np.setdiff1d(np.arange(len(step.tokens)), logit_rows)])
