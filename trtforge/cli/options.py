"""Options that several commands share, each declared once."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from trtforge.cli import completion
from trtforge.core import defaults
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.reasoning import REASONING_PARSERS

if TYPE_CHECKING:
    from trtforge.core.config_model import Config

FORMAT_GROUP = "Data types and quantisation"
"""Title of these options in `--help`."""

ENDPOINTS = "Endpoints"
"""The group of the options that say where a server listens, in `--help`."""

SAMPLING = "Sampling"
"""The group of the sampling options in `--help`."""

MOST_INT32 = 2**31 - 1
"""The largest number that a tensor of TYPE_INT32 holds."""

MOST_SECONDS = 2_000_000
"""The largest time limit: poll(2) counts milliseconds in an int."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and no decoration.")]
KvCacheDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Directory for KV blocks of the embedded engine: later prompts with the same beginning reuse them, also "
        "after a restart.",
        show_default=False,
    ),
]
KvCacheDirBytes = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Maximum size of these blocks; the least recently used are deleted first.",
        show_default=defaults.KV_CACHE_DIR_SIZE,
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=ENDPOINTS,
        help="Host name, besides localhost, that clients may use while the server listens on loopback without API "
        "keys; repeatable.",
        show_default=False,
    ),
]
ReasoningParserOption = Annotated[
    str | None,
    typer.Option(
        "--reasoning-parser",
        metavar="NAME",
        autocompletion=completion.words(*REASONING_PARSERS),
        rich_help_panel=ENDPOINTS,
        help="Return the reasoning of a reasoning model separately from the answer, in chats of OpenAI's API: "
        "deepseek-r1 or qwen3, as in trtllm-serve.",
        show_default=False,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the traceback of an error and more of the log.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]
Force = Annotated[bool, typer.Option("--force", help="Build again even if the artifact is up to date.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe's dotted key; repeatable."),
]
Workers = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel="TensorRT-LLM build",
        help="Ranks built at the same time, at most one per GPU.",
    ),
]
Container = Annotated[
    str | None,
    typer.Option(
        metavar="IMAGE|none",
        rich_help_panel="TensorRT-LLM build",
        help="Container image to build in; none builds on this machine. Default: this machine if it has the target "
        "release, else the release's image.",
    ),
]
Out = Annotated[
    Path,
    typer.Argument(metavar="OUT", help="Output directory; it appears only when it is complete.", show_default=False),
]
BuildDirectory = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Build directory.", show_default="build/<recipe>")
]
HfDirectory = Annotated[
    str,
    typer.Argument(metavar="HF_DIR", help="Hugging Face checkpoint: a directory or a hub id.", show_default=False),
]

CHOICE = "Formats, layout, hardware"
"""The group of the options that choose them in `--help`."""

QUANT_HELP = "Weight format: none, fp8, fp8_rowwise, int4_awq, w4a8_awq, int8_sq, int8_wo, int4_wo or nvfp4."
"""Help of every option --quant."""


def _quant(metavar: str, further: str = "") -> Any:
    """The option --quant."""
    return typer.Option(
        "--quant",
        metavar=metavar,
        autocompletion=completion.formats,
        rich_help_panel=CHOICE,
        help=f"{QUANT_HELP}{further}",
    )


Quant = Annotated[str | None, _quant("FORMAT")]
Quants = Annotated[str | None, _quant("FORMAT[,...]", " Several: a build of each, and a comparison.")]
Tp = Annotated[int | None, typer.Option("--tp", min=1, metavar="N", rich_help_panel=CHOICE, help="Tensor parallelism.")]
Pp = Annotated[
    int | None, typer.Option("--pp", min=1, metavar="N", rich_help_panel=CHOICE, help="Pipeline parallelism.")
]
Ep = Annotated[int | None, typer.Option("--ep", min=1, metavar="N", rich_help_panel=CHOICE, help="Expert parallelism.")]
GpuName = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        autocompletion=completion.gpus,
        rich_help_panel=CHOICE,
        help="GPU to build for, such as h100-80gb.",
        show_default="a model's: this machine's",
    ),
]
GoalName = Annotated[
    str | None,
    typer.Option(
        "--goal",
        metavar="GOAL",
        autocompletion=completion.goals,
        rich_help_panel=CHOICE,
        help="For a model: choose values not given for latency, throughput, memory or quality.",
    ),
]

MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens",
        min=1,
        max=MOST_INT32,
        metavar="N",
        rich_help_panel=SAMPLING,
        help="Maximum number of new tokens.",
    ),
]


def _engines_temperature(value: float | None) -> float | None:
    """A temperature that the embedded engine takes. Raises BadParameter, also for one that is not a number."""
    least, most = 1 / defaults.MOST_FACTOR, defaults.MOST_FACTOR
    if value and not least <= value <= most:
        raise typer.BadParameter(f"{value:g} is neither 0 nor from {least:g} to {most:g}.")
    return value


Temperature = Annotated[
    float | None,
    typer.Option(
        callback=_engines_temperature,
        metavar="T",
        rich_help_panel=SAMPLING,
        help=f"Sampling temperature, 0 or from {1 / defaults.MOST_FACTOR:g} to {defaults.MOST_FACTOR:g}; takes effect "
        "with --top-k or --top-p, as in TensorRT-LLM.",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k",
        min=0,
        max=MOST_INT32,
        metavar="K",
        rich_help_panel=SAMPLING,
        help="Sample from the K most probable tokens.",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        min=0,
        max=1,
        metavar="P",
        rich_help_panel=SAMPLING,
        help="Sample from the most probable tokens with a total probability of P.",
    ),
]
Seed = Annotated[
    int | None, typer.Option(min=0, max=2**64 - 1, metavar="N", rich_help_panel=SAMPLING, help="Random seed.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", metavar="WORD", rich_help_panel=SAMPLING, help="End the answer before this text; repeatable."
    ),
]

AnyConfig = TypeVar("AnyConfig", bound="Config")

_OPTIONS_OF = {
    "format": "--quant",
    "data.sequence_length": "--seq-len",
    "features": "--feature",
    "exclude_modules": "--exclude-module",
    "allowed_hosts": "--allow-host",
    "backends": "--backend",
    "models": "--model",
    "client_namespaces": "--client-namespace",
    "name_prefix": "--name",
    "target.tensorrt_llm": "--target-version",
}
"""Configuration keys whose option has another name."""


def from_options(
    cls: type[AnyConfig], values: Mapping[str, Any], command: str, name: Callable[[str], str] | None = None
) -> AnyConfig:
    """A configuration from a command's options. Raises UsageError naming the option with the wrong value.

    `name` maps a key to the name that messages use, by default the key's option.
    """
    try:
        return cls.parse(values, command, name or _option_of)
    except ForgeError as error:
        raise UsageError(error.message, hint=error.hint).at(*error.where).repaired_by(error.repair) from None


def _option_of(key: str) -> str:
    """The option that gives a configuration key, or one of the values of a repeatable one."""
    key = re.sub(r"\.\d+$", "", key)
    if key.startswith("features."):
        return f"--feature {key.removeprefix('features.')}"
    return _OPTIONS_OF.get(key) or f"--{key.rpartition('.')[2].replace('_', '-')}"


_BACKENDS_OF = {
    "device": ("auto", "torch"),
    "compute_dtype": ("auto", "torch"),
    "int8_activations": ("auto", "torch"),
    "workers": ("auto", "tensorrt_llm"),
}
"""The backends that use an option; `auto` may resolve to one of them."""


def require_heeded(context: typer.Context, backend: str) -> None:
    """Raise UsageError if the command line gives an option that this backend ignores; defaults do not count."""
    for name, backends in _BACKENDS_OF.items():
        source = context.get_parameter_source(name)
        # compared by name: newer releases of typer have their own copy of click
        if source is not None and source.name == "COMMANDLINE" and backend not in backends:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} applies only to the {backends[-1]} backend; the {backend} backend ignores it",
                hint=f"Leave it out, or choose the {backends[-1]} backend.",
            )
