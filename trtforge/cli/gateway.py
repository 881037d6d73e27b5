"""`trtforge gateway`: OpenAI's API over repositories that are served elsewhere."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import show
from trtforge.cli.options import ENDPOINTS, MOST_SECONDS, AllowHost, ReasoningParserOption, Verbose, from_options
from trtforge.core import defaults
from trtforge.core.errors import UsageError

if TYPE_CHECKING:
    from trtforge.gateway.config import GatewayConfig

_MODELS = "Models"


def gateway(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            rich_help_panel=_MODELS,
            help="gRPC endpoint of a server; several of the same models share the load. Repeatable.",
            show_default=defaults.GRPC_URL,
        ),
    ] = None,
    context_backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            rich_help_panel=_MODELS,
            help="gRPC endpoint of a server that only computes prompts; --backend servers then generate. Repeatable.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_MODELS,
            help="Text model to offer; repeatable. Default: those that the server lists, else ensemble.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_MODELS,
            help="Additional name of the first model, for clients.",
            show_default=False,
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:TASK",
            rich_help_panel=_MODELS,
            help="Name and task id of a LoRA adapter of the first model, which clients name as `model`. Repeatable.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", rich_help_panel=ENDPOINTS, help="Address to listen on.")
    ] = defaults.LOOPBACK,
    port: Annotated[
        int, typer.Option(min=1, max=65535, metavar="PORT", rich_help_panel=ENDPOINTS, help="Port to listen on.")
    ] = defaults.GATEWAY_PORT,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=ENDPOINTS,
            help="API keys, one per line, each of at least 16 characters; clients must send one of them.",
            show_default=False,
        ),
    ] = None,
    allow_host: AllowHost = None,
    reasoning_parser: ReasoningParserOption = None,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0, max=MOST_SECONDS, metavar="SECONDS", help="Time for running requests to finish after a signal."
        ),
    ] = defaults.DRAIN_TIMEOUT,
    verbose: Verbose = False,
) -> None:
    """Offer OpenAI's API for text models that Triton serves elsewhere.

    Prints `openai=http://HOST:PORT/v1` when it listens. Needs `pip install 'trtforge[openai]'`.

    Example: trtforge gateway --backend gpu1:8001 --backend gpu2:8001 --served-model-name llama
    """
    from trtforge.core.host_check import unheeded_names
    from trtforge.core.packages import require_openai
    from trtforge.gateway.config import GatewayConfig

    require_openai("trtforge gateway")
    from trtforge.gateway.server import run

    config = from_options(
        GatewayConfig,
        {
            "backends": tuple(backend or (defaults.GRPC_URL,)),
            "context_backends": tuple(context_backend or ()),
            "models": tuple(model or ()),
            "served_model_name": served_model_name,
            "adapters": _adapters(adapter or (), {served_model_name, *(model or ())}),
            "host": host,
            "port": port,
            "api_key_file": api_key_file,
            "allowed_hosts": tuple(allow_host or ()),
            "reasoning_parser": reasoning_parser,
            "drain_timeout": drain_timeout,
        },
        "gateway",
    )
    keys = config.api_key_file is not None
    if (unheeded := unheeded_names(config.host, config.allowed_hosts, with_keys=keys)) is not None:
        show.warning(unheeded)
    run(config, lambda: _listens(config))


def _listens(config: "GatewayConfig") -> None:
    print(f"openai=http://{config.address}/v1", flush=True)
    refused, whole = "requests are refused", "those of --backend compute prompts too"
    for given in ((config.backends, "--backend", refused), (config.context_backends, "--context-backend", whole)):
        Thread(target=_warn_of, args=given, daemon=True).start()


def _warn_of(backends: Sequence[str], option: str, without: str) -> None:
    """Warn of each backend that is not known to speak gRPC. Requests are sent all the same: it may start later.

    `without`: what happens while none of them answers.
    """
    from trtforge.serve.spoken import spoken

    for backend in backends:
        protocol = spoken(backend)
        if protocol == "http":
            port = f"give {option} its gRPC port ({defaults.GRPC_PORT} by default)"
            show.warning(f"{backend} speaks HTTP, not gRPC: {port}")
        elif protocol is None:
            show.warning(f"no gRPC server answers at {backend}: {without} until one does")


def _adapters(words: Sequence[str], models: Collection[str | None]) -> Mapping[str, int]:
    """Task ids by name. Raises UsageError for a word that is not NAME:TASK, and for a name that something else has."""
    from trtforge.engine_process.requests import UINT64_MAX
    from trtforge.formats.adapter import named_adapters

    found: dict[str, int] = {}
    for word in words:
        named = named_adapters(word)
        if not named or max(named.values()) > UINT64_MAX:
            raise UsageError(f"--adapter {word!r} is not NAME:TASK", hint="Give for example --adapter sql:1.")
        taken = next((name for name in named if name in found or name in models), None)
        if taken is not None:
            what = "another adapter" if taken in found else "a model"
            raise UsageError(f"--adapter {word!r}: {taken} is the name of {what}, too", hint="Give it another name.")
        found |= named
    return found
