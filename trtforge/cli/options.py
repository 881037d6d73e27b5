"""Options that several commands share, each declared once."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from trtforge.core.config_model import Config
from trtforge.core.errors import ForgeError, UsageError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and no decoration.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the trace of an error and more of the log.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]
Force = Annotated[bool, typer.Option("--force", help="Make it again even if it is already right.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe's dotted key; repeatable.")
]
Workers = Annotated[
    int, typer.Option(min=1, help="tensorrt_llm backend: ranks built at once, at most one on each GPU.")
]
Container = Annotated[
    str | None,
    typer.Option(
        metavar="IMAGE|none",
        help="tensorrt_llm backend: image to build in; none: this machine; left out: this machine if it has the target "
        "release, else the release's image.",
    ),
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; whole or absent.", show_default=False)]
HfDirectory = Annotated[
    str, typer.Argument(metavar="HF_DIR", help="Checkpoint directory or hub id.", show_default=False)
]

MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens to generate.")]
Temperature = Annotated[
    float | None,
    typer.Option(min=0, help="Sampling temperature; takes effect with --top-k or --top-p, as in TensorRT-LLM."),
]
TopK = Annotated[int | None, typer.Option("--top-k", min=0, help="Sample from the k most likely tokens.")]
TopP = Annotated[
    float | None, typer.Option("--top-p", min=0, max=1, help="Sample from the likeliest tokens of mass p.")
]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of the sampling.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="WORD", help="Stop at this text; repeatable.")]

AnyConfig = TypeVar("AnyConfig", bound=Config)


_OPTIONS_OF = {
    "format": "--quant",
    "data.sequence_length": "--seq-len",
    "exclude_modules": "--exclude-module",
    "name_prefix": "--name",
    "target.tensorrt_llm": "--target-version",
}
"""The options of keys that they are not named after."""


def from_options(
    cls: type[AnyConfig], values: Mapping[str, Any], command: str, name: Callable[[str], str] | None = None
) -> AnyConfig:
    """A configuration from a command's options. Raises UsageError naming the option: the command line is wrong.

    `name`: what users know a key as, if not as the option that is named after it.
    """
    try:
        return cls.parse(values, command, name or _option_of)
    except ForgeError as error:
        raise UsageError(error.message, hint=error.hint) from None


def _option_of(key: str) -> str:
    if key.startswith("features."):
        return f"--feature {key.removeprefix('features.')}"
    return _OPTIONS_OF.get(key) or f"--{key.rpartition('.')[2].replace('_', '-')}"


_BACKENDS_OF = {
    "device": ("auto", "torch"),
    "compute_dtype": ("auto", "torch"),
    "workers": ("auto", "tensorrt_llm"),
}
"""The backends that heed an option; `auto` may become one that does."""


def require_heeded(context: typer.Context, backend: str) -> None:
    """Raises UsageError for an option on the command line that this backend ignores. Defaults are nobody's wish."""
    for name, backends in _BACKENDS_OF.items():
        source = context.get_parameter_source(name)
        # by name: newer releases of typer have a click of their own
        if source is not None and source.name == "COMMANDLINE" and backend not in backends:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} is of the {backends[-1]} backend; the {backend} backend ignores it",
                hint=f"Leave it out, or choose backend {backends[-1]}.",
            )
