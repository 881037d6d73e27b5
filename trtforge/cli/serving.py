"""`trtforge serve` and `probe`: run what was built, and see whether it runs."""

from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli import completion
from trtforge.cli.options import (
    ENDPOINTS,
    MOST_SECONDS,
    AllowHost,
    KvCacheDir,
    KvCacheDirBytes,
    ReasoningParserOption,
    Verbose,
    from_options,
)
from trtforge.core import defaults
from trtforge.core.errors import UsageError

_LIFECYCLE = "Lifecycle"


def serve(
    repo: Annotated[
        Path, typer.Argument(metavar="REPO", help="Triton model repository or build directory.", show_default=False)
    ],
    http_port: Annotated[
        int,
        typer.Option(min=0, max=65535, metavar="PORT", rich_help_panel=ENDPOINTS, help="Port of the HTTP endpoint."),
    ] = defaults.HTTP_PORT,
    grpc_port: Annotated[
        int,
        typer.Option(min=0, max=65535, metavar="PORT", rich_help_panel=ENDPOINTS, help="Port of the gRPC endpoint."),
    ] = defaults.GRPC_PORT,
    metrics_port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, metavar="PORT", rich_help_panel=ENDPOINTS, help="Port of the Prometheus metrics."
        ),
    ] = defaults.METRICS_PORT,
    openai_port: Annotated[
        int | None,
        typer.Option(
            min=0,
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
            help="API keys, one per line, each of at least 16 characters; HTTP clients must send one of them.",
            show_default=False,
        ),
    ] = None,
    allow_host: AllowHost = None,
    reasoning_parser: ReasoningParserOption = None,
    launcher: Annotated[
        str,
        typer.Option(
            metavar="LAUNCHER",
            autocompletion=completion.launchers,
            rich_help_panel=_LIFECYCLE,
            help="How Triton is started: auto, local, docker, mpi or orchestrator (it starts its ranks itself). With "
            "--dry-run also slurm (a batch script) and trtllm-serve (NVIDIA's own server for the LLM API).",
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
            min=1,
            max=MOST_SECONDS,
            metavar="SECONDS",
            rich_help_panel=_LIFECYCLE,
            help="Time limit for the first generated token.",
        ),
    ] = defaults.READY_TIMEOUT,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            max=MOST_SECONDS,
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
            help="Write a trace of every iteration of the embedded engine, to view at https://ui.perfetto.dev.",
            show_default=False,
        ),
    ] = None,
    kv_cache_dir: KvCacheDir = None,
    kv_cache_dir_bytes: KvCacheDirBytes = None,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            rich_help_panel=_LIFECYCLE,
            help="Return when the server is ready; it keeps running in the background. `trtforge status` shows it, "
            "`trtforge stop` ends it.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command; start nothing.")] = False,
    verbose: Verbose = False,
) -> None:
    """Run Triton on a model repository, in the foreground or with --detach in the background.

    Prints `ready http=... grpc=... metrics=...` after the first generated token, and `openai=...` on the next line if
    the extra `openai` is installed. A port of 0 means any free port. SIGTERM, SIGINT and SIGHUP drain the server; a
    second signal, SIGTERM or SIGINT, kills it.

    Example: trtforge serve build/demo-int4awq/repository --http-port 9000

    Example: trtforge serve build/demo-int4awq --detach
    """
    from trtforge.cli.detached import serve_detached
    from trtforge.cli.places import artifact_at
    from trtforge.launch.doors import parse_doors
    from trtforge.serve.config import ServeConfig
    from trtforge.serve.free_ports import ports_chosen
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
            "allowed_hosts": tuple(allow_host or ()),
            "reasoning_parser": reasoning_parser,
            "launcher": launcher,
            "hosts": [host.strip() for host in hosts.split(",")] if hosts else (),
            "nodes": nodes,
            "ready_timeout": ready_timeout,
            "drain_timeout": drain_timeout,
            "restart": restart,
            "trace": trace,
            "kv_cache_dir": kv_cache_dir,
            "kv_cache_dir_bytes": kv_cache_dir_bytes or defaults.KV_CACHE_DIR_BYTES,
            "dry_run": dry_run,
            "verbose": verbose,
        },
        "serve",
    )
    if kv_cache_dir_bytes is not None and kv_cache_dir is None:
        raise UsageError("--kv-cache-dir-bytes without --kv-cache-dir has no effect", hint="Give the directory too.")
    repository = artifact_at(repo, "repository")
    chosen = ports_chosen(config)
    config = config.model_copy(update=chosen)
    if detach and not dry_run:
        words = [f"--{name.replace('_', '-')}={port}" for name, port in chosen.items()]
        raise typer.Exit(serve_detached(config, repository, words))
    raise typer.Exit(run(config, repository))


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
    timeout: Annotated[
        float, typer.Option(min=0.1, max=MOST_SECONDS, metavar="SECONDS", help="Time limit for the response.")
    ] = 10.0,
    verbose: Verbose = False,
) -> None:
    """Check a server, for container probes.

    Exit status 0 if the check passes, 1 if it fails.

    Example: trtforge probe ready --url 127.0.0.1:8000
    """
    from trtforge.serve.endpoint import Endpoint
    from trtforge.serve.probe import probe as run

    match kind:
        case "startup" | "live" | "ready":
            run(kind, Endpoint.of_http(url).url, model=model, timeout=timeout)
        case _:
            raise typer.BadParameter(f"{kind} is not startup, live or ready", param_hint="KIND")
    print(f"{kind}: ok")
