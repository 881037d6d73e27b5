"""Strict accounting before any byte is written: every source tensor is used or known, with its shape and dtype."""

from trtforge.core.errors import ForgeError
from trtforge.formats.hf import HfCheckpoint
from trtforge.models.family import Family
from trtforge.models.plan import CheckpointPlan

_FLOATS = ("float32", "float16", "bfloat16")
_SHOWN = 5


def check_sources(checkpoint: HfCheckpoint, family: Family, plan: CheckpointPlan) -> None:
    """Raises ForgeError naming the tensors that are missing, unexpected, of another shape or of no float dtype."""
    quantized = checkpoint.config.values.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else "unknown"
        raise ForgeError(
            f"{checkpoint.directory} is already quantised ({method})",
            hint="Convert the original float16 or bfloat16 checkpoint; trtforge quantises it.",
        )
    missing = sorted(set(plan.sources) - set(checkpoint.tensors))
    if missing:
        raise ForgeError(
            f"{checkpoint.directory} lacks {_listed(missing)}",
            hint=f"A {family.name} checkpoint with this config.json has them: fetch the files again.",
        )
    unexpected = sorted(
        name
        for name in set(checkpoint.tensors) - set(plan.sources) - plan.optional
        if not name.endswith(family.dropped)
    )
    if unexpected:
        raise ForgeError(
            f"{checkpoint.directory} holds tensors that a {family.name} model has no place for: {_listed(unexpected)}",
            hint="Nothing is left out silently: config.json is of another model, or lacks attention_bias or mlp_bias.",
        )
    for name, shape in sorted(plan.sources.items()):
        stored = checkpoint.tensors[name]
        if stored.spec.shape != shape:
            raise ForgeError(
                f"{stored.file}: {name} has shape {list(stored.spec.shape)}, config.json says {list(shape)}",
                hint="config.json and the weights are of different models: fetch both again.",
            )
        if stored.spec.dtype.name not in _FLOATS:
            raise ForgeError(
                f"{stored.file}: {name} has dtype {stored.spec.dtype.name}",
                hint=f"Weights to convert are {', '.join(_FLOATS)}.",
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
