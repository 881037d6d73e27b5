"""A model.py for Triton that stands in for TensorRT-LLM's backend with a target or a draft engine.

The model `..._draft` drafts, mostly what the other one would generate; the other one verifies. It takes only what
config.pbtxt declares, and writes what it was asked beside it, a line of JSON a request.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

with suppress(ImportError):  # tests import what the models compute
    import triton_python_backend_utils as pb_utils


def following(tokens: list[int]) -> int:
    """The target's next token."""
    return 300 + (7 * tokens[-1] + 3 * tokens[-2] + len(tokens)) % 1000 if len(tokens) > 1 else 300


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.drafts = args["model_name"].endswith("_draft")
        self.most = int(config["parameters"]["max_beam_width"]["string_value"])
        self.decoupled = config["model_transaction_policy"]["decoupled"]
        self.log = Path(os.environ["TRTFORGE_TESTS_ASKED"]) / args["model_name"]

    def execute(self, requests: list) -> list | None:
        answers = [self._answer(request) for request in requests]
        if not self.decoupled:
            return answers
        for request, answer in zip(requests, answers, strict=True):
            sender = request.get_response_sender()
            sender.send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None

    def _answer(self, request):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        count, tokens = int(given["request_output_len"].flat[0]), given["input_ids"][0].tolist()
        offered = given["draft_input_ids"][0].tolist() if "draft_input_ids" in given else []
        with self.log.open("a") as log:
            log.write(json.dumps({"tokens": tokens, "count": count, "offered": offered}) + "\n")
        if "stop" in given:
            return pb_utils.InferenceResponse(output_tensors=[])
        if self.drafts and len(tokens) > 60:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("the prompt is too long"))
        made: list[int] = []
        while len(made) < count:
            token = following([*tokens, *made])
            if self.drafts and (len(tokens) + len(made)) % 4 == 0:
                token += 1
            made.append(token)
            if offered and (len(made) > len(offered) or offered[len(made) - 1] != token):
                break
        outputs = {"output_ids": [[made]], "sequence_length": [[len(made)]]}
        return pb_utils.InferenceResponse(
            output_tensors=[pb_utils.Tensor(name, np.array(value, dtype=np.int32)) for name, value in outputs.items()]
        )
