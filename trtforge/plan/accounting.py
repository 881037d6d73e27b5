"""Strict accounting before any byte is written: every source tensor is expected, with its shape and dtype."""

from trtforge.core.errors import ForgeError
from trtforge.core.figures import listed
from trtforge.formats.hf import HfCheckpoint
from trtforge.formats.quantization_config import contradiction
from trtforge.formats.shards import StoredTensor
from trtforge.models.checkpoint_plan import CheckpointPlan
from trtforge.models.family import Embedding, Facts, Family
from trtforge.models.stored_parts import FLOATS, Expected

_SHOWN = 5
_OF_ADAPTERS = "base_model."
_EXPORT = "Export it again without {}, or convert the original float16 or bfloat16 checkpoint."
_OF_QUANTISED = ("qweight", "weight_packed", "weight_scale")
_WITHOUT_COUNTERPART = {
    ("k_proj.k_bias", "v_proj.v_bias"): ("the offsets of an affine KV cache", "them (ModelOpt's FP8_KV_CFG)"),
    ("zero_point", "qzeros"): ("zero points", "them (symmetric quantisation)"),
    ("act.scales",): ("scales of activations (AutoAWQ's ScaledActivation)", "them"),
    ("g_idx",): ("an order of the inputs (act-order)", "it"),
    ("pre_quant_scale",): ("a pre-quantisation scale of a layer that has none in this format", "it"),
    ("svdquant_lora_a", "svdquant_lora_b"): ("the low-rank part of SVDQuant", "it"),
    ("compressed", "bitmask"): ("sparse weights", "sparsity"),
}
"""Tensors that tools store beside quantised weights, by the end of their names: what they are, for messages, and the
option to export without."""


def check_sources(checkpoint: HfCheckpoint, family: Family, facts: Facts, plan: CheckpointPlan) -> None:
    """Raises ForgeError naming the tensors that are missing, unexpected, or of the wrong shape or dtype."""
    try:
        _check_sources(checkpoint, family, facts, plan)
    except ForgeError as error:
        said = contradiction(checkpoint.config) if plan.stored.tensors else None
        if said is None:
            raise
        raise ForgeError(error.message, hint=f"{said}. Correct the wrong file, or fetch both again.") from None


def _check_sources(checkpoint: HfCheckpoint, family: Family, facts: Facts, plan: CheckpointPlan) -> None:
    stored = plan.stored.tensors
    required = set(plan.sources) | {name for name, expected in stored.items() if not expected.optional}
    if stored:
        _require_plain_tables(checkpoint, family)
    missing = sorted(required - set(checkpoint.tensors))
    if missing:
        raise ForgeError(
            f"{checkpoint.directory} lacks {listed(missing, _SHOWN)}",
            hint=_way_out(checkpoint, family, plan, missing),
        )
    unexpected = sorted(
        name
        for name in set(checkpoint.tensors) - set(plan.sources) - set(plan.ties) - set(stored)
        if not name.endswith(family.dropped) and not family.carries(name, facts.sizes.num_layers)
    )
    if unexpected and stored:
        _require_counterparts(checkpoint, unexpected)
    if unexpected:
        raise ForgeError(
            f"{checkpoint.directory} holds unexpected tensors for a {family.name} model: {listed(unexpected, _SHOWN)}",
            hint="config.json belongs to another model, or lacks attention_bias or mlp_bias.",
        )
    wanted = {name: Expected(shape, FLOATS) for name, shape in plan.sources.items()} | dict(stored)
    for name, expected in sorted(wanted.items()):
        if name in checkpoint.tensors:
            _check(checkpoint.tensors[name], expected, exactly=name not in stored)


def _require_plain_tables(checkpoint: HfCheckpoint, family: Family) -> None:
    """Raises ForgeError for a quantised embedding or head."""
    for row in family.model:
        if isinstance(row, Embedding):
            module = row.source.removesuffix(".weight")
            found = [name for suffix in _OF_QUANTISED if (name := f"{module}.{suffix}") in checkpoint.tensors]
            if found:
                raise ForgeError(
                    f"{checkpoint.directory}: {module} is quantised ({listed(found, _SHOWN)}), which is not supported",
                    hint=f"Quantise with {module} excluded, or convert the original float16 or bfloat16 checkpoint.",
                )


def _require_counterparts(checkpoint: HfCheckpoint, unexpected: list[str]) -> None:
    """Raises ForgeError, with the reason, for tensors whose function TensorRT-LLM's layers lack."""
    for endings, (what, without) in _WITHOUT_COUNTERPART.items():
        found = [name for name in unexpected if name.endswith(endings)]
        if found:
            raise ForgeError(
                f"{checkpoint.directory} holds {what}, which TensorRT-LLM's checkpoints lack: {listed(found, _SHOWN)}",
                hint=_EXPORT.format(without),
            )


def _way_out(checkpoint: HfCheckpoint, family: Family, plan: CheckpointPlan, missing: list[str]) -> str:
    """Advice for missing tensors: they may be stored under another name or not needed."""
    for head, table in plan.ties.items():
        if table in missing and head in checkpoint.tensors:
            return f"{head}, which is tied to it, is stored instead: load and save the model with transformers."
    heads = [row.source for row in family.model if isinstance(row, Embedding) and row.tied]
    if missing == heads:
        return (
            'If its head is its embedding, set "tie_word_embeddings": true in config.json; else fetch the files again.'
        )
    stored = next((name for name in sorted(checkpoint.tensors) if name.endswith(f".{missing[0]}")), None)
    if stored is None:
        return f"A {family.name} checkpoint with this config.json needs them: fetch the files again."
    if stored.startswith(_OF_ADAPTERS):
        return f"{stored} is stored, as PEFT names it: save the model after `merge_and_unload`."
    return f"{stored} is stored: save the model's own tensors, without what wraps it (torch.compile, data parallelism)."


def _check(found: StoredTensor, expected: Expected, *, exactly: bool) -> None:
    spec, where = found.spec, f"{found.file}: {found.spec.name}"
    if not (spec.shape == expected.shape if exactly else expected.fits(spec.shape)):
        raise ForgeError(
            f"{where} has shape {list(spec.shape)}, config.json says {list(expected.shape)}",
            hint="config.json and the weights are of different models: fetch both again.",
        )
    if spec.dtype.name not in expected.dtypes:
        raise ForgeError(
            f"{where} has dtype {spec.dtype.name}, which cannot be converted",
            hint=f"Supported here: {', '.join(expected.dtypes)}.",
        )
