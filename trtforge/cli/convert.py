"""`trtforge convert`: from a Hugging Face checkpoint to a TensorRT-LLM checkpoint."""

from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import completion, show
from trtforge.cli.options import FORMAT_GROUP, QUANT_HELP, Force, HfDirectory, Json, Out, Quiet, Verbose, from_options
from trtforge.core.errors import UsageError
from trtforge.core.operands import operand

if TYPE_CHECKING:
    from trtforge.convert.stage import ConvertConfig
    from trtforge.core.features import Drafting
    from trtforge.core.progress import Silent, Terminal

_PARALLELISM = "Parallelism"
_DRAFTING = "Speculative decoding"


def convert(
    hf_dir: HfDirectory,
    out: Out,
    tp: Annotated[int, typer.Option(min=1, metavar="N", rich_help_panel=_PARALLELISM, help="Tensor parallelism.")] = 1,
    pp: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_PARALLELISM, help="Pipeline parallelism.")
    ] = 1,
    ep: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=_PARALLELISM,
            help="Expert parallelism: groups of ranks, each with whole experts.",
        ),
    ] = 1,
    cp: Annotated[int, typer.Option(min=1, metavar="N", rich_help_panel=_PARALLELISM, help="Context parallelism.")] = 1,
    parallel_embedding: Annotated[
        bool,
        typer.Option("--parallel-embedding", rich_help_panel=_PARALLELISM, help="Split the embedding over ranks."),
    ] = False,
    embedding_sharding_dim: Annotated[
        int,
        typer.Option(
            min=0,
            max=1,
            metavar="N",
            rich_help_panel=_PARALLELISM,
            help="Split the embedding along 0, the vocabulary, or 1, the hidden size.",
        ),
    ] = 0,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            autocompletion=completion.dtypes,
            rich_help_panel=FORMAT_GROUP,
            help="float16, bfloat16, float32, or auto: the checkpoint's dtype, with float32 stored as float16.",
        ),
    ] = "auto",
    quant: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            autocompletion=completion.formats,
            rich_help_panel=FORMAT_GROUP,
            help=f"{QUANT_HELP} A quantised checkpoint keeps its own format.",
        ),
    ] = "none",
    kv_cache: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            autocompletion=completion.kv_formats,
            rich_help_panel=FORMAT_GROUP,
            help="Format of the KV cache: none, fp8 or int8.",
        ),
    ] = "none",
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=FORMAT_GROUP,
            help="Calibration directory; required for fp8, int4_awq, w4a8_awq, int8_sq and nvfp4, used for int4_wo.",
        ),
    ] = None,
    exclude_module: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            rich_help_panel=FORMAT_GROUP,
            help="Linear layers to leave unquantised, such as *.0.mlp.down_proj; repeatable.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="BITS",
            rich_help_panel=FORMAT_GROUP,
            help="int4_awq in mixed precision: maximum mean bits per weight, such as 4.5bits; the layers that would "
            "lose most accuracy get fp8 or stay unquantised.",
        ),
    ] = None,
    medusa: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_DRAFTING,
            help="Medusa heads that become part of the checkpoint: a directory with medusa_lm_head.safetensors.",
        ),
    ] = None,
    medusa_heads: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", rich_help_panel=_DRAFTING, help="Take the first N heads; default: at most 4."),
    ] = None,
    eagle: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=_DRAFTING,
            help="EAGLE network (1 or 2) that becomes part of the checkpoint: its directory.",
        ),
    ] = None,
    eagle_layers: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", rich_help_panel=_DRAFTING, help="Runs of the EAGLE network in a step; default: 4."
        ),
    ] = None,
    max_draft_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=_DRAFTING,
            help="Draft tokens that a TensorRT engine verifies in a step; default: 63.",
        ),
    ] = None,
    shared_pre_quant_scale: Annotated[
        bool,
        typer.Option(
            "--shared-pre-quant-scale",
            rich_help_panel=FORMAT_GROUP,
            help="AWQ: one pre-quantisation scale for gate and up, which the llmapi backend requires.",
        ),
    ] = False,
    allow_nonfinite: Annotated[
        bool,
        typer.Option(
            "--allow-nonfinite",
            rich_help_panel=FORMAT_GROUP,
            help="Warn about NaN and infinite weights instead of refusing them; verify still refuses them.",
        ),
    ] = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Convert to a TensorRT-LLM checkpoint for one parallel layout.

    The weights are streamed from safetensors files: the model is never in memory as a whole.

    Example: trtforge convert ./llama ./checkpoint --tp 2 --quant int8_wo
    """
    from trtforge.cli.places import artifact_at
    from trtforge.convert.stage import ConvertConfig
    from trtforge.convert.stage import convert as run
    from trtforge.core.output_place import require_output
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
        raise UsageError(
            "--shared-pre-quant-scale applies only to AWQ formats", hint="Leave it out, or give --quant int4_awq."
        )
    drafting = _drafting(medusa, medusa_heads, eagle, eagle_layers, max_draft_len)
    require_output(out, "checkpoint")
    source, progress = resolve_source(hf_dir), for_this_terminal(quiet=quiet or json)
    calibration = None if calibration is None else artifact_at(calibration, "calibration")
    if budget is not None:
        config = _budgeted(config, budget, source, calibration, progress)
    with progress.waiting("convert"):
        result = run(config, source, out, calibration=calibration, drafting=drafting, force=force, progress=progress)
    verify = ["verify", operand(out), "--against", hf_dir]
    compile_ = ["compile", operand(out), "ENGINE", "--backend", "tensorrt_llm"]
    show.produced(result, json_output=json, next_command=join(["trtforge", *(verify if cp == 1 else compile_)]))


def _drafting(
    medusa: Path | None, heads: int | None, eagle: Path | None, layers: int | None, draft_tokens: int | None
) -> "Drafting | None":
    """The Medusa heads or EAGLE network to convert with the model; None without.

    Raises UsageError for options that do not belong together.
    """
    from trtforge.core.features import EagleFeature, MedusaFeature

    if medusa is not None and eagle is not None:
        raise UsageError("--medusa and --eagle: a checkpoint has only one of them", hint="Leave one out.")
    for option, given, needed, there in (
        ("--medusa-heads", heads, "--medusa", medusa),
        ("--eagle-layers", layers, "--eagle", eagle),
        ("--max-draft-len", draft_tokens, "--medusa or --eagle", medusa or eagle),
    ):
        if given is not None and there is None:
            raise UsageError(f"{option} applies only to {needed}", hint=f"Give {needed}, or leave {option} out.")
    if medusa is not None:
        return MedusaFeature(model=str(medusa), heads=heads, draft_tokens=draft_tokens)
    return None if eagle is None else EagleFeature(model=str(eagle), depth=layers, draft_tokens=draft_tokens)


def _budgeted(
    config: "ConvertConfig", budget: str, source: Path, calibration: Path | None, progress: "Terminal | Silent"
) -> "ConvertConfig":
    """The configuration with the formats that the budget affords."""
    from trtforge.core.recipe import GateConfig
    from trtforge.core.sizes import parse_bits
    from trtforge.pipeline.mixed import choose_formats

    bits = parse_bits(budget, "--budget")
    if config.quant != "int4_awq" or calibration is None:
        raise UsageError(
            "--budget applies only to --quant int4_awq with its calibration",
            hint="Give --quant int4_awq and --calibration DIR, or leave --budget out.",
        )
    if config.pp > 1:
        raise UsageError(
            "--budget with --pp: TensorRT-LLM numbers the layers of each pipeline stage from 0",
            hint="Give --pp 1, or leave --budget out.",
        )
    with progress.waiting("formats"):
        mixed = choose_formats(
            bits,
            source,
            calibration,
            GateConfig(),
            exclude_modules=config.exclude_modules,
            progress=progress,
        )
    return config.model_copy(update={"budget": bits, "formats": mixed.formats})
