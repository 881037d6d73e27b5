"""Malformed HTTP requests, each with the status that it must get; None: any refusal will do."""

import json
from dataclasses import dataclass
from typing import Any

from tests.serve.front.support import GENERATE, STREAM, post_bytes, request_bytes

INFER = "/v2/models/ensemble/infer"
TENSOR: dict[str, Any] = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}


@dataclass(frozen=True)
class Malformed:
    """A request as it is sent."""

    name: str
    data: bytes
    status: int | None = 400


def generate(name: str, body: bytes, status: int | None = 400) -> Malformed:
    return Malformed(name, post_bytes(GENERATE, body), status)


def field(name: str, value: object, status: int | None = None) -> Malformed:
    """A body of `/generate` that is good but for one field."""
    body = json.dumps({"text_input": "a", "max_tokens": 2} | {name: value}, allow_nan=False).encode()
    return Malformed(f"{name}={value!r}"[:40], post_bytes(GENERATE, body), status)


def tensor(name: str, change: dict[str, Any]) -> Malformed:
    return Malformed(name, post_bytes(INFER, json.dumps({"inputs": [TENSOR | change]}).encode()))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


CHUNKED = request_bytes("POST", GENERATE, "Transfer-Encoding: chunked")

CLASSES = {"name": "text_output", "parameters": {"classification": 1}}
FATAL = (
    Malformed("classes of a text", post_bytes(INFER, json.dumps({"inputs": [TENSOR], "outputs": [CLASSES]}).encode())),
    generate("a prompt of 5 MB", b'{"text_input":"' + b"a" * 5_000_000 + b'","max_tokens":2}', 413),
    generate("200,000 brackets", b'{"text_input":"x","parameters":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    Malformed("300,000 chunks", CHUNKED + b"1\r\n{\r\n" + chunk(b" ") * 300_000 + chunk(b"}") + b"0\r\n\r\n"),
)
"""What ends Triton 24.10, or did."""

HEADS = (
    Malformed("no host", b"GET /v2 HTTP/1.1\r\n\r\n"),
    Malformed("nonsense", b"nonsense\r\n\r\n"),
    Malformed("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
    Malformed("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", None),
    Malformed("HTTP/9", b"GET /v2 HTTP/9.9\r\nHost: x\r\n\r\n", 505),
    Malformed("space in a name", b"GET /v2 HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n"),
    Malformed("no colon", b"GET /v2 HTTP/1.1\r\nHost: x\r\nBad\r\n\r\n"),
    Malformed("NUL in a value", b"GET /v2 HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n"),
    Malformed("folded before a header", b"GET /v2 HTTP/1.1\r\n folded\r\nHost: x\r\n\r\n"),
    Malformed("two hosts", b"GET /v2 HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n"),
    Malformed("80 headers", request_bytes("GET", "/v2", *[f"X-{i}: a" for i in range(80)]), 431),
    Malformed("a long header", request_bytes("GET", "/v2", "X: " + "a" * 20_000), 431),
    Malformed("a long path", request_bytes("GET", "/v2/models/" + "a" * 3000), 414),
    Malformed("a very long path", request_bytes("GET", "/" + "a" * 30_000), 431),
    Malformed("length x", request_bytes("POST", GENERATE, "Content-Length: x")),
    Malformed("length -1", request_bytes("POST", GENERATE, "Content-Length: -1")),
    Malformed("length 1e3", request_bytes("POST", GENERATE, "Content-Length: 1e3")),
    Malformed("length 2**64", request_bytes("POST", GENERATE, f"Content-Length: {2**64}"), None),
    Malformed("length 10**20", request_bytes("POST", GENERATE, f"Content-Length: {10**20}"), None),
    Malformed("length 10**9", request_bytes("POST", GENERATE, f"Content-Length: {10**9}"), 413),
    Malformed("two lengths", request_bytes("POST", GENERATE, "Content-Length: 1", "Content-Length: 2")),
    Malformed("length and chunks", post_bytes(GENERATE, b"{}", "Transfer-Encoding: chunked")),
    Malformed("gzip transfer", request_bytes("POST", GENERATE, "Transfer-Encoding: gzip"), 501),
    Malformed("gzip content", post_bytes(GENERATE, b"{}", "Content-Encoding: gzip"), 415),
    Malformed("deflate content", post_bytes(GENERATE, b"{}", "Content-Encoding: deflate"), 415),
    Malformed("no length", request_bytes("POST", GENERATE)),
    Malformed("chunk size x", CHUNKED + b"x\r\n{}\r\n"),
    Malformed("chunk size -1", CHUNKED + b"-1\r\n{}\r\n"),
    Malformed("chunk size of 30 digits", CHUNKED + b"f" * 30 + b"\r\n{}\r\n"),
    Malformed("chunk longer than its size", CHUNKED + b"1\r\n{}\r\n0\r\n\r\n"),
    Malformed("binary header x", post_bytes(INFER, b"{}", "Inference-Header-Content-Length: x")),
    Malformed("binary header -1", post_bytes(INFER, b"{}", "Inference-Header-Content-Length: -1")),
    Malformed("binary header 0", post_bytes(INFER, b"{}", "Inference-Header-Content-Length: 0")),
    Malformed("binary header too long", post_bytes(INFER, b"{}", "Inference-Header-Content-Length: 3")),
    Malformed("binary header 2**64", post_bytes(INFER, b"{}", f"Inference-Header-Content-Length: {2**64}")),
)

PATHS = (
    Malformed("root", request_bytes("GET", "/"), 404),
    Malformed("dots", request_bytes("GET", "/v2/../v2/health/live")),
    Malformed("two slashes", request_bytes("GET", "//v2")),
    Malformed("percent", request_bytes("GET", "/v2/%2e%2e/logging")),
    Malformed("absolute", request_bytes("GET", "http://x/v2")),
    Malformed("a host of others", b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n", 403),
    Malformed("a page of others", request_bytes("GET", "/v2", "Origin: http://x"), 403),
    Malformed("unknown", request_bytes("GET", "/v3"), 404),
    Malformed("no such model", post_bytes("/v2/models/none/generate", b'{"text_input":"a"}'), None),
    Malformed("no such version", post_bytes("/v2/models/ensemble/versions/7/generate", b'{"text_input":"a"}'), None),
    Malformed("version x", post_bytes("/v2/models/ensemble/versions/x/generate", b"{}"), 404),
    Malformed("GET of generate", request_bytes("GET", GENERATE), 405),
    Malformed("DELETE", request_bytes("DELETE", "/v2/models/ensemble"), 405),
    Malformed("TRACE", request_bytes("TRACE", "/v2"), 405),
    Malformed("CONNECT", request_bytes("CONNECT", "x:1"), None),
    Malformed("logging", post_bytes("/v2/logging", b'{"log_verbose_level":9}'), 403),
    Malformed("trace", post_bytes("/v2/trace/setting", b'{"trace_file":"/tmp/x"}'), 403),
    Malformed("load", post_bytes("/v2/repository/models/ensemble/load", b"{}"), 403),
    Malformed("unload", post_bytes("/v2/repository/models/ensemble/unload", b"{}"), 403),
    Malformed("index", post_bytes("/v2/repository/index", b"{}"), 403),
    Malformed("register", post_bytes("/v2/systemsharedmemory/region/a/register", b'{"key":"/a"}'), 403),
    Malformed("cuda register", post_bytes("/v2/cudasharedmemory/region/a/register", b"{}"), 403),
    Malformed("statistics", request_bytes("GET", "/v2/models/stats"), 403),
    Malformed("config", request_bytes("GET", "/v2/models/ensemble/config"), 403),
)

BODIES = (
    generate("empty", b""),
    generate("blank", b"   "),
    generate("an array", b"[]"),
    generate("a string", b'"text"'),
    generate("null", b"null"),
    generate("not closed", b'{"text_input":"a"'),
    generate("a comma too many", b'{"text_input":"a",}'),
    generate("single quotes", b"{'text_input':'a'}"),
    generate("a comment", b'{"text_input":"a"/*x*/}'),
    generate("two objects", b"{}{}"),
    generate("a newline in a string", b'{"text_input":"a\nb"}'),
    generate("a wrong escape", b'{"text_input":"\\x41"}'),
    generate("half a surrogate", b'{"text_input":"\\ud83d","max_tokens":1}'),
    generate("invalid UTF-8", b'{"text_input":"\xc3\x28"}'),
    generate("overlong UTF-8", b'{"text_input":"\xc0\xaf"}'),
    generate("UTF-16", '{"text_input":"a"}'.encode("utf-16")),
    generate("a byte order mark", b"\xef\xbb\xbf{}"),
    generate("NaN", b'{"text_input":"a","temperature":NaN}'),
    generate("Infinity", b'{"text_input":"a","temperature":-Infinity}'),
    generate("1e999", b'{"text_input":"a","temperature":1e999}'),
    generate("a long number", b'{"text_input":"a","max_tokens":' + b"9" * 5000 + b"}"),
    generate("a name twice", b'{"text_input":"a","text_input":"b"}'),
    generate("40 levels", b'{"text_input":' + b"[" * 40 + b"]" * 40 + b"}"),
    generate("40 objects", b'{"parameters":' + b'{"a":' * 40 + b"1" + b"}" * 40 + b"}"),
    generate("parameters in an array", b'{"text_input":"a","parameters":[1]}'),
    Malformed("form", post_bytes(STREAM, b"text_input=a&max_tokens=2")),
    Malformed("stream of nothing", post_bytes(STREAM, b"{")),
)

FIELDS = (
    field("text_input", None),
    field("text_input", {"a": 1}),
    field("text_input", 7),
    field("text_input", ["a", "b"]),
    field("text_input", [["a"], ["b", "c"]]),
    field("max_tokens", "two"),
    field("max_tokens", None),
    field("max_tokens", {}),
    field("max_tokens", 0),
    field("max_tokens", -1),
    field("max_tokens", 2**31),
    field("max_tokens", 2**63),
    field("max_tokens", [1, 2]),
    field("temperature", "hot"),
    field("top_k", "many"),
    field("stop_words", 5),
    field("stream", "yes"),
)

TENSORS = (
    Malformed("no inputs", post_bytes(INFER, b"{}")),
    Malformed("inputs in an object", post_bytes(INFER, b'{"inputs":{}}')),
    tensor("negative shape", {"shape": [-1, 1]}),
    tensor("huge shape", {"shape": [2**62, 4]}),
    tensor("shape of text", {"shape": "1"}),
    tensor("ninety dimensions", {"shape": [1] * 90}),
    tensor("unknown datatype", {"datatype": "TEXT"}),
    tensor("no data", {"data": None, "parameters": {"binary_data_size": 5}}),
    tensor("size of -5", {"parameters": {"binary_data_size": -5}}),
    tensor("size of 2**63", {"parameters": {"binary_data_size": 2**63}}),
)

ALL = (*HEADS, *PATHS, *BODIES, *FIELDS, *TENSORS)
