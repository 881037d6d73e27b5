"""TensorRT-LLM's rules beyond a legal layout: the GPU's formats, the release, kernels and padding of engines.

They do not apply to the embedded engine.
"""

from collections.abc import Iterator

from trtforge.core.device import BFLOAT16_SM
from trtforge.core.parallel import Parallel
from trtforge.formats.releases import Release, Section
from trtforge.models.exclusions import rows_left
from trtforge.models.family import Facts, Family, Linear, Split
from trtforge.plan.formats import CACHES, WEIGHTS, CacheFormat, WeightFormat
from trtforge.plan.gpus import GPUS_PER_SERVER, Gpu, refusal
from trtforge.plan.kv import is_latent
from trtforge.plan.legality import Problem
from trtforge.plan.model import Model
from trtforge.plan.request import Request

HEAD_SIZES = (32, 48, 64, 80, 96, 104, 112, 128, 144, 160, 192, 224, 256)
"""`mmha_supported` in cpp/tensorrt_llm/kernels/decoderMaskedMultiheadAttention.cu."""

_INT4_COLUMN_BYTES = 32


def engine_problems(
    model: Model, request: Request, release: Release, parallel: Parallel, *, fits: bool
) -> Iterator[Problem]:
    """All problems of a request on TensorRT-LLM; `fits`: whether its layout is legal for the model."""
    weights, cache = WEIGHTS[request.quant], CACHES[request.kv_cache]
    if request.gpu is not None:
        yield from gpu_problems(request.gpu, weights, cache, request.dtype)
        yield from link_problems(request.gpu, parallel)
    yield from release_problems(release, model.family.architectures[model.config.architecture], weights, cache)
    yield from kernel_problems(model.facts)
    if fits:
        left = rows_left(model.family, model.facts, request.exclude_modules, model.stored)
        yield from padding_problems(model.family, model.facts, parallel, weights, request.group_size, left)
        yield from head_problems(model.facts.sizes.vocab, parallel.tp, weights)


def gpu_problems(gpu: Gpu, weights: WeightFormat, cache: CacheFormat, dtype: str) -> Iterator[Problem]:
    """Number formats for which the GPU has no kernels."""
    for rule, format in (("gpu_format", weights), ("gpu_kv_cache", cache)):
        if (why := refusal(gpu, format)) is not None:
            yield Problem(rule, why, "Choose another format or another --gpu.")
    if dtype == "bfloat16" and gpu.sm < BFLOAT16_SM:
        # gptAttentionCommon.cpp; TensorRT-LLM issue #2210
        message = f"{gpu.name} has compute capability {gpu.capability}: bfloat16 needs 8.0 (Ampere or later)"
        yield Problem("dtype", message, "Use --dtype float16 and compare the quality, or another --gpu.")


def release_problems(
    release: Release, architecture: str, weights: WeightFormat, cache: CacheFormat
) -> Iterator[Problem]:
    """What the release's engine builder does not support; only a warning if that is inferred."""
    wanted: tuple[tuple[Section, str | None], ...] = (
        ("architectures", architecture),
        ("quant_algo", weights.algorithm),
        ("kv_cache_quant_algo", cache.algorithm),
    )
    for section, name in wanted:
        problem = release.key_problem(section, name) if name is not None else None
        if problem is not None:
            doubt = "" if problem.refuses else " (inferred from its neighbours)"
            yield Problem("release", problem.message + doubt, problem.hint, problem.refuses)


def link_problems(gpu: Gpu, parallel: Parallel) -> Iterator[Problem]:
    """Warnings for tensor parallelism over slow links (TensorRT-LLM issue #1499)."""
    tp = parallel.tp
    if tp > max(GPUS_PER_SERVER, gpu.links.nvlink_gpus):
        message = f"tp {tp} spans servers: two all-reduces a layer go over the network"
        yield Problem("links", message, "Use pipeline parallelism between servers.", refuses=False)
    elif tp > gpu.links.nvlink_gpus:
        message = f"tp {tp} goes over PCIe on {gpu.name}: two all-reduces a layer"
        yield Problem("links", message, "Pipeline parallelism sends far less data.", refuses=False)


def kernel_problems(facts: Facts) -> Iterator[Problem]:
    """A head size without attention kernels."""
    size = facts.sizes.head_size
    if size not in HEAD_SIZES and not is_latent(facts.sizes):
        message = f"head size {size}: TensorRT-LLM's attention kernels support only {_listed(HEAD_SIZES)}"
        yield Problem("head_size", message, "Use the embedded engine (engine.backend: torch).")


def padding_problems(
    family: Family,
    facts: Facts,
    parallel: Parallel,
    format: WeightFormat,
    group_size: int,
    left: frozenset[str] = frozenset(),
) -> Iterator[Problem]:
    """Linear layers that the engine pads, so that the checkpoint no longer fits; `left`: unquantised, never padded.

    Inputs and outputs are padded to a multiple of tp x 64 (128 for W4A8), or of tp x group size if that is larger:
    `WeightOnlyGroupwiseQuantLinear` in quantization/layers.py. Groups of row-parallel inputs are checked in
    plan.legality.
    """
    if format.padded_to == 1:
        return
    tp, multiple = parallel.tp, max(format.padded_to, group_size if format.grouped else 1) * parallel.tp
    for row in family.layer:
        if not isinstance(row, Linear) or not row.quantized or row.target in left:
            continue
        inputs, name = facts.sizes.of(row.inputs), row.parts[0].module
        out = sum(facts.sizes.of(part.out) for part in row.parts)
        if row.split is Split.HEADS:  # KV heads are repeated where there are fewer than ranks
            repeated = max(1, tp // facts.sizes.num_kv_heads)
            out += sum(facts.sizes.of(part.out) * (repeated - 1) for part in row.parts if part.out == "kv")
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
