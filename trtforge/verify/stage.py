"""The verify stage: compares the converted ranks, on our runtime, with the Hugging Face model in `transformers`."""

from dataclasses import replace
from pathlib import Path

from trtforge.core.errors import ForgeError
from trtforge.core.manifest import Manifest, is_foreign
from trtforge.core.progress import Progress, Silent
from trtforge.core.recipe import GateConfig
from trtforge.formats.corpus import TokenWindows, needs_tokenizer, token_windows
from trtforge.formats.foreign import checkpoint_manifest, engine_manifest
from trtforge.formats.hf import TOKENIZER_DIRECTORY, HfCheckpoint, open_checkpoint
from trtforge.formats.quantization_config import read_quantized_source
from trtforge.formats.shards import read_header
from trtforge.formats.tokenizer import require_tokenizer
from trtforge.formats.trtllm import (
    CheckpointConfig,
    is_engine,
    rank_file,
    read_checkpoint_config,
    read_engine_config,
)
from trtforge.models.checkpoint_config import formats_in, layout_of_checkpoint
from trtforge.models.checkpoint_plan import checkpoint_plan
from trtforge.models.exclusions import modules_excluded_by
from trtforge.models.registry import family_of, family_of_checkpoint
from trtforge.verify.foreign import differing_fields, source_note
from trtforge.verify.result import Verification, failures


def verify(
    candidate: Path, reference: Path, gate: GateConfig, *, layers: bool = False, progress: Progress | None = None
) -> Verification:
    """Compare `candidate` (a checkpoint, or a torch engine as it was compiled) with `reference` in float32.

    `layers`: also report the error of every decoder layer's output.

    Raises ForgeError for a damaged artifact, a damaged tokenizer and unusable data. A failed gate does not raise; the
    result lists `failures`.
    """
    from trtforge.runtime.ranks.source import open_model

    engine = is_engine(candidate)
    if engine:
        open_model(candidate)  # refuses a TensorRT engine before it is hashed
    manifest = engine_manifest(candidate) if engine else checkpoint_manifest(candidate)
    config = read_engine_config(candidate)[0] if engine else read_checkpoint_config(candidate)
    source = open_checkpoint(reference)
    notes = _require_same_model(candidate, config, manifest, source)
    require_tokenizer(candidate / TOKENIZER_DIRECTORY, config.vocab_size)
    if needs_tokenizer(gate.data):
        require_tokenizer(reference, config.vocab_size)
    if not engine:
        _check_tensors(candidate, config, manifest, source, progress or Silent())
    windows = token_windows(
        gate.data,
        reference,
        samples=gate.samples,
        length=gate.sequence_length,
        vocab_size=config.vocab_size,
        seed=0,
        part="held_out",
    )
    tensors = sum(len(read_header(candidate / rank_file(rank.index))) for rank in config.parallel.ranks)
    found = _compare(candidate, source, gate, windows, tensors, layers, progress or Silent())
    return found.model_copy(update={"notes": notes})


def _require_same_model(
    candidate: Path, config: CheckpointConfig, manifest: Manifest, reference: HfCheckpoint
) -> tuple[str, ...]:
    """Notes on a foreign checkpoint: unrecorded facts, and fields of its config.json that differ from the model's.

    Raises ForgeError if the candidate was made from another model (for engines and foreign checkpoints, only sizes are
    compared).
    """
    facts = family_of(reference.config.architecture).facts(reference.config)
    sizes, foreign = facts.sizes, is_foreign(manifest)
    pairs = {
        "vocab_size": (config.vocab_size, sizes.vocab),
        "hidden_size": (config.hidden_size, sizes.hidden),
        "num_hidden_layers": (config.num_hidden_layers, sizes.num_layers),
    }
    differing = [key for key, (own, other) in pairs.items() if own != other]
    if manifest.identity.stage == "checkpoint" and not foreign:
        made_from = manifest.identity.inputs
        differing += [name for name, digest in reference.digests.items() if made_from.get(name) != digest]
    if differing:
        raise ForgeError(
            f"{reference.directory} is not the model that the candidate was made from: {differing[0]} differs",
            hint="Give the Hugging Face checkpoint that was converted as --against.",
        )
    return (source_note(candidate), *differing_fields(config, facts)) if foreign else ()


def _check_tensors(
    candidate: Path, config: CheckpointConfig, manifest: Manifest, reference: HfCheckpoint, progress: Progress
) -> None:
    """Compare copied tensors bit for bit; the logits cover quantised and repacked ones."""
    from trtforge.verify.tensors import check_tensors

    family, layout = family_of_checkpoint(reference), layout_of_checkpoint(config)
    if layout is not None:
        source, facts = read_quantized_source(reference.config), family.facts(reference.config)
        excluded = () if source or config.quantization.quantized_layers else modules_excluded_by(config, family, facts)
        layout = replace(
            layout,
            source=source,
            exclude_modules=excluded,
            formats=formats_in(config, family, facts),
            compensated=manifest.identity.config.get("rounding") == "compensated",
        )
        plan = checkpoint_plan(family, facts, layout)
        check_tensors(candidate, reference, plan, layout, progress)


def _compare(
    candidate: Path,
    reference: HfCheckpoint,
    gate: GateConfig,
    windows: TokenWindows,
    tensors: int,
    layers: bool,
    progress: Progress,
) -> Verification:
    from trtforge.verify.layers import compare_by_layer

    comparison, by_layer = compare_by_layer(candidate, reference, windows.windows, progress, layers=layers)
    perplexity, divergence = comparison.perplexity, comparison.divergences
    agreement = comparison.agreements / comparison.tokens
    return Verification(
        perplexity=perplexity,
        kl=divergence,
        top1_agreement=agreement,
        max_abs_logit_error=comparison.largest_error,
        tokens=comparison.tokens,
        tensors_checked=tensors,
        failures=failures(gate, perplexity.increase, agreement, divergence),
        layers=by_layer,
        blocks=comparison.blocks,
    )
