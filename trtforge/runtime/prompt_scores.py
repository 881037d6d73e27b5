"""Log probabilities of the prompts' own tokens, from the logits of a step that computes them."""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from trtforge.engine_process.requests import TopLogProbs
from trtforge.runtime.scheduling.scheduler import Row


def score_prompts(rows: Rows[Row], logits: Tensor) -> None:
    """Add the prompts' log probabilities to the sequences of rows that score.

    `logits`: float32 (wanted tokens of all rows, vocabulary), in the order of the rows.
    """
    first = 0
    for row in rows:
        if row.scores:
            _score(row, logits[first : first + row.wanted])
        first += row.wanted


def top_log_probs(log_probs: Tensor, count: int) -> list[TopLogProbs]:
    """The `count` most likely tokens of each row of (rows, vocabulary)."""
    values, tokens = log_probs.topk(min(count, log_probs.shape[1]), dim=1)
    return [tuple(zip(ids, row, strict=True)) for ids, row in zip(tokens.tolist(), values.tolist(), strict=True)]


def _score(row: Row, logits: Tensor) -> None:
    """The logits after token i are those of token i + 1. After a pause, positions that were scored are skipped."""
    sequence, prompt = row.sequence, row.sequence.request.prompt
    scored = len(sequence.prompt_log_probs)
    begin, end = max(row.start, scored), min(row.start + row.count, len(prompt) - 1)
    if begin >= end:
        return
    log_probs = logits[begin - row.start : end - row.start].log_softmax(dim=1)
    targets = torch.tensor(prompt[begin + 1 : end + 1], device=logits.device)
    sequence.prompt_log_probs += log_probs.gather(1, targets.unsqueeze(1)).squeeze(1).tolist()
    if count := sequence.request.sampling.top_log_probs:
        sequence.prompt_top += top_log_probs(log_probs, count)
