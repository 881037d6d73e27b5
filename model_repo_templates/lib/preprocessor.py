"""Text to token ids: the prompt, stop and bad words, the embedding bias, end and padding ids.

Used by the preprocessing model and, within their own process, by the text models.
"""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from chat_template import ChatTemplate
from input_values import INT32_MAX, InputValues
from model_config import ModelConfig
from numpy.typing import NDArray
from responder import RequestFailed
from tokenizer_file import load_tokenizer
from tokenizers import Tokenizer
from word_lists import LONGEST_WORDS, MOST_WORDS, embedding_bias, encode_words, word_list

from trtforge.core.reasoning import prompted_thought

if TYPE_CHECKING:
    from strict_guides import StrictGuides

PROMPT_THOUGHT = "prompt_thought"
"""The opening tag of reasoning with which the prompt of messages ends; empty if it ends with none."""
_UNKNOWN_LENGTH = 1 << 20
_LONGEST_WORD = 1024  # bytes
_MESSAGE_FIELDS = 1 << 16  # characters that roles and other fields may take beside the text
_MOST_BIASES = 1024
_LONGEST_LOGIT_BIAS = 1 << 16  # characters of its JSON
_LARGEST_BIAS = float(np.finfo(np.float32).max)


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
        tokenizer_directory = config.directory / config.text("tokenizer_dir")
        self._chat_template = ChatTemplate.load(tokenizer_directory) if config.flag("chat_template", False) else None
        self._strict_guides: StrictGuides | None = None
        if self._chat_template is not None and config.flag("strict_calls", False) and find_spec("xgrammar") is not None:
            import strict_guides  # of servers that have trtforge

            self._strict_guides = strict_guides.StrictGuides(self._chat_template, self.tokenizer)
        # Longer text cannot fit, whatever its tokens are: refuse it before tokenizing, which would block others.
        longest_token = max(len(token) for token in self.tokenizer.get_vocab())
        self._longest_prompt = config.integer("max_input_len", _UNKNOWN_LENGTH)
        self.longest_text = self._longest_prompt * (longest_token + 1)

    def prepare(self, inputs: Mapping[str, NDArray[Any]], table_rows: int = 0) -> dict[str, NDArray[Any]]:
        """The tensors of the preprocessing model's response. Raises RequestFailed.

        `table_rows`: of a prompt table, which are put before a text or messages whose tokens name none of them.
        """
        values = InputValues(inputs, self._names)
        outputs = self._prompt(values)
        if table_rows and "input_ids" not in values and outputs["INPUT_ID"].max() < self._vocab_size:
            rows = np.arange(self._vocab_size, self._vocab_size + table_rows, dtype=np.int32)
            ids = np.concatenate([rows[None], outputs["INPUT_ID"]], axis=1)
            outputs |= {"INPUT_ID": ids, "REQUEST_INPUT_LEN": _number(ids.size)}
        if "DECODER_QUERY" in values:
            outputs |= self._encode(values, "DECODER_QUERY", "DECODER_INPUT_ID", "REQUEST_DECODER_INPUT_LEN")
        outputs["REQUEST_OUTPUT_LEN"] = _number(values.integer("REQUEST_OUTPUT_LEN", 0, None, 1, INT32_MAX))
        last = self._vocab_size - 1
        end_id = values.integer("END_ID", 0, self._end_ids[0] if self._end_ids else -1, -1, last)
        outputs["OUT_END_ID"] = _number(end_id)
        outputs["OUT_PAD_ID"] = _number(values.integer("PAD_ID", 0, self._pad_id, -1, max(last, self._pad_id)))
        stop_words = encode_words(self.tokenizer, self._words(values, "STOP_WORDS_DICT"))
        if "END_ID" not in values:
            stop_words += self._more_stop_words
        if stop_words:
            outputs["STOP_WORDS_IDS"] = word_list(stop_words)
        if bad_words := encode_words(self.tokenizer, self._words(values, "BAD_WORDS_DICT")):
            outputs["BAD_WORDS_IDS"] = word_list(bad_words)
        outputs |= self._bias(values)
        if "PROMPT_TABLE_EXTRA_ID" in values:
            extra = values.array("PROMPT_TABLE_EXTRA_ID").reshape(1, 1)
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.where(outputs["INPUT_ID"] >= self._vocab_size, extra, 0)
        return outputs

    def _prompt(self, values: InputValues) -> dict[str, NDArray[Any]]:
        """INPUT_ID and REQUEST_INPUT_LEN of the one prompt that is given."""
        given = [name for name in ("QUERY", "messages", "input_ids") if name in values]
        if len(given) > 1:
            raise RequestFailed(f"{values.shown(given[0])} and {values.shown(given[1])}: a request has one prompt")
        if given == ["messages"]:
            return self._encode_messages(values)
        if given == ["input_ids"]:
            ids = values.array("input_ids").reshape(1, -1).astype(np.int32)
            if ids.size > self._longest_prompt:
                raise RequestFailed(
                    f"the prompt has {ids.size} tokens, this engine takes at most {self._longest_prompt}"
                )
            return {"INPUT_ID": ids, "REQUEST_INPUT_LEN": _number(ids.size)}
        return self._encode(values, "QUERY", "INPUT_ID", "REQUEST_INPUT_LEN")

    def _encode_messages(self, values: InputValues) -> dict[str, NDArray[Any]]:
        """With `PROMPT_THOUGHT`, and the guide that the answer needs. A template writes the special tokens itself."""
        if self._chat_template is None:
            raise RequestFailed("messages: the tokenizer has no chat template; send text_input")
        (text,) = values.texts("messages", 1)
        # An escaped character of JSON takes at most six.
        if len(text) > 6 * self.longest_text + _MESSAGE_FIELDS:
            raise RequestFailed(f"messages has {len(text)} characters, which is too long for this engine")
        chat = self._chat_template.chat(text)
        prompt = self._encode_text(
            values, "messages", chat.prompt, "INPUT_ID", "REQUEST_INPUT_LEN", special_tokens=False
        )
        thought = np.array([[prompted_thought(chat.prompt).encode()]], dtype=np.object_)
        guide = {} if self._strict_guides is None else self._strict_guides.inputs(chat, values)
        return prompt | {PROMPT_THOUGHT: thought} | guide

    def _encode(self, values: InputValues, name: str, ids_name: str, length_name: str) -> dict[str, NDArray[Any]]:
        values.array(name)
        (text,) = values.texts(name, 1)
        return self._encode_text(values, name, text, ids_name, length_name, special_tokens=self._add_special_tokens)

    def _encode_text(
        self, values: InputValues, name: str, text: str, ids_name: str, length_name: str, *, special_tokens: bool
    ) -> dict[str, NDArray[Any]]:
        if len(text) > self.longest_text:
            raise values.refused(
                name, f"a text of {len(text)} characters", f"at most {self.longest_text} characters for this engine"
            )
        # A batch of one: unlike `encode`, `encode_batch` releases the GIL.
        (encoded,) = self.tokenizer.encode_batch([text], add_special_tokens=special_tokens)
        if not encoded.ids:
            raise RequestFailed(f"{values.shown(name)} has no tokens")
        return {ids_name: np.array([encoded.ids], dtype=np.int32), length_name: _number(len(encoded.ids))}

    def _words(self, values: InputValues, name: str) -> list[str]:
        """The words of an input, before they are tokenized, for which other requests wait."""
        words = values.texts(name, MOST_WORDS)
        for word in words:
            if len(word.encode()) > _LONGEST_WORD:
                raise values.refused(name, f"a word of {len(word.encode())} bytes", f"at most {_LONGEST_WORD} bytes")
        size = sum(len(word.encode()) for word in words)
        if size > LONGEST_WORDS:
            raise values.refused(name, f"{size} bytes of words", f"at most {LONGEST_WORDS} bytes together")
        return words

    def _bias(self, values: InputValues) -> dict[str, NDArray[Any]]:
        words = self._words(values, "EMBEDDING_BIAS_WORDS")
        name = "EMBEDDING_BIAS_WEIGHTS"
        weights = values.array(name).flatten() if name in values else np.empty(0)
        if len(words) != len(weights):
            raise RequestFailed(
                f"{values.shown('EMBEDDING_BIAS_WORDS')} has {len(words)} words, "
                f"{values.shown(name)} has {len(weights)}"
            )
        by_id = self._logit_bias(values)
        if not words and not by_id:
            return {}
        if words:
            values.finite(name)
        bias = embedding_bias(self.tokenizer, words, weights.tolist(), self._vocab_size)
        for token, weight in by_id.items():
            bias[0, token] += weight
        return {"EMBEDDING_BIAS": bias}

    def _logit_bias(self, values: InputValues) -> dict[int, float]:
        """Token id to bias, from the JSON object that OpenAI's API has too."""
        texts = values.texts("logit_bias", 1)
        if not texts:
            return {}
        if len(texts[0]) > _LONGEST_LOGIT_BIAS:
            raise RequestFailed(f"logit_bias has {len(texts[0])} characters; at most {_LONGEST_LOGIT_BIAS} are allowed")
        try:
            bias = {int(token): float(weight) for token, weight in json.loads(texts[0]).items()}
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            raise RequestFailed("logit_bias is not a JSON object of token ids and numbers") from None
        if len(bias) > _MOST_BIASES:
            raise RequestFailed(f"logit_bias has {len(bias)} tokens; at most {_MOST_BIASES} are allowed")
        for token, weight in bias.items():
            if not 0 <= token < self._vocab_size:
                raise RequestFailed(f"logit_bias holds the id {token}; ids are from 0 to {self._vocab_size - 1}")
            if not abs(weight) <= _LARGEST_BIAS:
                raise RequestFailed(f"logit_bias of token {token} is {weight}; it must be a finite float32")
        return bias


def _number(value: int) -> NDArray[np.int32]:
    return np.array([[value]], dtype=np.int32)
