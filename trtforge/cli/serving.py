"""`trtforge serve`, `infer`, `generate` and `probe`: run what was built."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli import completion, show
from trtforge.cli.chat import served_build
from trtforge.cli.guide import Grammar, JsonSchema, Regex, guide_of
from trtforge.cli.options import ENDPOINTS, Json, MaxTokens, Seed, Stop, Temperature, TopK, TopP, Verbose, from_options
from trtforge.core import defaults
from trtforge.core.errors import UsageError

_LIFECYCLE = "Lifecycle"
_REQUEST = "Request"


def serve(
    repo: Annotated[Path, typer.Argument(metavar="REPO", help="Triton model repository.", show_default=False)],
    http_port: Annotated[
        int,
        typer.Option(min=1, max=65535, metavar="PORT", rich_help_panel=ENDPOINTS, help="Port of the HTTP endpoint."),
    ] = defaults.HTTP_PORT,
    grpc_port: Annotated[
        int,
        typer.Option(min=1, max=65535, metavar="PORT", rich_help_panel=ENDPOINTS, help="Port of the gRPC endpoint."),
    ] = defaults.GRPC_PORT,
    metrics_port: Annotated[
        int,
        typer.Option(
            min=1, max=65535, metavar="PORT", rich_help_panel=ENDPOINTS, help="Port of the Prometheus metrics."
        ),
    ] = defaults.METRICS_PORT,
    openai_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            metavar="PORT",
            rich_help_panel=ENDPOINTS,
            help="Port of OpenAI's API.",
            show_default="a free one above the others",
        ),
    ] = None,
    no_openai: Annotated[
        bool, typer.Option("--no-openai", rich_help_panel=ENDPOINTS, help="Do not offer OpenAI's API.")
    ] = False,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", rich_help_panel=ENDPOINTS, help="Address to listen on.")
    ] = defaults.LOOPBACK,
    open: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...",
            rich_help_panel=ENDPOINTS,
            help="Endpoints to enable: shared-memory, model-repository, model-config, statistics, trace, logging. "
            "All are disabled by default; repeatable.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=ENDPOINTS,
            help="API keys, one per line; HTTP clients must send one of them.",
            show_default=False,
        ),
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(
            metavar="LAUNCHER",
            autocompletion=completion.words("auto", "local", "docker", "mpi", "orchestrator", "slurm"),
            rich_help_panel=_LIFECYCLE,
            help="How Triton is started: auto, local, docker, mpi, orchestrator (it starts its ranks itself) or slurm "
            "(with --dry-run: a batch script).",
        ),
    ] = "auto",
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HOST,...",
            rich_help_panel=_LIFECYCLE,
            help="With --launcher mpi: hosts that the ranks are divided over, this machine first. Each needs the "
            "repository at the path that it was packaged for.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=_LIFECYCLE,
            help="With --launcher slurm or trtllm-serve: nodes for the ranks.",
        ),
    ] = 1,
    ready_timeout: Annotated[
        float,
        typer.Option(
            min=1, metavar="SECONDS", rich_help_panel=_LIFECYCLE, help="Time limit for the first generated token."
        ),
    ] = defaults.READY_TIMEOUT,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            rich_help_panel=_LIFECYCLE,
            help="Time for running requests to finish after a signal; 0 ends them at once.",
        ),
    ] = defaults.DRAIN_TIMEOUT,
    restart: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            autocompletion=completion.words("never", "on-failure"),
            rich_help_panel=_LIFECYCLE,
            help="never, or on-failure: restart a failed server, with increasing pauses.",
        ),
    ] = "never",
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_LIFECYCLE,
            help="Write a trace of every iteration of the embedded engine, which https://ui.perfetto.dev shows.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command; start nothing.")] = False,
    verbose: Verbose = False,
) -> None:
    """Run Triton on a model repository, in the foreground.

    Prints `ready http=... grpc=... metrics=...` after the first generated token, and `openai=...` on the next line if
    the extra `openai` is installed. SIGTERM and SIGINT drain the server; a second signal kills it.

    Example: trtforge serve build/demo-int4awq/repository --http-port 9000
    """
    from trtforge.cli.places import artifact_at
    from trtforge.serve.config import ServeConfig
    from trtforge.serve.doors import parse_doors
    from trtforge.serve.stage import serve as run

    config = from_options(
        ServeConfig,
        {
            "http_port": http_port,
            "grpc_port": grpc_port,
            "metrics_port": metrics_port,
            "openai": not no_openai,
            "openai_port": openai_port,
            "host": host,
            "open": parse_doors(open or ()),
            "api_key_file": api_key_file,
            "launcher": launcher,
            "hosts": [host.strip() for host in hosts.split(",")] if hosts else (),
            "nodes": nodes,
            "ready_timeout": ready_timeout,
            "drain_timeout": drain_timeout,
            "restart": restart,
            "trace": trace,
            "dry_run": dry_run,
            "verbose": verbose,
        },
        "serve",
    )
    raise typer.Exit(run(config, artifact_at(repo, "repository")))


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
            help="Serve this build or repository for the one request.",
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
        raise UsageError("--url with --build: the server runs, or is started", hint="Give one of them.")
    from trtforge.cli.prompt import prompt_text
    from trtforge.serve.client import Sampling
    from trtforge.serve.client import generate as ask
    from trtforge.serve.endpoint import Endpoint
    from trtforge.serve.request import Chat, answer_warnings, request_warnings

    endpoint = Endpoint.of(url, protocol)
    guide = guide_of(json_schema, regex, grammar)
    words = tuple(stop or ())
    sampling = Sampling(max_tokens, temperature, top_k, top_p, seed, stop=words, guide=guide, finish_reason=True)
    for warning in request_warnings(sampling, model):
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


def generate(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine of the torch backend.", show_default=False)],
    prompt: Annotated[
        str,
        typer.Argument(metavar="PROMPT", help="Prompt text; - reads it from standard input.", show_default=False),
    ],
    max_tokens: MaxTokens = 64,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    grammar: Grammar = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a trace of every iteration, which https://ui.perfetto.dev shows.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run the embedded engine in this process, without a server.

    Example: trtforge generate build/demo-int4awq/engine "Return the number of"

    Example: trtforge generate build/demo-int4awq/engine "Is a list mutable?" --regex "yes|no"
    """
    from trtforge.cli.places import artifact_at
    from trtforge.cli.prompt import prompt_text
    from trtforge.engine_process.requests import SamplingParams
    from trtforge.runtime.text import generate_text
    from trtforge.serve.request import Generated, Sampling, answer_warnings, request_warnings

    words = tuple(stop or ())
    asked = Sampling(max_tokens, temperature, top_k, top_p, seed, stop=words)
    for warning in request_warnings(asked):
        show.warning(warning)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    guide = guide_of(json_schema, regex, grammar)
    place, text = artifact_at(engine, "engine"), prompt_text(prompt)
    answer = generate_text(place, text, max_tokens=max_tokens, sampling=sampling, stop=words, guide=guide, trace=trace)
    if json:
        show.as_json(vars(answer))
    else:
        print(answer.text)
    said = Generated(answer.text, None, len(answer.tokens), answer.seconds, answer.seconds, answer.finish_reason)
    for warning in answer_warnings(asked, said):
        show.warning(warning)


def probe(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            autocompletion=completion.words("startup", "live", "ready"),
            help="startup, live or ready.",
            show_default=False,
        ),
    ],
    url: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the server's HTTP endpoint.")
    ] = defaults.HTTP_URL,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Model that live and ready send a request to.")
    ] = "ensemble",
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Time limit for the response.")] = 10.0,
    verbose: Verbose = False,
) -> None:
    """Check a server, for container probes.

    Exit status 0 if the check passes, 1 if it fails.

    Example: trtforge probe ready --url 127.0.0.1:8000
    """
    from trtforge.serve.probe import probe as run

    match kind:
        case "startup" | "live" | "ready":
            run(kind, url, model=model, timeout=timeout)
        case _:
            raise typer.BadParameter(f"{kind} is not startup, live or ready", param_hint="KIND")
    print(f"{kind}: ok")
