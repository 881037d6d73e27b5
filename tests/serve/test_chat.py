"""Chat through the real server with real engines: the prompts and the greedy answers are those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chat_templates import FAMILIES, QUESTION, SYSTEM, TALK, write_tokenizer
from tests.families import TINY
from tests.serve.conftest import Start
from tests.serve.test_text_tensors import post, streamed
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import EngineConfig
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package

NEW_TOKENS = 12


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_to_messages_are_those_of_transformers(name: str, start: Start, tmp_path: Path) -> None:
    family = FAMILIES[name]
    hf = tmp_path / "hf"
    tokenizer: Any = write_tokenizer(family, hf)
    model: Any = TINY[family.architecture](vocab_size=len(tokenizer), max_position_embeddings=512)
    model.save_pretrained(hf)
    checkpoint = convert(ConvertConfig(dtype="float32"), hf, tmp_path / "checkpoint").path
    engine = compile_engine(
        EngineConfig(backend="torch", compute_dtype="float32", max_seq_len=512), checkpoint, tmp_path / "engine"
    ).path
    server = start(package(PackageConfig(), engine, None, tmp_path / "repository").path)
    server.wait_ready()
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
