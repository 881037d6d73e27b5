"""What the attacks judge with: refusals, leaks, frames, slopes, plans and process trees."""

import asyncio
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from tests.assault import departures, h2, http1, malformed_grpc, malformed_http, soak
from tests.assault.messages import Reply, is_refusal, leaks, reply_of, text_request
from tests.assault.report import Report
from tests.assault.server import owner_of
from tests.assault.tree import Tree
from tests.patience import PATIENCE, eventually


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        ("UNAVAILABLE: the queue is full; retry in 2 s", True),
        ("INVALID_ARGUMENT: top_p is 7; it must be between 0 and 1", True),
        ("the queue is full", False),
        ("the server is UNAVAILABLE: retry", False),
        ("", False),
    ],
)
def test_a_refusal_begins_with_a_code_word(error: str, refused: bool) -> None:
    assert is_refusal(error) is refused


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("INVALID_ARGUMENT: top_p is 7", []),
        ("failed at /tmp/x/model.py", ["/tmp/x"]),
        ("got <class 'int'>", ["<class"]),
        ("<Engine object at 0x7f>", [" object at 0x"]),
        ("the ratio is 1/2, see /v2/models", []),
    ],
)
def test_leaks_are_paths_and_representations(text: str, found: list[str]) -> None:
    assert leaks(text) == found


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("trtforge-serve-3622-0h9pkm_p_a3ec0a40-d843-4630-84a7-928b92a2f503", 3622),
        ("trtforge-serve-3622-0h9pkm_p.lock", 3622),
        ("torch_17_4630_0", 17),
        ("sem.mp-a1b2c3d4", None),
    ],
)
def test_the_owner_of_shared_memory_is_the_first_number_in_its_name(name: str, owner: int | None) -> None:
    assert owner_of(name) == owner


def test_a_report_without_checks_does_not_pass() -> None:
    report = Report("x")
    assert not report.passed
    report.check("one", True)
    assert report.passed
    report.check("two", False, "seen")
    assert not report.passed
    assert [check.what for check in report.failures] == ["two"]


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 50))
def test_frames_are_found_however_they_arrive(payloads: list[bytes], piece: int) -> None:
    framed = b"".join(
        struct.pack(">I", len(payload))[1:] + b"\0\0" + struct.pack(">I", 2 * number + 1) + payload
        for number, payload in enumerate(payloads)
    )
    reader = h2.Reader(None)  # type: ignore[arg-type]
    got = [frame for at in range(0, len(framed), piece) for frame in reader.feed(framed[at : at + piece])]
    assert got == [(2 * number + 1, payload, False) for number, payload in enumerate(payloads)]


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_grpc_messages_are_cut_by_their_lengths(parts: list[bytes]) -> None:
    assert list(h2.messages(b"".join(b"\0" + struct.pack(">I", len(part)) + part for part in parts))) == parts


def test_the_slope_is_that_of_the_later_samples() -> None:
    warm = [soak.Sample(60.0 * minute, 100_000_000 * minute, 0, 0) for minute in range(5)]
    flat = [soak.Sample(60.0 * minute, 500_000_000 + 1_000_000 * minute, 0, 0) for minute in range(5, 20)]
    assert soak.slope(warm + flat) == pytest.approx(60.0)


@pytest.mark.parametrize(
    ("error", "foreign"),
    [
        ("incomplete string data for inference input 'text_input', expecting string of length 4294967295", True),
        ("INVALID_ARGUMENT: top_p is nan; it must be between 0 and 1", True),
        ("UNAVAILABLE: the queue is full", False),
        ("INTERNAL: the engine process ended", False),
    ],
)
def test_errors_of_malformed_requests_are_told_from_others(error: str, foreign: bool) -> None:
    assert soak.of_malformed(error) is foreign


@given(st.integers(1, 3000), st.integers())
def test_a_plan_of_departures_makes_all_requests(requests: int, seed: int) -> None:
    groups, singles = departures.plan(random.Random(seed), requests)
    assert 20 * len(groups) + len(singles) == requests
    assert set(groups) <= {"kill -9", "half-open"}
    assert not {"kill -9", "half-open"} & set(singles)


def test_there_are_enough_malformed_requests_and_each_has_its_name() -> None:
    grpc, http = malformed_grpc.cases(), malformed_http.cases()
    assert len(grpc) >= 150
    assert len(http) >= 100
    assert max(Counter(case.name for case in [*grpc, *http]).values()) == 1
    assert {case.model for case in grpc} == {
        "ensemble",
        "tensorrt_llm_bls",
        "tensorrt_llm",
        "preprocessing",
        "postprocessing",
    }
    assert all(case.request().model_name == case.model and case.fields for case in grpc)


def test_requests_carry_their_tensors() -> None:
    request = text_request("café", 7)
    assert [tensor.name for tensor in request.inputs] == ["text_input", "max_tokens", "stream"]
    assert list(request.raw_input_contents) == [b"\5\0\0\0caf\xc3\xa9", b"\7\0\0\0", b"\1"]


def test_a_response_is_read_as_text() -> None:
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.outputs.add(name="text_output")
    response.infer_response.raw_output_contents.append(b"\5\0\0\0caf\xc3\xa9")
    assert reply_of(response) == Reply("café", "", False)
    response.infer_response.parameters["triton_final_response"].bool_param = True
    assert reply_of(response).final
    assert reply_of(service_pb2.ModelStreamInferResponse(error_message="no")) == Reply(None, "no", False)


@pytest.mark.parametrize(
    ("sent", "status", "body"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}", 400, b"{}"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", 200, b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 413 No\r\n\r\nbody", 413, b"body"),
        (b"", 0, b""),
    ],
)
def test_a_response_is_read_as_it_comes(sent: bytes, status: int, body: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(sent)

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"127.0.0.1:{listener.getsockname()[1]}"
        response = asyncio.run(http1.exchange(url, http1.request_bytes("/"), 10))
        thread.join(timeout=PATIENCE)
    assert (response.status, response.body) == (status, body)


def test_a_tree_keeps_children_that_lost_their_parent() -> None:
    command = f"{sys.executable} -c 'import time; time.sleep(600)' & echo $!; wait"
    parent = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        tree = Tree(parent.pid)
        assert eventually(lambda: {parent.pid, child} <= tree.sample().keys())
        parent.kill()
        parent.wait()
        assert list(tree.alive()) == [child]
    finally:
        os.kill(child, signal.SIGKILL)
    assert eventually(lambda: not tree.alive())
