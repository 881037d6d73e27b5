"""Memory of the work before serving: calibration, conversion, verification, the build; and the server's shared memory.

What peers need is said beside it: they load the whole model and quantise it in place.
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
"""`trtforge convert` reads slabs of 16 MiB: what the program itself takes, at any size of model."""

LAYER_COPIES = 3
"""Times a layer's weights that calibration works in: themselves, a copy on the way in, magnitudes of one."""

CALIBRATION_BYTES = 112 * _MIB
"""Activations of one of its batches, and what torch's allocators keep."""

SKETCH_ROWS = 2039
"""Of what AWQ's calibration keeps of an input. A prime, so that what recurs in every sequence does not meet in one."""

BUILD_HOST_COPIES = 2
"""trtllm-build holds a rank's weights in host memory, and the engine before it is written."""

PYTHON_MODEL_SHM_BYTES = 64 * _MIB
"""Shared memory of one instance of a Python model in Triton (server issue #6195)."""

PYTHON_MODELS = 4
"""Those of a repository beside a TensorRT-LLM engine: all of its five models but `tensorrt_llm`."""

NCCL_SHM_BYTES = 1 * _GIB
"""What TensorRT-LLM's documentation asks for beside it (--shm-size=1g)."""

PROGRAM_BYTES = 600_000_000
"""trtforge itself where models run: torch, `transformers` and what their allocators keep."""

VERIFIED_LAYERS = 3
"""A decoder layer in float32 of the Hugging Face model, of the converted one, and room to unpack one in."""

VERIFIED_TABLES = 2.5
"""The output head in float32 of both models, and one as it is stored."""

VERIFIED_LOGITS = 6
"""A sample's logits, their logarithms and probabilities, of both models."""

_FLOAT32 = 4


@dataclass(frozen=True)
class Peaks:
    """Bytes that the work before serving takes. None: not needed, or not known because the layout cannot be.

    `calibration_gpu`: one decoder layer at a time, as trtforge does it, hidden states beyond --memory on the disk;
    `quantise_at_once_gpu`: with the whole model in memory. `build_host_per_worker`: for each rank that is built at
    once.
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
    limit: int | None = None,
) -> Peaks:
    """Of a model that is to be `held`; `memory` is that of its ranks. `quantised`: its source already is.

    `limit`: bytes that calibration is to stay under.
    """
    stored, whole = held.stored, held.whole
    batch = activation_bytes(facts, Parallel(), stored.itemsize, data.batch_size * data.sequence_length)
    calibration = None
    if not quantised and (stored.format.calibrated or held.cache.calibrated):
        needed = least_calibration(family, facts, whole, stored.itemsize, stored.format)
        calibration = batch + _hidden_states(facts, stored, data, limit, needed)
        calibration += largest_layer(whole, stored.itemsize) + _search_work(family, facts, whole, stored.format)
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


def least_calibration(family: Family, facts: Facts, whole: RankWeights, itemsize: int, wanted: WeightFormat) -> int:
    """Bytes that calibration to a format takes at least, with all hidden states on the disk, beside the program.

    In a dtype of `itemsize` bytes, of which `whole` is too. `--memory` is refused below that.
    """
    work = _search_work(family, facts, whole, wanted)
    return LAYER_COPIES * largest_layer(whole, itemsize) + work + CALIBRATION_BYTES


def calibration_problems(needed: int, limit: int) -> Iterator[Problem]:
    """A limit that a calibration which takes `needed` bytes at least cannot keep."""
    if limit < needed:
        message = f"calibration under {limit:,} bytes: one layer at a time needs {needed:,} beside the program itself"
        yield Problem("calibration", message, f"Set quantization.memory to at least {needed + PROGRAM_BYTES:,}.")


def _hidden_states(facts: Facts, stored: Stored, data: CalibrationConfig, limit: int | None, needed: int) -> int:
    """Bytes of the hidden states of all samples, or of those that stay in memory under a limit beside `needed`."""
    states = data.samples * data.sequence_length * facts.sizes.hidden * stored.itemsize
    return states if limit is None else min(states, max(0, limit - needed))


def _search_work(family: Family, facts: Facts, whole: RankWeights, wanted: WeightFormat) -> int:
    """Of AWQ: a float32 sketch of each input of a layer, and three float32 copies of its largest weight."""
    if not wanted.grouped or wanted.group_size is not None:
        return 0
    inputs = [facts.sizes.of(row.inputs) for row in family.linears if row.shares_input is None]
    inputs.append(max(sum(m.count * m.inputs for m in kind.matrices if m.expert) for kind in whole.kinds))
    largest = max((m.out * m.inputs for kind in whole.kinds for m in kind.matrices if m.formatted), default=0)
    return _FLOAT32 * (SKETCH_ROWS * sum(inputs) + 3 * largest)


def quantise_peak(source_bytes: int, bits: int) -> int:
    """GPU bytes, activations apart, of a tool that holds the 16-bit model and its copy of `bits` a weight at once.

    TensorRT-LLM issue #1331: 140 GB of a 70B model and 70 GB of its FP8 copy.
    """
    return source_bytes + source_bytes * bits // 16


def verify_host_peak(whole: RankWeights, itemsize: int, facts: Facts, gate: GateConfig) -> int:
    """Host bytes of verification: a layer of both models, or their heads, and the hidden states of all samples.

    `itemsize`: bytes of the dtype that `whole` is of.
    """

    def in_float32(block: Block) -> int:
        return _FLOAT32 * (sum(matrix.weights for matrix in block.matrices) + block.other // itemsize)

    head = in_float32(whole.last)
    logits = _FLOAT32 * gate.sequence_length * facts.sizes.vocab
    states = 2 * _FLOAT32 * gate.samples * gate.sequence_length * facts.sizes.hidden
    layers = VERIFIED_LAYERS * max(map(in_float32, whole.kinds))
    return PROGRAM_BYTES + states + max(layers, int(VERIFIED_TABLES * head) + VERIFIED_LOGITS * logits)


def build_gpu_peak(memory: Memory) -> int:
    """GPU bytes of trtllm-build for the largest rank: TensorRT times kernels beside the weights and activations.

    All of the weights, those that a server will stream too.
    """
    return max(rank.weights + rank.streamed + rank.activations for rank in memory.stages) + RUNTIME_BYTES


def build_host_peak(memory: Memory) -> int:
    """Host bytes of trtllm-build for one worker, at the largest rank."""
    return BUILD_HOST_COPIES * max(rank.weights + rank.streamed for rank in memory.stages)


def shared_memory(python_models: int) -> int:
    """Bytes of /dev/shm that Triton's Python models take, one instance each."""
    return PYTHON_MODEL_SHM_BYTES * python_models
