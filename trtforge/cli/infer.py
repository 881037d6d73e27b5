"""`trtforge infer`: one question to a server."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli import completion, show
from trtforge.cli.chat import served_build
from trtforge.cli.guide import Grammar, JsonSchema, Regex, guide_of
from trtforge.cli.options import (
    Json,
    MaxTokens,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    Verbose,
)
from trtforge.core import defaults
from trtforge.core.errors import UsageError

_REQUEST = "Request"


def infer(
    prompt: Annotated[
        str,
        typer.Argument(metavar="PROMPT", help="Prompt text; - reads it from standard input.", show_default=False),
    ],
    url: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            rich_help_panel=_REQUEST,
            help="Address of the server.",
            show_default=f"{defaults.GRPC_URL}, or {defaults.HTTP_URL} with --protocol http",
        ),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            metavar="PROTOCOL",
            autocompletion=completion.words("grpc", "http"),
            rich_help_panel=_REQUEST,
            help="grpc or http.",
            show_default="grpc",
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            autocompletion=completion.words("ensemble", "tensorrt_llm_bls"),
            rich_help_panel=_REQUEST,
            help="Model: ensemble or tensorrt_llm_bls.",
        ),
    ] = "ensemble",
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", rich_help_panel=_REQUEST, help="Print text as it is generated.")
    ] = True,
    chat: Annotated[
        bool,
        typer.Option("--chat", rich_help_panel=_REQUEST, help="PROMPT is a user's message: use the chat template."),
    ] = False,
    build: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_REQUEST,
            help="Serve this build or repository for this request.",
            show_default=False,
        ),
    ] = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    grammar: Grammar = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Send a prompt to a running server, over gRPC or HTTP.

    Example: trtforge infer "Return the number of" --max-tokens 32

    Example: trtforge infer "What is a list?" --chat --build build/demo-int4awq

    Example: cat prompt.txt | trtforge infer - --protocol http
    """
    if url is not None and build is not None:
        raise UsageError("--url cannot be combined with --build", hint="Give one of them.")
    from trtforge.cli.prompt import prompt_text, require_utf8
    from trtforge.serve.client import Sampling
    from trtforge.serve.client import generate as ask
    from trtforge.serve.endpoint import Endpoint
    from trtforge.serve.request import Chat, answer_warnings, request_warnings

    endpoint = Endpoint.of(url, protocol)
    guide = guide_of(json_schema, regex, grammar)
    words = tuple(stop or ())
    require_utf8(*words)
    sampling = Sampling(
        max_tokens, temperature, top_k, top_p, seed, stop=words, guide=guide, finish_reason=True, cuts_stop=True
    )
    for warning in request_warnings(sampling):
        show.warning(warning)
    text = prompt_text(prompt)
    with ExitStack() as stack:
        if build is not None:
            server, name = stack.enter_context(served_build(build, quiet=json))
            endpoint = Endpoint(server.http if endpoint.protocol == "http" else server.grpc, endpoint.protocol)
            model = name if model == "ensemble" else model
        shown = stack.enter_context(_Line())
        answer = ask(
            endpoint.url,
            model,
            Chat([{"role": "user", "content": text}]) if chat else text,
            sampling,
            protocol=endpoint.protocol,
            stream=stream,
            on_text=None if json else shown.add,
        )
    if json:
        show.as_json(vars(answer))
    for warning in answer_warnings(sampling, answer):
        show.warning(warning)
    if json:
        return
    print(f"{answer.output_tokens} tokens in {answer.seconds:.2f} s, {answer.pace}", file=sys.stderr)


class _Line:
    """Text that is shown as it comes; its line is ended, after an interruption too."""

    def __init__(self) -> None:
        self._begun = False

    def add(self, text: str) -> None:
        """Show more text."""
        print(text, end="", flush=True)
        self._begun = True

    def __enter__(self) -> "_Line":
        return self

    def __exit__(self, *_: object) -> None:
        if self._begun:
            print()
