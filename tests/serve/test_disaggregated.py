"""Disaggregated serving by two real servers: one computes prompts, the other one generates, by files in common."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from numpy.typing import NDArray
from openai import OpenAI

from tests.assault.server import Server, serving
from tests.conftest import DEMO_MODEL
from tests.patience import PATIENCE, eventually
from tests.ports import free_ports
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import EngineConfig
from trtforge.engine_process.context_phase import ContextPhase, prompt_digest
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package

SIZE = 32  # tokens of a block
PROMPT = list(range(20, 20 + 3 * SIZE + 5))
NEW = 9


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("disaggregated")
    checkpoint = convert(ConvertConfig(dtype="float32"), DEMO_MODEL, place / "checkpoint").path
    engine = compile_engine(EngineConfig(backend="torch"), checkpoint, place / "engine").path
    package(PackageConfig(), engine, None, place / "repository")
    return place / "repository"


@pytest.fixture(scope="module")
def pair(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A server for contexts and one for answers."""
    files = ("--kv-cache-dir", str(tmp_path_factory.mktemp("kv")))
    with serving(repository, *files) as context, serving(repository, *files) as generation:
        yield context, generation


Tensors = dict[str, NDArray[np.int32] | NDArray[np.uint8] | NDArray[np.bool_]]


def infer(server: Server, kind: str | None, **more: object) -> dict[str, NDArray[np.int32]]:
    """What the `tensorrt_llm` model answers over a stream, its pieces of `output_ids` together."""
    given: Tensors = {
        "input_ids": np.array([PROMPT], np.int32),
        "input_lengths": np.array([[len(PROMPT)]], np.int32),
        "request_output_len": np.array([[NEW]], np.int32),
        "exclude_input_in_output": np.array([[True]]),
        "return_perf_metrics": np.array([[True]]),
        **more,  # type: ignore[dict-item]
    }
    names = {"int32": "INT32", "uint8": "UINT8", "bool": "BOOL"}
    inputs = []
    for name, value in given.items():
        inputs.append(grpcclient.InferInput(name, list(value.shape), names[value.dtype.name]))
        inputs[-1].set_data_from_numpy(value)
    found: list[grpcclient.InferResult] = []
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.ports['grpc']}") as client:
        client.start_stream(lambda result, error: found.append(error or result))
        parameters = None if kind is None else {"request_type": kind}
        client.async_stream_infer("tensorrt_llm", inputs, parameters=parameters)
        client.stop_stream()
    for each in found:
        if isinstance(each, Exception):
            raise each
    tensors = {name: found[-1].as_numpy(name) for name in ("context_phase_params", "kv_cache_reused_blocks")}
    return {**tensors, "output_ids": np.concatenate([each.as_numpy("output_ids")[0, 0] for each in found])}


def test_the_second_server_goes_on_where_the_first_one_ended(pair: tuple[Server, Server]) -> None:
    """As clients of TensorRT-LLM's `disaggregated_serving_bls` send it, request by request."""
    context, generation = pair
    whole = infer(generation, None, input_ids=np.array([PROMPT[::-1]], np.int32))
    assert whole["context_phase_params"] is None
    first = infer(context, "context_only")
    handed = first["context_phase_params"]
    phase = ContextPhase.decode(handed.tobytes())
    assert first["output_ids"].tolist() == [phase.first_token]
    assert phase.prompt == prompt_digest(PROMPT)
    answer = infer(generation, "generation_only", context_phase_params=handed)
    assert answer["kv_cache_reused_blocks"].item() == 3
    assert answer["context_phase_params"] is None
    alone = infer(context, None)["output_ids"].tolist()
    assert (answer["output_ids"].tolist(), len(alone)) == (alone, NEW)
    other = infer(generation, "generation_only", context_phase_params=handed, streaming=np.array([[True]]))
    assert other["output_ids"].tolist() == alone


def test_text_models_have_both_as_tensors(pair: tuple[Server, Server]) -> None:
    def generate(server: Server, **more: object) -> dict[str, object]:
        address = f"http://127.0.0.1:{server.ports['http']}/v2/models/ensemble/generate"
        body = {"text_input": "Return the number of items in a list " * 6, "max_tokens": NEW, "top_logprobs": 2}
        wanted = {"return_finish_reason": True, "return_logprobs": True, "return_num_cached_tokens": True}
        answer = httpx.post(address, json=body | wanted | more, timeout=PATIENCE, headers={"Host": "localhost"})
        assert answer.status_code == 200, answer.json()["error"]
        found: dict[str, object] = answer.json()
        return found

    context, generation = pair
    first = generate(context, request_type="context_only")
    assert first["finish_reason"] == "not_finished"
    answer = generate(generation, request_type="generation_only", context_phase_params=first["context_phase_params"])
    alone = generate(context)
    scores, expected = json.loads(str(answer["logprobs"])), json.loads(str(alone["logprobs"]))
    assert [each["id"] for each in scores] == [each["id"] for each in expected]
    assert [each["logprob"] for each in scores] == pytest.approx([each["logprob"] for each in expected], abs=1e-4)
    assert (answer["text_output"], answer["finish_reason"]) == (alone["text_output"], "length")
    assert int(str(answer["num_cached_tokens"])) >= SIZE
    one = generate(context, request_type="context_only", max_tokens=1)
    assert one["finish_reason"] == "length"


def test_clients_of_openais_api_have_min_p_and_repeat_no_ngram(gateway: str) -> None:
    """With min_p 1 only the most likely token is left, in both phases of a request."""

    def tokens(**more: object) -> list[str]:
        answer = client.completions.create(
            model="ensemble",
            prompt="a b c a b c a b",
            max_tokens=24,
            logprobs=0,
            **more,  # type: ignore[call-overload]
        )
        assert answer.choices[0].logprobs is not None
        return list(answer.choices[0].logprobs.tokens or ())

    with OpenAI(base_url=gateway, api_key="none") as client:
        greedy = tokens(temperature=0)
        assert tokens(temperature=2, seed=5, extra_body={"min_p": 1}) == greedy
        assert tokens(temperature=2, seed=5) != greedy
        other = tokens(temperature=0, extra_body={"no_repeat_ngram_size": 2})
        pairs = list(pairwise(other))
        assert len(set(pairs)) == len(pairs)
        assert len(set(pairwise(greedy))) < len(greedy) - 1


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("context", {}, "request_type is 'context'; it must be one of context_and_generation, context_only"),
        ("generation_only", {}, "context_phase_params is missing"),
        ("context_only", {"num_return_sequences": np.array([[2]], np.int32)}, "num_return_sequences is 2"),
        (None, {"context_phase_params": np.zeros((1, 4), np.uint8)}, "for requests of the type generation_only only"),
        ("generation_only", {"context_phase_params": np.zeros((1, 4), np.uint8)}, "context_phase_params: not JSON"),
    ],
)
def test_what_does_not_go_together_is_refused(
    pair: tuple[Server, Server], kind: str | None, more: dict[str, object], said: str
) -> None:
    with pytest.raises(grpcclient.InferenceServerException, match=said):
        infer(pair[0], kind, **more)


@pytest.fixture(scope="module")
def gateway(pair: tuple[Server, Server]) -> Iterator[str]:
    """OpenAI's API over both servers."""
    (port,) = free_ports(1)
    context, generation = (f"127.0.0.1:{server.ports['grpc']}" for server in pair)
    command = [sys.executable, "-m", "trtforge", "gateway", "--port", str(port), "--backend", generation]
    process = subprocess.Popen([*command, "--context-backend", context], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip().removeprefix("openai=")
    process.terminate()
    process.wait(PATIENCE)


def test_a_gateway_has_one_server_compute_prompts_and_the_other_one_answer(
    pair: tuple[Server, Server], gateway: str
) -> None:
    """As OpenAI's client sees it, streamed or not; scores of each token included."""
    text = "A dictionary has keys and values. " * 5
    before = [settled(server) for server in pair]
    with OpenAI(base_url=gateway, api_key="none") as client:
        answer = client.completions.create(model="ensemble", prompt=text, max_tokens=NEW, temperature=0, logprobs=1)
        stream = client.completions.create(
            model="ensemble", prompt=text, max_tokens=NEW, temperature=0, stream=True, logprobs=1
        )
        parts = [part.choices[0] for part in stream if part.choices]
    choice = answer.choices[0]
    assert "".join(part.text for part in parts) == choice.text
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or ()) == NEW
    assert answer.usage is not None
    prompt = answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == NEW
    eventually(lambda: computed(pair[0]) - before[0] >= prompt + prompt % SIZE)
    assert settled(pair[0]) - before[0] == prompt + prompt % SIZE  # blocks are found again
    assert computed(pair[1]) - before[1] <= 2 * (prompt % SIZE + 1)
    plain = httpx.post(
        f"http://127.0.0.1:{pair[0].ports['http']}/v2/models/ensemble/generate",
        json={"text_input": text, "max_tokens": NEW},
        timeout=PATIENCE,
        headers={"Host": "localhost"},
    ).json()
    assert plain["text_output"] == choice.text


@pytest.mark.parametrize("token", [-1, 2**31, 10**30])
def test_alternatives_of_another_vocabulary_are_refused(pair: tuple[Server, Server], token: int) -> None:
    """No tokenizer has a text for them. The server goes on."""
    handed = ContextPhase(20, prompt_digest(PROMPT), -1.0, ((token, -1.0),)).encode()
    more = {"context_phase_params": list(handed), "input_ids": PROMPT}
    address = f"http://127.0.0.1:{pair[1].ports['http']}/v2/models/ensemble/generate"
    body = {"request_type": "generation_only", "max_tokens": NEW, "return_logprobs": True, "top_logprobs": 2, **more}
    answer = httpx.post(address, json=body, timeout=PATIENCE, headers={"Host": "localhost"})
    assert f"context_phase_params has token {token}" in answer.json()["error"]


def computed(server: Server) -> int:
    """Tokens of prompts that a server's engine computed so far."""
    metrics = httpx.get(f"http://127.0.0.1:{server.ports['metrics']}/metrics", headers={"Host": "localhost"}).text
    found = re.search(r'"total_context_tokens".*\} (\S+)', metrics)
    assert found is not None
    return int(float(found[1]))


def settled(server: Server) -> int:
    """What `computed` tells once the gauge, which follows the engine from time to time, has stopped changing."""
    found, before = computed(server), -1
    while found != before:
        time.sleep(2)
        found, before = computed(server), found
    return found
