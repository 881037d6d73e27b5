"""The text models' own tensors, in the real Triton server: messages, token ids, reasons, counts, log probabilities."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.conftest import DEMO_MODEL
from tests.serve.conftest import Running
from tests.serve.test_serving import post
from trtforge.serve.client import Protocol, Sampling, generate

MODELS = pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
MESSAGES = [{"role": "user", "content": "Naïve 🙂?"}]
_TYPES = {str: ("BYTES", np.object_), bool: ("BOOL", np.bool_), int: ("INT32", np.int32)}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def streamed(server: Running, model: str, **inputs: Any) -> list[dict[str, Any]]:
    """The responses of a gRPC stream as plain values. A list is token ids, or strings."""
    tensors = []
    for name, value in {"stream": True, **inputs}.items():
        values = value if isinstance(value, list) else [value]
        kind, dtype = _TYPES[type(values[0])]
        array = np.array([[each.encode() if isinstance(each, str) else each for each in values]], dtype=dtype)
        tensors.append(grpc.InferInput(name, array.shape, kind))
        tensors[-1].set_data_from_numpy(array)
    found: list[dict[str, Any]] = []
    errors: list[Exception] = []

    def take(result: grpc.InferResult, error: Exception | None) -> None:
        if error is not None:
            errors.append(error)
        elif result.get_response().outputs:
            found.append({each.name: result.as_numpy(each.name)[0, 0] for each in result.get_response().outputs})

    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(take)
        client.async_stream_infer(model, tensors)
        client.stop_stream()
    assert errors == []
    return found


@MODELS
def test_messages_are_rendered_by_the_tokenizers_template(server: Running, tokenizer: Any, model: str) -> None:
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    whole = post(
        server, model, messages=json.dumps(MESSAGES), max_tokens=len(ids), end_id=-1, return_num_input_tokens=True
    )
    assert whole.json()["num_input_tokens"] == len(ids)
    assert whole.json()["text_output"] == tokenizer.decode(ids, skip_special_tokens=True)
    without = json.dumps({"messages": MESSAGES, "add_generation_prompt": False})
    shorter = post(server, model, messages=without, max_tokens=1, return_num_input_tokens=True)
    assert shorter.json()["num_input_tokens"] == len(tokenizer.apply_chat_template(MESSAGES, return_dict=False))


@MODELS
def test_token_ids_are_a_prompt_as_they_are(server: Running, tokenizer: Any, model: str) -> None:
    ids = tokenizer("one two three")["input_ids"][1:]
    answer = post(server, model, input_ids=ids, max_tokens=len(ids), return_num_input_tokens=True).json()
    assert (answer["text_output"], answer["num_input_tokens"]) == (tokenizer.decode(ids), len(ids))


@MODELS
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "INVALID_ARGUMENT: text_input is missing"),
        ({"text_input": "a", "messages": "[]"}, "text_input and messages: a request has one prompt"),
        ({"text_input": "a", "input_ids": [3]}, "text_input and input_ids: a request has one prompt"),
        ({"messages": "[]"}, "messages: there must be at least one message"),
        ({"messages": '[{"role": "user", "content": 3}]'}, None),
        ({"input_ids": [99999]}, "holds the id 99999; ids are from 0 to"),
        ({"input_ids": [-1]}, "holds the id -1; ids are from 0 to"),
        ({"text_input": "a", "top_logprobs": 21}, "top_logprobs is 21; it must be a whole number from 0 to 20"),
        ({"text_input": "a", "priority": 1.5}, "priority is 1.5; it must be from 0 to 1"),
        ({"text_input": "a", "cache_salt": ""}, "cache_salt is empty; leave it out, or give a text"),
        ({"text_input": "a", "cache_salt": "b" * 1025}, "cache_salt is 1025 characters; it must be at most 1024"),
        ({"text_input": "a", "min_p": 1.5}, "min_p is 1.5; it must be from 0 to 1"),
        (
            {"text_input": "a", "no_repeat_ngram_size": -1},
            "no_repeat_ngram_size is -1; it must be a whole number from 0",
        ),
        ({"text_input": "a", "prompt_ignore_length": -1}, "prompt_ignore_length is -1; it must be a whole number"),
        ({"text_input": "a", "logit_bias": "[]"}, "logit_bias is not a JSON object of token ids and numbers"),
        ({"text_input": "a", "logit_bias": '{"5": "x"}'}, "logit_bias is not a JSON object of token ids and numbers"),
        ({"text_input": "a", "logit_bias": '{"99999": 1}'}, "logit_bias holds the id 99999; ids are from 0 to"),
        ({"text_input": "a", "logit_bias": '{"5": NaN}'}, "logit_bias of token 5 is nan; it must be a finite float32"),
        ({"text_input": "a", "logit_bias": '{"5": 1e300}'}, "logit_bias of token 5 is 1e+300"),
        ({"text_input": "a", "logit_bias": f'{{"5": 1{"0" * 400}}}'}, "logit_bias is not a JSON object"),
        ({"messages": json.dumps([{"role": "user", "content": "a " * 400_000}])}, "too long for this engine"),
    ],
)
def test_wrong_values_are_named(server: Running, model: str, inputs: dict[str, Any], message: str | None) -> None:
    answer = post(server, model, max_tokens=2, **inputs)
    if message is None:  # whatever a template makes of it
        assert answer.status_code in (200, 400)
    else:
        assert answer.status_code == 400
        assert message in answer.json()["error"]


@MODELS
@pytest.mark.parametrize(
    ("inputs", "reason", "count"),
    [
        ({"max_tokens": 3}, "length", 3),
        ({"max_tokens": 9, "stop_words": [" two"]}, "stop", 3),
        ({"max_tokens": 9, "text_input": "one two<|end_of_text|>"}, "stop", 3),
    ],
)
def test_reason_and_counts(server: Running, model: str, inputs: dict[str, Any], reason: str, count: int) -> None:
    asked = {"text_input": "one two", **inputs}
    wanted = {"return_finish_reason": True, "return_num_output_tokens": True, "return_num_input_tokens": True}
    whole = post(server, model, **asked, **wanted).json()
    assert (whole["finish_reason"], whole["num_output_tokens"]) == (reason, count)
    pieces = streamed(server, model, **asked, **wanted)
    assert [piece["finish_reason"].decode() for piece in pieces] == [""] * (len(pieces) - 1) + [reason]
    assert [piece["num_output_tokens"] for piece in pieces] == sorted(piece["num_output_tokens"] for piece in pieces)
    assert pieces[-1]["num_output_tokens"] == count
    assert {int(piece["num_input_tokens"]) for piece in pieces} == {whole["num_input_tokens"]}
    assert b"".join(piece["text_output"] for piece in pieces).decode() == whole["text_output"]
    assert {"finish_reason", "num_output_tokens", "num_input_tokens"}.isdisjoint(post(server, model, **asked).json())


@MODELS
def test_tokens_of_the_prompt_in_the_kv_cache_are_told_once(server: Running, model: str) -> None:
    asked = {"text_input": "one two", "max_tokens": 4}
    whole = post(server, model, **asked, return_num_cached_tokens=True).json()
    assert whole["num_cached_tokens"] == 1
    pieces = streamed(server, model, **asked, return_num_cached_tokens=True)
    assert [int(piece["num_cached_tokens"]) for piece in pieces if "num_cached_tokens" in piece] == [1]
    assert "num_cached_tokens" in pieces[0]
    assert b"".join(piece["text_output"] for piece in pieces).decode() == whole["text_output"]
    assert "num_cached_tokens" not in post(server, model, **asked).json()


@MODELS
def test_whether_the_prompt_began_reasoning_is_told_once_for_messages(server: Running, model: str) -> None:
    """The template of the demo model begins none."""
    asked = {"max_tokens": 4, "end_id": -1, "return_prompt_thought": True}
    assert post(server, model, **asked, messages=json.dumps(MESSAGES)).json()["prompt_thought"] == ""
    pieces = streamed(server, model, **asked, messages=json.dumps(MESSAGES))
    assert [piece.get("prompt_thought") for piece in pieces] == [b"", *[None] * (len(pieces) - 1)]
    assert "prompt_thought" not in post(server, model, **asked, text_input="one two").json()


@MODELS
def test_log_probabilities_name_their_tokens(server: Running, tokenizer: Any, model: str) -> None:
    text = "one 🙂 two"
    ids = tokenizer(text)["input_ids"]
    asked = {"text_input": text, "max_tokens": len(ids), "end_id": -1}
    wanted = {"return_logprobs": True, "top_logprobs": 2, "return_prompt_logprobs": True}
    whole = post(server, model, **asked, **wanted).json()
    made, prompt = json.loads(whole["logprobs"]), json.loads(whole["prompt_logprobs"])
    assert [entry["id"] for entry in made] == [entry["id"] for entry in prompt] == ids
    assert [entry["logprob"] for entry in made] == [-0.5] * len(ids)
    assert [entry["logprob"] for entry in prompt] == [None, *[-0.25] * (len(ids) - 1)]
    assert bytes(byte for entry in made for byte in entry["bytes"]).decode() == text
    assert (made[0]["token"], made[0]["bytes"]) == (tokenizer.decode(ids[:1]), [])
    assert [each["id"] for each in made[3]["top_logprobs"]] == [ids[3], ids[3] + 1]
    assert [each["logprob"] for each in made[3]["top_logprobs"]] == [-0.5, -1.5]
    pieces = streamed(server, model, **asked, **wanted)
    assert [entry for piece in pieces for entry in json.loads(piece["logprobs"])] == made
    assert [json.loads(piece["prompt_logprobs"]) for piece in pieces if "prompt_logprobs" in piece] == [prompt]
    assert "output_log_probs" not in whole


@MODELS
def test_stop_words_can_be_left_out(server: Running, model: str) -> None:
    asked = {"text_input": "one two three four", "max_tokens": 12, "stop_words": ["wo thr", "e f"]}
    whole = post(server, model, **asked, include_stop_str_in_output=False, return_finish_reason=True).json()
    assert (whole["text_output"], whole["finish_reason"]) == ("one t", "stop")
    pieces = streamed(server, model, **asked, include_stop_str_in_output=False)
    assert b"".join(piece["text_output"] for piece in pieces) == b"one t"
    unmatched = {**asked, "stop_words": ["fourx"], "max_tokens": 4}
    pieces = streamed(server, model, **unmatched, include_stop_str_in_output=False)
    plain = post(server, model, **unmatched).json()["text_output"]
    assert b"".join(piece["text_output"] for piece in pieces).decode() == plain


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_clients_get_the_text_before_a_stop_word(server: Running, protocol: Protocol) -> None:
    url = server.grpc if protocol == "grpc" else server.http
    asked = Sampling(max_tokens=12, stop=("wo thr",), finish_reason=True)
    for stream in (True, False):
        kind: Any = {"protocol": protocol, "stream": stream}
        cut = generate(url, "ensemble", "one two three four", replace(asked, cuts_stop=True), **kind)
        assert (cut.text, cut.finish_reason) == ("one t", "stop")
        assert generate(url, "ensemble", "one two three four", asked, **kind).finish_reason == "length"


@MODELS
def test_a_stop_word_at_the_very_end_is_the_reason(server: Running, model: str) -> None:
    asked = {
        "text_input": "one two",
        "max_tokens": 3,
        "stop_words": ["tw"],
        "include_stop_str_in_output": False,
    }
    for _ in range(5):  # how steps are merged into responses varies
        whole = post(server, model, **asked, return_finish_reason=True).json()
        assert (whole["text_output"].rstrip(), whole["finish_reason"]) == ("one", "stop")


def test_a_sequence_of_several_says_when_it_ended(server: Running, tokenizer: Tokenizer) -> None:
    wanted = {"return_finish_reason": True, "return_num_output_tokens": True, "num_return_sequences": 3}
    pieces = streamed(server, "ensemble", text_input="one two", max_tokens=5, **wanted)
    for index in range(3):
        own = [piece for piece in pieces if piece["sequence_index"] == index]
        assert [piece["finish_reason"] for piece in own] == [b""] * (len(own) - 1) + [b"length"]
        assert own[-1]["num_output_tokens"] == 5
