"""Token ids to text, each response by itself. For clients that call the engine model; text models do it themselves."""

from collections.abc import Mapping

import numpy as np
import triton_python_backend_utils as pb_utils
from detokenizer import Detokenizer, load_tokenizer
from model_config import ModelConfig


class TritonPythonModel:
    """The Python model that Triton loads."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer."""
        config = ModelConfig(args)
        self._tokenizer = load_tokenizer(str(config.directory / config.text("tokenizer_dir") / "tokenizer.json"))
        self._skip_special_tokens = config.flag("skip_special_tokens", True)

    def execute(self, requests: list["pb_utils.InferenceRequest"]) -> list["pb_utils.InferenceResponse"]:
        """One response a request: a text for every beam of every item, in that order."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: "pb_utils.InferenceRequest") -> "pb_utils.InferenceResponse":
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        texts = [
            [self._text(ids[:length].tolist()) for ids, length in zip(beams, lengths, strict=True)]
            for beams, lengths in zip(inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"], strict=True)
        ]
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array(texts, dtype=object))])

    def _text(self, ids: list[int]) -> bytes:
        whole = Detokenizer(self._tokenizer, skip_special_tokens=self._skip_special_tokens)
        return (whole.push(ids) + whole.flush()).encode()
