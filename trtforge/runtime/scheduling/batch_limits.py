"""How many requests and tokens an engine takes at once."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchLimits:
    """Limits that an engine was built with."""

    max_batch_size: int
    max_num_tokens: int
    max_input_len: int
    max_seq_len: int
    max_beam_width: int = 1
