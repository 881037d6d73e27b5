"""Logits processors: callables from the caller that change a request's logits before its next token is chosen."""

import math
from collections.abc import Sequence as Rows

from torch import Tensor

from trtforge.core.errors import RequestError, first_line
from trtforge.runtime.scheduling.sequence import Sequence


def process_logits(rows: Rows[Sequence], logits: Tensor) -> None:
    """Apply each row's processors to the model's unmodified logits, float32 (rows, vocabulary).

    If a processor fails or leaves no token to choose, the row gets a `failure` and logits of minus infinity.
    """
    for index, row in enumerate(rows):
        if row.request.logits_processors:
            _process([row], logits[index : index + 1])


def process_beams(members: Rows[Sequence], logits: Tensor) -> None:
    """Like `process_logits`, for the beams of one request: a processor sees all beams at once."""
    if members[0].request.logits_processors:
        _process(members, logits)


def _process(members: Rows[Sequence], logits: Tensor) -> None:
    first = members[0]
    request = first.request
    # Virtual tokens have other ids in a sequence than in the request.
    tokens = [[*request.prompt, *member.tokens[len(request.prompt) :]] for member in members]
    try:
        for processor in request.logits_processors:
            processor(first.order, logits.unsqueeze(0), tokens, None, None)
    except BaseException as error:  # SystemExit would end the thread of all requests, too
        text = f"the logits processor failed: {type(error).__name__}: {first_line(error)}"
        first.failure = RequestError(text, hint="The error's __cause__ has its traceback.")
        first.failure.__cause__ = error
    else:
        largest = float(logits.max())
        if math.isnan(largest) or largest == math.inf:
            hint = "Set finite logits; minus infinity excludes a token."
            first.failure = RequestError(f"the logits processor set a logit to {largest}", hint=hint)
    if first.failure is not None:
        logits.fill_(-math.inf)
