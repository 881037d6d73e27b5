"""The tables of docs/benchmarks.md and the summary of the README, made of the record."""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.benchmarks.record import (
    Calibrated,
    Calibration,
    Conversion,
    Decode,
    Latency,
    Measured,
    Place,
    Record,
    Spread,
)

ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
NONE = "–"
WAYS = {
    "fp8": "`trtforge calibrate`, fp8",
    "modelopt_fp8": "ModelOpt, fp8, float32",
    "int4_awq": "`trtforge calibrate`, int4_awq, nearest",
    "int4_awq_compensated": "`trtforge calibrate`, int4_awq, compensated",
    "modelopt_int4_awq": "ModelOpt, int4_awq, float32",
    "modelopt_int4_awq_bfloat16": "ModelOpt, int4_awq, bfloat16",
}


def pages(record: Record) -> dict[Path, str]:
    """Both pages as the record wants them. Raises ValueError for a page without one of its markers."""
    page = PAGE.read_text()
    for marker, make in BLOCKS.items():
        page = _filled(page, marker, make(record))
    return {PAGE: page, README: _filled(README.read_text(), "figures", summary(record))}


def summary(record: Record) -> str:
    """The README's ten figures."""
    memory = next((model.memory for model in record.calibration if model.memory), None)
    conversion = record.conversion[0]
    copy, ours, ours_tp8, peer_tp1, peer_tp8 = conversion.ways
    quality = next(each for each in record.quality.formats if each.format == "int4_awq")  # its default rounding
    built = {each.recipe: each for each in record.quality.builds}["demo-int4awq"]
    batching = record.inflight.engines[0]
    served = record.serving.engines
    ratios = sorted(each.rate / each.rate_in_process for each in served)
    later = sorted(each.first_token_ms - each.first_token_in_process_ms for each in served)
    rows = [
        (
            f"convert {conversion.gigabytes} GB of bfloat16",
            f"{ours.seconds} s at tp 1, {ours_tp8.seconds} s at tp 8",
            f"`{copy.name}`: {copy.seconds} s; `transformers`: {peer_tp1.seconds} s and {peer_tp8.seconds} s",
        ),
        (
            "peak memory of that",
            f"{ours.peak_mb} MB",
            f"`transformers`: {max(peer_tp1.peak_mb, peer_tp8.peak_mb):,} MB",
        ),
        (
            "plan and check Llama-3.1-405B, tp 8, pp 2",
            f"{conversion.plan_405b_seconds} s",
            "reads only the headers",
        ),
        (
            "calibrate INT4-AWQ, compensated (nearest)",
            _calibrates(record, "modelopt_int4_awq", single=True),
            "ModelOpt in float32, a window at a time as TensorRT-LLM calls it",
        ),
        (
            "",
            _calibrates(record, "modelopt_int4_awq_bfloat16", single=False),
            "ModelOpt at its fastest: bfloat16, batches of 8",
        ),
        (
            "peak memory of that, 200 M model",
            f"{memory.compensated:,} ({memory.trtforge:,}) MB" if memory else NONE,
            f"ModelOpt: {_span(memory.modelopt_bfloat16)} MB in bfloat16" if memory else NONE,
        ),
        (
            "perplexity, INT4-AWQ",
            _percent(quality.increase),
            f"ModelOpt: {_percent(quality.modelopt or 0)}; groups of 64",
        ),
        (
            "size of the linears, INT4-AWQ",
            f"{built.compression:.2f} times smaller",
            f"perplexity {_percent(built.increase)}; groups of 128",
        ),
        (
            "in-flight batching, 128 requests",
            f"{batching.inflight.rate:,} tokens/s",
            f"static batching: {batching.static_padded.rate:,} padded, {batching.static_dropped.rate:,} unpadded",
        ),
        (
            "through Triton, 32 streams",
            f"{ratios[0] * 100:.0f} to {ratios[-1] * 100:.0f} % of the engine's tokens/s",
            f"first token {later[0]} to {later[-1]} ms later",
        ),
    ]
    return _table(("what", "trtforge", "beside it"), rows)


def _inflight(record: Record) -> str:
    rows = []
    for each in record.inflight.engines:
        fast = each.inflight.rate
        static = (each.static_padded.rate, each.static_dropped.rate)
        compared = (f"{slow:,} tokens/s; in-flight {fast / slow:.2f} times" for slow in static)
        rows.append((each.engine, f"{fast:,} tokens/s", *compared))
    first = record.inflight.engines[0]
    notes = (
        f"Steps of the engine: {first.inflight.steps} in flight, {first.static_padded.steps} static. Where a step "
        "takes as long at any batch size, only their number counts."
    )
    table = _table(("engine", "in flight", "static, finished rows padded", "static, finished rows dropped"), rows)
    for way, rate in record.inflight.transformers.items():
        times = " and ".join(f"{each.inflight.rate / rate:.1f}" for each in record.inflight.engines)
        notes += f" `transformers` in float32, {way}: {rate:,} tokens/s; in flight {times} times."
    return f"{_where(record.inflight)}{table}\n\n{_wrapped(notes)}"


def _serving(record: Record) -> str:
    serving = record.serving
    rows = [
        (
            each.engine,
            f"{each.rate:,} tokens/s",
            f"{each.rate_in_process:,} tokens/s",
            f"{each.rate / each.rate_in_process * 100:.0f} %",
            f"{each.first_token_ms} ms, in process {each.first_token_in_process_ms} ms",
        )
        for each in serving.engines
    ]
    more = " to ".join(dict.fromkeys(map(str, serving.more_cpu_seconds)))
    shares = " to ".join(dict.fromkeys(f"{share * 100:.0f}" for share in serving.client_share))
    notes = (
        f"Serving takes {more} s more of CPU time for 1,000 tokens than the engine alone, on another core. "
        f"The client takes {shares} % of the CPU time."
    )
    table = _table(("engine", "through Triton", "in process", "ratio", "first token, p50"), rows)
    return f"{_where(serving)}{table}\n\n{_wrapped(notes)}"


def _decode(record: Record) -> str:
    return _by_machine("decode", map(_decoded, record.decode))


def _by_machine(name: str, tables: Iterable[str]) -> str:
    """The tables of one benchmark on several machines."""
    return "\n\n".join(tables) or f"Not recorded yet: `python -m tests.benchmarks {name}` measures and records it."


def _decoded(found: Decode) -> str:
    batches, limited = list(found.ways[0].decode), found.read_gb is not None
    rows = []
    for way in found.ways:
        rates = (*(f"{way.decode[batch]:g}" for batch in batches), f"{way.prefill:,}")
        rows.append((way.way, *rates, *((_share(way.bandwidth), _share(way.products)) if limited else ())))
    heads = ("tokens/s", *(f"{batch} in flight" for batch in batches), "prompts")
    table = _where(found) + _table((*heads, *(("bandwidth", "products") if limited else ())), rows)
    if not limited:
        return table
    notes = (
        f"The shares are of what the machine reads from memory, {found.read_gb:g} GB/s, by one request, and of its "
        f"products in registers, by {batches[-1]}: {found.bfloat16_giga:g} billion multiply-adds a second in bfloat16, "
        f"{found.int8_giga:g} in int8."
    )
    return f"{table}\n\n{_wrapped(notes)}"


def _gpu(record: Record) -> str:
    found = record.gpu
    if found is None:
        return "Not measured yet: no GPU was at hand. `make bench-gpu` measures and records it."
    rows = [
        (
            f"{way.model}, {way.format}",
            f"{way.alone:g}",
            _share(way.bandwidth),
            f"{way.together:g}",
            f"{way.together / way.transformers:.1f} times",
            f"{way.prompts:,}",
            _share(way.products),
        )
        for way in found.ways
    ]
    columns = ("tokens/s", "1 in flight", "bandwidth", "64 in flight", "`transformers`", "prompts", "products")
    fp8 = f", {found.fp8_tera:g} in FP8" if found.fp8_tera else ""
    notes = (
        f"Measured on {found.date}. The shares are of what a copy moves, {found.copy_gb:g} GB/s, by one request, and "
        f"of square matrix products, {found.bfloat16_tera:g} trillion multiply-adds a second in bfloat16{fp8}, by "
        "prompts."
    )
    return f"{_where(found)}{_table(columns, rows)}\n\n{_wrapped(notes)}"


def _latency(record: Record) -> str:
    return _by_machine("latency", map(_waited, record.latency))


def _waited(found: Latency) -> str:
    rows = [
        ("`Engine.load` to the first token, without imports", f"{found.load:,g}", ""),
        ("first token, prompt of a new prefix", f"{found.cold:,g}", ""),
        ("first token, prompt of a known prefix", f"{found.warm:,g}", f"{found.cold / found.warm:.1f} times as fast"),
        ("median gap of running requests", f"{found.gap:,g}", ""),
        *(
            (what, f"{gap:,g}", _times(gap, found.gap))
            for what, gap in (
                ("worst gap without the long prompt", found.worst_alone),
                ("99th percentile of gaps while the long prompt is admitted", found.most_gaps),
                ("worst gap while the long prompt is admitted", found.worst_gap),
            )
            if gap is not None
        ),
        ("first token of the long prompt alone", f"{found.long_alone:,g}", ""),
        ("first token of the long prompt beside them", f"{found.long:,g}", _times(found.long, found.long_alone)),
    ]
    return _where(found) + _table(("", "ms", "ratio"), rows)


def _times(value: float, of: float) -> str:
    return f"{value / of:.2f} times"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share * 100:.0f} %"


def _gateway(record: Record) -> str:
    found = record.gateway
    if found is None:
        return "Not recorded yet: `python -m tests.benchmarks gateway` measures and records it."
    rows = [
        (name, f"{way.p50_ms:.2f} ms", f"{way.rate:,}")
        for name, way in (("the gateway", found.gateway), ("a bare FastAPI proxy", found.proxy))
    ]
    table = _table(("way", "a request alone, p50", "requests/s, 32 connections"), rows)
    notes = f"The gateway streams {found.events:,} events a second to 32 connections."
    return f"{_where(found)}{table}\n\n{_wrapped(notes)}"


def _attacks(record: Record) -> str:
    parts = []
    for attack in record.attacks:
        columns = list(dict.fromkeys(name for row in attack.rows for name in row))
        rows = [[_cell(row.get(name, "")) for name in columns] for row in attack.rows]
        failed = f", failed: {'; '.join(attack.failed)}" if attack.failed else ", all held"
        head = f"### {attack.name[:1].upper()}{attack.name[1:]}\n\n"
        parts.append(head + _where(attack, f"{attack.checks} checks{failed}. ") + _table(columns, rows))
    return "\n\n".join(parts)


def _cell(figure: str | int | float) -> str:
    match figure:
        case float():
            return f"{figure:.2f}"
        case int():
            return f"{figure:,}"
        case _:
            return figure


def _conversion(record: Record) -> str:
    return _by_machine("conversion", map(_converted, record.conversion))


def _converted(found: Conversion) -> str:
    rows = [(way.name, f"{way.seconds}", f"{way.times_copy:.2f}", f"{way.peak_mb:,} MB") for way in found.ways]
    return (
        _where(found)
        + _table((f"{found.gigabytes} GB of bfloat16", "seconds", "times the copy", "peak memory"), rows)
        + f"\n\nPlanning and checking Llama-3.1-405B at tp 8, pp 2 from its headers takes {found.plan_405b_seconds} s."
    )


def _planning(record: Record) -> str:
    if record.planning is None:
        return "Not recorded yet: `python -m tests.benchmarks planning` measures and records it."
    rows = [(f"`{each.command}`", f"{each.seconds:.2f}", f"{each.peak_mb} MB") for each in record.planning.commands]
    return _where(record.planning) + _table(("command", "seconds", "peak memory"), rows)


def _calibration(record: Record) -> str:
    return "\n\n".join(map(_calibrated, record.calibration))


def _calibrated(model: Calibration) -> str:
    counts = sorted({each.tokens for each in model.ways})
    found = {(each.way, each.batch, each.tokens): each for each in model.ways}
    ways = dict.fromkeys((each.way, each.batch) for each in model.ways if not each.way.startswith("forward"))
    batch = next(each.batch for each in model.ways if each.way == "forward")
    forward = (
        tuple(_seconds(found[way, batch, count].seconds) for way in ("forward", "forward_bfloat16")) for count in counts
    )
    compensated = {each.tokens: each.seconds for each in model.ways if each.way == "int4_awq_compensated"}
    rows = [("forward pass, float32 (bfloat16)", *(f"{full} ({half})" for full, half in forward))]
    for way, size in ways:
        name = WAYS[way]
        if way.startswith("modelopt_int4"):
            name += ", a window at a time" if size == 1 else f", batches of {size}"
        rows.append((name, *(_calibrated_cell(found[way, size, count], compensated[count]) for count in counts)))
    text = _where(model, f"{model.model}, windows of {model.window} tokens: ")
    text += _table(("seconds", *(f"{count:,} tokens" for count in counts)), rows)
    if (memory := model.memory) is not None:
        compensated = f" ({memory.compensated:,} MB compensated)" if memory.compensated else ""
        text += "\n\n" + _wrapped(
            f"Peak memory of INT4-AWQ at {memory.tokens:,} tokens: {memory.trtforge:,} MB{compensated}; ModelOpt "
            f"{_span(memory.modelopt_float32)} MB in float32 and {_span(memory.modelopt_bfloat16)} MB in bfloat16."
        )
    return text


def _calibrates(record: Record, peer: str, *, single: bool) -> str:
    """How many times as fast as a peer all models are calibrated, with each rounding."""
    spans = []
    for ours in ("int4_awq_compensated", "int4_awq"):
        ratios = [
            each.seconds / seconds[ours, each.tokens]
            for model in record.calibration
            for seconds in [{(run.way, run.tokens): run.seconds for run in model.ways}]
            for each in model.ways
            if each.way == peer and (each.batch == 1) == single
        ]
        spans.append(f"{min(ratios):.1f} to {max(ratios):.1f}")
    return f"{spans[0]} ({spans[1]}) times as fast"


def _calibrated_cell(each: Calibrated, compensated: float) -> str:
    """`compensated`: seconds of our calibration with compensated rounding on as many tokens."""
    notes = []
    if each.times is not None and "int4" in each.way:
        notes.append(f"{each.seconds / compensated:.1f} times ({each.times:.1f})")
    if each.passes is not None and not each.way.startswith("modelopt"):
        in_bfloat16 = "" if each.passes_bfloat16 is None else f" ({each.passes_bfloat16:.1f} in bfloat16)"
        notes.append(f"{each.passes:.2f} passes{in_bfloat16}")
    shown = _seconds(each.seconds) + (" (extrapolated)" if each.extrapolated else "")
    return ": ".join((shown, *notes))


def _builds(record: Record) -> str:
    reference = record.quality.perplexity
    rows = [
        (
            each.recipe + (f" ({each.note})" if each.note else ""),
            f"{each.perplexity:.3f}",
            _percent(each.increase),
            NONE if each.compression is None else f"{each.compression:.2f} times smaller",
        )
        for each in record.quality.builds
    ]
    head = _where(record.quality, f"{record.quality.tokens:,} tokens, float32 reference {reference:.3f}: ")
    return head + _table(("recipe", "perplexity", "increase", "quantised linears"), rows)


def _formats(record: Record) -> str:
    rows = [
        (
            each.format + (f", {each.rounding}" if each.rounding else ""),
            _percent(each.increase),
            NONE if each.modelopt is None else _percent(each.modelopt),
            _divergence(each.kl),
            _divergence(each.modelopt_kl),
            f"{each.top1 * 100:.2f} %",
        )
        for each in record.quality.formats
    ]
    return _table(("format", "increase", "ModelOpt's", "mean KL", "ModelOpt's", "top-1 agreement"), rows)


def _domains(record: Record) -> str:
    def shown(spread: Spread, number: Callable[[float], str]) -> str:
        if spread.least == spread.most:
            return number(spread.median)
        return f"{number(spread.median)} ({number(spread.least)} to {number(spread.most)})"

    parts = []
    for model in record.domains:
        head = (
            f"{model.model[0].upper()}{model.model[1:]}, {model.calibrated:,} tokens of calibration, {model.judged:,} "
            f"judged of each kind, {model.runs} seeds: {model.machine}; {model.software}."
        )
        rows = [
            (
                each.format + (f", {each.group}" if "awq" in each.format else ""),
                each.way,
                shown(each.kl, _divergence),
                shown(each.kl_other, _divergence),
                shown(each.increase, _percent),
                shown(each.increase_other, _percent),
            )
            for each in model.ways
        ]
        columns = ("format", "way", "KL, own domain", "KL, other", "perplexity, own", "perplexity, other")
        parts.append(_wrapped(head) + "\n\n" + _table(columns, rows))
    return "\n\n".join(parts)


def _divergence(nats: float | None) -> str:
    return NONE if nats is None else f"{nats:.2e}"


BLOCKS = {
    "inflight": _inflight,
    "serving": _serving,
    "decode": _decode,
    "latency": _latency,
    "gpu": _gpu,
    "gateway": _gateway,
    "attacks": _attacks,
    "conversion": _conversion,
    "planning": _planning,
    "calibration": _calibration,
    "builds": _builds,
    "formats": _formats,
    "domains": _domains,
}


def _filled(text: str, marker: str, content: str) -> str:
    filled, count = re.subn(
        rf"<!-- {marker} -->\n.*?<!-- end -->",
        lambda _: f"<!-- {marker} -->\n{content}\n<!-- end -->",
        text,
        flags=re.S,
    )
    if count != 1:
        raise ValueError(f"<!-- {marker} --> stands {count} times in the page, not once")
    return filled


def _where(place: Place, what: str = "") -> str:
    """The lines above a table."""
    words = [place.machine, place.software]
    if isinstance(place, Measured):
        words.append(f"medians of {place.runs} interleaved runs" if place.runs > 1 else "one run")
    return _wrapped(what + "; ".join(words) + ".") + "\n\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(columns), "|".join("---" for _ in columns), *(" | ".join(row) for row in rows)]
    return "\n".join(f"|{line}|" if line.startswith("---") else f"| {line} |" for line in lines)


def _percent(fraction: float) -> str:
    return f"{round(fraction * 100, 2) + 0.0:+.2f} %"  # adding 0.0 makes -0.0 positive


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 1 else f"{seconds:g}"


def _span(span: tuple[int, int]) -> str:
    return f"{span[0]:,} to {span[1]:,}"
