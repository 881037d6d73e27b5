"""Whether a server does its job now: every one of its five models answers."""

import struct

from tests.assault.client import ask, infer, stubs
from tests.assault.messages import (
    PROMPTS,
    TEXT_MODELS,
    engine_inputs,
    message,
    numbers,
    strings,
    text_request,
)

_IDS = (5, 6, 7)


async def broken_models(url: str, within: float = 30.0) -> list[str]:
    """What is wrong, a line for each model that does not answer; empty if all do."""
    wrong = []
    async with stubs(url, 1) as (stub,):
        for model in TEXT_MODELS:
            answer = await ask(stub, text_request(PROMPTS[0], 4, model), within=within)
            if answer.kind != "answered" or not answer.text:
                wrong.append(f"{model}: {answer.kind} {answer.error}")
        answer = await ask(stub, message("tensorrt_llm", engine_inputs(_IDS, 2)), within=within)
        if answer.kind != "answered":
            wrong.append(f"tensorrt_llm: {answer.kind} {answer.error}")
        query = {"QUERY": strings((1, 1), b"The file"), "REQUEST_OUTPUT_LEN": numbers("INT32", (1, 1), 4)}
        outputs, error = await infer(stub, message("preprocessing", query), within)
        if not outputs.get("INPUT_ID"):
            wrong.append(f"preprocessing: {error or 'no INPUT_ID'}")
        tokens = {
            "TOKENS_BATCH": numbers("INT32", (1, 1, len(_IDS)), *_IDS),
            "SEQUENCE_LENGTH": numbers("INT32", (1, 1), len(_IDS)),
        }
        outputs, error = await infer(stub, message("postprocessing", tokens), within)
        if len(outputs.get("OUTPUT", b"")) < struct.calcsize("<I"):
            wrong.append(f"postprocessing: {error or 'no OUTPUT'}")
    return wrong
