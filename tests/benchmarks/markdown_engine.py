"""The tables of the embedded engine's speed."""

from tests.benchmarks.markdown_parts import by_machine, table, where, wrapped
from tests.benchmarks.record import Decode, Families, Latency, Record


def inflight(record: Record) -> str:
    """In-flight against static batching."""
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
    shown = table(("engine", "in flight", "static, finished rows padded", "static, finished rows dropped"), rows)
    for way, rate in record.inflight.transformers.items():
        times = " and ".join(f"{each.inflight.rate / rate:.1f}" for each in record.inflight.engines)
        notes += f" `transformers` in float32, {way}: {rate:,} tokens/s; in flight {times} times."
    return f"{where(record.inflight)}{shown}\n\n{wrapped(notes)}"


def decode(record: Record) -> str:
    """Tokens a second by format, with shares of the machine's limits."""
    return by_machine("decode", map(_decoded, record.decode))


def _decoded(found: Decode) -> str:
    batches, limited = list(found.ways[0].decode), found.read_gb is not None
    rows = []
    for way in found.ways:
        rates = (*(f"{way.decode[batch]:g}" for batch in batches), f"{way.prefill:,}")
        rows.append((way.way, *rates, *((_share(way.bandwidth), _share(way.limit)) if limited else ())))
    heads = ("tokens/s", *(f"{batch} in flight" for batch in batches), "prompts")
    shown = where(found) + table((*heads, *(("bandwidth", "limit") if limited else ())), rows)
    if not limited:
        return shown
    notes = (
        f"The machine reads {found.read_gb:g} GB/s from memory. A second has {found.bfloat16_giga:g} billion "
        "multiply-adds in bfloat16, or in float32 where these are faster, and "
        + (f"{found.int8_giga:g} in int8." if found.int8_giga else "none in int8.")
    )
    return f"{shown}\n\n{wrapped(notes)}"


def families(record: Record) -> str:
    """Networks other than Llama beside `transformers`."""
    return by_machine("families", map(_compared, record.families))


def _compared(found: Families) -> str:
    batches = list(found.networks[0].ours.decode)
    rows = []
    for each in found.networks:
        ours, theirs = each.ours, each.transformers
        speeds = [(ours.decode[batch], theirs.decode[batch]) for batch in batches] + [(ours.prefill, theirs.prefill)]
        cells = (f"{own:,g}, {own / other:.1f} times" for own, other in speeds)
        rows.append((f"{each.name}, {each.millions:,} M", *cells))
    return where(found) + table(("tokens/s", *(f"{batch} in flight" for batch in batches), "prompts"), rows)


def gpu(record: Record) -> str:
    """The engine on a GPU."""
    found = record.gpu
    if found is None:
        return "Not measured yet: no GPU was at hand. `make bench-gpu` measures and records it."
    rows = [
        (
            f"{way.model}, {way.format}",
            f"{way.alone:,g}",
            _share(way.bandwidth),
            f"{way.together:,g}",
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
    return f"{where(found)}{table(columns, rows)}\n\n{wrapped(notes)}"


def latency(record: Record) -> str:
    """How long requests wait."""
    return by_machine("latency", map(_waited, record.latency))


def _waited(found: Latency) -> str:
    rows = [
        ("`Engine.load` to the first token, without imports", f"{found.load:,g}", ""),
        ("first token, prompt of a new prefix", f"{found.cold:,g}", ""),
        ("first token, prompt of a known prefix", f"{found.warm:,g}", f"{found.cold / found.warm:.1f} times as fast"),
        ("median gap of running requests", f"{found.gap:,g}", ""),
        ("worst gap without the long prompt", *_in_times(found.worst_alone, found.gap)),
        ("99th percentile of gaps while the long prompt is admitted", *_in_times(found.most_gaps, found.gap)),
        ("worst gap while the long prompt is admitted", *_in_times(found.worst_gap, found.gap)),
        ("worst gap while it is restored from files", *_in_times(found.worst_restored, found.gap)),
        ("first token of the long prompt alone", f"{found.long_alone:,g}", ""),
        ("first token of the long prompt beside them", *_in_times(found.long, found.long_alone)),
        ("first token of the long prompt from files beside them", *_in_times(found.restored, found.long_alone)),
    ]
    return where(found) + table(("", "ms", "ratio"), [row for row in rows if row[1]])


def _in_times(value: float | None, of: float) -> tuple[str, str]:
    return ("", "") if value is None else (f"{value:,g}", f"{value / of:.2f} times")


def _share(share: float | None) -> str:
    return "" if share is None else f"{share * 100:.0f} %"
