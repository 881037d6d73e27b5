"""The main job: a recipe becomes a service, and what the service says is what `transformers` says.

Everything runs as a user runs it: the commands of the README, the real Triton server, the real tritonclient.
"""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tritonclient import grpc as triton

from tests.conftest import DEMO_MODEL
from tests.patience import PATIENCE
from tests.ports import free_ports

NEW_TOKENS = 32
END_IDS = (1, 3)  # of the demo model's generation_config.json
PROMPTS = 32


@dataclass(frozen=True)
class Expected:
    """One prompt and transformers' greedy continuation in float32, the end token not counted."""

    text: str
    prompt: list[int]
    continuation: list[int]
    continuation_text: str


@pytest.fixture(scope="module")
def expected() -> list[Expected]:
    """32 prompts of 1 to 300 tokens from the held-out text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = (DEMO_MODEL / "heldout.txt").read_text().replace("\f", " ")
    found = []
    for number in range(PROMPTS):
        prompt = text[number * 3000 :][: 5 + number * number]
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            output = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)[0, ids.shape[1] :].tolist()
        continuation = until_end(output)
        shown = tokenizer.decode(ids[0].tolist() + continuation, skip_special_tokens=True)
        before = tokenizer.decode(ids[0].tolist(), skip_special_tokens=True)
        found.append(Expected(prompt, ids[0].tolist(), continuation, shown[len(before) :]))
    return found


def until_end(ids: list[int]) -> list[int]:
    """The ids before the first end token."""
    return next((ids[:index] for index, token in enumerate(ids) if token in END_IDS), ids)


def trtforge(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trtforge", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@dataclass(frozen=True)
class Service:
    """A running server."""

    http: int
    grpc: int

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.grpc}"


@contextmanager
def serving(repository: Path) -> Iterator[Service]:
    """`trtforge serve`, ended with SIGTERM; nothing may be left of it."""
    http, grpc, metrics = free_ports(3)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    command = [sys.executable, "-m", "trtforge", "serve", str(repository), *ports]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        ready = server.stdout.readline()
        assert ready == f"ready http=127.0.0.1:{http} grpc=127.0.0.1:{grpc} metrics=127.0.0.1:{metrics}\n"
        yield Service(http, grpc)
    finally:
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate()
    assert server.returncode == 0, log
    assert list(Path("/dev/shm").glob(f"trtforge-serve-{server.pid}-*")) == []
    for port in (http, grpc, metrics):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def tensor(name: str, dtype: str, values: object) -> triton.InferInput:
    kinds = {"INT32": np.int32, "BOOL": np.bool_, "BYTES": np.object_}
    array = np.array(values, dtype=kinds[dtype])
    made = triton.InferInput(name, list(array.shape), dtype)
    made.set_data_from_numpy(array)
    return made


def responses(service: Service, model: str, inputs: list[triton.InferInput]) -> list[triton.InferResult]:
    """All responses of one decoupled request."""
    import queue

    answers: queue.Queue[tuple[triton.InferResult | None, Exception | None]] = queue.Queue()
    found = []
    with triton.InferenceServerClient(service.url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        while True:
            result, error = answers.get(timeout=PATIENCE)
            if error is not None:
                raise error
            final = result.get_response().parameters["triton_final_response"].bool_param
            if result.get_response().outputs:
                found.append(result)
            if final:
                break
        client.stop_stream()
    return found


def tokens_of(service: Service, item: Expected) -> list[int]:
    """The engine model's output ids. It knows one end id; the text models know all."""
    inputs = [
        tensor("input_ids", "INT32", [item.prompt]),
        tensor("input_lengths", "INT32", [[len(item.prompt)]]),
        tensor("request_output_len", "INT32", [[NEW_TOKENS]]),
        tensor("end_id", "INT32", [[1]]),
        tensor("streaming", "BOOL", [[True]]),
        tensor("exclude_input_in_output", "BOOL", [[True]]),
    ]
    found: list[int] = []
    for result in responses(service, "tensorrt_llm", inputs):
        length = result.as_numpy("sequence_length")[0, 0]
        found += result.as_numpy("output_ids")[0, 0][:length].tolist()
    return until_end(found)


def text_of(service: Service, item: Expected) -> str:
    """The ensemble's streamed text."""
    inputs = [
        tensor("text_input", "BYTES", [[item.text.encode()]]),
        tensor("max_tokens", "INT32", [[NEW_TOKENS]]),
        tensor("stream", "BOOL", [[True]]),
    ]
    found = responses(service, "ensemble", inputs)
    return "".join(result.as_numpy("text_output")[0, 0].decode() for result in found)


def concurrently(service: Service, ask: Callable, items: list[Expected]) -> list:
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(lambda item: ask(service, item), items))


@pytest.mark.parametrize("recipe", ["demo-fp32", "demo-tp2", "demo-pp2"])
def test_served_tokens_are_those_of_transformers(recipe: str, expected: list[Expected], tmp_path: Path) -> None:
    trtforge("build", recipe, "--out", tmp_path, "--json", "--set", "gate.samples=8")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verification"]["max_abs_logit_error"] < 1e-3
    assert [stage["stage"] for stage in report["stages"]] == ["convert", "verify", "compile", "package"]
    with serving(tmp_path / "repository") as service:
        assert concurrently(service, tokens_of, expected) == [item.continuation for item in expected]
        assert concurrently(service, text_of, expected) == [item.continuation_text for item in expected]
        alone = [tokens_of(service, item) for item in expected[::8]]
    assert alone == [item.continuation for item in expected[::8]]


@pytest.mark.parametrize(("recipe", "limit", "compression"), [("demo-fp8", 0.005, 1.9), ("demo-int4awq", 0.02, 3.5)])
def test_quantised_build_keeps_the_quality(recipe: str, limit: float, compression: float, tmp_path: Path) -> None:
    done = trtforge("build", recipe, "--out", tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    perplexity = report["verification"]["perplexity"]
    assert perplexity["candidate"] <= perplexity["reference"] * (1 + limit)
    assert f"perplexity  {perplexity['candidate']:.3f} against {perplexity['reference']:.3f}" in done.stdout
    assert report["compression"] > compression
    assert f"next: trtforge serve {tmp_path / 'repository'}" in done.stdout
