"""Text in, text out: the code of both `ensemble` and `tensorrt_llm_bls`.

Triton calls `execute` on one thread, which tokenizes and passes requests to the engine; the engine's client sends the
responses from its own thread.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import model_process
import numpy as np
import triton_python_backend_utils as pb_utils
from answer_report import AnswerReport
from background import Background
from input_names import GUIDE, GUIDE_TYPE, PHASE, InputNames
from input_values import InputValues, most_sequences
from model_config import ModelConfig
from numpy.typing import NDArray
from preprocessor import PROMPT_THOUGHT, Preprocessor
from responder import UNAVAILABLE, RequestFailed, Responder
from sequence_texts import SequenceTexts
from text_answer import TextAnswer
from text_engine import TextEngine
from text_options import OPTIONS, TextOptions
from token_texts import ScoredTexts
from watch import Watcher
from word_lists import MOST_WORDS

from trtforge.core.detokenizer import shows_first_space

_LONG_TEXT = 8192  # bytes; longer text takes milliseconds to tokenize, which happens on another thread
_LONG_TEXTS_WAITING = 64
PING = "trtforge_ping"
_TENSORRT_GUIDES = ("json", "json_schema", "regex", "ebnf_grammar")
"""Guides that TensorRT-LLM's backend follows; it answers without a guide for another type
(triton_backend/inflight_batcher_llm/src/utils.cc, getGuidedDecodingParamsFromTensors)."""


class TextCall(Responder):
    """One text request. `started`: what the engine's `start` returned."""

    def __init__(self, request: "pb_utils.InferenceRequest") -> None:
        super().__init__(request)
        # With `reshape` in config.pbtxt the model gets [batch]; the engine's inputs are [batch, 1].
        self.inputs = {name: value[:, None] if value.ndim == 1 else value for name, value in self.inputs.items()}
        self.started: object = None


class TextModel(ABC):
    """The Python model that Triton loads; derived classes choose the engine."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer, connect to the engine and start the threads."""
        model_process.set_up()
        config = ModelConfig(args)
        self._streams = config.decoupled
        self._most_beams = config.max_batch_size
        self._most_sequences = most_sequences(config.max_batch_size)
        self._exclude_input = config.flag("exclude_input_in_output", True)
        self._stops_by_text = config.flag("stop_words_as_text", False)
        self._engine_end_ids = config.flag("engine_end_ids", False)
        self._to_preprocessing = config.pairs("text_to_preprocessing")
        self._preprocessed = config.pairs("preprocessing_to_engine")
        self._to_engine = config.pairs("text_to_engine")
        self._outputs = dict(config.pairs("engine_to_text"))
        self._known = {name for name, _ in (*self._to_preprocessing, *self._to_engine)} | set(OPTIONS)
        self._own_channel = config.flag("engine_scores", False)
        self._guides = config.flag("guided_decoding", False)
        self._preprocessor = Preprocessor(config, {theirs: ours for ours, theirs in self._to_preprocessing})
        self._token_texts = ScoredTexts(self._preprocessor.tokenizer)
        engine_names = self._engine_names()
        self._names = InputNames(self._known, engine_names)
        self._engine = self.connect(config, engine_names)
        self._calls: Watcher[TextCall] = Watcher(config.integer("cancellation_check_period_ms", 100), self._cancel)
        self._long_texts = Background(_LONG_TEXTS_WAITING)

    @abstractmethod
    def connect(self, config: ModelConfig, names: Mapping[str, str]) -> TextEngine:
        """Connect to the engine. `names`: engine input to the client's name for it."""

    def execute(self, requests: list["pb_utils.InferenceRequest"]) -> None:
        """Take the requests; other threads send the responses."""
        with self._engine.together():
            for request in requests:
                self._take(TextCall(request), request.parameters())

    def finalize(self) -> None:
        """End the threads and the process."""
        self._calls.close()
        self._long_texts.close()
        self._engine.close()
        model_process.leave()

    def _take(self, call: TextCall, parameters: str) -> None:
        given = json.loads(parameters) if parameters else {}
        if given.get(PING):
            self._ping(call)
        elif self._is_long(call.inputs):
            if not self._long_texts.submit(lambda: self._serve(call, given)):
                call.fail("too many long prompts wait to be tokenized; retry in 1 s", UNAVAILABLE)
        else:
            self._serve(call, given)

    def _serve(self, call: TextCall, parameters: Mapping[str, object]) -> None:
        with call.failing():
            self._names.check(parameters)
            call.take_timeout(parameters)
            self._start(call)

    def _start(self, call: TextCall) -> None:
        inputs = InputValues(call.inputs)
        self._check(call.inputs)
        streaming = inputs.flag("stream", False)
        if streaming and not self._streams:
            raise RequestFailed("stream is true; this repository was packaged with streaming off")
        beams = inputs.integer("beam_width", 0, 1, 1, self._most_beams)
        # A beam search returns its beams as one sequence.
        sequences = 1 if beams > 1 else inputs.integer("num_return_sequences", 0, 1, 1, self._most_sequences)
        if sequences > 1 and not self._streams:
            raise RequestFailed("num_return_sequences must be 1: this repository was packaged with streaming off")
        options = self._options(call.inputs)
        prepared = self._prepare(call.inputs)
        prompt: list[int] = prepared["INPUT_ID"][0].tolist()
        with_input = not streaming and not inputs.flag("exclude_input_in_output", self._exclude_input)
        is_chat = "messages" in inputs  # with an answer of its own
        continues = with_input or not is_chat or shows_first_space(inputs.text(GUIDE_TYPE, 0))
        by_text = self._stops_by_text or not options.include_stop_words
        words = inputs.texts("stop_words", MOST_WORDS) if by_text else []
        own_end_ids = self._engine_end_ids and "end_id" not in inputs
        answer = TextAnswer(
            call,
            SequenceTexts(
                self._preprocessor.tokenizer,
                prompt if continues else [],
                words,
                sequences,
                include_words=options.include_stop_words,
            ),
            self._wanted_outputs(inputs),
            AnswerReport(
                options,
                prompt,
                int(prepared["REQUEST_OUTPUT_LEN"][0, 0]),
                self._token_texts,
                after_prompt=continues,
                prompt_thought=prepared[PROMPT_THOUGHT].flat[0].decode() if is_chat else None,
            ),
            streaming=streaming,
            prompt=self._prompt_text(inputs, prompt) if with_input else "",
            on_stopped=lambda: self._cancel(call),
        )
        engine_inputs = self._engine_inputs(call.inputs, prepared, searches_beams=beams > 1) | options.engine_inputs()
        engine_inputs["streaming"] = np.array([[streaming]])
        # A text stop word may end the answer early, but not a beam search.
        watched = bool(words) and self._streams and beams == 1
        call.started = self._engine.start(
            engine_inputs, answer, call.timeout, model_end_ids=own_end_ids, watched=watched
        )
        self._calls.add(call)
        if call.done:  # the answer ended before `started` was set
            self._cancel(call)

    def _options(self, inputs: Mapping[str, NDArray[Any]]) -> TextOptions:
        options = TextOptions.of(inputs)
        if options.by_own_channel is not None and not self._own_channel:
            raise RequestFailed(f"{options.by_own_channel} is not supported by this engine")
        return options

    def _prepare(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        names = (*self._to_preprocessing, *((name, name) for name in _PREPARED if name in self._known))
        table = inputs.get("prompt_embedding_table", _NONE)
        rows = table.shape[1] if table.ndim == 3 else 0  # of any other shape it is refused by the engine
        return self._preprocessor.prepare({theirs: inputs[ours] for ours, theirs in names if ours in inputs}, rows)

    def _wanted_outputs(self, inputs: InputValues) -> Mapping[str, str]:
        """The engine's outputs to pass on: the report has its own token counts and log probabilities."""
        left = set() if inputs.flag("return_log_probs", False) else {"output_log_probs", "cum_log_probs"}
        passed = {theirs: ours for theirs, ours in self._outputs.items() if ours not in left | set(_REPORTED)}
        return {**passed, PHASE: PHASE}

    def _prompt_text(self, inputs: InputValues, prompt: list[int]) -> str:
        if "text_input" in inputs:
            return inputs.texts("text_input", 1)[0]
        return self._preprocessor.tokenizer.decode(prompt)

    def _check(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        for name, value in inputs.items():
            if name not in self._known:
                raise RequestFailed(f"{name} is not supported by this repository")
            if name.startswith("guided_decoding_") and not self._guides:
                raise RequestFailed(f"{name}: this repository was packaged without guided decoding")
            if name == GUIDE_TYPE and not self._own_channel:
                _require_tensorrt_guide(InputValues(inputs).text(name, 0))
            if value.shape[0] != 1:
                raise RequestFailed(f"{name} holds {value.shape[0]} items; send a request for each")

    def _engine_inputs(
        self, inputs: Mapping[str, NDArray[Any]], prepared: Mapping[str, NDArray[Any]], *, searches_beams: bool
    ) -> dict[str, NDArray[Any]]:
        """The engine's tensors.

        The guide of an answer that may call functions goes before the request's own, from which it was made if there
        is one, unless the request searches beams or ignores the end id.
        """
        values = {theirs: inputs[ours] for ours, theirs in self._to_engine if ours in inputs and ours not in OPTIONS}
        values |= {theirs: prepared[ours] for ours, theirs in self._preprocessed if ours in prepared}
        ends = prepared["OUT_END_ID"][0, 0] >= 0
        if ends and not searches_beams:
            values |= {name: prepared[name] for name in (GUIDE_TYPE, GUIDE) if name in prepared}
        return values | {"exclude_input_in_output": np.array([[True]])}

    def _engine_names(self) -> dict[str, str]:
        """Engine input to the name that clients of this model use."""
        names = {theirs: ours for ours, theirs in self._to_engine}
        text_names = {theirs: ours for ours, theirs in self._to_preprocessing}
        for ours, theirs in self._preprocessed:
            names[theirs] = text_names.get(_SOURCES.get(ours, ""), ours)
        return names

    def _is_long(self, inputs: Mapping[str, NDArray[Any]]) -> bool:
        texts = (text for name in _TOKENIZED for text in inputs.get(name, _NONE).flat)
        return sum(len(text) for text in texts if isinstance(text, bytes)) > _LONG_TEXT

    def _ping(self, call: TextCall) -> None:
        def answer(failure: tuple[str, str] | None) -> None:
            if failure is not None:
                call.fail(*failure)
            else:
                call.send({"text_output": np.array([[b""]], dtype=object)}, final=True)

        self._engine.ping(answer)

    def _cancel(self, call: TextCall) -> None:
        if call.started is not None:
            self._engine.cancel(call.started)


_TOKENIZED = ("text_input", "messages", "stop_words", "bad_words", "embedding_bias_words")
_PREPARED = ("messages", "input_ids", "logit_bias", GUIDE_TYPE, GUIDE)
_REPORTED = ("num_input_tokens", "num_output_tokens")
_NONE = np.empty(0, dtype=object)
_SOURCES = {
    "INPUT_ID": "QUERY",
    "REQUEST_INPUT_LEN": "QUERY",
    "DECODER_INPUT_ID": "DECODER_QUERY",
    "REQUEST_DECODER_INPUT_LEN": "DECODER_QUERY",
    "REQUEST_OUTPUT_LEN": "REQUEST_OUTPUT_LEN",
    "STOP_WORDS_IDS": "STOP_WORDS_DICT",
    "BAD_WORDS_IDS": "BAD_WORDS_DICT",
    "EMBEDDING_BIAS": "EMBEDDING_BIAS_WORDS",
    "OUT_END_ID": "END_ID",
    "OUT_PAD_ID": "PAD_ID",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "PROMPT_TABLE_EXTRA_ID",
}
"""Preprocessing output to the input that determines it."""


def _require_tensorrt_guide(kind: str) -> None:
    if kind not in _TENSORRT_GUIDES:
        kinds = ", ".join(_TENSORRT_GUIDES)
        raise RequestFailed(f"{GUIDE_TYPE} is {kind!r}; TensorRT-LLM's engines follow {kinds}")
