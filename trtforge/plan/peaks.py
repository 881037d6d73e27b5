"""Peak memory of calibration, conversion, verification and the engine build, and the server's shared memory.

For comparison also the peak of tools that load the whole model and quantise it in place.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trtforge.core.parallel import Parallel
from trtforge.core.recipe import CalibrationConfig, GateConfig
from trtforge.models.family import Facts, Family
from trtforge.plan.formats import WEIGHTS, WeightFormat
from trtforge.plan.legality import Problem
from trtforge.plan.memory import RUNTIME_BYTES, Held, Memory, activation_bytes
from trtforge.plan.weights import Block, RankWeights, Stored

_MIB, _GIB = 1 << 20, 1 << 30
CONVERT_HOST_BYTES = 512 * _MIB
"""`trtforge convert` streams tensors in slabs, so its memory does not depend on the size of the model."""

LAYER_COPIES = 3
"""Copies of a layer's weights in calibration: the layer, a copy while it loads, absolute values of a weight."""

CALIBRATION_BYTES = 128 * _MIB
"""Activations of one calibration batch, and memory cached by torch and its libraries, measured on several CPUs."""

SKETCH_ROWS = 2039
"""Rows of AWQ's sketch of an input. A prime, so that tokens recurring in every sequence spread over the rows."""

_COPIES = 2  # of the largest Gram matrix and of the largest weights, while these are rounded with compensation

BUILD_HOST_COPIES = 2
"""trtllm-build holds a rank's weights in host memory, and the serialised engine until it is written."""

PYTHON_MODEL_SHM_BYTES = 64 * _MIB
"""Shared memory of one instance of a Python model in Triton (server issue #6195)."""

PYTHON_MODELS = 4
"""Python models of a repository with a TensorRT-LLM engine: all five models except `tensorrt_llm`."""

NCCL_SHM_BYTES = 1 * _GIB
"""Shared memory that TensorRT-LLM's documentation requires (--shm-size=1g)."""

PROGRAM_BYTES = 600_000_000
"""trtforge itself when it runs a model: torch, `transformers` and memory cached by their allocators."""

VERIFIED_LAYERS = 3
"""Decoder layers in float32: the Hugging Face model's, the converted one's, and space to unpack one."""

VERIFIED_TABLES = 2.5
"""LM heads in float32: both models', and one as stored (half the size)."""

VERIFIED_LOGITS = 6
"""Logits, log-probabilities and probabilities of a sample, of both models."""

_FLOAT32 = 4


@dataclass(frozen=True)
class Peaks:
    """Peak bytes of the stages before serving. None: not needed, or unknown because the layout is illegal.

    `calibration_gpu`: of trtforge, one decoder layer at a time, with hidden states beyond --memory on disk;
    `quantise_at_once_gpu`: of a tool with the whole model in memory. `build_host_per_worker`: for each rank that is
    built concurrently.
    """

    calibration_gpu: int | None
    quantise_at_once_gpu: int | None
    convert_host: int
    verify_host: int
    build_gpu: int | None
    build_host_per_worker: int | None
    shared_memory: int


def peaks(
    family: Family,
    facts: Facts,
    held: Held,
    data: CalibrationConfig,
    gate: GateConfig,
    memory: Memory | None,
    *,
    quantised: bool,
    compensated: bool = False,
    limit: int | None = None,
) -> Peaks:
    """The peaks for the deployment `held`; `memory`: of its ranks. `quantised`: the source is already quantised.

    `compensated`: calibration rounds with compensation. `limit`: bytes that calibration may use.
    """
    stored, whole = held.stored, held.whole
    batch = activation_bytes(facts, Parallel(), stored.itemsize, data.batch_size * data.sequence_length)
    calibration = None
    if not quantised and (stored.format.calibrated or compensated or held.cache.calibrated):
        needed = least_calibration(family, facts, whole, stored.itemsize, stored.format, compensated=compensated)
        calibration = batch + _hidden_states(facts, stored, data, limit, needed)
        calibration += largest_layer(whole, stored.itemsize)
        calibration += _search_work(family, facts, whole, stored.format, compensated=compensated)
    at_once = None
    plain = Stored(format=WEIGHTS["none"], itemsize=stored.itemsize)
    if not quantised and stored.format.bits is not None:
        at_once = batch + quantise_peak(whole.nbytes(plain, Parallel(), 0), stored.format.bits)
    return Peaks(
        calibration_gpu=calibration,
        quantise_at_once_gpu=at_once,
        convert_host=CONVERT_HOST_BYTES,
        verify_host=verify_host_peak(whole, stored.itemsize, facts, gate),
        build_gpu=None if memory is None else build_gpu_peak(memory),
        build_host_per_worker=None if memory is None else build_host_peak(memory),
        shared_memory=shared_memory(PYTHON_MODELS) + NCCL_SHM_BYTES,
    )


def largest_layer(whole: RankWeights, itemsize: int) -> int:
    """Bytes of the largest decoder layer, unquantised."""
    plain = Stored(format=WEIGHTS["none"], itemsize=itemsize)
    return max(kind.nbytes(plain) for kind in whole.kinds)


def least_calibration(
    family: Family, facts: Facts, whole: RankWeights, itemsize: int, wanted: WeightFormat, *, compensated: bool
) -> int:
    """The least bytes of calibration to a format, with all hidden states on disk, without the program itself.

    `itemsize`: bytes of the dtype of `whole`. `compensated`: how weights are rounded. A lower `--memory` is refused.
    """
    work = _search_work(family, facts, whole, wanted, compensated=compensated)
    return LAYER_COPIES * largest_layer(whole, itemsize) + work + CALIBRATION_BYTES


def calibration_problems(needed: int, limit: int) -> Iterator[Problem]:
    """A memory limit below the `needed` bytes of calibration."""
    if limit < needed:
        message = (
            f"calibration memory of {limit:,} bytes is too small: one layer at a time needs {needed:,} plus the "
            "program itself"
        )
        yield Problem("calibration", message, f"Set quantization.memory to at least {needed + PROGRAM_BYTES:,}.")


def _hidden_states(facts: Facts, stored: Stored, data: CalibrationConfig, limit: int | None, needed: int) -> int:
    """Bytes of the hidden states of all samples; with a limit, of those that fit in memory beside `needed`."""
    states = data.samples * data.sequence_length * facts.sizes.hidden * stored.itemsize
    return states if limit is None else min(states, max(0, limit - needed))


def _search_work(family: Family, facts: Facts, whole: RankWeights, wanted: WeightFormat, *, compensated: bool) -> int:
    """Bytes of AWQ's search: a float32 sketch of each input of a layer, three float32 copies of its largest weight.

    Compensated rounding keeps Gram matrices instead of sketches, also for a format without AWQ.
    """
    if not compensated and (not wanted.grouped or wanted.group_size is not None):
        return 0
    inputs = [facts.sizes.of(row.inputs) for row in family.linears if row.shares_input is None]
    inputs.append(max(sum(m.count * m.inputs for m in kind.matrices if m.expert) for kind in whole.kinds))
    largest = max((m.out * m.inputs for kind in whole.kinds for m in kind.matrices if m.formatted), default=0)
    if compensated:
        moments = 2 if wanted.name == "nvfp4" else 1
        return _compensation_work(family, facts, moments) + _FLOAT32 * 3 * largest
    return _FLOAT32 * (SKETCH_ROWS * sum(inputs) + 3 * largest)


def _compensation_work(family: Family, facts: Facts, moments: int) -> int:
    """Bytes of compensated rounding: float32 matrices of a layer's inputs, and copies of the largest one and of the
    largest weight.

    `moments`: matrices for each input, a Gram matrix and, for rounded inputs, that of their errors.
    """
    sizes = facts.sizes
    leaders = [row for row in family.linears if row.shares_input is None]
    widths = [sizes.of(row.inputs) for row in leaders]
    weights = [
        sizes.of(leader.inputs) * sizes.of(part.out)
        for leader in leaders
        for row in family.linears
        if leader.target in (row.target, row.shares_input)
        for part in row.parts
    ]
    for row in family.experts:
        widths += [sizes.of(row.inputs)] * sizes.of("experts")
        weights += [sizes.of(row.inputs) * sum(sizes.of(part.out) for part in row.parts)]
    grams = sum(width * width for width in widths)
    return _FLOAT32 * (moments * grams + _COPIES * (max(widths) ** 2 + max(weights, default=0)))


def quantise_peak(source_bytes: int, bits: int) -> int:
    """GPU bytes, without activations, of a tool that holds the 16-bit model and its `bits`-bit copy at once.

    TensorRT-LLM issue #1331: 140 GB of a 70B model and 70 GB of its FP8 copy.
    """
    return source_bytes + source_bytes * bits // 16


def verify_host_peak(whole: RankWeights, itemsize: int, facts: Facts, gate: GateConfig) -> int:
    """Host bytes of verification: a layer of both models, or their heads, and the hidden states of all samples.

    `itemsize`: bytes of the dtype of `whole`.
    """

    def in_float32(block: Block) -> int:
        return _FLOAT32 * (sum(matrix.weights for matrix in block.matrices) + block.other // itemsize)

    head = in_float32(whole.last)
    logits = _FLOAT32 * gate.sequence_length * facts.sizes.vocab
    states = 2 * _FLOAT32 * gate.samples * gate.sequence_length * facts.sizes.hidden
    layers = VERIFIED_LAYERS * max(map(in_float32, whole.kinds))
    return PROGRAM_BYTES + states + max(layers, int(VERIFIED_TABLES * head) + VERIFIED_LOGITS * logits)


def build_gpu_peak(memory: Memory) -> int:
    """GPU bytes of trtllm-build for the largest rank: it times kernels with weights and activations in memory.

    Includes weights that the server will stream.
    """
    return max(rank.weights + rank.streamed + rank.activations for rank in memory.stages) + RUNTIME_BYTES


def build_host_peak(memory: Memory) -> int:
    """Host bytes of trtllm-build for one worker, at the largest rank."""
    return BUILD_HOST_COPIES * max(rank.weights + rank.streamed for rank in memory.stages)


def shared_memory(python_models: int) -> int:
    """Bytes of /dev/shm for Triton's Python models, one instance each."""
    return PYTHON_MODEL_SHM_BYTES * python_models
