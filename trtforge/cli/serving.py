"""Running what was built: serve, infer, generate, probe."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli import show
from trtforge.cli.options import Json, MaxTokens, Seed, Stop, Temperature, TopK, TopP, Verbose, from_options


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (serve, infer, generate, probe):
        app.command(command.__name__, rich_help_panel="Serving")(command)


def serve(
    repo: Annotated[Path, typer.Argument(metavar="REPO", help="Model repository.", show_default=False)],
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535)] = 8002,
    host: Annotated[str, typer.Option(help="Address to listen on; loopback unless you say otherwise.")] = "127.0.0.1",
    open: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...",
            help="Endpoints to open: shared-memory, model-repository, model-config, statistics, trace, logging; "
            "all are closed unless named.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="API keys, one a line; clients of HTTP need one.", show_default=False),
    ] = None,
    launcher: Annotated[str, typer.Option(metavar="auto|local|docker|mpi", help="How Triton is started.")] = "auto",
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds until a token must have been made.")] = 300,
    drain_timeout: Annotated[
        float, typer.Option(metavar="S", min=0, help="Seconds that unfinished requests have after a signal; 0: none.")
    ] = 30,
    restart: Annotated[
        str, typer.Option(metavar="never|on-failure", help="Start a server that broke again, with growing pauses.")
    ] = "never",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the exact command and start nothing.")] = False,
    verbose: Verbose = False,
) -> None:
    """Launch Triton on a model repository, in the foreground. SIGTERM and SIGINT drain it, a second one kills it.

    Prints `ready http=... grpc=... metrics=...` once a real token was generated.

    [dim]Example: trtforge serve build/demo-int4awq/repository --http-port 9000[/dim]
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
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", show_default=False)],
    url: Annotated[str, typer.Option(help="HOST:PORT of the server.")] = "127.0.0.1:8001",
    protocol: Annotated[str, typer.Option(metavar="grpc|http", help="How to call it.")] = "grpc",
    model: Annotated[str, typer.Option(help="Model to call: ensemble or tensorrt_llm_bls.")] = "ensemble",
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it is made.")] = True,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Ask a running server, over gRPC streaming or HTTP generate.

    [dim]Example: trtforge infer "Return the number of" --url 127.0.0.1:8001 --max-tokens 32[/dim]
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
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", show_default=False)],
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

    [dim]Example: trtforge generate build/demo-int4awq/engine "Return the number of"[/dim]
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
    kind: Annotated[str, typer.Argument(metavar="startup|live|ready", show_default=False)],
    url: Annotated[str, typer.Option(help="HOST:PORT of the server's HTTP endpoint.")] = "127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Text model that is asked, for live and ready.")] = "ensemble",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 10.0,
    verbose: Verbose = False,
) -> None:
    """Check a server, for container probes: status 0 if it holds, 1 if not.

    [dim]Example: trtforge probe ready --url 127.0.0.1:8000[/dim]
    """
    from trtforge.serve.probe import probe as run

    match kind:
        case "startup" | "live" | "ready":
            run(kind, url, model=model, timeout=timeout)
        case _:
            raise typer.BadParameter(f"{kind} is not startup, live or ready", param_hint="KIND")
    print(f"{kind}: ok")
