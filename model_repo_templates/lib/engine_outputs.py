"""What one engine request answers: its sequences' tokens as they come, put into the tensors of TensorRT-LLM."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import triton_python_backend_utils as pb_utils
from responder import RequestFailed, Responder, flag_of

from trtforge.runtime.requests import GenerationRequest, Output


@dataclass
class Sequence:
    """One returned sequence. `tokens` and `log_probs` are those that were not sent yet."""

    item: int
    index: int
    request: GenerationRequest
    arrival_ns: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    cumulative_log_prob: float = 0.0
    generated: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    reused_blocks: int = 0
    allocated_blocks: int = 0
    finished: bool = False

    def take(self, output: Output) -> None:
        """Add what one step made."""
        if output.tokens:
            self.last_token_ns = time.monotonic_ns()
            self.first_token_ns = self.first_token_ns or self.last_token_ns
        self.tokens += output.tokens
        self.log_probs += output.log_probs
        self.generated += len(output.tokens)
        self.cumulative_log_prob = output.cumulative_log_prob
        self.reused_blocks, self.allocated_blocks = output.reused_blocks, output.allocated_blocks
        self.finished = output.finish_reason is not None


class Generation(Responder):
    """One engine request: a sequence for each prompt of its batch and each of `num_return_sequences`."""

    def __init__(self, request: "pb_utils.InferenceRequest", *, exclude_input: bool) -> None:
        super().__init__(request)
        self.streaming = flag_of(self.inputs, "streaming", False)
        self.sequences: list[Sequence] = []
        self._with_input = not self.streaming and not flag_of(self.inputs, "exclude_input_in_output", exclude_input)
        self._flags = {name: flag_of(self.inputs, name, False) for name in self.inputs if name.startswith("return_")}

    def take(self, sequence: Sequence, outputs: list[Output]) -> None:
        """Send what `outputs` add to one sequence: at once when streaming, else when it is finished.

        Raises RequestFailed with the engine's reason where it could not serve the request.
        """
        for output in outputs:
            if output.error is not None:
                raise RequestFailed(f"{output.error.message}. {output.error.hint}")
            sequence.take(output)
        final = all(other.finished for other in self.sequences)
        if sequence.finished or (self.streaming and sequence.tokens):
            self.send(self._tensors(sequence), final=final)
            sequence.tokens, sequence.log_probs = [], []

    def _tensors(self, sequence: Sequence) -> dict[str, np.ndarray]:
        prompt = sequence.request.prompt
        ids = [*prompt, *sequence.tokens] if self._with_input else sequence.tokens
        tensors = {"output_ids": _int32([[ids]]).reshape(1, 1, len(ids)), "sequence_length": _int32([[len(ids)]])}
        if self._wants("return_log_probs"):
            tensors["cum_log_probs"] = np.array([[sequence.cumulative_log_prob]], dtype=np.float32)
            tensors["output_log_probs"] = np.array([[sequence.log_probs]], dtype=np.float32)
        if len({other.item for other in self.sequences}) > 1:
            tensors["batch_index"] = _int32([[sequence.item]])
        if any(other.index for other in self.sequences):
            tensors["sequence_index"] = _int32([[sequence.index]])
        if self._wants("return_num_input_tokens"):
            tensors["num_input_tokens"] = _int32([[len(prompt)]])
        if self._wants("return_num_output_tokens"):
            tensors["num_output_tokens"] = _int32([[sequence.generated]])
        if sequence.finished and self._wants("return_perf_metrics"):
            tensors |= _performance(sequence)
        return tensors

    def _wants(self, flag: str) -> bool:
        return self._flags.get(flag, False)


def _performance(sequence: Sequence) -> Mapping[str, np.ndarray]:
    times = {
        "arrival_time_ns": sequence.arrival_ns,
        "first_token_time_ns": sequence.first_token_ns,
        "last_token_time_ns": sequence.last_token_ns,
    }
    counts = {
        "kv_cache_alloc_new_blocks": sequence.allocated_blocks - sequence.reused_blocks,
        "kv_cache_reused_blocks": sequence.reused_blocks,
        "kv_cache_alloc_total_blocks": sequence.allocated_blocks,
        "total_accepted_draft_tokens": 0,
        "total_draft_tokens": 0,
    }
    return {
        **{name: np.array([[value]], dtype=np.int64) for name, value in times.items()},
        **{name: _int32([[value]]) for name, value in counts.items()},
        "acceptance_rate": np.zeros((1, 1), dtype=np.float32),
    }


def _int32(values: list) -> np.ndarray:
    return np.array(values, dtype=np.int32)
