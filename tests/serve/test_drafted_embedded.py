"""Two embedded engines in one repository: clients send text, a smaller engine drafts and the served one verifies."""

import queue
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.conftest import DEMO_MODEL
from tests.patience import PATIENCE, eventually
from tests.serve.conftest import Running, start_server
from tests.serve.test_serving import post
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.features import FeaturesConfig
from trtforge.core.llm_api_features import NgramFeature
from trtforge.core.recipe import EngineConfig
from trtforge.core.serving import ServingConfig
from trtforge.engine_process.requests import GenerationRequest
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package
from trtforge.runtime.generate import generate
from trtforge.serve.client import Sampling, stream_text
from trtforge.serve.client import generate as ask

PROMPT, DRAFTS = "Return the number of", 5
IDS, VOCABULARY = (5, 6, 7, 8), 2048


def packaged(out: Path, served: Path, draft: Path, **serving: object) -> Path:
    values = {"draft_engine": str(draft), "kv_cache_tokens": 4096} | serving
    return package(PackageConfig(serving=ServingConfig.parse(values, "serving")), served, None, out).path


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model in float32, and in INT8, which drafts shorter prompts."""
    place = tmp_path_factory.mktemp("engines")
    made = {}
    for name, quant, length in (("target", "none", 512), ("draft", "int8_wo", 96)):
        checkpoint = convert(ConvertConfig(dtype="float32", quant=quant), DEMO_MODEL, place / f"{name}-checkpoint").path
        features = FeaturesConfig(kv_reuse=True, generation_logits=True)
        config = EngineConfig(backend="torch", features=features, max_input_len=length, max_seq_len=length + 40)
        made[name] = compile_engine(config, checkpoint, place / name).path
    return made


@pytest.fixture(scope="module")
def running(engines: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    repository = packaged(tmp_path_factory.mktemp("served") / "repository", engines["target"], engines["draft"])
    server = start_server(repository)
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()


def alone(engine: Path, prompt: str, tokens: int) -> str:
    """The served engine's own answer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    (made,) = generate(engine, [GenerationRequest("", tuple(ids), tokens)])
    whole: str = tokenizer.decode([*ids, *made.tokens])
    return whole.removeprefix(tokenizer.decode(ids))


def counted(
    server: Running, family: str = "trtforge_speculative_decoding", model: str = "tensorrt_llm"
) -> dict[str, int]:
    """The values of an engine's metrics, by their label: draft tokens that it has verified, and accepted."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    own = [line for line in lines if line.startswith(f"{family}{{") and f'model="{model}"' in line]
    labels = (re.search(r'(?:draft_tokens|ended)="(\w+)"', line) for line in own)
    return {label[1]: int(float(line.split()[-1])) for label, line in zip(labels, own, strict=True) if label}


def test_an_answer_in_steps_is_one_request(running: Running) -> None:
    """The first request after the one with which `trtforge serve` waited for the first token."""
    nothing = dict.fromkeys(("answered", "refused", "invalid", "late", "failed"), 0)
    assert eventually(lambda: counted(running, "trtforge_requests") == nothing | {"answered": 1})
    steps = counted(running)["drafted"]
    ask(running.http, "ensemble", PROMPT, Sampling(max_tokens=30), protocol="http")
    assert eventually(lambda: counted(running)["drafted"] >= steps + DRAFTS)
    assert eventually(lambda: counted(running, "trtforge_requests")["answered"] > 1)
    assert counted(running, "trtforge_requests") == nothing | {"answered": 2}
    assert counted(running, "trtforge_requests", "tensorrt_llm_draft") == nothing


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_client_gets_what_the_served_engine_alone_says(
    running: Running, engines: dict[str, Path], model: str
) -> None:
    answer = ask(running.http, model, PROMPT, Sampling(max_tokens=30), protocol="http")
    assert (answer.text, answer.output_tokens) == (alone(engines["target"], PROMPT, 30), 30)
    assert eventually(lambda: 10 < (found := counted(running)).get("accepted", 0) <= found["drafted"])


def test_it_streams_a_step_at_a_time(running: Running, engines: dict[str, Path]) -> None:
    pieces = list(stream_text(running.grpc, "tensorrt_llm_bls", PROMPT, Sampling(max_tokens=30)))
    assert 4 < len(pieces) <= 30
    assert "".join(pieces) == alone(engines["target"], PROMPT, 30)


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_client_of_the_bls_model_chooses_the_draft_tokens(
    running: Running, engines: dict[str, Path], drafts: int
) -> None:
    response = post(running, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=12, num_draft_tokens=drafts)
    assert (response.status_code, response.json()["text_output"]) == (200, alone(engines["target"], PROMPT, 12))
    refused = post(running, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=12, num_draft_tokens=DRAFTS + 1)
    assert refused.status_code == 400
    assert f"num_draft_tokens 6: the engine verifies 0 to {DRAFTS} draft tokens" in refused.json()["error"]


@pytest.mark.parametrize("with_logits", [False, True])
def test_sampled_requests_are_drafted_too(running: Running, with_logits: bool) -> None:
    options = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "seed": 3, "use_draft_logits": with_logits}
    response = post(running, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=40, **options)
    assert response.status_code == 200
    assert response.json()["text_output"].strip()


def test_what_the_draft_engine_does_not_take_is_answered_all_the_same(
    running: Running, engines: dict[str, Path]
) -> None:
    """The prompt gets too long for the draft engine on the way, and is so from the beginning."""
    for prompt, tokens in ((PROMPT, 160), (PROMPT * 30, 20)):
        answer = ask(running.http, "ensemble", prompt, Sampling(max_tokens=tokens), protocol="http")
        assert (answer.text, answer.output_tokens) == (alone(engines["target"], prompt, tokens), tokens)


def sent(server: Running, **tensors: np.ndarray) -> dict[str, np.ndarray]:
    """The answer of the engine model to tensors of a client."""
    base = {"input_ids": np.array([IDS], np.int32), "input_lengths": np.array([[len(IDS)]], np.int32)}
    base |= {"request_output_len": np.array([[12]], np.int32), "return_perf_metrics": np.array([[True]])}
    inputs = []
    for name, value in (base | tensors).items():
        inputs.append(triton.InferInput(name, value.shape, np_to_triton_dtype(value.dtype)))
        inputs[-1].set_data_from_numpy(value)
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = triton.InferenceServerClient(server.grpc)
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("tensorrt_llm", inputs)
    result, error = answers.get(timeout=PATIENCE)
    client.stop_stream()
    client.close()
    if error is not None:
        raise error
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def test_a_client_sends_its_own_draft_tokens(running: Running, engines: dict[str, Path]) -> None:
    (made,) = generate(engines["target"], [GenerationRequest("", IDS, 12)])
    drafts = np.array([[*made.tokens[:8], 0]], np.int32)
    for more in ({}, {"draft_logits": np.zeros((1, 9, VOCABULARY), np.float32)}):
        found = sent(running, draft_input_ids=drafts, **more)
        assert tuple(found["output_ids"][0, 0]) == made.tokens
        assert (found["total_draft_tokens"], found["total_accepted_draft_tokens"]) == ([[9]], [[8]])
    sampled = {"runtime_top_k": np.array([[5]], np.int32), "draft_acceptance_threshold": np.array([[1e-6]], np.float32)}
    logits = np.zeros((1, 1, VOCABULARY), np.float32)
    found = sent(running, draft_input_ids=drafts[:, :1], draft_logits=logits, **sampled)
    assert found["output_ids"][0, 0, 0] == made.tokens[0]  # far above the threshold
    for wrong, message in (
        ({"draft_input_ids": np.array([[VOCABULARY]], np.int32)}, "draft_input_ids holds the id 2048"),
        ({"draft_logits": logits}, "draft_input_ids is missing: draft_logits is about these tokens"),
        ({"draft_input_ids": drafts, "draft_logits": logits}, "draft_logits is float32 [1, 2048]; it must be numbers"),
        ({"draft_input_ids": np.ones((1, 600), np.int32)}, "draft_input_ids has 600 tokens, max_seq_len leaves"),
    ):
        with pytest.raises(InferenceServerException) as caught:
            sent(running, **wrong)
        assert message in str(caught.value)


def test_settings_that_do_not_fit_are_refused(engines: dict[str, Path], tmp_path: Path) -> None:
    for serving, message in (
        ({"kv_cache_tokens": None}, "both engines share memory, and each would take kv_cache_fraction of what is free"),
        ({"draft_gpu_device_ids": "1"}, "draft_gpu_device_ids: not supported by embedded engines"),
    ):
        with pytest.raises(ForgeError, match=message) as caught:
            packaged(tmp_path / "out", engines["target"], engines["draft"], **serving)
        assert caught.value.hint
    checkpoint = engines["target"].parent / "target-checkpoint"
    config = EngineConfig(backend="torch", features=FeaturesConfig(ngram=NgramFeature()))
    own = compile_engine(config, checkpoint, tmp_path / "own").path
    with pytest.raises(ForgeError, match="draft_engine: the engine has a drafter of its own"):
        packaged(tmp_path / "out", own, engines["draft"])
