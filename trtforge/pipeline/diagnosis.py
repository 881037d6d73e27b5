"""Floor 5: advice after a failed quality gate."""

from shlex import join

from trtforge.core.operands import operand
from trtforge.core.recipe import Recipe
from trtforge.formats.hf import cached_source
from trtforge.models.formats import FORMATS
from trtforge.pipeline.paths import Paths


def ways_to_quality(recipe: Recipe, *, quantized: bool) -> str:
    """Advice on what to change so that the recipe passes its gate. `quantized`: its model is already quantised."""
    if quantized:
        return "the original float16 or bfloat16 checkpoint, which trtforge quantises, or wider limits (gate)"
    if not FORMATS[recipe.quantization.format].calibrated:
        return "another format, or exclude layers (quantization.exclude_modules)"
    return "more or better calibration data, another format, or exclude layers (quantization.exclude_modules)"


def diagnosis_command(recipe: Recipe, paths: Paths, *, quantized: bool) -> str:
    """The command that finds the layers responsible for the loss of quality.

    For a calibrated format the sensitivity analysis, which reuses the build's calibration and proposes the layers to
    exclude. Otherwise, or if that analysis cannot run (`quantized`: the model is already quantised; a memory limit, no
    limit in the gate), the error after each layer.
    """
    quant, gate, model = recipe.quantization, recipe.gate, recipe.model
    source = str(cached_source(model.source, model.revision) or model.source)
    limits = [f"{name}={limit:g}" for name, limit in gate.limits.items()]
    if quantized or not FORMATS[quant.format].calibrated or quant.memory is not None or not limits:
        words = ["verify", operand(paths.checkpoint), "--against", source, "--layers", "--data", gate.data]
        words += ["--samples", str(gate.samples), "--seq-len", str(gate.sequence_length)]
        return join(["trtforge", *words, *(["--gate", ",".join(limits)] if limits else [])])
    data = quant.calibration
    words = ["calibrate", operand(source), operand(paths.calibration), "--sensitivity", "--quant", quant.format]
    words += ["--kv-cache", quant.kv_cache, "--data", data.data, "--samples", str(data.samples)]
    words += ["--seq-len", str(data.sequence_length), "--batch-size", str(data.batch_size), "--seed", str(data.seed)]
    words += ["--device", recipe.engine.device]
    if FORMATS[quant.format].smoothing == "awq":
        words += ["--group-size", str(quant.group_size), *(["--awq-clip"] if quant.awq_clip else [])]
    if quant.rounding != "auto":
        words += ["--rounding", quant.rounding]
    if quant.kv_scales != "auto":
        words += ["--kv-scales", quant.kv_scales]
    limits += [f"data={gate.data}", f"samples={gate.samples}", f"sequence_length={gate.sequence_length}"]
    return join(["trtforge", *words, "--gate", ",".join(limits)])
