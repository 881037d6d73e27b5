"""Text requests over HTTP: Triton's generate endpoints, server-sent events when streaming."""

from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from trtforge.core.api_keys import key_header, key_needed
from trtforge.core.errors import ForgeError
from trtforge.core.json_text import parse_json
from trtforge.serve.request import Piece, Prompt, Sampling, refused, silent, unreachable
from trtforge.serve.spoken import other_protocol


class HttpClient:
    """Client of one server, URL without scheme. `timeout`: seconds without any data; None: no limit."""

    def __init__(self, url: str, *, timeout: float | None = None) -> None:
        self._url = url
        self._timeout = httpx.Timeout(timeout, connect=10.0)

    def inputs(self, model: str) -> frozenset[str]:
        """The names of a model's inputs; empty if the server does not report them. Raises ForgeError if it is
        unreachable."""
        with self._client() as client:
            try:
                response = client.get(f"/v2/models/{model}")
                tensors = _object(response.text).get("inputs", ())
            except httpx.HTTPError as error:
                raise self._error(error) from None
            except ForgeError:
                return frozenset()
        return frozenset(str(tensor.get("name")) for tensor in tensors if isinstance(tensor, dict))

    def generate(self, model: str, prompt: Prompt, sampling: Sampling) -> Piece:
        """The whole answer in one response. Raises ForgeError if the server cannot be reached or refuses."""
        with self._client() as client:
            try:
                response = client.post(_endpoint(model, "generate"), json=_body(prompt, sampling, stream=False))
            except httpx.HTTPError as error:
                raise self._error(error) from None
        self._require_key(response)
        return _piece(_object(response.text))

    def stream(self, model: str, prompt: Prompt, sampling: Sampling) -> Iterator[Piece]:
        """The answer in pieces. Closing the generator closes the connection, which cancels the request."""
        endpoint, body = _endpoint(model, "generate_stream"), _body(prompt, sampling, stream=True)
        with self._client() as client:
            try:
                with client.stream("POST", endpoint, json=body) as response:
                    self._require_key(response)
                    if response.status_code != httpx.codes.OK:
                        _object(response.read().decode())
                    for line in response.iter_lines():
                        if line.startswith("data:"):
                            yield _piece(_object(line.removeprefix("data:")))
            except httpx.HTTPError as error:
                raise self._error(error) from None

    def _client(self) -> httpx.Client:
        """The HTTP client. It bypasses web proxies, as servers are internal, and sends TRTFORGE_API_KEY if set."""
        base = f"http://{self._url}"
        return httpx.Client(base_url=base, headers=key_header(), timeout=self._timeout, trust_env=False)

    def _require_key(self, response: httpx.Response) -> None:
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise key_needed(self._url)

    def _error(self, error: httpx.HTTPError) -> ForgeError:
        if isinstance(error, httpx.ReadTimeout):
            return silent(self._url, self._timeout.read or 0.0)
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return unreachable(self._url)
        if wrong := other_protocol(self._url, "http"):
            return wrong
        return ForgeError(
            f"the connection to {self._url} broke: {error or type(error).__name__}", hint="Look at the server's log."
        )


def _endpoint(model: str, verb: str) -> str:
    return f"/v2/models/{model}/{verb}"


def _body(prompt: Prompt, sampling: Sampling, *, stream: bool) -> Mapping[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in sampling.inputs(prompt, stream=stream).items()
    }


def _object(text: str) -> Mapping[str, Any]:
    try:
        values = parse_json(text, "the answer", hint="")
    except ForgeError:
        raise refused(text.strip() or "an empty answer") from None
    if not isinstance(values, dict):
        raise refused(text.strip())
    if "error" in values:
        raise refused(str(values["error"]))
    return values


def _piece(values: Mapping[str, Any]) -> Piece:
    text = values.get("text_output", "")
    return Piece(
        text[0] if isinstance(text, list) else text,
        _count(values, "num_input_tokens"),
        _count(values, "num_output_tokens"),
        str(values.get("finish_reason") or "") or None,
        None if values.get("prompt_thought") is None else str(values["prompt_thought"]),
    )


def _count(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    return None if value is None else int(value)
