"""Legal alternatives of format, parallel layout and KV cache, ranked for a goal."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import floor, log
from typing import Literal, get_args

from trtforge.core.recipe import QuantFormat
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.formats import CACHES, WEIGHTS
from trtforge.plan.gpus import GPUS_PER_SERVER
from trtforge.plan.model import Model
from trtforge.plan.request import Change, Option, Request
from trtforge.plan.roofline import Performance

Goal = Literal["latency", "throughput", "memory", "quality"]
GOALS: tuple[Goal, ...] = get_args(Goal)

COMMON_GPUS = ("l4", "l40s", "a100-80gb", "h100-80gb", "h200", "b200")
"""If no GPU is named, the best choice on each of these is shown."""

_TENSOR_PARALLEL, _PIPELINE_PARALLEL, _MOST_GPUS = (1, 2, 4, 8), (1, 2, 4), 16
_BATCH = 256  # concurrent requests for comparing throughput, if not given and if they fit the KV pool
_ALIKE = 1.05  # figures within 5 % count as equal: the estimates are not more accurate
_CLEARLY_MORE = 1.5  # ratio of KV cache sizes from which a larger cache counts as better
_SHOWN, _SHOWN_OF_A_WIDTH = 8, 2
_LOSS = ("none", "very low", "low", "medium", "high")
_MOST_LOSS = 3  # formats with a higher loss are planned on request, never proposed


@dataclass(frozen=True)
class Alternative:
    """A legal choice with its estimates for `performance.concurrency` requests of typical length."""

    evaluation: Evaluation
    performance: Performance
    why: str

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.evaluation.request.tp * self.evaluation.request.pp

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput per GPU."""
        return self.performance.tokens_per_second / self.gpus

    @property
    def request_seconds(self) -> float:
        """Seconds from a typical request's arrival to its last token."""
        assert self.evaluation.typical is not None
        return self.performance.request_seconds(self.evaluation.typical)

    @property
    def bytes_before_cache(self) -> int:
        """Bytes over all GPUs, without the KV pool."""
        assert self.evaluation.memory is not None
        return self.evaluation.memory.over_all("fixed")

    @property
    def loss(self) -> tuple[int, int]:
        """Typical loss of accuracy by weights and activations, and by the KV cache."""
        request = self.evaluation.request
        return WEIGHTS[request.quant].loss, CACHES[request.kv_cache].loss

    @property
    def kv_tokens_per_gpu(self) -> float:
        """KV pool tokens per GPU."""
        assert self.evaluation.memory is not None
        return self.evaluation.memory.kv_tokens / self.gpus

    @property
    def width(self) -> tuple[int | None, int | None]:
        """Bits of a weight and bytes of a cached value, None for the model's dtype."""
        request = self.evaluation.request
        return WEIGHTS[request.quant].bits, CACHES[request.kv_cache].itemsize

    def beats(self, other: "Alternative") -> bool:
        """Whether this alternative is at least as good in every respect, within the accuracy of the estimates."""
        return (
            all(mine <= its for mine, its in zip(self.loss, other.loss, strict=True))
            and self.gpus <= other.gpus
            and self.request_seconds <= _ALIKE * other.request_seconds
            and self.tokens_per_second_per_gpu * _ALIKE >= other.tokens_per_second_per_gpu
            and self.kv_tokens_per_gpu * _CLEARLY_MORE >= other.kv_tokens_per_gpu
        )


def alternatives(
    model: Model, request: Request, goal: Goal, kept: frozenset[Option] = frozenset()
) -> tuple[Alternative, ...]:
    """The best legal choices on the request's GPU, best first; without a GPU the best one on each common GPU.

    On a GPU without kernels for the request's dtype, they use float16. `kept`: those of --quant, --kv-cache, --tp, --pp
    and --ep whose values must not change.
    """
    if request.gpu is not None:
        return _best(model, request, goal, _SHOWN, kept)
    on_each = (_best(model, request.changed(Change("--gpu", name)), goal, 1, kept) for name in COMMON_GPUS)
    return tuple(alternative for found in on_each for alternative in found)


def fits_on(model: Model, request: Request) -> tuple[Evaluation, ...]:
    """The fewest GPUs of each common kind that the request's formats are legal on."""
    on_each = (smallest_legal(model, request.changed(Change("--gpu", name))) for name in COMMON_GPUS)
    return tuple(found for found in on_each if found is not None)


def smallest_legal(model: Model, request: Request) -> Evaluation | None:
    """The request on the fewest GPUs that make it legal, without expert parallelism; None if no layout does."""
    for tp, pp in _layouts():
        changes = Change("--tp", str(tp)), Change("--pp", str(pp)), Change("--ep", "1")
        evaluation = evaluate(model, request.changed(*changes))
        if evaluation.legal:
            return evaluation
    return None


def _best(model: Model, request: Request, goal: Goal, most: int, kept: frozenset[Option]) -> tuple[Alternative, ...]:
    dtype = _dtype_change(model, request)
    ranked = sorted(_legal(model, request.changed(*dtype), goal, kept), key=_KEYS[goal])
    if not ranked:
        return ()
    fewest = min(alternative.gpus for alternative in ranked)
    shown: list[Alternative] = []
    for alternative in ranked:
        alike = sum(other.width == alternative.width for other in shown)
        if alike < _SHOWN_OF_A_WIDTH and not any(other.beats(alternative) for other in shown):
            why = [_why(alternative, goal, fewest), *(f"with {change}" for change in dtype)]
            shown.append(replace(alternative, why="; ".join(why)))
    return tuple(shown[:most])


def _dtype_change(model: Model, request: Request) -> tuple[Change, ...]:
    """The change to float16, if the request's GPU has no kernels for its dtype."""
    broken = any(problem.rule == "dtype" for problem in evaluate(model, request).problems)
    return (Change("--dtype", "float16"),) if broken else ()


def _legal(model: Model, request: Request, goal: Goal, kept: frozenset[Option]) -> Iterator[Alternative]:
    quants = (model.stored.format,) if model.stored else get_args(QuantFormat)
    quants = tuple(name for name in quants if WEIGHTS[name].loss <= _MOST_LOSS)
    quants = (request.quant,) if "--quant" in kept else quants
    caches = (request.kv_cache,) if "--kv-cache" in kept else model.kv_caches
    experts = bool(model.facts.sparse_layers)
    for quant, cache, (tp, pp) in product(quants, caches, _kept_layouts(request, kept)):
        eps = (1, tp) if experts and tp > 1 else (1,)
        for ep in (request.ep,) if "--ep" in kept else eps:
            choice = replace(request, quant=quant, kv_cache=cache, tp=tp, pp=pp, ep=ep)
            choice = replace(choice, budget=choice.bits)
            if goal == "throughput" and request.concurrency is None:
                engine = request.engine.model_copy(
                    update={"max_batch_size": max(_BATCH, request.engine.max_batch_size)}
                )
                choice = replace(choice, engine=engine)
            evaluation = evaluate(model, choice)
            roofline = evaluation.roofline(model)
            if roofline is None or evaluation.typical is None or evaluation.limits is None:
                continue
            fits = min(evaluation.typical_requests or 1, evaluation.limits.max_batch_size)
            at_once = request.concurrency or (1 if goal == "latency" else max(1, fits))
            yield Alternative(evaluation, roofline.performance(at_once, evaluation.typical), "")


def _layouts() -> list[tuple[int, int]]:
    """Tensor and pipeline parallelism in servers of eight GPUs, the fewest GPUs first."""
    found = [
        (tp, pp)
        for tp, pp in product(_TENSOR_PARALLEL, _PIPELINE_PARALLEL)
        if tp * pp <= GPUS_PER_SERVER or (tp == GPUS_PER_SERVER and tp * pp <= _MOST_GPUS)
    ]
    return sorted(found, key=lambda layout: (layout[0] * layout[1], layout[1]))


def _kept_layouts(request: Request, kept: frozenset[Option]) -> list[tuple[int, int]]:
    """The layouts to try, with the request's --tp or --pp if that is kept, even if the size is unusual."""
    layouts = _layouts()
    if "--tp" in kept:
        layouts = [(request.tp, pp) for pp in dict.fromkeys(pp for _, pp in layouts)]
    if "--pp" in kept:
        layouts = [(tp, request.pp) for tp in dict.fromkeys(tp for tp, _ in layouts)]
    return layouts


def _about(value: float) -> int:
    """Logarithmic bucket of a value, about 5 % wide."""
    return floor(log(value) / log(_ALIKE))


_KEYS: dict[Goal, Callable[[Alternative], tuple[object, ...]]] = {
    # the fastest answer, in the hundredths that are shown; among equals the fewest GPUs, then the least loss
    "latency": lambda a: (round(a.request_seconds, 2), a.gpus, a.loss),
    # the most tokens a GPU: replicas of a small deployment beat one large one
    "throughput": lambda a: (-_about(a.tokens_per_second_per_gpu), a.loss, a.gpus, a.request_seconds),
    # the fewest GPUs, then the least memory on them
    "memory": lambda a: (a.gpus, a.bytes_before_cache, a.loss),
    # the least loss; among equals the fewest GPUs that hold it, then the fastest
    "quality": lambda a: (a.loss, a.gpus, a.request_seconds),
}


def _why(alternative: Alternative, goal: Goal, fewest: int) -> str:
    evaluation, performance = alternative.evaluation, alternative.performance
    assert evaluation.memory is not None
    weights, cache = alternative.loss
    reasons = {
        "latency": f"an answer in {alternative.request_seconds:.2f} s, {performance.concurrency} at once",
        "throughput": f"{alternative.tokens_per_second_per_gpu:,.0f} tokens/s a GPU, {performance.concurrency} at once",
        "memory": f"{alternative.bytes_before_cache / 1e9:.1f} GB before the KV cache",
        "quality": f"typical loss of accuracy: {_LOSS[weights]} by weights, {_LOSS[cache]} by the KV cache",
    }
    ordered = [reasons[goal], *(text for name, text in reasons.items() if name == "quality" != goal)]
    if alternative.gpus == fewest:
        ordered.append("the fewest GPUs that hold it")
    return "; ".join(ordered)
