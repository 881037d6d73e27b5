"""Text models whose engine model Triton itself runs, like TensorRT-LLM's C++ backend; a fake engine takes its place."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer

from tests.patience import PATIENCE, eventually
from tests.serve.conftest import Running, package_with_fake_engine, start_server
from tests.serve.fake_engine import LONGEST_PROMPT
from tests.serve.test_serving import PROMPT, active_requests, echoed, post
from trtforge.core.errors import ForgeError
from trtforge.formats.triton import ModelRole
from trtforge.package.config import PackageConfig
from trtforge.package.parameters import text_parameters
from trtforge.package.triton_models import ModelCode
from trtforge.serve.client import Sampling, generate, stream_text


def code_for_triton(role: ModelRole, backend: str) -> ModelCode:
    """What a repository of backend tensorrt_llm has, with our engine model in the place of NVIDIA's."""
    return "triton" if role in ("ensemble", "tensorrt_llm_bls") else "1"


def parameters_for_triton(*args: Any, **options: Any) -> dict[str, str]:
    """The text models' parameters without what only models with an engine process have."""
    return text_parameters(*args, **options) | {"strict_calls": "false"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with patch.multiple(
        "trtforge.package.triton_models", model_code=code_for_triton, text_parameters=parameters_for_triton
    ):
        repository = package_with_fake_engine(tmp_path_factory.mktemp("triton"), PackageConfig())
    assert (repository / "ensemble" / "1" / "triton_engine.py").is_file()
    assert not (repository / "ensemble" / "1" / "served_engine.py").exists()
    server = start_server(repository)
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_clients_see_what_they_see_of_an_engine_process(running: Running, tokenizer: Tokenizer, model: str) -> None:
    params = Sampling(max_tokens=60)
    pieces = list(stream_text(running.grpc, model, PROMPT, params))
    whole = generate(running.http, model, PROMPT, params, protocol="http")
    assert whole.text == "".join(pieces) == echoed(tokenizer, PROMPT, 60)
    assert len(pieces) > 1  # pieces that wait for a busy client are merged
    assert whole.output_tokens == 60


def test_many_requests_at_once_are_answered_each_with_its_own_text(running: Running, tokenizer: Tokenizer) -> None:
    def ask(number: int) -> bool:
        prompt = f"request {number} says {'ha' * (number % 30)}"
        model = "ensemble" if number % 2 else "tensorrt_llm_bls"
        pieces = stream_text(running.grpc, model, prompt, Sampling(max_tokens=12))
        return "".join(pieces) == echoed(tokenizer, prompt, 12)

    with ThreadPoolExecutor(48) as pool:
        assert all(pool.map(ask, range(200)))


def test_a_client_that_goes_away_frees_its_request(running: Running) -> None:
    pieces = stream_text(running.grpc, "ensemble", PROMPT, Sampling(max_tokens=100000))
    next(pieces)
    assert eventually(lambda: active_requests(running) == 1)
    pieces.close()
    assert eventually(lambda: active_requests(running) == 0)


def test_a_stop_word_in_the_text_ends_the_engines_request(running: Running) -> None:
    params = Sampling(max_tokens=100000, stop=("ne tw",))
    assert generate(running.grpc, "tensorrt_llm_bls", "one two three", params).text == "one tw"
    assert eventually(lambda: active_requests(running) == 0)


def test_several_sequences_come_back_whole(running: Running) -> None:
    import httpx

    lines = httpx.post(
        f"http://{running.http}/v2/models/ensemble/generate_stream",
        json={"text_input": "one two", "max_tokens": 3, "num_return_sequences": 2},
        timeout=PATIENCE,
    ).text
    assert lines.count('"text_output":"one two"') == 2


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_phases_are_passed_to_the_engine_model_and_back(running: Running, tokenizer: Tokenizer, model: str) -> None:
    """The type of the request as its parameter, `context_phase_params` as its tensors."""
    asked = {"text_input": PROMPT, "max_tokens": 6, "return_finish_reason": True}
    first = post(running, model, **asked, request_type="context_only").json()
    handed = first["context_phase_params"]
    assert json.loads(bytes(handed))["first_gen_tokens"] == tokenizer.encode(PROMPT).ids[:1]
    assert first["finish_reason"] == "not_finished"
    chosen = tokenizer.encode("x").ids[-1]
    other = json.dumps(json.loads(bytes(handed)) | {"first_gen_tokens": [chosen]}).encode()
    answer = post(running, model, **asked, request_type="generation_only", context_phase_params=list(other)).json()
    expected = tokenizer.decode([chosen, *tokenizer.encode(PROMPT).ids[1:6]])
    assert (answer["text_output"].strip(), answer["finish_reason"]) == (expected.strip(), "length")
    refused = post(running, model, **asked, request_type="generation_only")
    assert "context_phase_params is missing" in refused.json()["error"]


def test_errors_of_the_engine_reach_the_client(running: Running) -> None:
    with pytest.raises(ForgeError, match=f"tokens, {LONGEST_PROMPT} fit"):
        generate(running.grpc, "ensemble", "too long " * 200, Sampling(max_tokens=5))


def test_a_ping_goes_through_the_engine_model(running: Running) -> None:
    response = post(running, "ensemble", text_input="", max_tokens=1, trtforge_ping=True)
    assert (response.status_code, response.json()["text_output"]) == (200, "")
