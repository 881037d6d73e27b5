"""The stages one by one: calibrate, convert, verify, compile, package."""

from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli import show
from trtforge.cli.options import (
    Container,
    Force,
    HfDirectory,
    Json,
    Out,
    Quiet,
    Set,
    Verbose,
    Workers,
    from_options,
    require_heeded,
)
from trtforge.cli.sensitivity import DEFAULT_GATE, show_sensitivity
from trtforge.core.errors import ForgeError, UsageError


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (calibrate, convert, verify, compile_, package):
        app.command(command.__name__.rstrip("_"), rich_help_panel="Stages")(command)


def calibrate(
    hf_dir: HfDirectory,
    out: Out,
    quant: Annotated[
        str,
        typer.Option(
            metavar="fp8|int4_awq|w4a8_awq|int8_sq|nvfp4|none",
            help="Format to calibrate for; none: the KV cache alone.",
            show_default=False,
        ),
    ],
    kv_cache: Annotated[str, typer.Option(metavar="none|fp8|int8", help="Format of the KV cache.")] = "none",
    data: Annotated[
        str,
        typer.Option(
            help="FILE.jsonl, .txt, .parquet, .safetensors, hf:ID\\[@REVISION][:CONFIG[:SPLIT]] or builtin:stdlib."
        ),
    ] = "builtin:stdlib",
    samples: Annotated[int, typer.Option(min=1, help="Number of samples.")] = 128,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens of a sample.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per forward pass.")] = 8,
    group_size: Annotated[int, typer.Option(metavar="64|128", help="INT4-AWQ group.")] = 128,
    awq_clip: Annotated[bool, typer.Option("--awq-clip", help="AWQ: also search where to clip blocks.")] = False,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Stay under this, such as 16GB; hidden states go to disk.")
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Also find the linear layers that lose most, and what to leave out.")
    ] = False,
    gate: Annotated[
        str | None,
        typer.Option(metavar="FILE|KEY=V,...", help=f"--sensitivity: what to reach; {DEFAULT_GATE} if not given."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Order in which samples are drawn.")] = 0,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where the model runs.")] = "auto",
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure a model's activations once, for every parallel layout.

    With --sensitivity each linear layer is also quantised alone, and the fewest are found that must stay as they are
    for the gate to hold: convert's --exclude-module, or exclude_modules in a recipe.

    [dim]Example: trtforge calibrate ./llama ./calibration --quant int4_awq --data prompts.jsonl[/dim]
    """
    from trtforge.calibrate.stage import CalibrateConfig
    from trtforge.calibrate.stage import calibrate as run
    from trtforge.cli.gate import parse_gate
    from trtforge.core.progress import for_this_terminal
    from trtforge.formats.calibration import open_calibration
    from trtforge.formats.hf import resolve_source
    from trtforge.models.formats import FORMATS

    if quant in FORMATS and quant != "none" and not FORMATS[quant].calibrated:
        raise UsageError(
            f"--quant {quant} needs no calibration", hint=f"Run `trtforge convert {hf_dir} CHECKPOINT --quant {quant}`."
        )
    config = from_options(
        CalibrateConfig,
        {
            "format": quant,
            "kv_cache": kv_cache,
            "group_size": group_size,
            "awq_clip": awq_clip,
            "memory": memory,
            "device": device,
            "data": {
                "data": data,
                "samples": samples,
                "sequence_length": seq_len,
                "batch_size": batch_size,
                "seed": seed,
            },
        },
        "calibrate",
    )
    if quant == "none" and kv_cache == "none":
        raise UsageError("--quant none without --kv-cache: nothing needs a calibration", hint="Give either.")
    if FORMATS[config.format].smoothing != "awq" and (awq_clip or group_size != 128):
        option = "--awq-clip" if awq_clip else "--group-size"
        raise UsageError(f"{option} is of AWQ; --quant {quant} has no use for it", hint="Leave it out.")
    if gate is not None and not sensitivity:
        raise UsageError("--gate without --sensitivity", hint="`trtforge verify --gate` checks a checkpoint.")
    if sensitivity and memory is not None:
        raise UsageError(
            "--sensitivity with --memory: the analysis keeps all hidden states of the gate's samples in memory",
            hint="Calibrate with --memory first, then run it again with --sensitivity alone.",
        )
    if sensitivity and quant == "none":
        raise UsageError("--sensitivity without a format", hint="Give --quant.")
    source, progress = resolve_source(hf_dir), for_this_terminal(quiet=quiet or json)
    limits = parse_gate(gate or DEFAULT_GATE, {})
    result = run(config, source, out, force=force, progress=progress)
    for warning in open_calibration(out).warnings:
        show.warning(warning)
    following = f"trtforge convert {hf_dir} CHECKPOINT --quant {quant} --kv-cache {kv_cache} --calibration {out}"
    if not sensitivity:
        show.produced(result, json_output=json, next_command=following)
        return
    from trtforge.pipeline.sensitivity import analyse

    found = analyse(config, source, out, limits, progress)
    excluded = found.proposal.exclude_modules if found.proposal else ()
    following += "".join(f" --exclude-module {name}" for name in excluded)
    if not json:
        show_sensitivity(found)
    show.produced(result, json_output=json, next_command=following, more={"sensitivity": found.as_json()})
    if found.proposal is None:
        raise ForgeError(
            f"no exclusions meet the gate: {'; '.join(map(str, found.last.verification.failures))} with all left out",
            hint="What is left is the KV cache, the model's own dtype, or experts: change those, or the gate.",
        )


def convert(
    hf_dir: HfDirectory,
    out: Out,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline parallelism.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallelism: groups of whole experts.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context parallelism.")] = 1,
    dtype: Annotated[
        str, typer.Option(metavar="auto|float16|bfloat16|float32", help="auto: the source's; float32 becomes float16.")
    ] = "auto",
    quant: Annotated[
        str,
        typer.Option(
            metavar="none|fp8|fp8_rowwise|int4_awq|w4a8_awq|int8_sq|int8_wo|int4_wo|nvfp4",
            help="Format; a quantised source keeps its own.",
        ),
    ] = "none",
    kv_cache: Annotated[str, typer.Option(metavar="none|fp8|int8", help="Format of the KV cache.")] = "none",
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration directory; fp8, int4_awq, w4a8_awq, int8_sq and nvfp4 need one.")
    ] = None,
    exclude_module: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Linear layer that stays as it is, such as *.0.mlp.down_proj; repeatable."
        ),
    ] = None,
    parallel_embedding: Annotated[bool, typer.Option("--parallel-embedding", help="Shard the embedding too.")] = False,
    embedding_sharding_dim: Annotated[int, typer.Option(min=0, max=1, help="0: vocabulary, 1: hidden size.")] = 0,
    shared_pre_quant_scale: Annotated[
        bool,
        typer.Option("--shared-pre-quant-scale", help="AWQ: one scale for gate and up, as backend llmapi needs it."),
    ] = False,
    allow_nonfinite: Annotated[
        bool,
        typer.Option("--allow-nonfinite", help="Convert NaN and infinite weights with a warning; verify refuses them."),
    ] = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a TensorRT-LLM checkpoint for a parallel layout, streamed from safetensors.

    [dim]Example: trtforge convert ./llama ./checkpoint --tp 2 --quant int4_awq --calibration ./calibration[/dim]
    """
    from trtforge.convert.stage import ConvertConfig
    from trtforge.convert.stage import convert as run
    from trtforge.core.progress import for_this_terminal
    from trtforge.formats.hf import resolve_source

    config = from_options(
        ConvertConfig,
        {
            "tp": tp,
            "pp": pp,
            "ep": ep,
            "cp": cp,
            "dtype": dtype,
            "quant": quant,
            "kv_cache": kv_cache,
            "exclude_modules": tuple(exclude_module or ()),
            "parallel_embedding": parallel_embedding,
            "embedding_sharding_dim": embedding_sharding_dim,
            "shared_pre_quant_scale": shared_pre_quant_scale,
            "allow_nonfinite": allow_nonfinite,
        },
        "convert",
    )
    if embedding_sharding_dim and not parallel_embedding:
        raise UsageError("--embedding-sharding-dim without --parallel-embedding", hint="Give both.")
    if shared_pre_quant_scale and quant not in ("int4_awq", "w4a8_awq"):
        raise UsageError("--shared-pre-quant-scale is for AWQ", hint="Leave it out, or give --quant int4_awq.")
    source, progress = resolve_source(hf_dir), for_this_terminal(quiet=quiet or json)
    result = run(config, source, out, calibration=calibration, force=force, progress=progress)
    following = f"verify {out} --against {hf_dir}" if cp == 1 else f"compile {out} ENGINE --backend tensorrt_llm"
    show.produced(result, json_output=json, next_command=f"trtforge {following}")


def verify(
    candidate: Annotated[Path, typer.Argument(metavar="CHECKPOINT_OR_ENGINE", show_default=False)],
    against: Annotated[str, typer.Option(help="The Hugging Face checkpoint it was made from.", show_default=False)],
    data: Annotated[str, typer.Option(help="As for calibrate.")] = "builtin:stdlib",
    samples: Annotated[int, typer.Option(min=1, help="Number of samples.")] = 32,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens of a sample.")] = 256,
    gate: Annotated[
        str | None, typer.Option(metavar="FILE|KEY=V,...", help="Limits: perplexity_increase, top1_agreement, kl_mean.")
    ] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Also the error after every layer: which one broke.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare converted ranks with the Hugging Face model: perplexity, KL divergence, agreement.

    Exit status 1 when the gate does not hold.

    [dim]Example: trtforge verify ./checkpoint --against ./llama --gate perplexity_increase=0.01[/dim]
    """
    from trtforge.cli.gate import parse_gate, show_verification
    from trtforge.core.progress import for_this_terminal
    from trtforge.formats.hf import resolve_source
    from trtforge.verify.stage import verify as run

    limits = parse_gate(gate, {"data": data, "samples": samples, "sequence_length": seq_len})
    progress = for_this_terminal(quiet=quiet or json)
    result = run(candidate, resolve_source(against), limits, layers=layers, progress=progress)
    show_verification(result, json_output=json)
    if not result.passed:
        raise ForgeError(
            f"the gate does not hold: {'; '.join(map(str, result.failures))}",
            hint="Calibrate with more or better data, or use another format.",
        )


def compile_(
    context: typer.Context,
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="For llmapi also a Hugging Face directory.", show_default=False),
    ],
    out: Out,
    backend: Annotated[str, typer.Option(metavar="auto|tensorrt_llm|torch|llmapi", help="Who runs it.")] = "auto",
    tp: Annotated[
        int | None, typer.Option(min=1, help="llmapi, of a Hugging Face directory: tensor parallelism.")
    ] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="As --tp: pipeline parallelism.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="As --tp: expert parallelism.")] = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="torch backend: where it runs.")] = "auto",
    compute_dtype: Annotated[
        str, typer.Option(metavar="auto|float16|bfloat16|float32", help="torch backend: type of the arithmetic.")
    ] = "auto",
    target_version: Annotated[str, typer.Option(help="TensorRT-LLM release that serves the engine.")] = "1.2.1",
    gpu: Annotated[str | None, typer.Option(help="GPU the engine is for.")] = None,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Requests in flight at once.")] = 64,
    max_input_len: Annotated[int | None, typer.Option(min=1, help="Longest prompt in tokens.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(min=2, help="Longest prompt plus output.")] = None,
    max_num_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in one step.")] = None,
    max_beam_width: Annotated[int, typer.Option(min=1, help="Beams of a request.")] = 1,
    tokens_per_block: Annotated[int | None, typer.Option(min=1, help="Tokens in one KV cache block.")] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]", help="kv_reuse, lora.max_rank=16, lookahead, ...: engine.features; repeatable."
        ),
    ] = None,
    workers: Workers = 1,
    container: Container = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the exact plan and build nothing.")] = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Build an engine from a checkpoint: paged KV cache and in-flight batching on.

    [dim]Example: trtforge compile ./checkpoint ./engine --backend tensorrt_llm --max-batch-size 32 --dry-run[/dim]

    [dim]Example: trtforge compile ./checkpoint ./engine --backend tensorrt_llm --feature lookahead --dry-run[/dim]
    """
    from trtforge.cli.features import parse_features
    from trtforge.compile.stage import CompileOptions, compile_engine, plan_engine
    from trtforge.core.parallel import Parallel
    from trtforge.core.progress import for_this_terminal
    from trtforge.core.recipe import EngineConfig

    config = from_options(
        EngineConfig,
        {
            "backend": backend,
            "device": device,
            "compute_dtype": compute_dtype,
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
    if dry_run:
        show.as_json(plan_engine(config, checkpoint, out, options).as_json())
        return
    progress = for_this_terminal(quiet=quiet or json)
    result = compile_engine(config, checkpoint, out, options, force=force, progress=progress)
    show.produced(result, json_output=json, next_command=f"trtforge package {out} REPOSITORY")


def package(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", show_default=False)],
    out: Out,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of the tokenizer; left out: the engine's own.", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option(metavar="PREFIX", help="Put before the five model names.")] = "",
    feature: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="What an engine was built for that was not compiled here."),
    ] = None,
    target_version: Annotated[
        str | None, typer.Option(help="TensorRT-LLM release that serves it.", show_default="the engine's own")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU that serves it, such as h100-80gb.", show_default=False)] = None,
    set_: Set = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Generate the Triton model repository of an engine; an engine that cannot run on its target is refused.

    [dim]Example: trtforge package ./engine ./repository --set serving.scheduler=max_utilization[/dim]
    """
    from trtforge.cli.features import parse_features
    from trtforge.cli.settings import serving_settings
    from trtforge.core.features import FeaturesConfig
    from trtforge.package.models import PackageConfig
    from trtforge.package.stage import package as run
    from trtforge.package.target import PackageTarget

    features = from_options(FeaturesConfig, parse_features(feature), "--feature", str) if feature else None
    target = PackageTarget(tensorrt_llm=target_version, gpu=gpu)
    serving = serving_settings(set_ or [])
    values = {"serving": serving, "name_prefix": name, "features": features, "target": target}
    config = from_options(PackageConfig, values, "package")
    result = run(config, engine, tokenizer, out, force=force)
    show.produced(result, json_output=json, next_command=f"trtforge serve {out}")
