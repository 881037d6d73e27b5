"""An engine process behind TensorRT-LLM's interface: tensors in, tokens out as the engine generates them.

This model starts the engine process, which the text models use as well. Derived models choose the engine.
"""

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import model_process
import triton_python_backend_utils as pb_utils
from engine_metrics import EngineMetrics
from engine_outputs import SequenceState, Wanted
from engine_requests import RequestedSequence, requested_sequences
from input_names import InputNames
from input_values import InputValues
from model_config import ModelConfig
from request_types import request_type
from responder import RequestFailed, Responder
from served_engine import request_limits
from watch import Watcher

from trtforge.core.errors import ForgeError, killed
from trtforge.engine_process.client import EngineClient, Submitted
from trtforge.engine_process.context_phase import RequestType
from trtforge.engine_process.messages import Update
from trtforge.engine_process.rendezvous import socket_path
from trtforge.engine_process.start import EngineProcess


class EngineCall(Responder):
    """One engine request: a sequence for each prompt of its batch and each of `num_return_sequences`."""

    def __init__(self, request: "pb_utils.InferenceRequest") -> None:
        super().__init__(request)
        self.submitted: Submitted | None = None
        self.phases: RequestType = "context_and_generation"
        self._states: list[SequenceState] = []

    def begin(self, sequences: Sequence[RequestedSequence], *, streaming: bool, with_prompt: bool) -> None:
        """Register the sequences before their first update arrives. Raises RequestFailed."""
        now = time.monotonic_ns()
        self._streaming, self._with_prompt = streaming, with_prompt
        self._states = [SequenceState(s.item, s.index, s.request, now) for s in sequences]
        self._wanted = Wanted.of(self.inputs, 1 + max(s.item for s in sequences), len(sequences))
        self._unfinished = len(sequences)

    def take(self, updates: list[tuple[int, Update]]) -> None:
        """Send updates: immediately when streaming, else each sequence when it is finished."""
        for sequence, update in updates:
            if update.failure is not None:
                self.fail(update.failure.message, update.failure.code.value)
                return
            state = self._states[sequence]
            state.take(update)
            self._unfinished -= state.finished
            if state.finished or (self._streaming and state.tokens):
                tensors = state.token_outputs(with_prompt=self._with_prompt)
                self.send(tensors | state.optional_outputs(self._wanted), final=not self._unfinished)
                state.sent()


class EngineProcessModel(ABC):
    """A Python model that Triton loads; derived classes give the engine's command."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the engine process and connect to it."""
        model_process.set_up()
        config = ModelConfig(args)
        self._decoupled = config.decoupled
        self._limits = request_limits(config)
        self._exclude_input = config.flag("exclude_input_in_output", False)
        self._names = InputNames(config.inputs, {_without_prefix(name): name for name in config.inputs})
        self._ending = threading.Event()
        period = config.integer("stats_check_period_ms", 100) / 1000
        self._metrics = EngineMetrics(config.name, args["model_version"])
        try:
            path = socket_path(config.name, os.getppid())
            self._process = EngineProcess(self.command(config, path))
        except ForgeError as error:
            raise pb_utils.TritonModelException(_with_hint(error)) from error
        self._process.watch(self._on_end)
        self._client = EngineClient(
            path, config.name, os.getpid(), figures_period=period, on_figures=self._metrics.update
        )
        self._calls: dict[str, EngineCall] = {}
        self._watcher: Watcher[EngineCall] = Watcher(config.integer("cancellation_check_period_ms", 100), self._cancel)

    @abstractmethod
    def command(self, config: ModelConfig, socket: Path) -> Sequence[str]:
        """The arguments to the Python interpreter that start the engine process. Raises ForgeError."""

    def execute(self, requests: list["pb_utils.InferenceRequest"]) -> None:
        """Pass the requests to the engine; other threads send the responses."""
        with self._client.together():
            for request in requests:
                self._take(EngineCall(request), request.parameters())

    def finalize(self) -> None:
        """End the engine's process and this one."""
        self._ending.set()
        self._watcher.close()
        self._client.close()
        self._process.end()
        model_process.leave()

    def _take(self, call: EngineCall, parameters: str) -> None:
        with call.failing():
            if parameters:
                given = json.loads(parameters)
                self._names.check(given)
                call.take_timeout(given)
                call.phases = request_type(given)
            values = InputValues(call.inputs)
            if values.flag("stop", False):
                self._stop(call)
            else:
                self._start(call, values)

    def _start(self, call: EngineCall, values: InputValues) -> None:
        streaming = values.flag("streaming", False)
        if streaming and not self._decoupled:
            raise RequestFailed("streaming is true; this repository was packaged with streaming off")
        sequences = requested_sequences(call.inputs, self._limits, phases=call.phases)
        if len(sequences) > 1 and not self._decoupled:
            raise RequestFailed("several sequences in one request: this repository was packaged with streaming off")
        with_prompt = not streaming and not values.flag("exclude_input_in_output", self._exclude_input)
        call.begin(sequences, streaming=streaming, with_prompt=with_prompt)
        if call.request_id:
            self._forget_finished()
            self._calls[call.request_id] = call
        call.submitted = self._client.submit(tuple(s.request for s in sequences), call, call.timeout)
        self._watcher.add(call)

    def _stop(self, stop: EngineCall) -> None:
        """TensorRT-LLM's stop request: ends the request with the same id; an unknown one has already finished."""
        call = self._calls.get(stop.request_id)
        if call is not None:
            self._cancel(call)
        stop.send({}, final=True)

    def _cancel(self, call: EngineCall) -> None:
        if call.submitted is not None:
            self._client.cancel(call.submitted)

    def _forget_finished(self) -> None:
        if len(self._calls) > 2 * self._client.unanswered + 64:
            self._calls = {name: call for name, call in self._calls.items() if not call.done}

    def _on_end(self, status: int) -> None:
        """The engine process ended by itself: exit, so that Triton restarts this process."""
        if not self._ending.is_set():
            failure = killed("the engine process", status)
            why = f"the engine process ended with status {status}" if failure is None else _with_hint(failure)
            pb_utils.Logger.log_error(why)
            self._client.close()
            os._exit(1)


def _with_hint(error: ForgeError) -> str:
    """As `trtforge serve` takes an error and its hint from the server's log."""
    return f"{error.message} (hint: {error.hint})"


def _without_prefix(name: str) -> str:
    """As text models and other servers name an input: top_k is TensorRT-LLM's runtime_top_k."""
    return name.removeprefix("runtime_")
