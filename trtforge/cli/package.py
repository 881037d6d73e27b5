"""`trtforge package`: from an engine to a Triton model repository."""

from pathlib import Path
from shlex import join
from typing import Annotated

import typer

from trtforge.cli import completion, show
from trtforge.cli.options import Force, Json, Out, Quiet, Set, Verbose, from_options
from trtforge.core.operands import operand

_REPOSITORY = "Model repository"
_TARGET = "Target"


def package(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine directory.", show_default=False)],
    out: Out,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_REPOSITORY,
            help="Tokenizer directory.",
            show_default="the engine's tokenizer",
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(metavar="PREFIX", rich_help_panel=_REPOSITORY, help="Prefix of the five model names."),
    ] = "",
    set_: Set = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            rich_help_panel=_TARGET,
            help="Feature of an engine that trtforge did not compile; repeatable.",
        ),
    ] = None,
    target_version: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            rich_help_panel=_TARGET,
            help="TensorRT-LLM release that serves the engine.",
            show_default="the engine's own",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=completion.gpus,
            rich_help_panel=_TARGET,
            help="GPU that serves the engine, such as h100-80gb.",
            show_default=False,
        ),
    ] = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Generate the Triton model repository of an engine.

    An engine that cannot run on the target is refused.

    Example: trtforge package ./engine ./repository --gpu h100-80gb
    """
    from trtforge.cli.features import parse_features
    from trtforge.cli.places import artifact_at
    from trtforge.cli.settings import serving_settings
    from trtforge.core.features import FeaturesConfig
    from trtforge.core.output_place import require_output
    from trtforge.package.config import PackageConfig
    from trtforge.package.stage import package as run
    from trtforge.package.target import PackageTarget

    features = from_options(FeaturesConfig, parse_features(feature), "--feature", str) if feature else None
    target = PackageTarget(tensorrt_llm=target_version, gpu=gpu)
    serving = serving_settings(set_ or [])
    values = {"serving": serving, "name_prefix": name, "features": features, "target": target}
    config = from_options(PackageConfig, values, "package")
    require_output(out, "repository")
    result = run(config, artifact_at(engine, "engine"), tokenizer, out, force=force)
    show.produced(result, json_output=json, next_command=join(["trtforge", "serve", operand(out)]))
