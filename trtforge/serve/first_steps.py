"""Commands to paste once a server is ready: curl, `trtforge infer` and Python. They never contain a key."""

import json
from collections.abc import Mapping
from shlex import join, quote

from trtforge.core.api_keys import KEY_VARIABLE
from trtforge.serve.config import ServeConfig

_PROMPT, _TOKENS = "Hello", 32


def first_steps(config: ServeConfig, model: str) -> tuple[str, str, str]:
    """Three commands for a shell on this machine. `model`: the text model."""
    infer = ["trtforge", "infer", _PROMPT, "--url", config.grpc_address]
    if model != "ensemble":
        infer += ["--model", model]
    if config.openai and config.openai_port is not None:
        url = f"http://{config.address(config.openai_port)}/v1"
        body: Mapping[str, object] = {"model": model, "prompt": _PROMPT, "max_tokens": _TOKENS}
        return _curl(config, f"{url}/completions", body), join(infer), _openai(config, url, model)
    url = f"http://{config.address(config.http_port)}/v2/models/{model}/generate"
    body = {"text_input": _PROMPT, "max_tokens": _TOKENS}
    return _curl(config, url, body), join(infer), _urllib(config, url, body)


def _curl(config: ServeConfig, url: str, body: Mapping[str, object]) -> str:
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if config.api_key_file is not None else ""
    return f"curl {url} -H 'Content-Type: application/json'{key} -d {quote(json.dumps(body))}"


def _openai(config: ServeConfig, url: str, model: str) -> str:
    with_key = config.api_key_file is not None
    key = f"os.environ[{KEY_VARIABLE!r}]" if with_key else "'none'"
    program = (
        f"{'import os; ' if with_key else ''}from openai import OpenAI; "
        f"print(OpenAI(base_url={url!r}, api_key={key}).completions.create("
        f"model={model!r}, prompt={_PROMPT!r}, max_tokens={_TOKENS}).choices[0].text)"
    )
    return f'python -c "{program}"'


def _urllib(config: ServeConfig, url: str, body: Mapping[str, object]) -> str:
    with_key = config.api_key_file is not None
    headers = f", {{'x-api-key': os.environ[{KEY_VARIABLE!r}]}}" if with_key else ""
    program = (
        f"import json{', os' if with_key else ''}; from urllib.request import Request, urlopen; "
        f"print(json.load(urlopen(Request({url!r}, json.dumps({dict(body)!r}).encode(){headers})))['text_output'])"
    )
    return f'python -c "{program}"'
