"""Chat through the real server with real engines: the prompts and the greedy answers are those of transformers."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from tests.chat_templates import CALLING, FAMILIES, QUESTION, SYSTEM, TALK, write_tokenizer
from tests.families import TINY
from tests.serve.conftest import Start
from tests.serve.test_text_tensors import post, streamed
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import EngineConfig
from trtforge.gateway.tool_calls import split
from trtforge.gateway.tools import ToolUse
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package

NEW_TOKENS = 12


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_to_messages_are_those_of_transformers(name: str, start: Start, tmp_path: Path) -> None:
    family = FAMILIES[name]
    hf = tmp_path / "hf"
    tokenizer: Any = write_tokenizer(family, hf)
    model: Any = TINY[family.architecture](vocab_size=len(tokenizer), max_position_embeddings=512)
    server = served(model, hf, start)
    for messages in (QUESTION, TALK, *([[*SYSTEM, *TALK]] if family.system else [])):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        with torch.inference_mode():
            made = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS)[0, len(ids) :]
        end = model.generation_config.eos_token_id
        expected = made.tolist()[: made.tolist().index(end)] if end in made.tolist() else made.tolist()
        asked = {"messages": json.dumps(messages), "max_tokens": NEW_TOKENS}
        answer = post(server, "ensemble", **asked, return_num_input_tokens=True, return_logprobs=True).json()
        assert answer["num_input_tokens"] == len(ids)
        assert [entry["id"] for entry in json.loads(answer["logprobs"])] == expected
        assert answer["text_output"] == tokenizer.decode(expected, skip_special_tokens=True)
        pieces = streamed(server, "tensorrt_llm_bls", **asked)
        assert b"".join(piece["text_output"] for piece in pieces).decode() == answer["text_output"]
    biased = post(server, "ensemble", input_ids=ids, max_tokens=3, logit_bias='{"7": 1000}', return_logprobs=True)
    assert [entry["id"] for entry in json.loads(biased.json()["logprobs"])] == [7, 7, 7]


WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Köln"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def test_calls_of_strict_functions_keep_to_their_schemas(start: Start, tmp_path: Path) -> None:
    """The model knows nothing; its bias makes it begin calls all the time."""
    hf = tmp_path / "hf"
    tokenizer: Any = write_tokenizer(CALLING, hf)
    tokenizer.add_tokens(["<tool_call>"])
    tokenizer.save_pretrained(hf)
    model: Any = TINY[CALLING.architecture](vocab_size=len(tokenizer), max_position_embeddings=512)
    server = served(model, hf, start)
    function: dict[str, Any] = {"name": "weather", "parameters": WEATHER, "strict": True}
    bias = json.dumps({tokenizer.convert_tokens_to_ids("<tool_call>"): 1000})

    def answer(function: dict[str, Any], allows_calls: bool | None = None, **options: object) -> Any:
        asked: dict[str, Any] = {"messages": QUESTION, "tools": [{"type": "function", "function": function}]}
        asked |= {} if allows_calls is None else {"guide_allows_calls": allows_calls}
        return post(
            server, "ensemble", **{"max_tokens": 200, "logit_bias": bias, **options}, messages=json.dumps(asked)
        )

    text = answer(function).json()["text_output"]
    _, calls = split(ToolUse("auto", ("weather",)), text, "length")
    arguments = [json.loads(call.arguments) for call in calls if call.complete]
    assert arguments
    for values in arguments:
        jsonschema.validate(values, WEATHER)
    free = {**function, "strict": False}
    assert answer(free).json()["text_output"] == "<tool_call>" * 200
    assert answer(function, beam_width=2).status_code == 200  # a search of beams follows no guide
    assert answer(function, end_id=-1).json()["text_output"] == "<tool_call>" * 200
    own = answer(function, guided_decoding_guide_type="regex", guided_decoding_guide="[a-c]{5}").json()["text_output"]
    assert re.fullmatch("[a-c]{5}", own)
    form = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": '{"enum": [true]}'}
    assert answer(free, **form).json()["text_output"] == answer(free, False, **form).json()["text_output"] == "true"
    assert answer(free, True, **form).json()["text_output"].startswith('<tool_call>\n{"name": "weather"')
    says = json.dumps({tokenizer.convert_tokens_to_ids("t"): 1000})
    assert answer(free, True, **form, logit_bias=says).json()["text_output"] == "true"
    other = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-c]{5}"}
    assert re.fullmatch("[a-c]{5}", answer(free, True, **other).json()["text_output"])  # only schemas of JSON
    for schema, said in (
        ({"type": "nope"}, "the guide of type structural_tag is refused"),
        ({"enum": ["x" * 140_000]}, "messages: the schemas of functions make a guide of 140"),
    ):
        refused = answer({**function, "parameters": schema})
        assert refused.status_code == 400
        assert said in refused.json()["error"]


def served(model: Any, hf: Path, start: Start) -> Any:
    """A server of a model whose tokenizer is in `hf`."""
    model.save_pretrained(hf)
    checkpoint = convert(ConvertConfig(dtype="float32"), hf, hf.parent / "checkpoint").path
    engine = compile_engine(
        EngineConfig(backend="torch", compute_dtype="float32", max_seq_len=512, max_beam_width=2),
        checkpoint,
        hf.parent / "engine",
    ).path
    server = start(package(PackageConfig(), engine, None, hf.parent / "repository").path)
    server.wait_ready()
    return server
