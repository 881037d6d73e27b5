"""`trtforge verify`: a checkpoint or an engine compared with its Hugging Face model."""

from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli.options import Json, Quiet, Verbose
from trtforge.core import defaults
from trtforge.core.errors import ForgeError

_EVALUATION = "Evaluation"


def verify(
    candidate: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT_OR_ENGINE", help="Checkpoint or engine to verify.", show_default=False),
    ],
    against: Annotated[
        str,
        typer.Option(
            metavar="HF_DIR",
            rich_help_panel=_EVALUATION,
            help="The Hugging Face checkpoint that it was made from.",
            show_default=False,
        ),
    ],
    data: Annotated[
        str, typer.Option(metavar="SRC", rich_help_panel=_EVALUATION, help="Evaluation data; see calibrate --data.")
    ] = defaults.CALIBRATION_DATA,
    samples: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=_EVALUATION, help="Number of samples.")
    ] = defaults.GATE_SAMPLES,
    seq_len: Annotated[
        int, typer.Option(min=2, metavar="N", rich_help_panel=_EVALUATION, help="Tokens per sample.")
    ] = defaults.GATE_TOKENS,
    gate: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|KEY=V,...",
            rich_help_panel=_EVALUATION,
            help="Limits: perplexity_increase, top1_agreement, kl_mean, kl_p99.",
        ),
    ] = None,
    layers: Annotated[
        bool,
        typer.Option("--layers", rich_help_panel=_EVALUATION, help="Also report the error after every decoder layer."),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare converted weights with the Hugging Face model.

    Reports perplexity, KL divergence (mean and 99th percentile) and top-1 agreement, with 95 % intervals. Exit status 1
    if the gate fails.

    Example: trtforge verify ./checkpoint --against ./llama --layers
    """
    from trtforge.cli.gate import parse_gate, show_verification
    from trtforge.cli.places import artifact_at
    from trtforge.core.progress import for_this_terminal
    from trtforge.formats.hf import resolve_source
    from trtforge.verify.stage import verify as run

    limits = parse_gate(gate, {"data": data, "samples": samples, "sequence_length": seq_len})
    progress = for_this_terminal(quiet=quiet or json)
    place = artifact_at(candidate, "checkpoint", "engine")
    with progress.waiting("verify"):
        result = run(place, resolve_source(against), limits, layers=layers, progress=progress)
    show_verification(result, json_output=json)
    if not result.passed:
        raise ForgeError(
            f"the quality gate failed: {'; '.join(map(str, result.failures))}",
            hint="Calibrate with more or better data, or use another format.",
        )
