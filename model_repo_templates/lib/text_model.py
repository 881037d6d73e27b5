"""Text in, text out: the code of both `ensemble` and `tensorrt_llm_bls`.

Each request runs on its own thread through preprocessing and the engine model, so what streaming needs to remember
(held-back characters, spaces, stop words) is in one place and in order. Triton's own ensemble scheduler has no such
place: its postprocessing step sees responses of all requests mixed.
"""

import traceback
import uuid
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import numpy as np
import triton_python_backend_utils as pb_utils
from detokenizer import load_tokenizer
from model_config import ModelConfig
from responder import RequestFailed, Responder, flag_of, texts_of
from texts import OUTPUT_IDS, SEQUENCE, SEQUENCE_LENGTH, Tensors, Texts
from watch import Watcher
from workers import Workers


class TextCall(Responder):
    """One text request. `engine_id` names it to the engine model, unique whatever ids the clients chose."""

    def __init__(self, request: "pb_utils.InferenceRequest") -> None:
        super().__init__(request)
        # Where config.pbtxt has `reshape` the model sees [batch]; the models that it calls want [batch, 1] again.
        self.inputs = {name: value[:, None] if value.ndim == 1 else value for name, value in self.inputs.items()}
        self.engine_id = f"{self.request_id or 'text'}-{uuid.uuid4().hex}"
        self.generating = False


class TextModel:
    """The Python model that Triton loads."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer and start the threads."""
        config = ModelConfig(args)
        self._tokenizer = load_tokenizer(str(config.directory / config.text("tokenizer_dir") / "tokenizer.json"))
        self._streams = config.decoupled
        self._exclude_input = config.flag("exclude_input_in_output", True)
        self._stops_by_text = config.flag("stop_words_as_text", False)
        self._engine_end_ids = config.flag("engine_end_ids", False)
        self._preprocessing = config.text("preprocessing_model_name")
        self._engine = config.text("tensorrt_llm_model_name")
        self._to_preprocessing = config.pairs("text_to_preprocessing")
        self._preprocessed = config.pairs("preprocessing_to_engine")
        self._to_engine = config.pairs("text_to_engine")
        self._from_engine = config.pairs("engine_to_text")
        self._known = {name for name, _ in (*self._to_preprocessing, *self._to_engine)}
        self._calls: Watcher[TextCall] = Watcher(config.integer("cancellation_check_period_ms", 100), self._cancel)
        self._workers = Workers(config.integer("concurrency", 64))
        self._stoppers = Workers(4)

    def execute(self, requests: list["pb_utils.InferenceRequest"]) -> None:
        """Take the requests; their responses follow from other threads."""
        for request in requests:
            call = TextCall(request)
            self._calls.add(call)
            self._workers.submit(partial(self._serve, call))

    def _serve(self, call: TextCall) -> None:
        try:
            if not call.cancelled():
                self._generate(call)
        except RequestFailed as failure:
            call.fail(str(failure))
        except Exception as error:
            pb_utils.Logger.log_error(traceback.format_exc())
            call.fail(f"{type(error).__name__} while serving the request: {error}")
        finally:
            call.finish()

    def _generate(self, call: TextCall) -> None:
        self._check(call.inputs)
        streaming = flag_of(call.inputs, "stream", False)
        if streaming and not self._streams:
            raise RequestFailed("stream: this repository was packaged with streaming off")
        prepared = self._preprocess(call)
        with_input = not streaming and not flag_of(call.inputs, "exclude_input_in_output", self._exclude_input)
        context = prepared["INPUT_ID"][0].tolist() if with_input else []
        words = texts_of(call.inputs, "stop_words") if self._stops_by_text else []
        engine_inputs = self._engine_inputs(call.inputs, prepared)
        # A stop word found in the text can only end the generation early if the tokens come one by one.
        ends_early = self._streams and bool(words) and not flag_of(call.inputs, "return_log_probs", False)
        engine_inputs["streaming"] = np.array([[streaming or ends_early]])
        responses = self._responses(call, engine_inputs)
        texts = Texts(self._tokenizer, context, words)
        if streaming:
            self._send_pieces(call, responses, texts)
        else:
            prompt = texts_of(call.inputs, "text_input")[0] if with_input else ""
            self._send_whole(call, responses, texts, prompt)

    def _send_pieces(self, call: TextCall, responses: Iterator[Tensors], texts: Texts) -> None:
        """A response for every step that has new text (or other outputs), and what is held back at the end."""
        for outputs in responses:
            _, pieces = texts.push(outputs)
            passed = self._passed(outputs)
            if any(pieces) or passed.keys() - {SEQUENCE}:
                call.send({"text_output": _strings(pieces), **passed})
            self._stop_early(call, texts)
        for index, pieces in texts.flush():
            if any(pieces):
                tag = {SEQUENCE: np.array([[index]], dtype=np.int32)} if texts.several else {}
                call.send({"text_output": _strings(pieces), **tag})

    def _send_whole(self, call: TextCall, responses: Iterator[Tensors], texts: Texts, prompt: str) -> None:
        """One response for each returned sequence, when all of it is there."""
        whole: dict[int, list[str]] = {}
        passed: dict[int, dict[str, np.ndarray]] = {}
        for outputs in responses:
            index, pieces = texts.push(outputs)
            before = whole.get(index, [prompt] * len(pieces))
            whole[index] = [text + piece for text, piece in zip(before, pieces, strict=True)]
            passed.setdefault(index, {}).update(self._passed(outputs))
            self._stop_early(call, texts)
        for position, (index, pieces) in enumerate(texts.flush(), start=1):
            complete = [text + piece for text, piece in zip(whole[index], pieces, strict=True)]
            call.send({"text_output": _strings(complete), **passed[index]}, final=position == len(whole))

    def _check(self, inputs: Tensors) -> None:
        for name, value in inputs.items():
            if name not in self._known:
                raise RequestFailed(f"{name} is not supported by this repository")
            if value.shape[0] != 1:
                raise RequestFailed(f"{name}: {value.shape[0]} texts in one request; send a request for each")

    def _preprocess(self, call: TextCall) -> Tensors:
        request = pb_utils.InferenceRequest(
            model_name=self._preprocessing,
            requested_output_names=[name for name, _ in self._preprocessed],
            inputs=[
                pb_utils.Tensor(theirs, call.inputs[ours])
                for ours, theirs in self._to_preprocessing
                if ours in call.inputs
            ],
        )
        return _outputs(request.exec())

    def _engine_inputs(self, inputs: Tensors, prepared: Tensors) -> dict[str, np.ndarray]:
        values = {theirs: inputs[ours] for ours, theirs in self._to_engine if ours in inputs}
        values |= {theirs: prepared[ours] for ours, theirs in self._preprocessed if ours in prepared}
        if self._engine_end_ids and "end_id" not in inputs:
            del values["end_id"]
        return values | {"exclude_input_in_output": np.array([[True]])}

    def _responses(self, call: TextCall, inputs: Tensors) -> Iterator[Tensors]:
        request = pb_utils.InferenceRequest(
            model_name=self._engine,
            request_id=call.engine_id,
            requested_output_names=[OUTPUT_IDS, SEQUENCE_LENGTH, *(name for name, _ in self._from_engine)],
            inputs=[pb_utils.Tensor(name, value) for name, value in inputs.items()],
            parameters={"use_engine_end_ids": True} if self._engine_end_ids and "end_id" not in inputs else {},
        )
        call.generating = True
        for response in self._exec(request):
            outputs = _outputs(response)
            if OUTPUT_IDS in outputs:
                yield outputs

    def _exec(self, request: "pb_utils.InferenceRequest") -> Iterable["pb_utils.InferenceResponse"]:
        return request.exec(decoupled=True) if self._streams else [request.exec()]

    def _passed(self, outputs: Tensors) -> dict[str, np.ndarray]:
        return {theirs: outputs[ours] for ours, theirs in self._from_engine if ours in outputs}

    def _stop_early(self, call: TextCall, texts: Texts) -> None:
        if texts.stopped:
            self._cancel(call)
            call.generating = False

    def _cancel(self, call: TextCall) -> None:
        if call.generating:
            self._stoppers.submit(partial(self._stop_engine, call.engine_id))

    def _stop_engine(self, engine_id: str) -> None:
        """TensorRT-LLM's way to end a request: another one with its id and `stop`."""
        one = np.ones((1, 1), dtype=np.int32)
        inputs = {"input_ids": one, "input_lengths": one, "request_output_len": one, "stop": np.array([[True]])}
        request = pb_utils.InferenceRequest(
            model_name=self._engine,
            request_id=engine_id,
            requested_output_names=[OUTPUT_IDS, SEQUENCE_LENGTH],
            inputs=[pb_utils.Tensor(name, value) for name, value in inputs.items()],
        )
        for response in self._exec(request):
            if response.has_error():
                pb_utils.Logger.log_warn(f"stopping {engine_id}: {response.error().message()}")


def _outputs(response: "pb_utils.InferenceResponse") -> dict[str, np.ndarray]:
    """A response's tensors, copied: their memory goes with the response. Raises RequestFailed with its error."""
    if response.has_error():
        raise RequestFailed(response.error().message())
    return {tensor.name(): np.array(tensor.as_numpy()) for tensor in response.output_tensors()}


def _strings(texts: list[str]) -> np.ndarray:
    return np.array([[text.encode() for text in texts]], dtype=object)
