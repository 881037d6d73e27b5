"""Text to token ids: the prompt, stop and bad words, the embedding bias, end and padding ids."""

from collections.abc import Mapping

import numpy as np
import triton_python_backend_utils as pb_utils
from detokenizer import load_tokenizer
from model_config import ModelConfig
from responder import RequestFailed, texts_of
from word_lists import embedding_bias, encode_words, word_list

_UNKNOWN_LENGTH = 1 << 20


class TritonPythonModel:
    """The Python model that Triton loads."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer."""
        config = ModelConfig(args)
        self._tokenizer = load_tokenizer(str(config.directory / config.text("tokenizer_dir") / "tokenizer.json"))
        self._add_special_tokens = config.flag("add_special_tokens", True)
        self._end_ids = config.integers("end_ids")
        self._pad_id = config.integer("pad_id", self._end_ids[0] if self._end_ids else 0)
        # TensorRT-LLM's engine knows one end id: the model's other ones reach it as stop words of one token.
        self._more_stop_words = [[i] for i in self._end_ids[1:]] if config.flag("end_ids_as_stop_words", False) else []
        self._vocab_size = config.integer("vocab_size", self._tokenizer.get_vocab_size())
        # Longer text cannot fit whatever its tokens are, and must not keep others waiting while it is cut into them.
        longest_token = max(len(token) for token in self._tokenizer.get_vocab())
        self._longest_text = config.integer("max_input_len", _UNKNOWN_LENGTH) * (longest_token + 1)

    def execute(self, requests: list["pb_utils.InferenceRequest"]) -> list["pb_utils.InferenceResponse"]:
        """One response a request."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: "pb_utils.InferenceRequest") -> "pb_utils.InferenceResponse":
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            outputs = self._prepare(inputs)
        except RequestFailed as failure:
            error = pb_utils.TritonError(str(failure), pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse([], error)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])

    def _prepare(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        queries = texts_of(inputs, "QUERY")
        if len(queries) != 1:
            raise RequestFailed(f"QUERY holds {len(queries)} texts; send a request for each")
        outputs = self._encode(queries[0], "INPUT_ID", "REQUEST_INPUT_LEN")
        if "DECODER_QUERY" in inputs:
            outputs |= self._encode(
                texts_of(inputs, "DECODER_QUERY")[0], "DECODER_INPUT_ID", "REQUEST_DECODER_INPUT_LEN"
            )
        outputs["REQUEST_OUTPUT_LEN"] = inputs["REQUEST_OUTPUT_LEN"].astype(np.int32)
        outputs["OUT_END_ID"] = inputs.get("END_ID", _number(self._end_ids[0] if self._end_ids else -1))
        outputs["OUT_PAD_ID"] = inputs.get("PAD_ID", _number(self._pad_id))
        stop_words = encode_words(self._tokenizer, texts_of(inputs, "STOP_WORDS_DICT"))
        if "END_ID" not in inputs:
            stop_words += self._more_stop_words
        if stop_words:
            outputs["STOP_WORDS_IDS"] = word_list(stop_words)
        bad_words = encode_words(self._tokenizer, texts_of(inputs, "BAD_WORDS_DICT"))
        if bad_words:
            outputs["BAD_WORDS_IDS"] = word_list(bad_words)
        outputs |= self._bias(inputs)
        if "PROMPT_TABLE_EXTRA_ID" in inputs:
            extra = inputs["PROMPT_TABLE_EXTRA_ID"].reshape(1, 1)
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.where(outputs["INPUT_ID"] >= self._vocab_size, extra, 0)
        return outputs

    def _encode(self, text: str, ids_name: str, length_name: str) -> dict[str, np.ndarray]:
        if len(text) > self._longest_text:
            raise RequestFailed(f"the prompt has {len(text)} characters, far more than this engine takes")
        ids = self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens).ids
        if not ids:
            raise RequestFailed("the prompt has no tokens")
        return {ids_name: np.array([ids], dtype=np.int32), length_name: _number(len(ids))}

    def _bias(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        words = texts_of(inputs, "EMBEDDING_BIAS_WORDS")
        weights = [float(weight) for weight in inputs.get("EMBEDDING_BIAS_WEIGHTS", np.empty(0)).flat]
        if len(words) != len(weights):
            raise RequestFailed(f"embedding_bias_words has {len(words)} words, embedding_bias_weights {len(weights)}")
        return {"EMBEDDING_BIAS": embedding_bias(self._tokenizer, words, weights, self._vocab_size)} if words else {}


def _number(value: int) -> np.ndarray:
    return np.array([[value]], dtype=np.int32)
