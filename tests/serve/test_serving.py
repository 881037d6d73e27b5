"""The generated repository in the real Triton server, called by real clients; the engine behind it is the fake one."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.patience import PATIENCE, eventually
from tests.serve.conftest import Running
from tests.serve.fake_engine import LONGEST_PROMPT
from trtforge.core.errors import ForgeError
from trtforge.serve.client import Protocol, Sampling, generate, stream_text
from trtforge.serve.probe import probe

PROMPT = "Naïve café 🙂 costs 日本語 ¥5"


def echoed(tokenizer: Tokenizer, prompt: str, count: int) -> str:
    """The text that the fake engine makes of a prompt."""
    ids = tokenizer.encode(prompt).ids
    return str(tokenizer.decode([ids[i % len(ids)] for i in range(count)]))


def url_of(server: Running, protocol: Protocol) -> str:
    return server.grpc if protocol == "grpc" else server.http


def active_requests(server: Running) -> int:
    metrics = httpx.get(f"http://{server.metrics}/metrics", timeout=PATIENCE).text
    found = re.search(r'nv_trt_llm_request_metrics\{.*request_type="active".*\} (\d+)', metrics)
    assert found is not None
    return int(found[1])


def post(server: Running, model: str, **inputs: object) -> httpx.Response:
    return httpx.post(f"http://{server.http}/v2/models/{model}/generate", json=inputs, timeout=PATIENCE)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_streamed_text_equals_whole_text(server: Running, tokenizer: Tokenizer, model: str, protocol: Protocol) -> None:
    url, params = url_of(server, protocol), Sampling(max_tokens=60)
    pieces = list(stream_text(url, model, PROMPT, params, protocol=protocol))
    whole = generate(url, model, PROMPT, params, protocol=protocol)
    assert whole.text == "".join(pieces) == echoed(tokenizer, PROMPT, 60)
    assert len(pieces) > 1  # pieces that wait for a busy client are merged
    assert "\ufffd" not in pieces[0]
    assert whole.output_tokens == 60
    assert whole.input_tokens == len(tokenizer.encode(PROMPT).ids)


def test_requests_beside_one_another_do_not_mix(server: Running, tokenizer: Tokenizer) -> None:
    def ask(number: int) -> bool:
        prompt = f"request {number} says {'ha' * number}"
        model = "ensemble" if number % 2 else "tensorrt_llm_bls"
        pieces = stream_text(server.grpc, model, prompt, Sampling(max_tokens=40))
        return "".join(pieces) == echoed(tokenizer, prompt, 40)

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(ask, range(32)))


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_client_that_goes_away_frees_its_request(server: Running, protocol: Protocol) -> None:
    pieces = stream_text(url_of(server, protocol), "ensemble", PROMPT, Sampling(max_tokens=100000), protocol=protocol)
    next(pieces)
    assert eventually(lambda: active_requests(server) == 1)
    pieces.close()
    assert eventually(lambda: active_requests(server) == 0)


def inputs_of(max_tokens: int) -> list[Any]:
    """PROMPT's tensors for tritonclient over gRPC."""
    import tritonclient.grpc as grpc

    text = grpc.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[PROMPT.encode()]], dtype=object))
    count = grpc.InferInput("max_tokens", [1, 1], "INT32")
    count.set_data_from_numpy(np.array([[max_tokens]], dtype=np.int32))
    return [text, count]


def error_of(server: Running, model: str, max_tokens: int, **options: Any) -> str:
    """What ends a request of PROMPT in a gRPC stream."""
    import tritonclient.grpc as grpc

    errors: list[str] = []
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: errors.append(str(error)))
        client.async_stream_infer(model, inputs_of(max_tokens), **options)
        assert eventually(lambda: bool(errors))
        client.stop_stream()
    return errors[0]


def test_a_client_that_gives_up_waiting_frees_its_request(server: Running) -> None:
    """Over gRPC; Triton notices a closed HTTP connection only when it has something to send."""
    import tritonclient.grpc as grpc

    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("ensemble", inputs_of(100000))
        assert eventually(lambda: active_requests(server) == 1)
        client.stop_stream(cancel_requests=True)
        assert eventually(lambda: active_requests(server) == 0)


def test_an_error_of_one_request_reaches_only_that_one(server: Running, tokenizer: Tokenizer) -> None:
    def ask(prompt: str) -> str:
        return generate(server.grpc, "ensemble", prompt, Sampling(max_tokens=50), stream=True).text

    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(ask, PROMPT)
        with pytest.raises(ForgeError, match=f"tokens, {LONGEST_PROMPT} fit. Shorten the prompt") as caught:
            ask("too long " * 200)
        assert good.result() == echoed(tokenizer, PROMPT, 50)
    assert "Correct the request" in caught.value.hint


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"max_tokens": 0}, "INVALID_ARGUMENT: max_tokens is 0; it must be a whole number from 1 to 2147483647"),
        ({"lora_task_id": 7}, "lora_task_id is not supported by this engine"),
        ({"beam_width": 4}, "beam_width is 4; this model returns only 1 beam"),
        ({"guided_decoding_guide_type": "xml"}, "guided_decoding_guide_type is xml; it must be one of json, json_sche"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide is missing"),
        ({"guided_decoding_guide": "a|b"}, "guided_decoding_guide_type is missing: it says what"),
        ({"return_context_logits": True}, "return_context_logits is true; this engine supports only false"),
        ({"embedding_bias_words": ["a"]}, "embedding_bias_words has 1 words, embedding_bias_weights has 0"),
        ({"text_input": "x" * 200_000}, "text_input is a text of 200000 characters; it must be at most "),
        ({"text_input": ["a", "b"]}, "text_input"),
    ],
)
def test_what_cannot_be_served_is_said(server: Running, inputs: dict[str, object], said: str) -> None:
    response = post(server, "ensemble", **({"text_input": "a", "max_tokens": 2} | inputs))
    assert response.status_code == 400
    assert said in response.json()["error"]


def test_draft_tokens_are_refused(server: Running) -> None:
    response = post(server, "tensorrt_llm_bls", text_input="a", max_tokens=2, num_draft_tokens=3)
    assert response.json()["error"] == "INVALID_ARGUMENT: num_draft_tokens is not supported by this repository"


def test_prompt_comes_back_when_asked_for(server: Running, tokenizer: Tokenizer) -> None:
    inputs = {"text_input": "one two", "max_tokens": 4, "exclude_input_in_output": False}
    ids = tokenizer.encode("one two").ids
    text = post(server, "ensemble", **inputs).json()["text_output"]
    assert text == "one two" + tokenizer.decode([*ids, *(ids[i % len(ids)] for i in range(4))])[len("one two") :]


def test_stop_word_ends_the_answer_and_is_part_of_it(server: Running) -> None:
    for model in ("ensemble", "tensorrt_llm_bls"):
        response = post(server, model, text_input="one two three", max_tokens=50, stop_words=[" two"])
        assert response.json()["text_output"].endswith(" two")
        assert response.json()["text_output"].count("two") == 1


def test_stop_word_across_tokens_is_found_by_the_bls_model(server: Running, tokenizer: Tokenizer) -> None:
    """In context the tokens are others than those of the word alone."""
    prompt, word = "one two three", "ne tw"
    alone = tokenizer.encode(word, add_special_tokens=False).tokens
    assert not any(token in tokenizer.encode(prompt).tokens for token in alone[1:])
    for stream in (False, True):
        answer = generate(
            server.grpc, "tensorrt_llm_bls", prompt, Sampling(max_tokens=100000, stop=(word,)), stream=stream
        )
        assert answer.text == "one tw"
    assert eventually(lambda: active_requests(server) == 0)


def test_end_ids_of_the_model_end_the_answer_and_a_request_may_choose_its_own(server: Running) -> None:
    """Generation ends at each of the model's end ids (1 and 3); an `end_id` in the request replaces them."""
    inputs = {"text_input": "one<|end|> two<|end_of_text|> three", "max_tokens": 8}
    assert post(server, "ensemble", **inputs).json()["text_output"] == "one"
    assert post(server, "ensemble", **inputs, end_id=1).json()["text_output"] == "one two"


def test_log_probs_and_cache_figures_come_when_asked_for(server: Running) -> None:
    response = post(
        server, "ensemble", text_input="one two", max_tokens=3, return_log_probs=True, return_perf_metrics=True
    ).json()
    assert response["output_log_probs"] == [-0.5, -0.5, -0.5]
    assert response["cum_log_probs"] == -1.5
    assert (response["kv_cache_reused_blocks"], response["kv_cache_alloc_new_blocks"]) == (1, 2)
    assert response["kv_cache_alloc_total_blocks"] == 3
    times = ["arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"]
    assert 0 < response[times[0]] <= response[times[1]] <= response[times[2]] <= response[times[3]]


def test_engine_model_takes_batches_and_several_sequences(server: Running) -> None:
    import tritonclient.grpc as grpc

    answers: list[tuple[int, int, list[int]]] = []
    with grpc.InferenceServerClient(server.grpc) as client:
        arrays = {
            "input_ids": np.array([[5, 6, 7], [8, 9, 0]], dtype=np.int32),
            "input_lengths": np.array([[3], [2]], dtype=np.int32),
            "request_output_len": np.array([[4], [3]], dtype=np.int32),
            "num_return_sequences": np.array([[2], [2]], dtype=np.int32),
        }
        inputs = []
        for name, array in arrays.items():
            inputs.append(grpc.InferInput(name, array.shape, "INT32"))
            inputs[-1].set_data_from_numpy(array)

        def take(result: grpc.InferResult, error: Exception | None) -> None:
            assert error is None
            ids = result.as_numpy("output_ids")[0, 0].tolist()
            answers.append(
                (int(result.as_numpy("batch_index")[0, 0]), int(result.as_numpy("sequence_index")[0, 0]), ids)
            )

        client.start_stream(take)
        client.async_stream_infer("tensorrt_llm", inputs)
        assert eventually(lambda: len(answers) == 4)
        client.stop_stream()
    assert sorted(answers) == [
        (0, 0, [5, 6, 7, 5]),
        (0, 1, [5, 6, 7, 5]),
        (1, 0, [8, 9, 8]),
        (1, 1, [8, 9, 8]),
    ]


def test_several_sequences_come_back_as_text(server: Running) -> None:
    lines = httpx.post(
        f"http://{server.http}/v2/models/ensemble/generate_stream",
        json={"text_input": "one two", "max_tokens": 3, "num_return_sequences": 2},
        timeout=PATIENCE,
    ).text
    assert lines.count('"text_output":"one two"') == 2
    assert '"sequence_index":1' in lines


def test_stop_request_ends_the_request_of_the_same_id(server: Running) -> None:
    body = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 100000, "end_id": -1}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: post(server, "tensorrt_llm", **body, id="mine").json())
        assert eventually(lambda: active_requests(server) == 1)
        assert post(server, "tensorrt_llm", **body, id="mine", stop=True).status_code == 200
        assert running.result()["sequence_length"] < 100000
    assert post(server, "tensorrt_llm", **body, id="unknown", stop=True).status_code == 200


def test_probes_see_a_server_that_generates(server: Running) -> None:
    for kind in ("startup", "live", "ready"):
        probe(kind, server.http)  # type: ignore[arg-type]


def test_repository_is_not_written_to(server: Running, fake_repository: Path) -> None:
    assert not list(fake_repository.rglob("__pycache__"))


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_ping_needs_no_token(server: Running, model: str) -> None:
    response = post(server, model, text_input="", max_tokens=1, trtforge_ping=True)
    assert (response.status_code, response.json()["text_output"]) == (200, "")


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temprature": 0.5}, "temprature is no input of this model; did you mean temperature?"),
        ({"max_new_tokens": 5}, "max_new_tokens is no input of this model; did you mean max_tokens?"),
        ({"len_penalty": 3}, "len_penalty is no input of this model; did you mean length_penalty?"),
    ],
)
def test_a_misspelled_input_is_refused(server: Running, model: str, given: dict[str, object], said: str) -> None:
    """Triton's generate endpoint makes a parameter of it."""
    response = post(server, model, text_input=PROMPT, max_tokens=2, **given)
    assert response.status_code == 400
    assert said in response.json()["error"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"top_k": 3}, "top_k is no input of this model; did you mean runtime_top_k?"),
        ({"stop_words": "end"}, "stop_words is no input of this model; did you mean stop_words_list?"),
        ({"temprature": 0.5}, "temprature is no input of this model; did you mean temperature?"),
    ],
)
def test_the_engine_refuses_a_misspelled_input(server: Running, given: dict[str, object], said: str) -> None:
    body = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 3}
    response = post(server, "tensorrt_llm", **body, **given)
    assert response.status_code == 400
    assert said in response.json()["error"]


def test_an_input_given_as_a_parameter_is_refused(server: Running) -> None:
    said = error_of(server, "ensemble", 2, parameters={"top_k": 3})
    assert "top_k is an input of this model, not a parameter" in said


def test_a_clients_own_parameters_are_left_alone(server: Running) -> None:
    response = post(server, "ensemble", text_input=PROMPT, max_tokens=2, my_trace="7", user="me", priority=1)
    assert (response.status_code, bool(response.json()["text_output"])) == (200, True)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_request_ends_at_its_timeout(server: Running, model: str) -> None:
    said = error_of(server, model, 100000, timeout=200_000)
    assert "DEADLINE_EXCEEDED: the request's timeout has passed" in said
    assert eventually(lambda: active_requests(server) == 0)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
def test_a_timeout_of_the_generate_endpoint_holds_too(server: Running, model: str) -> None:
    """There Triton makes an ordinary parameter of it."""
    engine = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 100000}
    asked = engine if model == "tensorrt_llm" else {"text_input": PROMPT, "max_tokens": 100000}
    ended = post(server, model, **asked, timeout=100_000)
    assert (ended.status_code, ended.json()["error"]) == (504, "DEADLINE_EXCEEDED: the request's timeout has passed")
    assert eventually(lambda: active_requests(server) == 0)
    for value, shown in (("soon", "'soon'"), (-1, "-1"), (True, "True")):
        wrong = post(server, model, **asked, timeout=value)
        assert wrong.status_code == 400
        assert f"timeout is {shown}; it must be a whole number of microseconds" in wrong.json()["error"]
