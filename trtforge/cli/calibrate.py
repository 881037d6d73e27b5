"""`trtforge calibrate`: the statistics that scaling factors are computed from."""

from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import completion, show
from trtforge.cli.options import Force, HfDirectory, Json, Out, Quiet, Verbose, from_options
from trtforge.cli.sensitivity import DEFAULT_GATE, show_sensitivity
from trtforge.core import defaults
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.operands import operand

if TYPE_CHECKING:
    from trtforge.calibrate.stage import CalibrateConfig
    from trtforge.pipeline.sensitivity import Sensitivity

_FORMAT = "Quantisation"
_SAMPLES = "Calibration samples"
_SENSITIVITY = "Sensitivity analysis"
_EXECUTION = "Execution"


def calibrate(
    hf_dir: HfDirectory,
    out: Out,
    quant: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            autocompletion=completion.calibrated_formats,
            rich_help_panel=_FORMAT,
            help="Format to calibrate for: fp8, int4_awq, w4a8_awq, int8_sq, nvfp4, int4_wo (to round with "
            "compensation), or none (the KV cache only).",
            show_default=False,
        ),
    ],
    kv_cache: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            autocompletion=completion.kv_formats,
            rich_help_panel=_FORMAT,
            help="Format of the KV cache: none, fp8 or int8.",
        ),
    ] = "none",
    group_size: Annotated[
        int, typer.Option(metavar="N", rich_help_panel=_FORMAT, help="AWQ group size: 64 or 128.")
    ] = defaults.GROUP_SIZE,
    awq_clip: Annotated[
        bool,
        typer.Option("--awq-clip", rich_help_panel=_FORMAT, help="AWQ: also search the clipping range of each group."),
    ] = False,
    kv_scales: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            autocompletion=completion.words("auto", "largest", "searched"),
            rich_help_panel=_FORMAT,
            help="Scales of the KV cache: largest (from the largest magnitude, as in ModelOpt), searched (smallest "
            "error of attention), or auto: searched for int8, largest for fp8.",
        ),
    ] = "auto",
    rounding: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            autocompletion=completion.roundings,
            rich_help_panel=_FORMAT,
            help="Rounding of 4-bit weights: nearest (as in ModelOpt), compensated (later columns correct errors), or "
            "auto: compensated.",
        ),
    ] = "auto",
    data: Annotated[
        str,
        typer.Option(
            metavar="SRC",
            rich_help_panel=_SAMPLES,
            help="A .jsonl, .txt, .parquet or .safetensors file, builtin:stdlib, or a dataset of the hub: hf:ID, "
            "hf:ID:CONFIG or hf:ID:CONFIG:SPLIT; hf:ID@REVISION fixes its revision.",
        ),
    ] = defaults.CALIBRATION_DATA,
    samples: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_SAMPLES, help="Number of calibration samples.")
    ] = defaults.CALIBRATION_SAMPLES,
    seq_len: Annotated[
        int, typer.Option(min=2, metavar="N", rich_help_panel=_SAMPLES, help="Tokens per sample.")
    ] = defaults.CALIBRATION_TOKENS,
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_SAMPLES, help="Samples per forward pass.")
    ] = defaults.CALIBRATION_BATCH_SIZE,
    seed: Annotated[
        int, typer.Option(metavar="N", rich_help_panel=_SAMPLES, help="Random seed for drawing samples.")
    ] = 0,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            rich_help_panel=_SENSITIVITY,
            help="Also rank the linear layers by quantisation error and propose which ones to exclude.",
        ),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            rich_help_panel=_SENSITIVITY,
            help="Rank by running the model with each layer quantised alone, instead of predicting its error.",
        ),
    ] = False,
    gate: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|KEY=V,...",
            rich_help_panel=_SENSITIVITY,
            help="Limits that the proposal must meet.",
            show_default=DEFAULT_GATE,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            autocompletion=completion.devices,
            rich_help_panel=_EXECUTION,
            help="Device: auto, cpu or cuda.",
        ),
    ] = "auto",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            rich_help_panel=_EXECUTION,
            help="Memory limit, such as 16GB; hidden states are kept on disk.",
        ),
    ] = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Collect activation statistics, once for every parallel layout.

    With --sensitivity, the error of quantising each linear layer alone is predicted to find the smallest set of layers
    to exclude so that the gate passes. Pass these layers to convert's --exclude-module, or to exclude_modules in a
    recipe.

    Example: trtforge calibrate ./llama ./calibration --quant int4_awq
    """
    from trtforge.calibrate.stage import CalibrateConfig
    from trtforge.calibrate.stage import calibrate as run
    from trtforge.cli.gate import parse_gate
    from trtforge.core.output_place import require_output
    from trtforge.core.progress import for_this_terminal
    from trtforge.formats.calibration import open_calibration
    from trtforge.formats.hf import resolve_source

    _require_calibrated(quant, kv_cache, hf_dir)
    sampling = {"data": data, "samples": samples, "sequence_length": seq_len, "batch_size": batch_size, "seed": seed}
    config = from_options(
        CalibrateConfig,
        {
            "format": quant,
            "kv_cache": kv_cache,
            "group_size": group_size,
            "awq_clip": awq_clip,
            "rounding": rounding,
            "kv_scales": kv_scales,
            "memory": memory,
            "device": device,
            "data": sampling,
        },
        "calibrate",
    )
    _require_consistent(config, gate, sensitivity=sensitivity, measure=measure)
    require_output(out, "calibration")
    source, progress = resolve_source(hf_dir), for_this_terminal(quiet=quiet or json)
    limits = parse_gate(gate or DEFAULT_GATE, {})
    with progress.waiting("calibrate"):
        result = run(config, source, out, force=force, progress=progress)
    for warning in open_calibration(out).warnings:
        show.warning(warning)
    following = ["trtforge", "convert", operand(hf_dir), "CHECKPOINT", "--quant", quant, "--kv-cache", kv_cache]
    following += ["--calibration", str(out)]
    if not sensitivity:
        show.produced(result, json_output=json, next_command=join(following))
        return
    from trtforge.pipeline.sensitivity import analyse

    with progress.waiting("sensitivity"):
        found = analyse(config, source, out, limits, progress, measured=measure)
    for name in found.proposal.exclude_modules if found.proposal else ():
        following += ["--exclude-module", name]
    if not json:
        show_sensitivity(found)
    show.produced(result, json_output=json, next_command=join(following), more={"sensitivity": found.as_json()})
    _keep(found, out)
    _require_proposal(found)


def _require_proposal(found: "Sensitivity") -> None:
    """Raise ForgeError if no exclusions meet the gate."""
    if found.proposal is None:
        raise ForgeError(
            f"no exclusions meet the gate: {'; '.join(map(str, found.last.verification.failures))} "
            f"with {len(found.last.exclude_modules)} layers excluded",
            hint="The remaining error comes from the KV cache, the dtype or the experts: change those, or the gate.",
        )


def _keep(found: "Sensitivity", out: Path) -> None:
    """Keep the ranking for the reports of builds; a place that cannot be written to is a warning."""
    from trtforge.pipeline.report_facts import sensitivity_file
    from trtforge.pipeline.sensitivity import keep

    try:
        keep(found, out)
    except OSError as error:
        show.warning(f"{sensitivity_file(out)}: {error.strerror}; reports of builds will not show the ranking")


def _require_calibrated(quant: str, kv_cache: str, hf_dir: str) -> None:
    """Raise UsageError for a format that is converted to without a calibration, which a KV cache may need alone."""
    from trtforge.models.formats import FORMATS
    from trtforge.plan.formats import CACHES

    if quant in FORMATS and quant != "none" and not FORMATS[quant].calibrated and len(FORMATS[quant].methods) == 1:
        converted = f"trtforge convert {quote(hf_dir)} CHECKPOINT --quant {quant}"
        if kv_cache in CACHES and CACHES[kv_cache].calibrated:
            own = f"trtforge calibrate {quote(hf_dir)} CALIBRATION --quant none --kv-cache {kv_cache}"
            raise UsageError(
                f"--quant {quant} needs no calibration, and --kv-cache {kv_cache} one of its own",
                hint=f"Run `{own}`, then `{converted} --kv-cache {kv_cache} --calibration CALIBRATION`.",
            )
        cached = "" if kv_cache == "none" else f" --kv-cache {kv_cache}"
        raise UsageError(f"--quant {quant} needs no calibration", hint=f"Run `{converted}{cached}`.")


def _require_consistent(config: "CalibrateConfig", gate: str | None, *, sensitivity: bool, measure: bool) -> None:
    """Raise UsageError for options that exclude one another."""
    from trtforge.calibrate.stage import require_measured
    from trtforge.models.formats import FORMATS

    if config.format == "none" and config.kv_cache == "none":
        raise UsageError("--quant none without --kv-cache: nothing needs a calibration", hint="Give one of them.")
    if FORMATS[config.format].smoothing != "awq" and (config.awq_clip or config.group_size != 128):
        option = "--awq-clip" if config.awq_clip else "--group-size"
        raise UsageError(f"{option} applies only to AWQ formats, not to --quant {config.format}", hint="Leave it out.")
    require_measured(config)
    if gate is not None and not sensitivity:
        raise UsageError("--gate without --sensitivity", hint="To check a checkpoint, run `trtforge verify --gate`.")
    if measure and not sensitivity:
        raise UsageError("--measure without --sensitivity", hint="Give --sensitivity, or leave --measure out.")
    if sensitivity and config.memory is not None:
        raise UsageError(
            "--sensitivity with --memory: the analysis keeps all hidden states of the gate's samples in memory",
            hint="Calibrate with --memory first, then run again with --sensitivity and without --memory.",
        )
    if sensitivity and config.format == "none":
        raise UsageError("--sensitivity without a weight format", hint="Give a format other than none to --quant.")
    if sensitivity and FORMATS[config.format].rounding is None:
        raise UsageError(
            f"--sensitivity is not available for {config.format}, whose weights TensorRT-LLM's build rounds",
            hint="Run `trtforge verify CHECKPOINT --against HF_DIR --layers` for the error of each layer.",
        )
