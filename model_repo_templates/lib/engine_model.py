"""An engine behind TensorRT-LLM's interface: tensors in, tokens out as the engine makes them.

What the engine is, the models that derive from this say.
"""

import itertools
import json
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import triton_python_backend_utils as pb_utils
from engine_inputs import Limits, batch_size, check_supported, generation_request, sequences_per_prompt
from engine_outputs import Generation, Sequence
from model_config import ModelConfig
from responder import RequestFailed, flag_of
from watch import Watcher

from trtforge.core.errors import ForgeError
from trtforge.runtime.requests import GenerationRequest, Output


class RequestEngine(Protocol):
    """What generates. Outputs come on a thread of its own."""

    def submit(self, request: GenerationRequest, on_output: Callable[[Output], None]) -> None:
        """Start a request; its last output has a finish_reason."""

    def cancel(self, request_id: str) -> None:
        """End a request; one that is over is no error."""

    def close(self) -> None:
        """End the engine."""


class EngineModel:
    """A Python model that Triton loads, but for its engine."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the engine and start the threads."""
        config = ModelConfig(args)
        self._config = config
        self._limits = Limits(config.integer("vocab_size", 0), config.integers("end_ids"))
        self._exclude_input = config.flag("exclude_input_in_output", False)
        queue_size = config.integer("max_queue_size", 0)
        self._most_sequences = config.max_batch_size + queue_size if queue_size else None
        try:
            self._engine = self.load(config)
        except ForgeError as error:
            raise pb_utils.TritonModelException(f"{error.message} (hint: {error.hint})") from error
        self._names = itertools.count()
        self._generations: dict[str, Generation] = {}
        self._active = 0
        self._lock = threading.Lock()
        self._outputs: queue.SimpleQueue[tuple[Generation, Sequence, Output]] = queue.SimpleQueue()
        self._watcher: Watcher[Generation] = Watcher(config.integer("cancellation_check_period_ms", 100), self._cancel)
        threading.Thread(target=self._send_outputs, name="sender", daemon=True).start()

    def load(self, config: ModelConfig) -> RequestEngine:
        """The engine. Raises ForgeError if it cannot be loaded."""
        raise NotImplementedError

    def heard(self, output: Output) -> None:
        """Called with every output, on the engine's thread."""

    def execute(self, requests: list["pb_utils.InferenceRequest"]) -> None:
        """Hand the requests to the engine; their responses follow from other threads."""
        for request in requests:
            generation = Generation(request, exclude_input=self._exclude_input)
            try:
                if flag_of(generation.inputs, "stop", False):
                    self._stop(generation)
                else:
                    chosen = json.loads(request.parameters() or "{}")
                    self._start(generation, engine_end_ids=bool(chosen.get("use_engine_end_ids", False)))
            except RequestFailed as failure:
                generation.fail(str(failure))
            except Exception as error:
                pb_utils.Logger.log_error(traceback.format_exc())
                generation.fail(f"{type(error).__name__} while starting the request: {error}")

    def finalize(self) -> None:
        """End the engine's processes."""
        self._engine.close()

    def _start(self, generation: Generation, *, engine_end_ids: bool) -> None:
        inputs = generation.inputs
        check_supported(inputs)
        if generation.streaming and not self._config.decoupled:
            raise RequestFailed("streaming: this repository was packaged with streaming off")
        for item in range(batch_size(inputs)):
            for index in range(sequences_per_prompt(inputs, item)):
                name = str(next(self._names))
                request = generation_request(inputs, item, index, name, self._limits, engine_end_ids=engine_end_ids)
                generation.sequences.append(Sequence(item, index, request, time.monotonic_ns()))
        if len(generation.sequences) > 1 and not self._config.decoupled:
            raise RequestFailed("several sequences in one request: this repository was packaged with streaming off")
        with self._lock:
            waiting = self._active + len(generation.sequences)
            if self._most_sequences is not None and waiting > self._most_sequences:
                raise RequestFailed(f"the queue is full: {self._active} requests run or wait; try again later")
            self._active = waiting
            if generation.request_id:
                self._generations[generation.request_id] = generation
        self._watcher.add(generation)
        for sequence in generation.sequences:
            self._engine.submit(sequence.request, partial(self._on_output, generation, sequence))

    def _on_output(self, generation: Generation, sequence: Sequence, output: Output) -> None:
        """On the engine's thread: only pass it on."""
        self.heard(output)
        self._outputs.put((generation, sequence, output))

    def _send_outputs(self) -> None:
        """Send responses; steps that came while another response was sent go out together."""
        while True:
            batch = [self._outputs.get()]
            while not self._outputs.empty():
                batch.append(self._outputs.get())
            steps: dict[int, tuple[Generation, Sequence, list[Output]]] = {}
            for generation, sequence, output in batch:
                steps.setdefault(id(sequence), (generation, sequence, []))[2].append(output)
            for generation, sequence, outputs in steps.values():
                self._send(generation, sequence, outputs)

    def _send(self, generation: Generation, sequence: Sequence, outputs: list[Output]) -> None:
        try:
            generation.take(sequence, outputs)
        except RequestFailed as failure:
            generation.fail(str(failure))
            self._cancel(generation)
        except Exception as error:
            pb_utils.Logger.log_error(traceback.format_exc())
            generation.fail(f"{type(error).__name__} while sending a response: {error}")
            self._cancel(generation)
        if outputs[-1].finish_reason is not None:
            self._forget(generation)

    def _forget(self, generation: Generation) -> None:
        """One of its sequences ended."""
        with self._lock:
            self._active -= 1
            if generation.done and self._generations.get(generation.request_id) is generation:
                del self._generations[generation.request_id]

    def _stop(self, stop: Generation) -> None:
        """TensorRT-LLM's stop request: ends the request of the same id; one that is unknown is already over."""
        with self._lock:
            generation = self._generations.get(stop.request_id)
        if generation is not None:
            self._cancel(generation)
        stop.send({}, final=True)

    def _cancel(self, generation: Generation) -> None:
        for sequence in generation.sequences:
            self._engine.cancel(sequence.request.request_id)
