"""`trtforge serve`, `infer`, `generate` and `probe`: run what was built."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli import show
from trtforge.cli.options import Json, MaxTokens, Seed, Stop, Temperature, TopK, TopP, Verbose, from_options
from trtforge.core import defaults

_ENDPOINTS = "Endpoints"
_LIFECYCLE = "Lifecycle"
_REQUEST = "Request"


def serve(
    repo: Annotated[Path, typer.Argument(metavar="REPO", help="Triton model repository.", show_default=False)],
    http_port: Annotated[
        int,
        typer.Option(min=1, max=65535, metavar="PORT", rich_help_panel=_ENDPOINTS, help="Port of the HTTP endpoint."),
    ] = defaults.HTTP_PORT,
    grpc_port: Annotated[
        int,
        typer.Option(min=1, max=65535, metavar="PORT", rich_help_panel=_ENDPOINTS, help="Port of the gRPC endpoint."),
    ] = defaults.GRPC_PORT,
    metrics_port: Annotated[
        int,
        typer.Option(
            min=1, max=65535, metavar="PORT", rich_help_panel=_ENDPOINTS, help="Port of the Prometheus metrics."
        ),
    ] = defaults.METRICS_PORT,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", rich_help_panel=_ENDPOINTS, help="Address to listen on.")
    ] = defaults.LOOPBACK,
    open: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...",
            rich_help_panel=_ENDPOINTS,
            help="Endpoints to enable: shared-memory, model-repository, model-config, statistics, trace, logging. "
            "All are disabled by default; repeatable.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_ENDPOINTS,
            help="API keys, one per line; HTTP clients must send one of them.",
            show_default=False,
        ),
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(
            metavar="LAUNCHER", rich_help_panel=_LIFECYCLE, help="How Triton is started: auto, local, docker or mpi."
        ),
    ] = "auto",
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
            rich_help_panel=_LIFECYCLE,
            help="never, or on-failure: restart a failed server, with increasing pauses.",
        ),
    ] = "never",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command; start nothing.")] = False,
    verbose: Verbose = False,
) -> None:
    """Run Triton on a model repository, in the foreground.

    Prints `ready http=... grpc=... metrics=...` after the first generated token. SIGTERM and SIGINT drain the server;
    a second signal kills it.

    Example: trtforge serve build/demo-int4awq/repository --http-port 9000
    """
    from trtforge.serve.config import ServeConfig
    from trtforge.serve.doors import parse_doors
    from trtforge.serve.stage import serve as run

    config = from_options(
        ServeConfig,
        {
            "http_port": http_port,
            "grpc_port": grpc_port,
            "metrics_port": metrics_port,
            "host": host,
            "open": parse_doors(open or ()),
            "api_key_file": api_key_file,
            "launcher": launcher,
            "ready_timeout": ready_timeout,
            "drain_timeout": drain_timeout,
            "restart": restart,
            "dry_run": dry_run,
            "verbose": verbose,
        },
        "serve",
    )
    raise typer.Exit(run(config, repo))


def infer(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Prompt text.", show_default=False)],
    url: Annotated[
        str, typer.Option(metavar="HOST:PORT", rich_help_panel=_REQUEST, help="Address of the server.")
    ] = defaults.GRPC_URL,
    protocol: Annotated[str, typer.Option(metavar="PROTOCOL", rich_help_panel=_REQUEST, help="grpc or http.")] = "grpc",
    model: Annotated[
        str, typer.Option(metavar="NAME", rich_help_panel=_REQUEST, help="Model: ensemble or tensorrt_llm_bls.")
    ] = "ensemble",
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", rich_help_panel=_REQUEST, help="Print text as it is generated.")
    ] = True,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Send a prompt to a running server, over gRPC or HTTP.

    Example: trtforge infer "Return the number of" --max-tokens 32
    """
    from trtforge.serve.client import Sampling
    from trtforge.serve.client import generate as ask

    if protocol not in ("grpc", "http"):
        raise typer.BadParameter(f"{protocol} is neither grpc nor http", param_hint="--protocol")
    answer = ask(
        url,
        model,
        prompt,
        Sampling(max_tokens, temperature, top_k, top_p, seed, stop=tuple(stop or ())),
        protocol="http" if protocol == "http" else "grpc",
        stream=stream,
        on_text=None if json else lambda text: print(text, end="", flush=True),
    )
    if json:
        show.as_json(vars(answer))
        return
    print()
    rate = f", {answer.output_tokens / answer.seconds:.0f} tokens/s" if answer.output_tokens else ""
    first = f"first text after {answer.first_token_seconds * 1000:.0f} ms"
    print(f"{answer.output_tokens} tokens in {answer.seconds:.2f} s, {first}{rate}", file=sys.stderr)


def generate(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine of the torch backend.", show_default=False)],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Prompt text.", show_default=False)],
    max_tokens: MaxTokens = 64,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run the embedded engine in this process, without a server.

    Example: trtforge generate build/demo-int4awq/engine "Return the number of"
    """
    from trtforge.engine_process.requests import SamplingParams
    from trtforge.runtime.text import generate_text

    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    answer = generate_text(engine, prompt, max_tokens=max_tokens, sampling=sampling, stop=tuple(stop or ()))
    if json:
        show.as_json(vars(answer))
    else:
        print(answer.text)


def probe(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="startup, live or ready.", show_default=False)],
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
