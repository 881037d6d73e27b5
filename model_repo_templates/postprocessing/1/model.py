"""Token ids to text, each response independently: for clients of the engine model, as text models detokenize."""

from collections.abc import Mapping

import model_process
import numpy as np
import triton_python_backend_utils as pb_utils
from model_config import ModelConfig
from numpy.typing import NDArray
from responder import RequestFailed, triton_error
from tokenizer_file import load_tokenizer


class TritonPythonModel:
    """The Python model that Triton loads."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer."""
        model_process.set_up()
        config = ModelConfig(args)
        self._tokenizer = load_tokenizer(str(config.directory / config.text("tokenizer_dir") / "tokenizer.json"))
        self._vocab_size = config.integer("vocab_size", self._tokenizer.get_vocab_size())
        self._skip_special_tokens = config.flag("skip_special_tokens", True)

    def execute(self, requests: list["pb_utils.InferenceRequest"]) -> list["pb_utils.InferenceResponse"]:
        """One response per request: a text for every beam of every item, in that order."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        """End the process."""
        model_process.leave()

    def _respond(self, request: "pb_utils.InferenceRequest") -> "pb_utils.InferenceResponse":
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            texts = self._texts(inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"])
        except RequestFailed as failure:
            return pb_utils.InferenceResponse([], triton_error(str(failure)))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array(texts, dtype=object))])

    def _texts(self, tokens: NDArray[np.int32], lengths: NDArray[np.int32]) -> list[list[bytes]]:
        """int32 [items, beams, tokens] and [items, beams] to one UTF-8 text per item and beam."""
        if tokens.shape[:2] != lengths.shape:
            raise RequestFailed(
                f"SEQUENCE_LENGTH has the shape {list(lengths.shape)}; TOKENS_BATCH of shape {list(tokens.shape)} "
                f"needs {list(tokens.shape[:2])}"
            )
        if lengths.size and not 0 <= lengths.min() <= lengths.max() <= tokens.shape[2]:
            raise RequestFailed(
                f"SEQUENCE_LENGTH is {lengths.min()} to {lengths.max()}; it must be from 0 to {tokens.shape[2]}, "
                "the tokens in TOKENS_BATCH"
            )
        return [
            [self._text(ids[:length].tolist()) for ids, length in zip(beams, counts, strict=True)]
            for beams, counts in zip(tokens, lengths, strict=True)
        ]

    def _text(self, ids: list[int]) -> bytes:
        wrong = [token for token in ids if not 0 <= token < self._vocab_size]
        if wrong:
            raise RequestFailed(f"TOKENS_BATCH holds the id {wrong[0]}; ids are from 0 to {self._vocab_size - 1}")
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
        return text.encode()
