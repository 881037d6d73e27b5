"""A step with short chunks of prompts beside single tokens as one of single tokens only, which a CPU's ranks record."""

from dataclasses import replace

import numpy as np

from trtforge.runtime.scheduling.batch import Step

MOST_BESIDE = 64
"""Tokens of prompts: as many as the CPU kernels take of one sequence at once."""


def single_tokens(step: Step) -> Step:
    """The step with a row for each token.

    As it is without single tokens, with more tokens of prompts than MOST_BESIDE, and where one of these gives logits:
    what is left of a prompt has too many lengths to record each.
    """
    if len(step.tokens) == len(step.counts):
        return step
    singles = step.generation_rows
    if singles == 0 or len(step.tokens) - singles > MOST_BESIDE or step.wanted[singles:].any():
        return step
    rows, positions = step.positions()
    return replace(
        step,
        starts=positions,
        counts=np.ones(len(rows), dtype=np.int64),
        wanted=step.wanted[rows],
        tables=step.tables[rows],
        adapters=step.adapters[rows] if len(step.adapters) else step.adapters,
        window_tables=step.window_tables[rows] if len(step.window_tables) else step.window_tables,
    )
