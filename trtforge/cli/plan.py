"""`trtforge plan`: memory, concurrency, estimated speed and alternatives of a deployment."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtforge.cli import completion, show
from trtforge.cli.options import FORMAT_GROUP, QUANT_HELP, Json, Set, Verbose
from trtforge.core.errors import ForgeError, Repair, UsageError

if TYPE_CHECKING:
    from trtforge.core.recipe import Recipe
    from trtforge.plan.alternatives import Goal


_DEPLOYMENT = "Deployment"
_WORKLOAD = "Workload"
_ALTERNATIVES = "Alternatives"


def plan(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_HF_DIR",
            autocompletion=completion.recipes,
            help="Recipe, checkpoint directory or hub id.",
            show_default=False,
        ),
    ],
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=completion.gpus,
            rich_help_panel=_DEPLOYMENT,
            help="GPU to serve on, such as h100 or l40s.",
        ),
    ] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=_DEPLOYMENT, help="Tensor parallelism.")
    ] = None,
    pp: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=_DEPLOYMENT, help="Pipeline parallelism.")
    ] = None,
    ep: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=_DEPLOYMENT,
            help="Expert parallelism: groups of ranks, each with whole experts.",
        ),
    ] = None,
    target_version: Annotated[
        str | None, typer.Option(metavar="VERSION", rich_help_panel=_DEPLOYMENT, help="TensorRT-LLM release.")
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", rich_help_panel=_DEPLOYMENT, help="Maximum length of prompt plus output."),
    ] = None,
    max_num_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=_DEPLOYMENT, help="Maximum tokens per iteration.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            autocompletion=completion.dtypes,
            rich_help_panel=FORMAT_GROUP,
            help="The model's dtype: auto, float16, bfloat16 or float32.",
        ),
    ] = None,
    quant: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            autocompletion=completion.formats,
            rich_help_panel=FORMAT_GROUP,
            help=QUANT_HELP,
        ),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            autocompletion=completion.kv_formats,
            rich_help_panel=FORMAT_GROUP,
            help="Format of the KV cache: none (the model's dtype), fp8 or int8.",
        ),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(metavar="N", rich_help_panel=FORMAT_GROUP, help="AWQ group size: 64 or 128.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", rich_help_panel=_WORKLOAD, help="Typical requests that must run at the same time."
        ),
    ] = None,
    prompt_len: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_WORKLOAD, help="Tokens of a typical prompt.")
    ] = 1024,
    output_len: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_WORKLOAD, help="Tokens of a typical output.")
    ] = 256,
    alternatives: Annotated[
        bool,
        typer.Option("--alternatives", rich_help_panel=_ALTERNATIVES, help="Rank legal configurations by --goal."),
    ] = False,
    goal: Annotated[
        str,
        typer.Option(
            metavar="GOAL",
            autocompletion=completion.goals,
            rich_help_panel=_ALTERNATIVES,
            help="latency, throughput, memory or quality.",
        ),
    ] = "throughput",
    set_: Set = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Plan a deployment: legality, memory, concurrency, speed.

    Only config.json and safetensors headers are read. Without --tp and --pp, the fewest GPUs into which the model fits
    are planned. An illegal configuration is reported with the nearest legal one, and the exit status is 1, or 0 if
    --alternatives finds legal ones. Times are estimates. A TensorRT-LLM checkpoint is planned in its own layout and
    formats.

    Example: trtforge plan Qwen/Qwen2.5-7B --gpu h100-80gb --tp 2 --quant fp8

    Example: trtforge plan mine.yaml --alternatives --goal latency
    """
    from trtforge.cli.plan_view import show_plan
    from trtforge.plan.checkpoint_model import model_to_plan
    from trtforge.plan.planner import plan as make
    from trtforge.plan.request import Option, request_of
    from trtforge.plan.roofline import Workload

    recipe = _recipe(source, tuple(set_ or ()))
    if group_size not in (None, 64, 128):
        raise UsageError(
            f"--group-size {group_size}: the group size must be 64 or 128", hint="Use --group-size 64 or 128."
        )
    model = model_to_plan(recipe.model.source, recipe.model.revision)
    options: dict[Option, Any] = {
        "--tp": tp,
        "--pp": pp,
        "--ep": ep,
        "--quant": quant,
        "--kv-cache": kv_cache,
        "--group-size": group_size,
        "--dtype": dtype,
        "--gpu": gpu,
        "--target-version": target_version,
        "--max-seq-len": max_seq_len,
        "--max-num-tokens": max_num_tokens,
        "--concurrency": concurrency,
    }
    request = request_of(recipe, model, options, Workload(prompt_len, output_len))
    asked = any(size is not None for size in (tp, pp, ep)) or "parallel" in recipe.model_fields_set
    result = make(model, request, _goal(goal), with_alternatives=alternatives, any_layout=not asked)
    if json:
        show.as_json(result.as_json())
    else:
        show_plan(result, goal, wanted=alternatives)
    if not result.alternatives:  # a legal alternative is what --alternatives asks for
        for fix in result.fixes[:1]:
            changes = tuple((change.option, change.value) for change in fix.changes)
            repair = Repair(options=changes) if changes else None
            raise ForgeError(fix.problem.message, hint=fix.text).repaired_by(repair)


def _recipe(source: str, overrides: tuple[str, ...]) -> "Recipe":
    """The recipe, or a recipe with defaults for the model."""
    from trtforge.cli.chosen import located
    from trtforge.cli.places import artifact_at
    from trtforge.core.recipe import Recipe, load_recipe

    source = located(source)
    if Path(source).is_dir():
        source = str(artifact_at(Path(source), "checkpoint"))
    if not Path(source).is_dir() and (Path(source).is_file() or "/" not in source):
        from trtforge.cli.recipes import find

        return load_recipe(find(source, models=True), overrides)
    if overrides:
        raise UsageError(
            f"--set applies only to recipes, and {source} is a model", hint="Give a recipe, or use the options."
        )
    return Recipe.parse({"name": "plan", "model": {"source": source}}, "plan")


def _goal(name: str) -> "Goal":
    from trtforge.plan.alternatives import GOALS

    for goal in GOALS:
        if goal == name:
            return goal
    raise typer.BadParameter(f"{name} is not a goal: {', '.join(GOALS)}", param_hint="--goal")
