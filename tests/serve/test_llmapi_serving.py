"""The model of an llmapi engine in the real Triton server, with a fake of TensorRT-LLM's LLM API behind it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer

from tests.compile.checkpoints import engine as settings
from tests.conftest import DEMO_MODEL
from tests.package import fake_tensorrt_llm
from tests.ports import free_ports
from tests.serve.conftest import Running
from tests.serve.test_serving import PROMPT, echoed, post
from trtforge.compile.stage import compile_engine
from trtforge.core.assets import asset_directory
from trtforge.core.errors import ForgeError
from trtforge.package.config import PackageConfig
from trtforge.package.repository import LIBRARIES
from trtforge.package.stage import package
from trtforge.serve.client import Sampling, generate, stream_text

# As `trtforge serve`, but that nothing asks for a GPU and an installed TensorRT-LLM.
_MAIN = """
import sys
from pathlib import Path
import trtforge.serve.stage as stage
from trtforge.serve.config import ServeConfig
stage.require_runnable = lambda launch, facts: None
ports = dict(zip(("http_port", "grpc_port", "metrics_port"), map(int, sys.argv[2:5])))
sys.exit(stage.serve(ServeConfig(**ports, launcher="local", ready_timeout=150, drain_timeout=5), Path(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("llmapi")
    config = settings(backend="llmapi", max_batch_size=4, max_seq_len=128)
    engine = compile_engine(config, DEMO_MODEL, directory / "engine").path
    templates = directory / "templates"
    shutil.copytree(asset_directory("model_repo_templates"), templates)
    shutil.copyfile(str(fake_tensorrt_llm.__file__), templates / "lib" / "tensorrt_llm.py")
    codes = LIBRARIES["tensorrt_llm"]
    libraries = {**LIBRARIES, "tensorrt_llm": {**codes, "llmapi": (*codes["llmapi"], "tensorrt_llm")}}
    with (
        patch("trtforge.package.stage.asset_directory", lambda name: templates),
        patch("trtforge.package.repository.LIBRARIES", libraries),
    ):
        repository = package(PackageConfig(), engine, None, directory / "repository").path
    ports = free_ports(3)
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, str(repository), *map(str, ports)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    server = Running(process, *(f"127.0.0.1:{port}" for port in ports))
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_clients_see_what_they_see_of_an_engine(running: Running, model: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    params = Sampling(max_tokens=30)
    pieces = list(stream_text(running.grpc, model, PROMPT, params, protocol="grpc"))
    whole = generate(running.http, model, PROMPT, params, protocol="http")
    assert whole.text == "".join(pieces) == echoed(tokenizer, PROMPT, 30)
    assert len(pieces) > 1  # pieces that wait for a busy client are merged
    assert whole.output_tokens == 30


def test_stop_words_of_several_tokens_end_an_answer(running: Running) -> None:
    found = generate(running.grpc, "ensemble", PROMPT, Sampling(max_tokens=40, stop=("本語",)), protocol="grpc")
    assert found.text.endswith("本語")
    assert found.output_tokens is not None
    assert found.output_tokens < 40


def test_what_the_model_cannot_do_is_said(running: Running) -> None:
    params = Sampling(max_tokens=4, bad=("costs a lot",))
    with pytest.raises(ForgeError, match="bad_words: the LLM API supports single-token words only"):
        generate(running.grpc, "ensemble", PROMPT, params, protocol="grpc")


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_scores_of_prompt_and_answer_come_through(running: Running, model: str) -> None:
    inputs = {"return_logprobs": True, "top_logprobs": 3, "return_prompt_logprobs": True}
    prompt_text = f"{PROMPT} {model}"
    answer = post(running, model, text_input=prompt_text, max_tokens=4, **inputs).json()
    tokens, prompt = json.loads(answer["logprobs"]), json.loads(answer["prompt_logprobs"])
    assert [token["logprob"] for token in tokens] == [-0.5] * 4
    for token in (*tokens, *prompt[1:]):
        assert [top["id"] for top in token["top_logprobs"]] == [token["id"] + rank for rank in range(3)]
        assert [top["logprob"] for top in token["top_logprobs"]] == [-0.5, -1.5, -2.5]
    ids = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(prompt_text).ids
    assert [token["id"] for token in prompt] == ids
    assert prompt[0]["logprob"] is None
    assert {token["logprob"] for token in prompt[1:]} == {-0.5}
    again = post(running, model, text_input=prompt_text, max_tokens=4, **inputs)
    assert again.status_code == 400
    assert "positions, because the others are in reused KV blocks" in again.json()["error"]
