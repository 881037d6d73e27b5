"""How `trtforge plan` prints a plan: plain lines and columns of at most 80 characters, with units in the headings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtforge.cli import show
from trtforge.core.figures import counted

if TYPE_CHECKING:
    from trtforge.plan.alternatives import Alternative
    from trtforge.plan.planner import Plan
    from trtforge.plan.request import Request

_PARTS = (
    ("weights", "weights"),
    ("KV cache", "kv_pool"),
    ("activations (at most)", "activations"),
    ("logits", "logits"),
    ("sampling buffers (at most)", "decoder"),
    ("runtime (estimate)", "runtime"),
    ("linear attention", "state"),
    ("LoRA adapters", "lora"),
    ("drafting (at most)", "draft"),
    ("prompt tables", "tables"),
    ("total", "total"),
)
"""What takes memory: label, and name in the plan's memory."""
_OF_FEATURES = ("state", "lora", "draft", "tables")
_LEGEND = (
    "reqs: requests at the same time; answer s: seconds from a request to its last token; first ms: milliseconds to "
    "the first token; {each}tok/s/GPU: output tokens per second of all requests, divided by the GPUs. "
    "All are estimates."
)
_LEGEND_OF_EACH = "each ms: milliseconds for each further token; "


def show_plan(result: "Plan", goal: str, *, wanted: bool) -> None:
    """Print a plan. `wanted`: the alternatives too, which are ranked by `goal`."""
    evaluation, request = result.evaluation, result.evaluation.request
    embedded = evaluation.embedded
    split = f"tp {request.tp}, pp {request.pp}" + (f", ep {request.ep}" if request.ep > 1 else "")
    show.line(f"{result.model.name} on {_where(request, on_cpu=_on_cpu(result))} ({split}); {_formats(request)}")
    if embedded is not None:
        computes = f"computes in {embedded.compute_dtype} on {embedded.device}"
        show.line(f"embedded engine: {computes}, kernels {embedded.kernel}")
    show.line("legal" if evaluation.legal else "not legal")
    for fix in result.fixes:
        show.line(f"problem: {fix.problem.message}. {fix.text}")
    for warning in (*evaluation.warnings, *result.notes):
        show.line(f"warning: {warning}" if warning in evaluation.warnings else f"note: {warning}")
    _memory(result)
    _capacity(result)
    _before_serving(result)
    _estimates(result)
    if result.fits:
        fits = ((found.request.tp * found.request.pp, found.request.engine.target.gpu) for found in result.fits)
        show.line(f"fits: {', '.join(f'{gpus} x {gpu}' for gpus, gpu in fits)}")
    if wanted:
        _alternatives(result.alternatives, goal)


def _on_cpu(result: "Plan") -> bool:
    embedded = result.evaluation.embedded
    return embedded is not None and embedded.device == "cpu"


def _where(request: "Request", *, on_cpu: bool) -> str:
    ranks = request.tp * request.pp
    if on_cpu:
        return "the CPU" if ranks == 1 else f"{ranks} ranks on the CPU"
    return f"{ranks} x {request.engine.target.gpu or 'any GPU'}"


def _formats(request: "Request") -> str:
    weights = f"{request.dtype} weights" if request.quant == "none" else f"{request.quant} weights"
    cache = request.dtype if request.kv_cache == "none" else request.kv_cache
    return f"{weights}, {cache} KV cache"


def _print_columns(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    show.line(f"\n{title}")
    for line in show.columns([header, *rows], right=right):
        print(f"  {line}")


def _memory(result: "Plan") -> None:
    memory = result.evaluation.memory
    if memory is not None:
        sizes = [(label, name, getattr(memory.fullest, name), memory.over_all(name)) for label, name in _PARTS]
        rows = [
            [label, show.size(one), show.size(every)]
            for label, name, one, every in sizes
            if every or name not in _OF_FEATURES
        ]
        title, whose = ("Host memory", "rank") if _on_cpu(result) else ("GPU memory", "GPU")
        _print_columns(title, ["part", f"fullest {whose}", f"all {whose}s"], rows, right=(1, 2))
        if _on_cpu(result):
            _this_machine(memory.over_all("total"))
        if memory.over_all("host"):
            show.line(f"host memory: {show.size(memory.over_all('host'))} for adapters, streamed weights and KV blocks")
    show.line(f"model: {show.size(result.weights)} of weights, {result.kv_per_token:,} bytes of KV cache per token")


def _this_machine(needed: int) -> None:
    """The memory of this machine beside what the ranks need."""
    from trtforge.machine.host import Host
    from trtforge.machine.memory import read_memory

    memory = read_memory(Host())
    if memory is not None:
        verdict = "enough" if needed <= memory.most else "too little"
        show.line(f"this machine has {show.size(memory.most)} of memory: {verdict}")


def _capacity(result: "Plan") -> None:
    from trtforge.plan.instances import instances_of

    evaluation, memory = result.evaluation, result.evaluation.memory
    limits, typical = evaluation.limits, evaluation.typical
    if memory is None or limits is None or typical is None or not memory.kv_tokens:
        return
    needs = f" (as --concurrency {evaluation.request.concurrency or 1} needs)"
    asked = "" if evaluation.request.gpu or evaluation.embedded else needs
    full = f"{counted(evaluation.full_length_requests or 0, 'request')} of {limits.max_seq_len:,} tokens (max_seq_len)"
    show.line(
        f"KV cache{asked}: {memory.kv_tokens:,} tokens = {full} or {evaluation.typical_requests:,} of "
        f"{typical.length:,} tokens; max_batch_size is {limits.max_batch_size:,}"
    )
    if memory.windows is not None:
        kept = memory.windows.as_json()["layers"]
        show.line("sliding windows: " + ", ".join(f"{n} layers keep {int(w):,} tokens" for w, n in kept.items()))
    elif evaluation.embedded is not None and result.model.facts.config.get("sliding_window"):
        show.line("sliding windows: the embedded engine keeps the KV cache of all tokens in every layer")
    instances = instances_of(evaluation)
    if instances is not None:
        show.line(
            f"{instances.count} instances on {instances.gpus} GPUs: {show.size(instances.per_gpu)} on the fullest, "
            f"{show.size(instances.total)} in all; {instances.max_concurrency:,} requests of max_seq_len"
        )
    show.line(f"longest prompt: {evaluation.longest_prompt:,} tokens")


def _before_serving(result: "Plan") -> None:
    """The memory of the stages before serving."""
    peaks = result.peaks
    if peaks.calibration_gpu is not None:
        where = "host" if _on_cpu(result) else "GPU"
        show.line(f"calibration: {show.size(peaks.calibration_gpu)} of {where} memory, layer by layer")
    if peaks.quantise_at_once_gpu is not None:
        show.line(f"quantisation with the whole model in memory: {show.size(peaks.quantise_at_once_gpu)}")
    show.line(f"verification: {show.size(peaks.verify_host)} of host memory")
    if peaks.build_gpu is not None and peaks.build_host_per_worker is not None:
        show.line(
            f"engine build: {show.size(peaks.build_gpu)} of GPU memory and {show.size(peaks.build_host_per_worker)} of "
            "host memory for each rank that is built at the same time"
        )


def _estimates(result: "Plan") -> None:
    typical = result.evaluation.typical
    if not result.curve or typical is None:
        return
    rows = [
        [str(p.concurrency), f"{1e3 * p.ttft:.0f} ms", f"{1e3 * p.tpot:.1f} ms", f"{p.tokens_per_second:,.0f}"]
        for p in result.curve
    ]
    header = ["requests at once", "first token", "each further token", "tokens/s of all requests"]
    sizes = f"{typical.prompt:,} prompt tokens and {typical.output:,} output tokens"
    _print_columns(f"Estimates, not measurements, for requests of {sizes}", header, rows, right=(0, 1, 2, 3))


def _alternatives(found: "Sequence[Alternative]", goal: str) -> None:
    if not found:
        show.line("alternatives: no legal configuration found")
        return
    several = len({one.evaluation.request.engine.target.gpu for one in found}) > 1
    rows = []
    for number, one in enumerate(found, 1):
        request, point = one.evaluation.request, one.performance
        gpus = [f"{one.gpus} x {request.engine.target.gpu}"] if several else [str(number), str(one.gpus)]
        each = [] if several else [f"{1e3 * point.tpot:.1f}"]
        rows.append(
            [
                *gpus,
                f"{request.tp}/{request.pp}" + (f"/{request.ep}" if request.ep > 1 else ""),
                request.quant,
                request.kv_cache,
                f"{point.concurrency}",
                f"{one.request_seconds:.2f}",
                f"{1e3 * point.ttft:.0f}",
                *each,
                f"{one.tokens_per_second_per_gpu:,.0f}",
            ]
        )
    first = ["GPUs"] if several else ["#", "GPUs"]
    split = "tp/pp" if all(one.evaluation.request.ep == 1 for one in found) else "tp/pp/ep"
    middle = [split, "weights", "KV", "reqs", "answer s", "first ms", *([] if several else ["each ms"]), "tok/s/GPU"]
    figures = range(len(first) + 3, len(first) + len(middle))
    _print_columns(f"Alternatives, best first for {goal}", [*first, *middle], rows, right=figures)
    show.line(_LEGEND.format(each="" if several else _LEGEND_OF_EACH))
    for number, one in enumerate(found, 1):
        name = one.evaluation.request.engine.target.gpu if several else number
        show.line(f"{name}: {one.why}")
