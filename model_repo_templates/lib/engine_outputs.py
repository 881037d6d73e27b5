"""The state of an engine request's sequences, and TensorRT-LLM's optional output tensors that report it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from input_names import PHASE
from input_values import InputValues
from numpy.typing import ArrayLike, NDArray
from request_types import handed_on

from trtforge.engine_process.messages import Update
from trtforge.engine_process.requests import CUT, Beam, GenerationRequest, TopLogProbs


@dataclass(frozen=True)
class Wanted:
    """The optional outputs that a request asks for."""

    log_probs: bool
    num_input_tokens: bool
    num_output_tokens: bool
    performance: bool
    batch_index: bool
    sequence_index: bool
    context_logits: bool
    generation_logits: bool

    @classmethod
    def of(cls, inputs: Mapping[str, NDArray[Any]], items: int, sequences: int) -> "Wanted":
        """`items`: number of prompts; `sequences`: number of sequences that they return in total."""
        values = InputValues(inputs)
        return cls(
            log_probs=values.flag("return_log_probs", False),
            num_input_tokens=values.flag("return_num_input_tokens", False),
            num_output_tokens=values.flag("return_num_output_tokens", False),
            performance=values.flag("return_perf_metrics", False),
            batch_index=items > 1,
            sequence_index=sequences > items,
            context_logits=values.flag("return_context_logits", False),
            generation_logits=values.flag("return_generation_logits", False),
        )


@dataclass(slots=True)
class SequenceState:
    """One returned sequence. `tokens`, `log_probs` and logits (native float32): those not sent yet. `cut`: it was
    cancelled.

    `top_log_probs`: beside each token of the last update.
    """

    item: int
    index: int
    request: GenerationRequest
    arrival_ns: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    cumulative_log_prob: float = 0.0
    generated: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    reused_blocks: int = 0
    allocated_blocks: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    beams: Sequence[Beam] = ()
    finished: bool = False
    cut: bool = False
    top_log_probs: Sequence[TopLogProbs] = ()
    context_logits: bytearray = field(default_factory=bytearray)
    generation_logits: bytearray = field(default_factory=bytearray)

    def take(self, update: Update) -> None:
        """Add the output of one or several steps."""
        if update.tokens:
            self.last_token_ns = time.monotonic_ns()
            self.first_token_ns = self.first_token_ns or self.last_token_ns
        self.tokens += update.tokens
        self.log_probs += update.log_probs
        self.context_logits += update.context_logits
        self.generation_logits += update.generation_logits
        self.generated += len(update.tokens)
        self.cumulative_log_prob = update.cumulative_log_prob
        self.reused_blocks, self.allocated_blocks = update.reused_blocks, update.allocated_blocks
        self.drafted_tokens, self.accepted_tokens = update.drafted_tokens, update.accepted_tokens
        self.beams = update.beams
        self.generated += len(update.beams[0].tokens) if update.beams else 0
        if update.beams:
            self.last_token_ns = self.first_token_ns = time.monotonic_ns()
        self.scheduled_ns = update.scheduled_ns
        self.finished, self.cut = update.finish_reason is not None, update.finish_reason in CUT
        self.top_log_probs = update.top_log_probs

    def sent(self) -> None:
        """Forget the tokens, log probabilities and logits that were sent."""
        self.tokens, self.log_probs = [], []
        self.context_logits, self.generation_logits = bytearray(), bytearray()

    def optional_outputs(self, wanted: Wanted) -> dict[str, NDArray[Any]]:
        """The tensors that the request asked for besides tokens, with batch dimension."""
        tensors: dict[str, NDArray[Any]] = {}
        if wanted.log_probs:
            totals = [beam.cumulative_log_prob for beam in self.beams] or [self.cumulative_log_prob]
            each = [beam.log_probs for beam in self.beams] or [self.log_probs]
            tensors["cum_log_probs"] = np.array([totals], dtype=np.float32)
            tensors["output_log_probs"] = _padded(each, 0).astype(np.float32)
        if wanted.context_logits and self.context_logits:
            rows = len(self.request.prompt)
            tensors["context_logits"] = np.frombuffer(bytes(self.context_logits), np.float32).reshape(1, rows, -1)
        if wanted.generation_logits and self.generation_logits:
            rows = len(self.tokens)
            logits = np.frombuffer(bytes(self.generation_logits), np.float32)
            tensors["generation_logits"] = logits.reshape(1, 1, rows, -1)
        if wanted.batch_index:
            tensors["batch_index"] = _int32([[self.item]])
        if wanted.sequence_index:
            tensors["sequence_index"] = _int32([[self.index]])
        if wanted.num_input_tokens:
            tensors["num_input_tokens"] = _int32([[len(self.request.prompt)]])
        if wanted.num_output_tokens:
            tensors["num_output_tokens"] = _int32([[self.generated]])
        if self.finished and wanted.performance:
            tensors |= self._performance()
        if self.finished and self.request.context_only and not self.cut:
            tensors[PHASE] = handed_on(self.request, self.tokens, self.log_probs, self.top_log_probs)
        return tensors

    def token_outputs(self, *, with_prompt: bool) -> dict[str, NDArray[Any]]:
        """output_ids [1, beams, tokens], padded with an end id, and sequence_length [1, beams]."""
        prompt = self.request.prompt if with_prompt else ()
        if not self.beams:
            ids: Sequence[int] = [*prompt, *self.tokens] if prompt else self.tokens
            return {"output_ids": _int32([[ids]]).reshape(1, 1, len(ids)), "sequence_length": _int32([[len(ids)]])}
        rows = [[*prompt, *beam.tokens] for beam in self.beams]
        padding = min(self.request.end_ids, default=0)
        return {
            "output_ids": _padded(rows, padding).astype(np.int32),
            "sequence_length": _int32([[len(row) for row in rows]]),
        }

    def _performance(self) -> Mapping[str, NDArray[Any]]:
        times = {
            "arrival_time_ns": self.arrival_ns,
            "first_scheduled_time_ns": self.scheduled_ns,
            "first_token_time_ns": self.first_token_ns,
            "last_token_time_ns": self.last_token_ns,
        }
        counts = {
            "kv_cache_alloc_new_blocks": self.allocated_blocks - self.reused_blocks,
            "kv_cache_reused_blocks": self.reused_blocks,
            "kv_cache_alloc_total_blocks": self.allocated_blocks,
            "total_accepted_draft_tokens": self.accepted_tokens,
            "total_draft_tokens": self.drafted_tokens,
        }
        rate = self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0
        return {
            **{name: np.array([[value]], dtype=np.int64) for name, value in times.items()},
            **{name: _int32([[value]]) for name, value in counts.items()},
            "acceptance_rate": np.array([[rate]], dtype=np.float32),
        }


def _padded(rows: Sequence[Sequence[float]], padding: float) -> NDArray[np.float64]:
    """[1, rows, longest row]."""
    longest = max(map(len, rows))
    padded = [[*row, *[padding] * (longest - len(row))] for row in rows]
    return np.array([padded], dtype=np.float64).reshape(1, len(rows), longest)


def _int32(values: ArrayLike) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)
