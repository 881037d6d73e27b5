"""Metrics are found from the addresses of a server and read while it lasts; what is no such server is said."""

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.advise.texts import text
from tests.ports import free_ports
from trtforge.advise.rules import judged
from trtforge.advise.sources import Sources, observe
from trtforge.core.errors import ForgeError, UsageError

CONFIG = {"parameters": {"max_num_tokens": {"string_value": "512"}, "odd": 3}}


class Fake:
    """HTTP servers on loopback ports; what they answer may change. `key`: wanted for all but metrics."""

    def __init__(self) -> None:
        self.started: list[ThreadingHTTPServer] = []
        self.key = ""

    def start(self, answers: Mapping[str, str], port: int = 0) -> str:
        def locked(path: str, key: str | None) -> bool:
            return bool(self.key) and path != "/metrics" and key != self.key

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = answers.get(self.path)
                status = 404 if found is None else 200
                self.send_response(401 if locked(self.path, self.headers.get("x-api-key")) else status)
                self.end_headers()
                self.wfile.write((found or "no").encode())

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.started.append(server)
        return f"127.0.0.1:{server.server_address[1]}"

    def stop(self) -> None:
        for server in self.started:
            server.shutdown()
            server.server_close()
        self.started.clear()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """Servers that end with the test; none is in the background."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("trtforge.advise.sources._PERIOD", 0.02)
    servers = Fake()
    yield servers
    servers.stop()


@pytest.mark.parametrize("form", ["{}", "http://{}", "http://{}/metrics", "{}/", "grpc://{}"])
def test_the_address_of_metrics(fake: Fake, form: str) -> None:
    address = fake.start({"/metrics": text("embedded")})
    assert Sources.at([form.format(address)]).metrics == (address,)


def test_metrics_beside_an_address_of_the_server(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ports of a server follow one another: HTTP, gRPC, metrics, OpenAI's API."""
    metrics, gateway = fake.start({"/metrics": text("embedded")}), fake.start({"/metrics": text("gateway")})
    port = int(metrics.rpartition(":")[2])
    monkeypatch.setattr("trtforge.advise.sources.spoken", lambda address: "http")
    for beside in (port - 2, port - 1):
        api = f"127.0.0.1:{beside}"
        assert Sources.at([api]) == Sources((metrics,), tuple(dict.fromkeys((api, f"127.0.0.1:{port - 2}"))))
    assert Sources.at([gateway, metrics]).metrics == (gateway, metrics)
    assert Sources.at([f"http://{gateway}/v1"]).metrics[0] == gateway


def test_settings_are_those_that_are_open(fake: Fake) -> None:
    answers = {"/metrics": text("embedded"), "/v2/models/tensorrt_llm/config": json.dumps(CONFIG)}
    sources = Sources.at([fake.start(answers)])
    assert sources.settings(["tensorrt_llm", "other"]) == (
        {"tensorrt_llm": {"max_num_tokens": "512"}},
        {"other": {404}},
    )
    for damaged in ("[1]", "{", json.dumps({"parameters": [1]})):
        answers["/v2/models/tensorrt_llm/config"] = damaged
        assert sources.settings(["tensorrt_llm"]) == ({}, {})


def test_settings_may_need_a_key(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = text("embedded", {'request_type="waiting"': 5, 'request_type="scheduled"': 4})
    address = fake.start({"/metrics": busy, "/v2/models/tensorrt_llm/config": json.dumps(CONFIG)})
    fake.key = "the-key-of-the-server"
    monkeypatch.delenv("TRTFORGE_API_KEY", raising=False)
    assert Sources.at([address]).settings(["tensorrt_llm"]) == ({}, {"tensorrt_llm": {401}})
    _, missing = judged(observe(Sources.at([address]), 0.05, lambda _: None)[0])
    needed = "tensorrt_llm: max_num_tokens, as its model configuration needs an API key (TRTFORGE_API_KEY)"
    assert [each.lacks for each in missing] == [needed]
    monkeypatch.setenv("TRTFORGE_API_KEY", fake.key)
    assert Sources.at([address]).settings(["tensorrt_llm"]) == ({"tensorrt_llm": {"max_num_tokens": "512"}}, {})


def test_which_address_has_the_engine_may_not_be_known(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """One says nothing of its models, another wants a key: the engine may be either's."""
    monkeypatch.delenv("TRTFORGE_API_KEY", raising=False)
    busy = text("embedded", {'request_type="waiting"': 5, 'request_type="scheduled"': 4})
    wants = Fake()
    wants.key = "the-key-of-the-server"
    try:
        metrics, locked = fake.start({"/metrics": busy}), wants.start({})
        sources = Sources((metrics,), (metrics, locked))
        assert sources.settings(["tensorrt_llm"]) == ({}, {"tensorrt_llm": {401, 404}})
        _, missing = judged(observe(sources, 0.05, lambda _: None)[0])
    finally:
        wants.stop()
    either = "is closed or needs an API key (TRTFORGE_API_KEY)"
    assert [each.lacks for each in missing] == [f"tensorrt_llm: max_num_tokens, as its model configuration {either}"]


def test_a_server_is_observed_until_it_stops(fake: Fake) -> None:
    sources = Sources.at([fake.start({"/metrics": text("embedded")})])
    passed: list[float] = []
    seen, ended = observe(sources, 0.2, passed.append)
    assert ended == ""
    assert len(seen.readings) == len(passed) + 1 >= 2
    assert seen.engines[0].seen[-1].requests_max == 4

    def stop(seconds: float) -> None:
        if len(passed) == 30:
            fake.stop()
        passed.append(seconds)

    passed.clear()
    seen, ended = observe(sources, 60, stop)
    assert len(seen.readings) >= 30
    assert "no server answers at" in ended
    answers = {"/metrics": text("embedded")}
    sources = Sources.at([fake.start(answers)])
    seen, ended = observe(sources, 60, lambda _: answers.pop("/metrics", None))
    assert (len(seen.readings), ended) == (2, f"{sources.metrics[0]} answers /metrics with HTTP 404")
    answers["/metrics"] = text("embedded")
    fake.stop()
    with pytest.raises(ForgeError, match="no server answers at"):
        observe(sources, 60, passed.append)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({}, "answers /metrics with HTTP 404"),
        ({"/metrics": "<html>\n</html>\n"}, "line 1 is not of Prometheus' text format: '<html>'"),
        ({"/metrics": "vllm:num_requests_running 3\n"}, "has no metrics of Triton or of trtforge (vllm:num_requests_"),
        ({"/metrics": ""}, "has no metrics of Triton or of trtforge (none at all)"),
    ],
)
def test_another_server_is_said(fake: Fake, answers: dict[str, str], said: str) -> None:
    with pytest.raises(ForgeError) as caught:
        Sources.at([fake.start(answers)])
    assert said in caught.value.message
    assert "Give the address of its metrics, such as 127.0.0.1:8002" in caught.value.hint


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://a:1", "metrics are read over HTTP without TLS"),
        ("unix:/x", "metrics are not on a Unix socket"),
        ("a:b", "neither HOST:PORT"),
        ("a:70000", "port 70000 does not exist"),
    ],
)
def test_what_is_no_address_is_wrong_usage(url: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Sources.at([url])


def test_what_speaks_no_http_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            with contextlib.suppress(OSError):  # closed with the test
                while True:
                    with listener.accept()[0] as connection:
                        connection.sendall(b"SSH-2.0-OpenSSH_9.2\x1b[31m\r\n")
                        connection.recv(1000)

        Thread(target=greet, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ForgeError) as caught:
            Sources.at([address])
    assert caught.value.message == f"what answers at {address} does not speak HTTP"


def test_one_server_is_judged_at_a_time(fake: Fake) -> None:
    one, other = (fake.start({"/metrics": text("embedded")}) for _ in range(2))
    with pytest.raises(UsageError, match=f"{one} and {other} are two servers"):
        Sources.at([one, other])
    assert Sources.at([one, one]).metrics == (one,)


def test_nothing_is_searched_beside_an_address_where_nobody_answers(fake: Fake) -> None:
    (port,) = free_ports(1)
    with pytest.raises(ForgeError, match=f"no server answers at 127.0.0.1:{port}"):
        Sources.at([f"127.0.0.1:{port}"])


def test_the_command(fake: Fake, run: Any) -> None:
    busy = text("embedded", {'request_type="waiting"': 5, 'request_type="scheduled"': 4})
    address = fake.start({"/metrics": busy})
    status, out, err = run("advise", address, "--seconds", "1")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"{address}: ")
    assert lines[1] == "tensorrt_llm: running 4.0 of 4, waiting 5.0, KV blocks 1%"
    assert lines[2] == "1. tensorrt_llm: all places in the batch are taken (certain)"
    assert lines[3].startswith("   seen: requests waited while 4 of 4 ran in 100% of the readings")
    assert lines[5] == "   setting: serving.max_batch_size, engine.max_batch_size"
    assert lines[-1] == "not judged: tensorrt_llm: max_num_tokens, as its model configuration is closed"
    status, out, err = run("advise", address, "--seconds", "1", "--json")
    found = json.loads(out)
    assert (status, err, found["metrics"], found["ended"]) == (0, "", [address], None)
    assert [each["rule"] for each in found["advice"]] == ["batch"]
    assert found["engines"]["tensorrt_llm"]["waiting"] == 5
    assert {each["rule"] for each in found["missing"]} == {"tokens"}
