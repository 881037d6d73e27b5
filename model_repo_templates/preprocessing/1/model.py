"""Text to token ids: the prompt, stop and bad words, the embedding bias, end and padding ids."""

from collections.abc import Mapping
from typing import Any

import model_process
import triton_python_backend_utils as pb_utils
from model_config import ModelConfig
from numpy.typing import NDArray
from preprocessor import Preprocessor
from responder import RequestFailed, triton_error


class TritonPythonModel:
    """The Python model that Triton loads."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer."""
        model_process.set_up()
        self._preprocessor = Preprocessor(ModelConfig(args))

    def execute(self, requests: list["pb_utils.InferenceRequest"]) -> list["pb_utils.InferenceResponse"]:
        """One response per request."""
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        """End the process."""
        model_process.leave()

    def _respond(self, request: "pb_utils.InferenceRequest") -> "pb_utils.InferenceResponse":
        try:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            outputs = self._prepare(inputs)
        except RequestFailed as failure:
            return pb_utils.InferenceResponse([], triton_error(str(failure)))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])

    def _prepare(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        for name, value in inputs.items():
            if len(value) != 1:
                raise RequestFailed(f"{name} holds {len(value)} items; send a request for each")
        return self._preprocessor.prepare(inputs)
