"""How an engine batches, and how many requests and tokens it takes at once."""

from dataclasses import dataclass
from typing import Literal

Batching = Literal["inflight", "static_padded", "static_dropped"]
"""The static modes are benchmark baselines: a batch is admitted when the previous one is done. `static_padded` keeps
computing finished rows until then, `static_dropped` does not."""


@dataclass(frozen=True)
class BatchLimits:
    """Limits that an engine was built with."""

    max_batch_size: int
    max_num_tokens: int
    max_input_len: int
    max_seq_len: int
    max_beam_width: int = 1
