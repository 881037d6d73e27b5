"""`trtforge compile`: from a checkpoint to an engine."""

from pathlib import Path
from shlex import join
from typing import Annotated

import typer

from trtforge.cli import completion, show
from trtforge.cli.options import (
    Container,
    Force,
    Json,
    Out,
    Quiet,
    Verbose,
    Workers,
    from_options,
    require_heeded,
)
from trtforge.core import defaults
from trtforge.core.operands import operand

_BACKEND = "Backend and target"
_LIMITS = "Engine limits"
_TORCH = "torch backend"
_LLMAPI = "llmapi backend, Hugging Face checkpoint"


def compile_(
    context: typer.Context,
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="TensorRT-LLM checkpoint; for the llmapi backend also a Hugging Face checkpoint.",
            show_default=False,
        ),
    ],
    out: Out,
    backend: Annotated[
        str,
        typer.Option(
            metavar="BACKEND",
            autocompletion=completion.backends,
            rich_help_panel=_BACKEND,
            help="Runtime of the engine: auto, tensorrt_llm, torch (the embedded engine) or llmapi.",
        ),
    ] = "auto",
    target_version: Annotated[
        str,
        typer.Option(metavar="VERSION", rich_help_panel=_BACKEND, help="TensorRT-LLM release that serves the engine."),
    ] = defaults.TENSORRT_LLM,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=completion.gpus,
            rich_help_panel=_BACKEND,
            help="GPU of the engine, such as h100-80gb.",
        ),
    ] = None,
    max_batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_LIMITS, help="Maximum number of requests in flight.")
    ] = defaults.MAX_BATCH_SIZE,
    max_input_len: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=_LIMITS, help="Maximum prompt length in tokens.")
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", rich_help_panel=_LIMITS, help="Maximum length of prompt plus output."),
    ] = None,
    max_num_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=_LIMITS, help="Maximum tokens per iteration.")
    ] = None,
    max_beam_width: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_LIMITS, help="Maximum beam width.")
    ] = 1,
    tokens_per_block: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=_LIMITS, help="Tokens per KV block.")
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            rich_help_panel=_LIMITS,
            help="A key of engine.features, such as kv_reuse, lookahead or lora.max_rank=16; repeatable.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            autocompletion=completion.devices,
            rich_help_panel=_TORCH,
            help="Device: auto, cpu or cuda.",
        ),
    ] = "auto",
    compute_dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            autocompletion=completion.dtypes,
            rich_help_panel=_TORCH,
            help="Compute dtype: auto, float16, bfloat16 or float32.",
        ),
    ] = "auto",
    int8_activations: Annotated[
        bool,
        typer.Option(
            "--int8-activations",
            rich_help_panel=_TORCH,
            help="INT4 layers round their activations to 8 bits on the CPU: faster for prompts and many requests.",
        ),
    ] = False,
    workers: Workers = 1,
    container: Container = None,
    tp: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=_LLMAPI, help="Tensor parallelism.")
    ] = None,
    pp: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=_LLMAPI, help="Pipeline parallelism.")
    ] = None,
    ep: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=_LLMAPI, help="Expert parallelism.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the build plan; build nothing.")] = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Build an engine with a paged KV cache and in-flight batching.

    --dry-run prints the exact build configuration and the command of every rank.

    Example: trtforge compile checkpoint engine --max-batch-size 32

    Example: trtforge compile checkpoint engine --feature lookahead --dry-run
    """
    from trtforge.cli.features import parse_features
    from trtforge.cli.places import artifact_at
    from trtforge.compile.stage import CompileOptions, compile_engine, plan_engine
    from trtforge.core.output_place import require_output
    from trtforge.core.parallel import Parallel
    from trtforge.core.progress import for_this_terminal
    from trtforge.core.recipe import EngineConfig
    from trtforge.formats.foreign import foreign_note

    config = from_options(
        EngineConfig,
        {
            "backend": backend,
            "device": device,
            "compute_dtype": compute_dtype,
            "int8_activations": int8_activations,
            "target": {"gpu": gpu, "tensorrt_llm": target_version},
            "max_batch_size": max_batch_size,
            "max_input_len": max_input_len,
            "max_seq_len": max_seq_len,
            "max_num_tokens": max_num_tokens,
            "max_beam_width": max_beam_width,
            "tokens_per_block": tokens_per_block,
            "features": parse_features(feature or []),
        },
        "compile",
    )
    require_heeded(context, config.backend)
    parallel = Parallel(tp or 1, pp or 1, ep or 1) if tp or pp or ep else None
    options = CompileOptions(workers=workers, container=container, parallel=parallel)
    checkpoint = artifact_at(checkpoint, "checkpoint")
    if dry_run:
        planned = plan_engine(config, checkpoint, out, options).as_json()
        show.as_json(planned | {"warnings": [*filter(None, [foreign_note(checkpoint)]), *planned["warnings"]]})
        return
    require_output(out, "engine")
    progress = for_this_terminal(quiet=quiet or json)
    with progress.waiting("compile"):
        result = compile_engine(config, checkpoint, out, options, force=force, progress=progress, warn=show.warning)
    note = foreign_note(checkpoint)
    next_command = join(["trtforge", "package", operand(out), "REPOSITORY"])
    show.produced(result, json_output=json, next_command=next_command, more={"notes": [note]} if note else None)
