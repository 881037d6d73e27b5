"""Malformed HTTP requests, byte for byte; each is answered with a status of 400 to 499 and a JSON error."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from tests.assault.http1 import Chunks, request_bytes

_GENERATE = "/v2/models/ensemble/generate"
_STREAM = "/v2/models/ensemble/generate_stream"
_BODY = b'{"text_input": "The file", "max_tokens": 4}'


@dataclass(frozen=True)
class Case:
    """A malformed request. `may_close`: the connection may end without a response; `may_answer`: it may be served."""

    name: str
    sent: bytes | Callable[[], Chunks]
    may_close: bool = False
    may_answer: bool = False
    half_close: bool = False
    within: float = 20.0
    status: int | None = None
    """The one status that is right; None is any 4xx."""


def cases() -> list[Case]:
    """All of them, in a fixed order."""
    return [*_of_json(), *_of_infer(), *_of_protocol(), *_of_chunks(), *_of_paths()]


def _of_json() -> Iterator[Case]:
    deep = 200_000
    bodies: dict[str, bytes] = {
        "empty body": b"",
        "half an object": b'{"text_input": "a"',
        "array": b"[]",
        "number": b"5",
        "null": b"null",
        "text": b'"text"',
        "single quotes": b"{'text_input': 'a'}",
        "garbage behind": _BODY + b"}}",
        "no UTF-8": b'{"text_input": "\xff\xfe", "max_tokens": 4}',
        "half a surrogate": b'{"text_input": "\\ud800", "max_tokens": 4}',
        "NUL": b"\0" * 64,
        "bad escape": b'{"text_input": "\\q", "max_tokens": 4}',
        "[ 200,000 deep": b"[" * deep,
        "{ 200,000 deep": b'{"a":' * deep,
        "closed 200,000 deep": b'{"text_input": ' + b"[" * deep + b"]" * deep + b', "max_tokens": 4}',
        "5 MB prompt": json.dumps({"text_input": "word " * 1_000_000, "max_tokens": 4}).encode(),
        "5,000 digits": b'{"text_input": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        "number too large": b'{"text_input": "a", "max_tokens": 4, "temperature": 1e999}',
        "max_tokens text": b'{"text_input": "a", "max_tokens": "four"}',
        "max_tokens 2^31": b'{"text_input": "a", "max_tokens": 2147483648}',
        "max_tokens negative": b'{"text_input": "a", "max_tokens": -4}',
        "max_tokens 1.5": b'{"text_input": "a", "max_tokens": 1.5}',
        "max_tokens null": b'{"text_input": "a", "max_tokens": null}',
        "max_tokens list": b'{"text_input": "a", "max_tokens": [4, 4]}',
        "text_input number": b'{"text_input": 7, "max_tokens": 4}',
        "text_input object": b'{"text_input": {"a": 1}, "max_tokens": 4}',
        "two texts": b'{"text_input": ["a", "b"], "max_tokens": 4}',
        "no texts": b'{"text_input": [], "max_tokens": 4}',
        "NaN": b'{"text_input": "a", "max_tokens": 4, "temperature": NaN}',
        "without text_input": b'{"max_tokens": 4}',
        "without max_tokens": b'{"text_input": "a"}',
        "top_p 7": b'{"text_input": "a", "max_tokens": 4, "top_p": 7}',
        "num_return_sequences 2^31-1": b'{"text_input": "a", "max_tokens": 4, "num_return_sequences": 2147483647}',
    }
    for name, body in bodies.items():
        for path in (_GENERATE, _STREAM):
            yield Case(f"{path.rpartition('/')[2]}: {name}", request_bytes(path, body), may_close=len(body) > 1_000_000)


def _of_infer() -> Iterator[Case]:
    path = "/v2/models/preprocessing/infer"
    query = {"name": "QUERY", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}
    length = {"name": "REQUEST_OUTPUT_LEN", "shape": [1, 1], "datatype": "INT32", "data": [4]}
    bodies: dict[str, object] = {
        "inputs missing": {},
        "inputs a number": {"inputs": 5},
        "inputs of numbers": {"inputs": [5]},
        "negative shape": {"inputs": [query, {**length, "shape": [-1, 1]}]},
        "huge shape": {"inputs": [query, {**length, "shape": [1, 2**62]}]},
        "unknown type": {"inputs": [query, {**length, "datatype": "INT33"}]},
        "wrong type": {"inputs": [{**query, "datatype": "FP32", "data": [1.0]}, length]},
        "without data": {"inputs": [{"name": "QUERY", "shape": [1, 1], "datatype": "BYTES"}, length]},
        "too little data": {"inputs": [query, {**length, "shape": [1, 2], "data": [4]}]},
        "nested data": {"inputs": [query, {**length, "data": [[[[[4, 5]]]]]}]},
        "shared memory": {"inputs": [query, {**length, "parameters": {"shared_memory_region": "x"}}]},
    }
    for name, body in bodies.items():
        yield Case(f"infer: {name}", request_bytes(path, json.dumps(body).encode()))
    for size in ("1000000", "-1", "9223372036854775807", '"four"'):
        lied = json.dumps({"inputs": [query, {**length, "data": None}]}).replace(
            '"data": null', f'"parameters": {{"binary_data_size": {size}}}'
        )
        header = {"Inference-Header-Content-Length": str(len(lied))}
        sent = request_bytes(path, lied.encode() + b"\4\0\0\0", headers=header)
        yield Case(f"infer: binary_data_size is {size}", sent)
    whole = json.dumps({"inputs": [query, length]}).encode()
    for size in ("1000000", "-5", "abc", "3"):
        header = {"Inference-Header-Content-Length": size}
        yield Case(f"infer: header length is {size}", request_bytes(path, whole, headers=header))


def _of_protocol() -> Iterator[Case]:
    for method in ("GET", "PUT", "DELETE", "PATCH", "BREW", "TRACE"):
        yield Case(f"method {method}", request_bytes(_GENERATE, _BODY, method=method), may_close=method == "BREW")
    good = request_bytes(_GENERATE, _BODY)
    yield Case("no request line", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\r\n\r\n", may_close=True)
    yield Case("HTTP/9.9", good.replace(b"HTTP/1.1", b"HTTP/9.9", 1), may_close=True, status=505)
    many = {f"X-{number}": "value" for number in range(10_000)}
    yield Case("10,000 headers", request_bytes(_GENERATE, _BODY, headers=many), may_close=True)
    yield Case("1 MB header", request_bytes(_GENERATE, _BODY, headers={"X-A": "a" * 1_000_000}), may_close=True)
    yield Case("endless header", request_bytes(_GENERATE, _BODY)[:40] + b"a" * 3_000_000, may_close=True)
    for length in ("-1", "abc", "99999999999999999999999", "1e3"):
        yield Case(f"length {length}", request_bytes(_GENERATE, _BODY, length=length), may_close=True)
    two = request_bytes(_GENERATE, _BODY, headers={"Content-Length": "3"})
    yield Case("two lengths", two, may_close=True)
    yield Case("length too small", request_bytes(_GENERATE, _BODY, length="10"))
    longer = request_bytes(_GENERATE, _BODY, length="1000")
    yield Case("length too large, then the end", longer, may_close=True, half_close=True)
    yield Case("length too large, then silence", longer, may_close=True, within=90)
    yield Case("slow body", _slow(request_bytes(_GENERATE, b"", length="600"), b" "), may_close=True, within=120)
    yield Case(
        "slow headers", _slow(f"POST {_GENERATE} HTTP/1.1\r\n".encode(), b"X: 1\r\n"), may_close=True, within=120
    )
    for coding, body in (("gzip", b"no gzip"), ("gzip", gzip.compress(b" " * 50_000_000)), ("wrong", _BODY)):
        sent = request_bytes(_GENERATE, body, headers={"Content-Encoding": coding})
        yield Case(f"{coding} of {len(body)} bytes", sent)


def _of_chunks() -> Iterator[Case]:
    head = request_bytes(_GENERATE, length=None, headers={"Transfer-Encoding": "chunked"})
    tiny = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in _BODY) + b"0\r\n\r\n"
    yield Case("chunks of one byte", head + tiny, may_answer=True)
    yield Case("300,000 tiny chunks", head + b"1\r\n \r\n" * 300_000 + b"0\r\n\r\n", may_close=True)
    for name, chunks in {
        "bad size": b"zz\r\nabc\r\n",
        "negative size": b"-5\r\nabc\r\n",
        "huge size": b"ffffffffffffffff\r\nabc\r\n",
        "long size line": b"1" * 100_000,
        "no end": b"3\r\nabc\r\n",
    }.items():
        yield Case(f"chunks: {name}", head + chunks, may_close=True, half_close=True)
    both = {"Transfer-Encoding": "chunked"}
    yield Case("chunks and a length", request_bytes(_GENERATE, tiny, headers=both), may_close=True, may_answer=True)


def _of_paths() -> Iterator[Case]:
    for path in (
        "/v2/models/../../../../etc/passwd/generate",
        "/v2/models/%2e%2e%2f%2e%2e%2fetc/generate",
        "/v2/models/ensemble%00/generate",
        "/v2/models//generate",
        "/v2/models/nobody/generate",
        "/v2/models/ensemble/versions/99/generate",
        "/v2/models/ensemble/versions/abc/generate",
        "/v2/models/ensemble/versions/-1/generate",
        "/v2/models/<script>/generate",
        "/v2/models/" + "a" * 100_000 + "/generate",
        "/v2/nowhere",
        "/%ff%fe",
        "/v2/systemsharedmemory/region/x/register",
        "/v2/repository/models/ensemble/unload",
        "/v2/logging",
        "/v2/trace/setting",
    ):
        yield Case(f"path {path[:48]}", request_bytes(path, b"{}"), may_close=len(path) > 1000)


def _slow(head: bytes, piece: bytes) -> Callable[[], Chunks]:
    """The head, then a piece twice a second."""

    async def chunks() -> AsyncIterator[bytes]:
        yield head
        while True:
            await asyncio.sleep(0.5)
            yield piece

    return chunks
