"""`trtforge plan`: memory, concurrency, estimated speed and alternatives of a deployment."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtforge.cli import show
from trtforge.cli.options import FORMAT_GROUP, Json, Set, Verbose
from trtforge.core.errors import ForgeError, UsageError

if TYPE_CHECKING:
    from trtforge.core.recipe import Recipe
    from trtforge.plan.alternatives import Alternative, Goal
    from trtforge.plan.planner import Plan


_DEPLOYMENT = "Deployment"
_WORKLOAD = "Workload"
_ALTERNATIVES = "Alternatives"


def plan(
    source: Annotated[
        str,
        typer.Argument(metavar="RECIPE_OR_HF_DIR", help="Recipe, checkpoint directory or hub id.", show_default=False),
    ],
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=_DEPLOYMENT, help="GPU to serve on, such as h100-80gb."),
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
            help="Expert parallelism: groups that hold whole experts.",
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
            metavar="DTYPE", rich_help_panel=FORMAT_GROUP, help="The model's dtype: auto, float16, bfloat16 or float32."
        ),
    ] = None,
    quant: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            rich_help_panel=FORMAT_GROUP,
            help="Weight format: none, fp8, fp8_rowwise, int4_awq, w4a8_awq, int8_sq, int8_wo, int4_wo or nvfp4.",
        ),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
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
        typer.Option(metavar="GOAL", rich_help_panel=_ALTERNATIVES, help="latency, throughput, memory or quality."),
    ] = "throughput",
    set_: Set = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Plan a deployment: legality, memory, concurrency, speed.

    Only config.json and safetensors headers are read. An illegal configuration is reported with the nearest legal one,
    and the exit status is 1. Times are estimates.

    Example: trtforge plan Qwen/Qwen2.5-7B --gpu h100-80gb --tp 2 --quant fp8

    Example: trtforge plan mine.yaml --alternatives --goal latency
    """
    from trtforge.plan.model import find_model
    from trtforge.plan.planner import plan as make
    from trtforge.plan.request import Option, request_of
    from trtforge.plan.roofline import Workload

    recipe = _recipe(source, tuple(set_ or ()))
    if group_size not in (None, 64, 128):
        raise UsageError(
            f"--group-size {group_size}: the group size must be 64 or 128", hint="Use --group-size 64 or 128."
        )
    model = find_model(recipe.model.source, recipe.model.revision)
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
    result = make(model, request, _goal(goal), with_alternatives=alternatives)
    if json:
        show.as_json(result.as_json())
    else:
        _show(result, goal, wanted=alternatives)
    for fix in result.fixes[:1]:
        raise ForgeError(fix.problem.message, hint=fix.text)


def _recipe(source: str, overrides: tuple[str, ...]) -> "Recipe":
    """The recipe, or a recipe with defaults for the model."""
    from trtforge.core.recipe import Recipe, load_recipe

    if not Path(source).is_dir() and (Path(source).is_file() or "/" not in source):
        from trtforge.cli.recipes import find

        return load_recipe(find(source), overrides)
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


def _show(result: "Plan", goal: str, *, wanted: bool) -> None:
    evaluation, request = result.evaluation, result.evaluation.request
    embedded = evaluation.embedded
    anything = embedded.device if embedded else "any GPU"
    on = f"{request.tp * request.pp} x {request.engine.target.gpu or anything}"
    formats = f"weights {request.quant}, KV cache {request.kv_cache}, {request.dtype}"
    print(f"{result.model.name}: tp {request.tp}, pp {request.pp}, ep {request.ep} on {on}; {formats}")
    if embedded is not None:
        print(f"embedded engine: computes in {embedded.compute_dtype} on {embedded.device}, kernels {embedded.kernel}")
    print("legal" if evaluation.legal else "not legal")
    for fix in result.fixes:
        print(f"  problem: {fix.problem.message}\n    fix: {fix.text}")
    _memory(result)
    _capacity(result)
    for warning in (*evaluation.warnings, *result.model.notes):
        print(f"warning: {warning}")
    _estimates(result)
    if result.fits:
        fits = ((found.request.tp * found.request.pp, found.request.engine.target.gpu) for found in result.fits)
        print(f"fits: {', '.join(f'{gpus} x {gpu}' for gpus, gpu in fits)}")
    if wanted:
        _alternatives(result.alternatives, goal)


_ROWS = (
    ("weights", "weights"),
    ("KV pool", "kv_pool"),
    ("activations (upper bound)", "activations"),
    ("logits", "logits"),
    ("sampling buffers (upper bound)", "decoder"),
    ("runtime (estimate)", "runtime"),
    ("LoRA adapters", "lora"),
    ("drafting (upper bound)", "draft"),
    ("total", "total"),
)
_OF_FEATURES = ("lora", "draft")


def _memory(result: "Plan") -> None:
    memory = result.evaluation.memory
    if memory is not None:
        sizes = [(label, name, getattr(memory.fullest, name), memory.over_all(name)) for label, name in _ROWS]
        rows = [
            [label, show.size(one), show.size(every)]
            for label, name, one, every in sizes
            if every or name not in _OF_FEATURES
        ]
        show.table("Memory", ["", "fullest GPU", "all GPUs"], rows)
        if memory.over_all("host"):
            print(f"host memory: {show.size(memory.over_all('host'))} for adapters and streamed weights")
    print(f"model: weights {show.size(result.weights)}, KV cache {result.kv_per_token:,} bytes per token")


def _capacity(result: "Plan") -> None:
    evaluation, memory = result.evaluation, result.evaluation.memory
    limits, typical, peaks = evaluation.limits, evaluation.typical, result.peaks
    if memory is not None and limits is not None and typical is not None and memory.kv_tokens:
        needs = f" (as --concurrency {evaluation.request.concurrency or 1} needs)"
        asked = "" if evaluation.request.gpu or evaluation.embedded else needs
        full = f"{evaluation.full_length_requests:,} requests of {limits.max_seq_len:,}"
        print(
            f"KV pool{asked}: {memory.kv_tokens:,} tokens = {full} or {evaluation.typical_requests:,} of "
            f"{typical.length:,} tokens; max_batch_size is {limits.max_batch_size:,}"
        )
        print(f"longest prompt: {evaluation.longest_prompt:,} tokens")
    if peaks.calibration_gpu is not None:
        print(f"calibration: {show.size(peaks.calibration_gpu)} of GPU memory, layer by layer")
    if peaks.quantise_at_once_gpu is not None:
        print(f"quantisation with the whole model in memory: {show.size(peaks.quantise_at_once_gpu)}")
    print(f"verification: {show.size(peaks.verify_host)} of host memory")
    if peaks.build_gpu is not None and peaks.build_host_per_worker is not None:
        print(
            f"engine build: {show.size(peaks.build_gpu)} of GPU memory and {show.size(peaks.build_host_per_worker)} of "
            "host memory for each rank that is built at the same time"
        )


def _estimates(result: "Plan") -> None:
    typical = result.evaluation.typical
    if not result.curve or typical is None:
        return
    rows = [
        [str(p.concurrency), f"{1e3 * p.ttft:.0f} ms", f"{1e3 * p.tpot:.1f} ms", f"{p.tokens_per_second:,.0f}"]
        for p in result.curve
    ]
    show.table("Estimates, not measurements", ["concurrency", "TTFT", "TPOT", "tokens/s"], rows)
    print(f"for requests with {typical.prompt:,} prompt tokens and {typical.output:,} output tokens")


def _alternatives(found: "Sequence[Alternative]", goal: str) -> None:
    if not found:
        print("alternatives: no legal configuration found")
        return
    names = {one.evaluation.request.engine.target.gpu for one in found}
    rows = []
    for number, one in enumerate(found, 1):
        request, memory, point = one.evaluation.request, one.evaluation.memory, one.performance
        rows.append(
            [
                f"{number}: {one.gpus}" + (f" x {request.engine.target.gpu}" if len(names) > 1 else ""),
                f"{request.tp}/{request.pp}" + (f"/{request.ep}" if request.ep > 1 else ""),
                f"{request.quant} {request.kv_cache}",
                f"{memory.kv_tokens if memory else 0:,}",
                f"{point.concurrency}",
                f"{1e3 * point.ttft:.0f} {1e3 * point.tpot:.1f}",
                f"{one.tokens_per_second_per_gpu:,.0f}",
            ]
        )
    columns = ["GPUs", "tp/pp", "weights KV", "KV tokens", "concurrency", "TTFT TPOT", "tokens/s/GPU"]
    show.table(f"Alternatives, best first for {goal}", columns, rows)
    for number, one in enumerate(found, 1):
        print(f"{number}: {one.why}")
