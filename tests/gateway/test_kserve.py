"""The gateway's side of KServe v2 gRPC, against a real gRPC server without a model."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from tests.gateway.fake import FakeBackend
from tests.gateway.kserve_server import Servicer, serving
from tests.patience import PATIENCE, eventually
from tests.ports import free_ports
from trtforge.core.server_errors import SHUTTING_DOWN, without_paths
from trtforge.engine_process.context_phase import RequestType
from trtforge.gateway.backend import GONE, BackendError, ServedModel
from trtforge.gateway.errors import ApiError, AskedBy, of_backend
from trtforge.gateway.kserve import KServeBackend
from trtforge.gateway.kserve_tensors import infer_request
from trtforge.gateway.request import Piece, Sampling, TextRequest
from trtforge.gateway.router import Router

EVERYTHING = Sampling(0.5, 0.25, 40, -2, 1.0, -1.5, 1.25, 3, '{"5":1.0}', 0.75, "é 1", 0.125, 4, 5)


def run(address: str, act: Callable[[KServeBackend], Awaitable[object]], *names: str) -> object:
    async def whole() -> object:
        backend = KServeBackend(address, names)
        try:
            return await asyncio.wait_for(act(backend), PATIENCE)  # type: ignore[arg-type]
        finally:
            await backend.close()

    return asyncio.run(whole())


async def pieces(backend: KServeBackend, request: TextRequest) -> list[Piece]:
    async with aclosing(backend.generate(request)) as found:
        return [piece async for piece in found]


def failure(address: str, request: TextRequest, *names: str) -> BackendError:
    with pytest.raises(BackendError) as caught:
        run(address, lambda backend: pieces(backend, request), *names)
    return caught.value


def test_every_field_arrives_with_the_declared_type() -> None:
    servicer = Servicer(FakeBackend())
    request = TextRequest(
        "ensemble", 5, messages='[{"role":"user","content":"a b"}]', stream=True, sequences=2, sampling=EVERYTHING,
        stop=("é", "xx"), logprobs=True, top_logprobs=2, prompt_logprobs=True,
    )  # fmt: skip
    with serving(servicer) as address:
        run(address, lambda backend: pieces(backend, request))
    assert servicer.asked == [
        (
            "ensemble",
            {
                "messages": '[{"role":"user","content":"a b"}]',
                "max_tokens": 5,
                "stream": True,
                "stop_words": ("é", "xx"),
                "num_return_sequences": 2,
                "temperature": 0.5,
                "top_p": 0.25,
                "top_k": 40,
                "seed": 2**64 - 2,
                "presence_penalty": 1.0,
                "frequency_penalty": -1.5,
                "repetition_penalty": 1.25,
                "min_tokens": 3,
                "priority": 0.75,
                "cache_salt": "é 1",
                "min_p": 0.125,
                "no_repeat_ngram_size": 4,
                "prompt_ignore_length": 5,
                "logit_bias": '{"5":1.0}',
                "return_num_input_tokens": True,
                "return_num_output_tokens": True,
                "return_num_cached_tokens": True,
                "return_prompt_thought": True,
                "return_finish_reason": True,
                "return_logprobs": True,
                "return_prompt_logprobs": True,
                "top_logprobs": 2,
            },
        )
    ]


@pytest.mark.parametrize(
    ("stream", "cached", "thought"), [(True, None, "<think>"), (False, 1, None), (False, None, "")]
)
def test_pieces_are_read(stream: bool, cached: int | None, thought: str | None) -> None:
    fake = FakeBackend(cached=cached, thought=thought)
    request = TextRequest("ensemble", 3, prompt="Naïve café", stream=stream, logprobs=True)
    with serving(Servicer(fake)) as address:
        found = run(address, lambda backend: pieces(backend, request))
    assert found == list(fake._streamed(request) if stream else fake._whole(request))


def test_token_ids_are_sent_as_they_are() -> None:
    servicer = Servicer(FakeBackend())
    with serving(servicer) as address:
        run(address, lambda backend: pieces(backend, TextRequest("ensemble", 1, prompt=(7, 9))))
    assert servicer.asked[0][1]["input_ids"] == (7, 9)
    assert "text_input" not in servicer.asked[0][1]


def test_stop_words_go_to_the_model_that_compares_text() -> None:
    servicer = Servicer(FakeBackend(), ("ensemble", "tensorrt_llm_bls"))
    stopping = TextRequest("ensemble", 1, prompt="a", stop=("b",))

    async def both(backend: KServeBackend) -> None:
        await pieces(backend, stopping)
        await pieces(backend, TextRequest("ensemble", 1, prompt="a"))

    with serving(servicer) as address:
        run(address, both)
        servicer.names = ("ensemble",)
        run(address, both)
    assert [model for model, _ in servicer.asked] == ["tensorrt_llm_bls", "ensemble", "ensemble", "ensemble"]


def names_of(found: object) -> list[str]:
    assert isinstance(found, tuple)
    return [model.name for model in found]


def test_models_come_from_the_index_or_by_name() -> None:
    servicer = Servicer(FakeBackend(), ("a_ensemble", "a_tensorrt_llm_bls", "b_ensemble"))
    with serving(servicer) as address:
        assert names_of(run(address, KServeBackend.models)) == ["a_ensemble", "b_ensemble"]
        assert names_of(run(address, KServeBackend.models, "b_ensemble")) == ["b_ensemble"]
        servicer.lists, servicer.names = False, ("ensemble",)
        assert names_of(run(address, KServeBackend.models)) == ["ensemble"]


def test_an_unknown_model_is_not_found() -> None:
    with serving(Servicer(FakeBackend())) as address:
        assert failure(address, TextRequest("other", 1, prompt="a")).code == "NOT_FOUND"


def test_a_server_that_has_unloaded_its_models_to_stop_is_gone() -> None:
    servicer, request = Servicer(FakeBackend()), TextRequest("ensemble", 1, prompt="a", stop=("b",))

    async def known_and_not(backend: KServeBackend) -> list[BackendError]:
        found = []
        await pieces(backend, TextRequest("ensemble", 1, prompt="a"))
        servicer.unloaded = True
        for asked in (TextRequest("ensemble", 1, prompt="a"), request):
            with pytest.raises(BackendError) as caught:
                await pieces(backend, asked)
            found.append(caught.value)
        with pytest.raises(BackendError) as caught:
            await backend.models()
        return [*found, caught.value]

    with serving(servicer) as address:
        found = run(address, known_and_not)
    assert isinstance(found, list)
    assert [(each.code, of_backend(each).status) for each in found] == [(GONE, 503)] * 3
    assert {each.message for each in found} == {"the model server is stopping, or its model is not loaded"}


def test_a_server_that_serves_no_text_model_does_not_have_the_one_asked_for() -> None:
    async def models(backend: KServeBackend) -> BackendError:
        with pytest.raises(BackendError, match="has no text model") as caught:
            await backend.models()
        return caught.value

    with serving(Servicer(FakeBackend(), names=())) as address:
        found = run(address, models)
    assert isinstance(found, BackendError)
    assert found.code == "NOT_FOUND"


def test_a_server_that_begins_to_stop_is_gone() -> None:
    said = "[request id: x] Server is stopping, scheduler for model has stopped accepting new inference requests"
    with serving(Servicer(FakeBackend(error=BackendError(said)))) as address:
        assert failure(address, TextRequest("ensemble", 1, prompt="a")).code == GONE


def test_a_draining_server_is_left_out_while_another_one_serves() -> None:
    draining = Servicer(FakeBackend(error=BackendError("UNAVAILABLE: " + SHUTTING_DOWN)))
    request = TextRequest("ensemble", 2, prompt="a", stream=True)

    async def routed(*addresses: str) -> list[Piece]:
        router = Router([KServeBackend(address) for address in addresses])
        try:
            async with aclosing(router.generate(request)) as found:
                return [piece async for piece in found]
        finally:
            await router.close()

    with serving(draining) as first, serving(Servicer(FakeBackend())) as second:
        assert [piece.text for piece in asyncio.run(routed(first, second))] == ["a", "a"]
        with pytest.raises(BackendError) as caught:
            asyncio.run(routed(first))
    error = of_backend(caught.value)
    assert (error.status, error.message, error.headers) == (503, SHUTTING_DOWN, {"retry-after": "5"})
    assert len(draining.asked) == 2


def test_a_server_that_is_not_there_is_gone_and_found_when_it_starts() -> None:
    port = free_ports(1)[0]

    async def both(backend: KServeBackend) -> bool:
        with pytest.raises(BackendError) as caught:
            await backend.models()
        assert caught.value.code == GONE
        assert not await backend.ready()
        with serving(Servicer(FakeBackend()), port):
            for _ in range(100):
                if await backend.ready():
                    return bool(await backend.models())
                await asyncio.sleep(0.05)
        return False

    assert run(f"127.0.0.1:{port}", both)


def test_a_closed_iterator_cancels_the_call() -> None:
    fake = FakeBackend(delay=0.02)

    async def leave(backend: KServeBackend) -> None:
        request = TextRequest("ensemble", 1000, prompt="a b", stream=True)
        async with aclosing(backend.generate(request)) as found:
            await found.__anext__()
            assert fake.running == 1

    with serving(Servicer(fake)) as address:
        run(address, leave)
        assert eventually(lambda: fake.running == 0)
    assert fake.cancelled == 1


def test_a_whole_stream_is_read_to_its_end() -> None:
    servicer = Servicer(FakeBackend())
    with serving(servicer) as address:
        run(address, lambda backend: pieces(backend, TextRequest("ensemble", 3, prompt="a", stream=True)))
    assert (servicer.half_closed, servicer.backend.cancelled) == (1, 0)


@pytest.mark.parametrize(
    ("text", "status", "code", "retry"),
    [
        ("INVALID_ARGUMENT: top_k is -1", 400, None, None),
        (
            "INVALID_ARGUMENT: the prompt has 9 tokens, this engine takes at most 5",
            400,
            "context_length_exceeded",
            None,
        ),
        ("UNAVAILABLE: the queue is full: 9 sequences run or wait; retry in 7 s", 429, "rate_limit_exceeded", "7"),
        ("Exceeds maximum queue size", 429, "rate_limit_exceeded", "1"),
        ("UNAVAILABLE: the server is stopping", 503, "server_unavailable", "1"),
        ("DEADLINE_EXCEEDED: the request's timeout has passed", 504, None, None),
        ("INTERNAL: the request could not be started", 500, None, None),
        ("something else at /opt/models/x.py", 500, None, None),
    ],
)
def test_errors_of_the_server_get_their_status(text: str, status: int, code: str | None, retry: str | None) -> None:
    fake = FakeBackend(error=BackendError(text))
    with serving(Servicer(fake)) as address:
        error = of_backend(failure(address, TextRequest("ensemble", 1, prompt="a")))
    assert (error.status, error.code, error.headers.get("retry-after")) == (status, code, retry)
    assert "/opt" not in error.message
    assert not error.message.startswith(("INVALID", "UNAVAILABLE"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see /opt/models/x.py: line 3", "see x.py: line 3"),
        ("(/tmp/a/b)", "(b)"),
        ("no GET /v2/models/x", "no GET /v2/models/x"),
        ("#/properties/a/properties/b: Unsupported type", "#/properties/a/properties/b: Unsupported type"),
        ("Cannot find field definitions in #/definitions/x", "Cannot find field definitions in #/definitions/x"),
    ],
)
def test_paths_of_the_machine_are_not_shown_and_places_in_schemas_are(text: str, shown: str) -> None:
    assert without_paths(text) == shown


@pytest.mark.parametrize(
    ("text", "said", "param"),
    [
        ("num_return_sequences is 200; it must be", "n is 200; it must be", "n"),
        ("text_input holds the id 9", "prompt holds the id 9", "prompt"),
        ("messages: the chat template refuses them", "prompt: the chat template refuses them", "prompt"),
        ("logit_bias holds the id 9", "logit_bias holds the id 9", "logit_bias"),
        ("the guide of type json_schema is refused", "the guide of type json_schema is refused", "tools"),
        (
            "the prompt has 9 tokens",
            "this model's maximum context length is exceeded: the prompt has 9 tokens",
            "prompt",
        ),
        (
            "messages has 99 characters, which is too long for this engine",
            "this model's maximum context length is exceeded: messages has 99 characters, which is too long for this "
            "engine",
            "prompt",
        ),
        ("lora_task_id 7 is not known", "lora_task_id 7 is not known", None),
    ],
)
def test_what_the_server_refuses_has_the_name_that_the_request_has(text: str, said: str, param: str | None) -> None:
    error = of_backend(BackendError(f"INVALID_ARGUMENT: {text}", "INVALID_ARGUMENT"), AskedBy("prompt", "tools"))
    assert (error.status, error.message, error.param) == (400, said, param)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (TextRequest("m", 1, messages="[]"), "no input messages; run `trtforge package` again"),
        (TextRequest("m", 1, prompt=(1,)), "no input input_ids; run `trtforge package` again"),
        (TextRequest("m", 1, prompt="a", logprobs=True), "no input return_logprobs; run `trtforge package` again"),
        (TextRequest("m", 1, prompt="a", sampling=Sampling(logit_bias="{}")), "no input logit_bias"),
    ],
)
def test_what_an_older_repository_lacks_is_said(request_: TextRequest, said: str) -> None:
    old = ServedModel("m", {"text_input": "BYTES", "max_tokens": "INT32", "stream": "BOOL"})
    with pytest.raises(BackendError, match=said) as caught:
        infer_request(old, request_)
    assert of_backend(caught.value).status == 400


@pytest.mark.parametrize("kind", ["context_only", "generation_only"])
def test_an_older_repository_that_computes_no_phase_is_no_error_of_the_client(kind: RequestType) -> None:
    """Who runs the gateway chose the server."""
    old = ServedModel("m", {"text_input": "BYTES", "max_tokens": "INT32", "stream": "BOOL"})
    with pytest.raises(BackendError, match="no input request_type; run `trtforge package` again") as caught:
        infer_request(old, TextRequest("m", 1, prompt="a", request_type=kind))
    assert of_backend(caught.value).status == 500


def test_a_tokenizer_without_chat_template_is_said() -> None:
    model = ServedModel("m", {"max_tokens": "INT32", "stream": "BOOL", "return_finish_reason": "BOOL"})
    with pytest.raises(BackendError) as caught:
        infer_request(model, TextRequest("m", 1, messages="[]"))
    assert of_backend(caught.value).message.startswith(
        "this model has no chat template, so it cannot answer chat messages; use /v1/completions, or"
    )


def test_an_older_repository_is_asked_for_no_more_than_it_has() -> None:
    servicer = Servicer(FakeBackend(old=True))
    with serving(servicer) as address:
        found = run(address, lambda backend: pieces(backend, TextRequest("ensemble", 2, prompt="a b")))
    assert found == [Piece(text="a b")]
    assert set(servicer.asked[0][1]) == {"text_input", "max_tokens", "stream"}


def test_errors_have_openais_form() -> None:
    body = json.loads(ApiError(429, "later", code="rate_limit_exceeded").body())
    assert body == {
        "error": {"message": "later", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
    }
