"""KV blocks that requests to a real server ask to keep, or share only with requests of the same salt."""

from collections.abc import Iterator

import httpx
import pytest
from openai import BadRequestError, OpenAI
from openai.types import CompletionUsage

from tests.assault.server import Server, serving
from tests.conftest import DEMO_MODEL
from tests.patience import PATIENCE, eventually
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import EngineConfig
from trtforge.core.serving import ServingConfig
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package

SIZE = 32  # tokens of a block
LONG = 4 * SIZE + 3
TOKENS = 40 * SIZE


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A server whose KV cache holds 40 blocks, and the address of OpenAI's API."""
    place = tmp_path_factory.mktemp("retention")
    checkpoint = convert(ConvertConfig(dtype="float32"), DEMO_MODEL, place / "checkpoint").path
    engine = compile_engine(EngineConfig(backend="torch"), checkpoint, place / "engine").path
    package(PackageConfig(serving=ServingConfig(kv_cache_tokens=TOKENS)), engine, None, place / "repository")
    with serving(place / "repository") as server:
        assert eventually(lambda: len(server.output) > 1)
        yield server, server.output[1].removeprefix("openai=")


def reused(server: Server, number: int, **more: object) -> int:
    """Send a prompt of five blocks, of which four can be reused; how many were. Raises AssertionError for a refusal."""
    body = {
        "input_ids": [number] * LONG,
        "input_lengths": LONG,
        "request_output_len": 2,
        "return_perf_metrics": True,
        **more,
    }
    return blocks(server, "tensorrt_llm", body)


def blocks(server: Server, model: str, body: dict[str, object]) -> int:
    address = f"http://127.0.0.1:{server.ports['http']}/v2/models/{model}/generate"
    answer = httpx.post(address, json=body, timeout=PATIENCE, headers={"Host": "localhost"})
    assert answer.status_code == 200, answer.json()["error"]
    return int(answer.json()["kv_cache_reused_blocks"])


def kept(priority: int, **more: object) -> dict[str, object]:
    values = {"starts": [0], "ends": [-1], "priorities": [priority], **more}
    return {f"retention_token_range_{name}": value for name, value in values.items()}


def test_a_prompt_of_high_priority_stays_where_others_go(served: tuple[Server, str]) -> None:
    server = served[0]
    assert reused(server, 5, **kept(80)) == 0
    assert reused(server, 6) == 0
    assert reused(server, 7, **kept(80, durations_ms=[0])) == 0
    assert [reused(server, number) for number in range(10, 20)] == [0] * 10
    assert [reused(server, number) for number in (5, 6, 7)] == [4, 0, 0]


def test_prompts_of_low_priority_go_first(served: tuple[Server, str]) -> None:
    server = served[0]
    assert reused(server, 30) == 0
    low = kept(1, durations_ms=[-1]) | {"retention_decode_priority": 1, "retention_decode_duration_ms": -1}
    assert [reused(server, number, **low) for number in range(40, 50)] == [0] * 10
    assert reused(server, 30) == 4


def test_what_cannot_be_read_is_refused_by_the_tensors_name(served: tuple[Server, str]) -> None:
    for given, message in (
        (kept(101), "retention_token_range_priorities is 101; it must be a whole number from 0 to 100"),
        ({"cache_salt": "a"}, "cache_salt is an input of the text models only, such as ensemble"),
        (kept(50, ends=[4, 5]), "retention_token_range_ends has 2 values, retention_token_range_starts has 1"),
    ):
        with pytest.raises(AssertionError, match=message):
            reused(served[0], 60, **given)


def test_openais_api_shares_blocks_by_salt(served: tuple[Server, str]) -> None:
    """What the gateway was sent with a salt is found by the text model's tensor of this name."""
    server, address = served
    client = OpenAI(base_url=address, api_key="none", max_retries=0, timeout=PATIENCE)

    def found(number: int, **more: object) -> int:
        body = {"input_ids": [number] * LONG, "max_tokens": 2, "return_perf_metrics": True, **more}
        return blocks(server, "ensemble", body)

    for number, salt in ((70, {}), (71, {"cache_salt": "a"}), (72, {"cache_salt": "b"})):
        client.completions.create(model="ensemble", prompt=[number] * LONG, max_tokens=2, extra_body=salt)
    assert [found(70, cache_salt="a"), found(71), found(72, cache_salt="a")] == [0, 0, 0]
    assert [found(70), found(71, cache_salt="a"), found(72, cache_salt="b")] == [4, 4, 4]
    with pytest.raises(BadRequestError, match="cache_salt must be a non-empty string, not an empty string"):
        client.completions.create(model="ensemble", prompt=[70], max_tokens=2, extra_body={"cache_salt": ""})


def test_openais_usage_counts_what_the_cache_had(served: tuple[Server, str]) -> None:
    client = OpenAI(base_url=served[1], api_key="none", max_retries=0, timeout=PATIENCE)
    asked = {"model": "ensemble", "prompt": [80] * LONG, "max_tokens": 2}

    def cached(usage: CompletionUsage | None) -> int | None:
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        found = usage.prompt_tokens_details.cached_tokens
        assert found is not None
        assert found <= usage.prompt_tokens
        return found

    assert cached(client.completions.create(**asked, n=3).usage) == 0, "what its own copies share was not in the cache"
    assert cached(client.completions.create(**asked).usage) == 4 * SIZE
    assert cached(client.completions.create(**asked, n=3).usage) == 4 * SIZE
    *_, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert cached(last.usage) == 4 * SIZE
    both = {**asked, "prompt": [[80] * LONG, [80] * (2 * SIZE)]}
    assert cached(client.completions.create(**both).usage) == (4 + 1) * SIZE, "the last token is always computed"
    talk = [{"role": "user", "content": "What is a list? " * 20}]
    for _ in range(2):
        chat = client.chat.completions.create(model="ensemble", messages=talk, max_tokens=2)
    response = client.responses.create(model="ensemble", input=talk, max_output_tokens=2)
    assert chat.usage is not None
    assert response.usage is not None
    most = (chat.usage.prompt_tokens - 1) // SIZE * SIZE
    assert most > 0
    assert (cached(chat.usage), response.usage.input_tokens_details.cached_tokens) == (most, most)
