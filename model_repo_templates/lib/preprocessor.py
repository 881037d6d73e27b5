"""Text to token ids: the prompt, stop and bad words, the embedding bias, end and padding ids.

Used by the preprocessing model and, within their own process, by the text models.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from detokenizer import load_tokenizer
from input_values import INT32_MAX, InputValues
from model_config import ModelConfig
from numpy.typing import NDArray
from responder import RequestFailed
from tokenizers import Tokenizer
from word_lists import MOST_WORDS, embedding_bias, encode_words, word_list

_UNKNOWN_LENGTH = 1 << 20
_LONGEST_WORD = 1024  # bytes


class Preprocessor:
    """Converts a text request to engine inputs. `names`: input names to show in errors, where they differ."""

    def __init__(self, config: ModelConfig, names: Mapping[str, str] | None = None) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(
            str(config.directory / config.text("tokenizer_dir") / "tokenizer.json")
        )
        self._names = names or {}
        self._add_special_tokens = config.flag("add_special_tokens", True)
        self._end_ids = config.integers("end_ids")
        self._pad_id = config.integer("pad_id", self._end_ids[0] if self._end_ids else 0)
        # TensorRT-LLM's engine takes one end id; the model's others are passed as single-token stop words.
        self._more_stop_words = [[i] for i in self._end_ids[1:]] if config.flag("end_ids_as_stop_words", False) else []
        self._vocab_size = config.integer("vocab_size", self.tokenizer.get_vocab_size())
        # Longer text cannot fit, whatever its tokens are: refuse it before tokenizing, which would block others.
        longest_token = max(len(token) for token in self.tokenizer.get_vocab())
        self.longest_text = config.integer("max_input_len", _UNKNOWN_LENGTH) * (longest_token + 1)

    def prepare(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The tensors of the preprocessing model's response. Raises RequestFailed."""
        values = InputValues(inputs, self._names)
        outputs = self._encode(values, "QUERY", "INPUT_ID", "REQUEST_INPUT_LEN")
        if "DECODER_QUERY" in values:
            outputs |= self._encode(values, "DECODER_QUERY", "DECODER_INPUT_ID", "REQUEST_DECODER_INPUT_LEN")
        outputs["REQUEST_OUTPUT_LEN"] = _number(values.integer("REQUEST_OUTPUT_LEN", 0, None, 1, INT32_MAX))
        last = self._vocab_size - 1
        end_id = values.integer("END_ID", 0, self._end_ids[0] if self._end_ids else -1, -1, last)
        outputs["OUT_END_ID"] = _number(end_id)
        outputs["OUT_PAD_ID"] = _number(values.integer("PAD_ID", 0, self._pad_id, -1, max(last, self._pad_id)))
        stop_words = self._words(values, "STOP_WORDS_DICT")
        if "END_ID" not in values:
            stop_words += self._more_stop_words
        if stop_words:
            outputs["STOP_WORDS_IDS"] = word_list(stop_words)
        if bad_words := self._words(values, "BAD_WORDS_DICT"):
            outputs["BAD_WORDS_IDS"] = word_list(bad_words)
        outputs |= self._bias(values)
        if "PROMPT_TABLE_EXTRA_ID" in values:
            extra = values.array("PROMPT_TABLE_EXTRA_ID").reshape(1, 1)
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.where(outputs["INPUT_ID"] >= self._vocab_size, extra, 0)
        return outputs

    def _encode(self, values: InputValues, name: str, ids_name: str, length_name: str) -> dict[str, NDArray[Any]]:
        values.array(name)
        (text,) = values.texts(name, 1)
        if len(text) > self.longest_text:
            raise values.refused(
                name, f"a text of {len(text)} characters", f"at most {self.longest_text} characters for this engine"
            )
        # A batch of one: unlike `encode`, `encode_batch` releases the GIL.
        (encoded,) = self.tokenizer.encode_batch([text], add_special_tokens=self._add_special_tokens)
        if not encoded.ids:
            raise RequestFailed(f"{values.shown(name)} has no tokens")
        return {ids_name: np.array([encoded.ids], dtype=np.int32), length_name: _number(len(encoded.ids))}

    def _words(self, values: InputValues, name: str) -> list[list[int]]:
        words = values.texts(name, MOST_WORDS)
        for word in words:
            if len(word.encode()) > _LONGEST_WORD:
                raise values.refused(name, f"a word of {len(word.encode())} bytes", f"at most {_LONGEST_WORD} bytes")
        return encode_words(self.tokenizer, words)

    def _bias(self, values: InputValues) -> dict[str, NDArray[Any]]:
        words = values.texts("EMBEDDING_BIAS_WORDS", MOST_WORDS)
        name = "EMBEDDING_BIAS_WEIGHTS"
        weights = values.array(name).flatten() if name in values else np.empty(0)
        if len(words) != len(weights):
            raise RequestFailed(
                f"{values.shown('EMBEDDING_BIAS_WORDS')} has {len(words)} words, "
                f"{values.shown(name)} has {len(weights)}"
            )
        if not words:
            return {}
        values.finite(name)
        return {"EMBEDDING_BIAS": embedding_bias(self.tokenizer, words, weights.tolist(), self._vocab_size)}


def _number(value: int) -> NDArray[np.int32]:
    return np.array([[value]], dtype=np.int32)
