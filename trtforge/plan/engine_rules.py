"""Whether TensorRT-LLM builds an engine of a checkpoint; plan, convert and compile share these rules.

They judge release, family, format, layout, sizes and GPU from the checkpoint's config.json alone. `convert` checks with
plan.network_rules whether any release builds it. The rules do not apply to the embedded engine.
"""

from collections.abc import Iterator

from trtforge.core.device import BFLOAT16_SM
from trtforge.core.parallel import Parallel
from trtforge.formats.releases import Problem as ReleaseProblem
from trtforge.formats.releases import Release
from trtforge.formats.trtllm import MIXED_PRECISION, CheckpointConfig
from trtforge.models.checkpoint_sizes import quantised_linears, sizes_of
from trtforge.models.family import Family, Split
from trtforge.models.registry import WITH_VISION_ONLY, family_of_engine
from trtforge.plan.formats import BY_ALGORITHM, CACHE_BY_ALGORITHM, CacheFormat, WeightFormat
from trtforge.plan.gpus import GPUS_PER_SERVER, Gpu, refusal
from trtforge.plan.legality import Problem
from trtforge.plan.network_rules import network_problems, unquantised_rows

HEAD_SIZES = (32, 48, 64, 80, 96, 104, 112, 128, 144, 160, 192, 224, 256)
"""`mmha_supported` in cpp/tensorrt_llm/kernels/decoderMaskedMultiheadAttention.cu."""

_INT4_COLUMN_BYTES = 32


def engine_problems(
    checkpoint: CheckpointConfig, release: Release, gpu: Gpu | None = None, *, fits: bool = True
) -> Iterator[Problem]:
    """All problems of a checkpoint in TensorRT-LLM; `fits`: whether its layout is legal for the model."""
    family = family_of_engine(checkpoint.base_architecture)
    weights = BY_ALGORITHM.get(checkpoint.quantization.quant_algo)
    cache = CACHE_BY_ALGORITHM.get(checkpoint.quantization.kv_cache_quant_algo)
    if gpu is not None:
        yield from gpu_problems(gpu, weights, cache, checkpoint.dtype)
        yield from link_problems(gpu, checkpoint.parallel)
    yield from release_problems(checkpoint, release)
    yield from kernel_problems(checkpoint)
    yield from mixed_problems(checkpoint)
    yield from network_problems(checkpoint, release, converted=fits)
    if fits and weights is not None:
        if family is not None:
            yield from padding_problems(checkpoint, family, weights)
        yield from head_problems(checkpoint.vocab_size, checkpoint.parallel.tp, weights)


def mixed_problems(checkpoint: CheckpointConfig) -> Iterator[Problem]:
    """Mixed precision in TensorRT engines.

    `PretrainedConfig` reads quant_cfg.json (tensorrt_llm/models/modeling_utils.py). 0.17.0.dev2024121700 looks a
    layer up by its exact name (`get_quant_cfg`). In the 1.x line (commit 01ea6d79) `layer_quant_mode` and
    `_get_quant_cfg` call `fnmatch`, which the file imports as a module: every lookup is a TypeError. The releases'
    own tags were not seen, nor an engine that any of them built.
    """
    if checkpoint.quantization.quant_algo == MIXED_PRECISION:
        yield Problem(
            "mixed_precision",
            "TensorRT engines of mixed precision are not supported: no release is known to build them",
            "Use engine.backend llmapi or torch, or one format for all layers (no quantization.budget).",
        )


def gpu_problems(gpu: Gpu, weights: WeightFormat | None, cache: CacheFormat | None, dtype: str) -> Iterator[Problem]:
    """Number formats for which the GPU has no kernels; None: an unknown format."""
    for rule, format in (("gpu_format", weights), ("gpu_kv_cache", cache)):
        if format is not None and (why := refusal(gpu, format)) is not None:
            yield Problem(rule, why, "Choose another format or another --gpu.")
    if dtype == "bfloat16" and gpu.sm < BFLOAT16_SM:
        # gptAttentionCommon.cpp; TensorRT-LLM issue #2210
        message = f"{gpu.name} has compute capability {gpu.capability}: bfloat16 needs 8.0 (Ampere or later)"
        yield Problem("dtype", message, "Use --dtype float16 and compare the quality, or another --gpu.")


def release_problems(checkpoint: CheckpointConfig, release: Release) -> Iterator[Problem]:
    """Properties that the release's engine builder does not support; only a warning if that is inferred.

    An architecture that trtforge converts is always refused, because the data states which release added it.
    """
    family = family_of_engine(checkpoint.base_architecture)
    if family is not None and not family.engines:
        message = f"TensorRT-LLM builds no engines for {checkpoint.architecture}: only its PyTorch backend runs it"
        backend = "torch" if checkpoint.architecture in WITH_VISION_ONLY else "llmapi"
        yield Problem("release", message, f"Use engine.backend: {backend}.")
        return
    unknown = release.key_problem("architectures", checkpoint.architecture)
    if unknown is not None and family is not None:
        yield Problem("release", unknown.message, unknown.hint)
        unknown = None
    for problem in (unknown, *_unknown_to(release, checkpoint)):
        if problem is not None:
            doubt = "" if problem.refuses else " (inferred from other releases; trtllm-build decides)"
            yield Problem("release", problem.message + doubt, problem.hint, problem.refuses)


def _unknown_to(release: Release, checkpoint: CheckpointConfig) -> Iterator[ReleaseProblem | None]:
    """Everything else in config.json that the release may reject; it rejects unknown keys of nested objects."""
    quantization = checkpoint.quantization
    yield release.value_problem(release.field("plugin_config", "dtype"), checkpoint.dtype)
    yield release.value_problem(release.flags()["--logits_dtype"], checkpoint.logits_dtype)
    if quantization.quant_algo is not None:
        yield release.key_problem("quant_algo", quantization.quant_algo)
    if quantization.kv_cache_quant_algo is not None:
        yield release.key_problem("kv_cache_quant_algo", quantization.kv_cache_quant_algo)
    for key in checkpoint.mapping:
        yield release.key_problem("mapping", key)
    for key in quantization.model_dump(exclude={"quantized_layers"}):  # that is in a separate file
        yield release.key_problem("quantization", key)
    moe = (checkpoint.model_extra or {}).get("moe")
    for key in moe if isinstance(moe, dict) else ():
        yield release.key_problem("moe", key)


def link_problems(gpu: Gpu, parallel: Parallel) -> Iterator[Problem]:
    """Warnings for tensor parallelism over slow links (TensorRT-LLM issue #1499)."""
    tp = parallel.tp
    if tp > max(GPUS_PER_SERVER, gpu.links.nvlink_gpus):
        message = f"tp {tp} spans servers: two all-reduces a layer go over the network"
        yield Problem("links", message, "Use pipeline parallelism between servers.", refuses=False)
    elif tp > gpu.links.nvlink_gpus:
        message = f"tp {tp} goes over PCIe on {gpu.name}: two all-reduces a layer"
        yield Problem("links", message, "Pipeline parallelism sends far less data.", refuses=False)


def kernel_problems(checkpoint: CheckpointConfig) -> Iterator[Problem]:
    """The problem of a head size without attention kernels."""
    size, latent = checkpoint.head_size, "kv_lora_rank" in (checkpoint.model_extra or {})
    if size not in HEAD_SIZES and not latent:
        message = f"head size {size}: TensorRT-LLM's attention kernels support only {_listed(HEAD_SIZES)}"
        yield Problem("head_size", message, "Use the embedded engine (engine.backend: torch).")


def padding_problems(checkpoint: CheckpointConfig, family: Family, format: WeightFormat) -> Iterator[Problem]:
    """Linear layers that the engine pads, so that the checkpoint no longer fits; unquantised ones are never padded.

    Inputs and outputs are padded to a multiple of tp x 64 (128 for W4A8), or of tp x group size if that is larger:
    `WeightOnlyGroupwiseQuantLinear` in quantization/layers.py. Groups of row-parallel inputs are checked in
    plan.legality.
    """
    if format.padded_to == 1:
        return
    tp, group = checkpoint.parallel.tp, checkpoint.quantization.group_size if format.grouped else 1
    sizes, left = sizes_of(checkpoint), unquantised_rows(checkpoint, family)
    multiple = max(format.padded_to, group) * tp
    for row in quantised_linears(checkpoint, family):
        if row.target in left:
            continue
        inputs, name = sizes.of(row.inputs), row.parts[0].module
        out = sum(sizes.of(part.out) for part in row.parts)
        if row.split is Split.HEADS:  # KV heads are repeated if there are fewer than ranks
            repeated = max(1, tp // sizes.num_kv_heads)
            out += sum(sizes.of(part.out) * (repeated - 1) for part in row.parts if part.out == "kv")
        for what, size in (("inputs", inputs), ("outputs", out)):
            by_group = format.grouped and row.split is Split.ROW and what == "inputs"
            if size % multiple and not by_group:
                message = (
                    f"{name}: {size} {what} are not a multiple of {multiple // tp} x tp {tp}: TensorRT-LLM pads the "
                    f"{format.name} layer, and the checkpoint no longer fits"
                )
                yield Problem("awq_padding", message, "Choose a smaller --tp, or another format.")


def head_problems(vocab: int, tp: int, format: WeightFormat) -> Iterator[Problem]:
    """A quantised LM head: INT4 kernels need a rank's columns (two weights a byte) in multiples of 32 bytes.

    TensorRT-LLM issue #843. No format that trtforge writes quantises the head.
    """
    columns = vocab // tp // 2
    if format.quantizes_head and format.bits == 4 and columns % _INT4_COLUMN_BYTES:
        message = f"lm_head: {columns} bytes a rank at tp {tp} are not a multiple of {_INT4_COLUMN_BYTES}"
        yield Problem("vocab", message, "Choose a smaller --tp with a larger --pp, or leave the head unquantised.")


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
