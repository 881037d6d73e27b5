"""Candidate changes that may fix a broken rule, the least intrusive first."""

from collections.abc import Callable, Iterator
from math import log2
from typing import get_args

from trtforge.core.recipe import QuantFormat
from trtforge.formats.releases import read_release_data
from trtforge.plan import feature_choices
from trtforge.plan.evaluate import calibration_needs
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.formats import CACHES, WEIGHTS
from trtforge.plan.gpus import GPUS, GPUS_PER_SERVER
from trtforge.plan.model import Model
from trtforge.plan.peaks import PROGRAM_BYTES
from trtforge.plan.request import Change, Option
from trtforge.plan.speculation import speculation_of

_MOST_RANKS = 64
_Candidates = Callable[[Model, Evaluation], Iterator[tuple[Change, ...]]]


def candidates(
    model: Model, evaluation: Evaluation, rule: str, without: frozenset[str]
) -> Iterator[tuple[Change, ...]]:
    """Sets of changes that may fix a rule's problem, except the choices named in `without`."""
    for name in _CHOICES.get(rule, ()):
        if name not in without:
            yield from _CANDIDATES[name](model, evaluation)


def _tensor_parallel(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    request = evaluation.request
    sizes = [n for n in _divisors(model.facts.sizes.num_heads) if n != request.tp]
    yield from ((Change("--tp", str(n)),) for n in _nearest_first(sizes, request.tp))


def _pipeline(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    request = evaluation.request
    sizes = [n for n in _divisors(model.facts.sizes.num_layers) if n != request.pp]
    yield from ((Change("--pp", str(n)),) for n in _nearest_first(sizes, request.pp))


def _same_ranks(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """Less tensor and more pipeline parallelism, which users of TensorRT-LLM settled on (#729, #843)."""
    request = evaluation.request
    for tp in sorted((n for n in _divisors(request.tp) if n < request.tp), reverse=True):
        yield Change("--tp", str(tp)), Change("--pp", str(request.pp * request.tp // tp))


def _stages_as_ranks(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """The same number of ranks with tensor parallelism only."""
    request = evaluation.request
    yield Change("--pp", "1"), Change("--tp", str(request.tp * request.pp))


def _more_ranks(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """More GPUs, the fewest first: part of a server or whole servers, tensor parallelism within a server only."""
    request, sizes = evaluation.request, model.facts.sizes
    layouts = [
        (tp * pp, pp, tp)
        for tp in _divisors(sizes.num_heads)
        for pp in _divisors(sizes.num_layers)
        if request.tp * request.pp < tp * pp <= _MOST_RANKS and tp <= GPUS_PER_SERVER
    ]
    for ranks, pp, tp in sorted(layouts):
        if ranks > GPUS_PER_SERVER and ranks % GPUS_PER_SERVER:
            continue
        changes: tuple[tuple[Option, int, int], ...] = (("--tp", tp, request.tp), ("--pp", pp, request.pp))
        yield tuple(Change(option, str(new)) for option, new, old in changes if new != old)


def _experts(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    request = evaluation.request
    sizes = [n for n in _divisors(request.tp) if n != request.ep]
    yield from ((Change("--ep", str(n)),) for n in _nearest_first(sizes, request.ep))


def _group(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    yield from ((Change("--group-size", str(n)),) for n in (128, 64) if n != evaluation.request.group_size)


def _quant(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """Formats that conversion writes (or the source's own), the nearest bit width first."""
    request = evaluation.request
    bits = WEIGHTS[request.quant].bits or 16
    names = (model.stored.format,) if model.stored else get_args(QuantFormat)
    others = [WEIGHTS[name] for name in names if name != request.quant]
    for format in sorted(others, key=lambda other: (abs((other.bits or 16) - bits), other.loss)):
        yield (Change("--quant", format.name),)


def _kv_cache(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """Other KV cache formats, the lowest loss of accuracy first."""
    others = [CACHES[name] for name in model.kv_caches if name != evaluation.request.kv_cache]
    yield from ((Change("--kv-cache", format.name),) for format in sorted(others, key=lambda other: other.loss))


def _dtype(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    if evaluation.request.dtype != "float16":
        yield (Change("--dtype", "float16"),)


def _gpu(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """GPUs with at least as much memory: the smallest first, then the oldest."""
    now = evaluation.request.gpu
    if now is not None:
        larger = [gpu for gpu in GPUS if gpu.memory >= now.memory and gpu.name != now.name]
        yield from ((Change("--gpu", gpu.name),) for gpu in sorted(larger, key=lambda gpu: (gpu.memory, gpu.sm)))


def _release(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """The newest releases first."""
    for line in reversed(read_release_data("build-config")["versions"]):
        if not line["id"].endswith(".x"):
            yield (Change("--target-version", line["id"]),)


def _length(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """The longest max_seq_len that fits the KV pool."""
    if evaluation.memory is not None and evaluation.memory.kv_tokens > 1:
        yield (Change("--max-seq-len", str(evaluation.memory.kv_tokens)),)


def _concurrency(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """As many requests as fit; a smaller batch leaves at least as much memory for the KV pool."""
    if evaluation.typical_requests:
        yield (Change("--concurrency", str(evaluation.typical_requests)),)


def _lengths(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    """The smallest legal max_num_tokens, or lengths that are consistent with one another and with the model."""
    engine, positions = evaluation.request.engine, model.facts.sizes.max_positions
    speculation = speculation_of(engine.features)
    each = engine.max_beam_width if speculation is None else speculation.draft_tokens + 1
    generation = engine.max_batch_size * each
    yield (Change("--max-num-tokens", str(max(generation, engine.tokens_per_block or 64, engine.max_input_len or 1))),)
    if engine.max_input_len is not None:
        yield (Change("--max-seq-len", str(engine.max_input_len + 1)),)
        yield (Change("--set", f"engine.max_input_len={(engine.max_seq_len or positions) - 1}"),)
    yield (Change("--max-seq-len", str(positions)),)


def _calibration(model: Model, evaluation: Evaluation) -> Iterator[tuple[Change, ...]]:
    needed = calibration_needs(model, evaluation.request) + PROGRAM_BYTES
    yield (Change("--set", f"quantization.memory={needed}"),)


_CANDIDATES: dict[str, _Candidates] = {
    "tp": _tensor_parallel,
    "pp": _pipeline,
    "same_ranks": _same_ranks,
    "stages_as_ranks": _stages_as_ranks,
    "more_ranks": _more_ranks,
    "ep": _experts,
    "group": _group,
    "quant": _quant,
    "kv_cache": _kv_cache,
    "dtype": _dtype,
    "gpu": _gpu,
    "release": _release,
    "length": _length,
    "concurrency": _concurrency,
    "lengths": _lengths,
    "calibration": _calibration,
    "paging": feature_choices.paging,
    "none_beyond_paging": feature_choices.none_beyond_paging,
    "without_moe": feature_choices.without_moe,
    "without_attention_dp": feature_choices.without_attention_dp,
    "speculation": feature_choices.speculation,
    "one_stage": feature_choices.one_stage,
    "lora_modules": feature_choices.lora_modules,
    "lora_cache": feature_choices.lora_cache,
    "all_on_gpu": feature_choices.all_on_gpu,
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "mapping": ("ep", "tp"),
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "columns": ("tp",),
    "rows": ("tp",),
    "layers": ("pp",),
    "experts": ("ep", "tp"),
    "quant": ("quant",),
    "kv_cache": ("kv_cache",),
    "awq_group": ("ep", "same_ranks", "tp", "group", "quant"),
    "int4_pairs": ("tp", "quant"),
    "awq_padding": ("same_ranks", "tp", "group", "quant"),
    "vocab": ("same_ranks", "tp", "quant"),
    "format": ("quant",),
    "kv_format": ("kv_cache",),
    "gpu_format": ("quant", "gpu"),
    "gpu_kv_cache": ("kv_cache", "gpu"),
    "dtype": ("dtype", "gpu"),
    "release": ("release", "quant"),
    "network_release": ("release", "quant"),
    "network_format": ("quant", "release"),
    "pipeline": ("stages_as_ranks", "pp"),
    "memory": ("more_ranks", "quant", "gpu"),
    "kv_pool": ("length", "kv_cache", "more_ranks", "quant"),
    "concurrency": ("kv_cache", "more_ranks", "concurrency"),
    "limits": ("lengths",),
    "features": ("paging", "kv_cache"),
    "calibration": ("calibration",),
    "backend": ("none_beyond_paging",),
    "moe": ("without_moe",),
    "attention_dp": ("without_attention_dp",),
    "speculation": ("speculation", "kv_cache", "one_stage", "quant", "gpu"),
    "draft": ("tp", "pp"),
    "lora": ("lora_modules", "quant"),
    "lora_cache": ("lora_cache", "quant", "more_ranks"),
    "weights_on_gpu": ("quant", "all_on_gpu"),
}
"""The choices to try for each rule, the least intrusive first."""


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, min(number, _MOST_RANKS) + 1) if number % n == 0]


def _nearest_first(sizes: list[int], now: int) -> list[int]:
    """Sort by how usual a size is: within one server first, then powers of two, then the nearest to `now`."""
    return sorted(sizes, key=lambda n: (n > max(now, GPUS_PER_SERVER), n & (n - 1) > 0, abs(log2(n) - log2(now)), n))
