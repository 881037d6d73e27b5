"""Log probabilities of tokens; prompt log probabilities and prompt logits from the steps that compute the prompts."""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from trtforge.engine_process.requests import TopLogProbs
from trtforge.runtime.native.bindings import native_for
from trtforge.runtime.native.sampling import log_sums
from trtforge.runtime.scheduling.rows import Row


def score_prompts(rows: Rows[Row], logits: Tensor) -> None:
    """Add the prompts' log probabilities and logits to the sequences of rows that score.

    `logits`: float32 (wanted tokens of all rows, vocabulary), in the order of the rows.
    """
    first = 0
    for row in rows:
        if row.scores:
            _score(row, logits[first : first + row.wanted])
        first += row.wanted


def log_sums_of(logits: Tensor) -> Tensor:
    """log(sum of exp(logit)) of each row of float32 logits (rows, vocabulary); subtract it for log probabilities."""
    kernels = native_for(logits.device, logits.dtype)
    return logits.logsumexp(dim=1) if kernels is None else log_sums(kernels, logits)


def top_log_probs(logits: Tensor, sums: Tensor, count: int) -> list[TopLogProbs]:
    """The `count` most likely tokens of each row of logits (rows, vocabulary). `sums`: from `log_sums_of`."""
    values, tokens = logits.topk(min(count, logits.shape[1]), dim=1)
    values -= sums.unsqueeze(1)
    return [tuple(zip(ids, row, strict=True)) for ids, row in zip(tokens.tolist(), values.tolist(), strict=True)]


def _score(row: Row, logits: Tensor) -> None:
    """Score a row: the logits after token i score token i + 1. After a pause, scored positions are skipped."""
    sequence, prompt = row.sequence, row.sequence.request.prompt
    begin, end = max(row.start, sequence.scored), min(row.start + row.count, len(prompt) - 1)
    if begin >= end:
        return
    sequence.scored = end
    own = logits[begin - row.start : end - row.start]
    if sequence.request.context_logits:
        sequence.context_logits += own.cpu().numpy().tobytes()
    if not sequence.request.sampling.prompt_log_probs:
        return
    sums = log_sums_of(own)
    targets = torch.tensor(prompt[begin + 1 : end + 1], device=logits.device)
    sequence.prompt_log_probs += (own.gather(1, targets.unsqueeze(1)).squeeze(1) - sums).tolist()
    if count := sequence.request.sampling.top_log_probs:
        sequence.prompt_top += top_log_probs(own, sums, count)
