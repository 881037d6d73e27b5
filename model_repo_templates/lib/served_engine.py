"""The engine process as text models use it: engine tensors in, pieces out."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from engine_outputs import SequenceState, Wanted
from engine_requests import RequestedSequence, RequestLimits, requested_sequences
from input_names import REQUEST_TYPE
from input_values import InputValues
from model_config import ModelConfig
from numpy.typing import NDArray
from request_types import request_type
from text_engine import Piece, PieceReceiver

from trtforge.engine_process.client import EngineClient, Submitted
from trtforge.engine_process.messages import Update
from trtforge.engine_process.rendezvous import socket_path
from trtforge.engine_process.requests import RequestFailure


def request_limits(config: ModelConfig) -> RequestLimits:
    """The limits in a model's parameters."""
    return RequestLimits(
        config.integer("vocab_size", 0),
        config.max_batch_size,
        config.integers("end_ids"),
        max_beam_width=config.integer("max_beam_width", 1),
        guided=config.flag("guided_decoding", True),
        lora_task_ids=config.integers("lora_task_ids"),
        logits=tuple(name for name in config.text("returned_logits").split(",") if name),
        lookahead=config.integer("lookahead_window_size", 0) > 0,
        takes_adapters=config.flag("takes_adapters", False),
        takes_drafts=config.flag("takes_drafts", True),
        takes_prompt_tables=config.flag("takes_prompt_tables", False),
        takes_phases=config.flag("takes_phases", True),
        seed=None if config.flag("random_seed", False) else 0,
    )


class ServedEngine:
    """A TextEngine. `names`: engine input to the name to show in errors."""

    def __init__(self, config: ModelConfig, names: Mapping[str, str]) -> None:
        path = socket_path(config.text("tensorrt_llm_model_name"), os.getppid())
        self._limits = request_limits(config)
        self._names = names
        self._client = EngineClient(path, config.name, os.getpid())

    def start(
        self,
        inputs: Mapping[str, NDArray[Any]],
        receiver: PieceReceiver,
        timeout: float | None,
        *,
        model_end_ids: bool,
        watched: bool,
    ) -> Submitted:
        """See TextEngine. Pieces always come as they are made."""
        return self._submitted(self._requested(inputs, model_end_ids=model_end_ids), inputs, receiver, timeout)

    def _requested(self, inputs: Mapping[str, NDArray[Any]], *, model_end_ids: bool) -> list[RequestedSequence]:
        values = InputValues(inputs)
        phases = request_type({REQUEST_TYPE: values.text(REQUEST_TYPE, 0)} if REQUEST_TYPE in values else {})
        engine_inputs = {name: value for name, value in inputs.items() if name != REQUEST_TYPE}
        return requested_sequences(
            engine_inputs, self._limits, model_end_ids=model_end_ids, names=self._names, phases=phases
        )

    def _submitted(
        self,
        sequences: list[RequestedSequence],
        inputs: Mapping[str, NDArray[Any]],
        receiver: PieceReceiver,
        timeout: float | None,
    ) -> Submitted:
        answer = _Answer(sequences, Wanted.of(inputs, 1, len(sequences)), receiver)
        return self._client.submit(tuple(sequence.request for sequence in sequences), answer, timeout)

    def together(self) -> AbstractContextManager[None]:
        """See TextEngine."""
        return self._client.together()

    def cancel(self, started: object) -> None:
        """See TextEngine."""
        assert isinstance(started, Submitted)
        self._client.cancel(started)

    def ping(self, answer: Callable[[tuple[str, str] | None], None]) -> None:
        """See TextEngine."""

        def on_ping(failure: RequestFailure | None) -> None:
            answer(None if failure is None else (failure.message, failure.code.value))

        self._client.ping(on_ping)

    def close(self) -> None:
        """See TextEngine."""
        self._client.close()


class _Answer:
    """Turns updates of sequences into pieces."""

    def __init__(self, sequences: list[RequestedSequence], wanted: Wanted, receiver: PieceReceiver) -> None:
        now = time.monotonic_ns()
        self._states = [SequenceState(s.item, s.index, s.request, now) for s in sequences]
        self._wanted = wanted
        self._receiver = receiver

    def take(self, updates: list[tuple[int, Update]]) -> None:
        """Called on the client's thread."""
        self._receiver.take([self._piece(sequence, update) for sequence, update in updates])

    def _piece(self, sequence: int, update: Update) -> Piece:
        if update.failure is not None:
            return Piece(sequence, [], True, failure=(update.failure.message, update.failure.code.value))
        state = self._states[sequence]
        state.take(update)
        prompt = update.prompt_log_probs
        piece = Piece(
            sequence,
            [list(beam.tokens) for beam in state.beams] or [state.tokens],
            state.finished,
            state.optional_outputs(self._wanted),
            reason=update.finish_reason or "",
            log_probs=state.beams[0].log_probs if state.beams else state.log_probs,
            top_log_probs=update.top_log_probs,
            prompt_log_probs=None if prompt is None else (prompt.values, prompt.top),
            cached_tokens=update.cached_tokens,
        )
        state.sent()
        return piece
