"""`trtforge run`: build what is missing, serve it, open a chat."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli import completion
from trtforge.cli.build import How, build_chosen
from trtforge.cli.chat import ChatReasoning, System, parser_of, talk
from trtforge.cli.chosen import Choice, choose
from trtforge.cli.options import (
    BuildDirectory,
    Ep,
    GoalName,
    GpuName,
    MaxTokens,
    Pp,
    Quant,
    Quiet,
    Seed,
    Set,
    Temperature,
    TopK,
    TopP,
    Tp,
    Verbose,
)
from trtforge.cli.resumption import resumable_part
from trtforge.core import defaults
from trtforge.core.builds import RECIPE_FILE, require_one_build
from trtforge.core.errors import UsageError


def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_BUILD",
            autocompletion=completion.recipes,
            help="Model directory, hub id, recipe, or a build directory.",
            show_default=False,
        ),
    ],
    out: BuildDirectory = None,
    quant: Quant = None,
    tp: Tp = None,
    pp: Pp = None,
    ep: Ep = None,
    gpu: GpuName = None,
    goal: GoalName = None,
    set_: Set = None,
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    reasoning_parser: ChatReasoning = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Build a model if needed, serve it, and chat with it.

    The server ends with the chat; use `trtforge serve` to keep one running.

    Example: trtforge run Qwen/Qwen2.5-0.5B-Instruct --quant int4_awq

    Example: trtforge run build/demo-int4awq
    """
    from trtforge.cli.places import artifact_at
    from trtforge.serve.client import Sampling

    parser = parser_of(reasoning_parser)
    choice = Choice(quant, tp, pp, ep, gpu, goal)
    overrides = tuple(set_ or ())
    given = bool(choice.words or overrides or out is not None)
    if _is_ready(Path(target)) and not given:
        build = artifact_at(Path(target), "repository")
    else:
        if quant is not None and "," in quant:
            raise UsageError(f"--quant {quant}: run takes one format", hint="Use `trtforge build` for several.")
        require_one_build(Path(target), "repository")
        with resumable_part("run"), redirect_stdout(sys.stderr):  # only answers are data here
            asked = choose(target, choice, overrides, out)
            build_chosen(asked, How(quiet=quiet))
        build = asked.out
    sampling = Sampling(max_tokens, temperature, top_k, top_p, seed, finish_reason=True)
    talk(defaults.GRPC_URL, build, None, system, sampling, parser=parser, quiet=quiet)


def _is_ready(directory: Path) -> bool:
    """Whether this is a build that can be served as it is: its derived recipe, if it has one, was not edited."""
    from trtforge.pipeline.derivation import is_unedited

    if not (directory / "repository").is_dir():
        return False
    recipe = directory / RECIPE_FILE
    return not recipe.is_file() or is_unedited(recipe.read_text(encoding="utf-8", errors="replace"))
