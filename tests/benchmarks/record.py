"""The figures of docs/benchmarks.json: the last recorded run of each benchmark, rounded as the page shows them.

`python -m tests.benchmarks` measures and records the benchmarks; with `--attacks FILE` it records the reports that
`python -m tests.assault --json FILE` wrote.
"""

import json
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from trtforge.core.config_model import Config

RECORD = Path(__file__).parents[2] / "docs" / "benchmarks.json"
Range = tuple[float, float]


class Place(Config):
    """Where it ran."""

    machine: str
    software: str


class Measured(Place):
    """A benchmark. `runs`: how often each way was measured, in turns; the figures are medians."""

    runs: int


OnMachine = TypeVar("OnMachine", bound=Place)


class Throughput(Config):
    """Tokens a second, and how many steps of the engine it took."""

    rate: int
    steps: int


class InFlightEngine(Config):
    """One engine under the three ways to batch."""

    engine: str
    inflight: Throughput
    static_padded: Throughput
    static_dropped: Throughput


class InFlight(Measured):
    """In-flight against static batching. `transformers`: tokens a second of its ways, in float32."""

    engines: tuple[InFlightEngine, ...]
    transformers: dict[str, int] = Field(default_factory=dict)


class DecodeWay(Config):
    """Tokens a second while decoding, by the number of requests in flight, and of prompts.

    Shares of the machine's limits: `bandwidth` of one request, `limit` of the tighter one by the most requests.
    """

    way: str
    decode: dict[int, float]
    prefill: int
    bandwidth: float | None = None
    limit: float | None = None


class Decode(Measured):
    """The embedded engine on a random Llama of 200 M parameters.

    The machine's limits: GB/s read from memory, 1e9 multiply-adds a second of bfloat16 and of int8.
    """

    ways: tuple[DecodeWay, ...]
    read_gb: float | None = None
    bfloat16_giga: float | None = None
    int8_giga: float | None = None


class Network(Config):
    """A random network of so many million parameters in bfloat16, by the embedded engine and by `transformers`."""

    name: str
    millions: int
    ours: DecodeWay
    transformers: DecodeWay


class Families(Measured):
    """Networks of other families than Llama: tests/benchmarks/families.py."""

    networks: tuple[Network, ...]


class GpuWay(Config):
    """Tokens a second of one model in one format: one request, 64 requests and `transformers`' 64, prompts.

    Shares of the GPU's limits: `bandwidth` of one request, `products` of prompts.
    """

    model: str
    format: str
    alone: float
    bandwidth: float
    together: float
    transformers: float
    prompts: int
    products: float


class Gpu(Measured):
    """The embedded engine on a GPU, on a date: tests/benchmarks/gpu.py. Limits: GB/s, 1e12 multiply-adds a second."""

    date: str
    ways: tuple[GpuWay, ...]
    copy_gb: float
    bfloat16_tera: float
    fp8_tera: float


class Latency(Measured):
    """The embedded engine on the random Llama of `decode`, in ms: see tests/benchmarks/latency.py.

    Figures that may be missing were not measured on that machine.
    """

    load: float
    cold: float
    warm: float
    gap: float
    worst_gap: float
    worst_alone: float | None = None
    most_gaps: float | None = None
    long: float
    long_alone: float
    restored: float | None = None
    worst_restored: float | None = None


class ServedEngine(Config):
    """One engine through Triton and in process: tokens a second, and the median first token in ms."""

    engine: str
    rate: int
    rate_in_process: int
    first_token_ms: int
    first_token_in_process_ms: int


class Serving(Measured):
    """`client_share` of all CPU time; `more_cpu_seconds` for 1,000 tokens than in process. Ranges over the engines."""

    engines: tuple[ServedEngine, ...]
    client_share: Range
    more_cpu_seconds: Range


class GatewayWay(Config):
    """One way: the median request alone in ms, and requests a second of 32 connections."""

    p50_ms: float
    rate: int


class Gateway(Measured):
    """OpenAI's API before a server without a model. `events`: streamed events a second of 32 connections."""

    gateway: GatewayWay
    proxy: GatewayWay
    events: int


class Attack(Place):
    """What an attack of `python -m tests.assault` reported. `failed`: its checks that did not hold."""

    name: str
    checks: int
    failed: tuple[str, ...] = ()
    rows: tuple[dict[str, str | int | float], ...]

    def column(self, name: str) -> list[float]:
        """The numbers of a column."""
        return [float(row[name]) for row in self.rows]


class Way(Config):
    """One command. `times_copy`: seconds by those of copying the files."""

    name: str
    seconds: float
    times_copy: float
    peak_mb: int


class Conversion(Measured):
    """Conversion of a model of `gigabytes`; `plan_405b_seconds`: planning a layout of 405B from its headers."""

    gigabytes: float
    ways: tuple[Way, ...]
    plan_405b_seconds: float


class Command(Config):
    """One command that plans."""

    command: str
    seconds: float
    peak_mb: int


class Planning(Measured):
    """What planning Llama-3.1-405B takes."""

    commands: tuple[Command, ...]


class Calibrated(Config):
    """One way to calibrate. `passes`: seconds by those of a forward pass; `times`: by those of trtforge's own."""

    way: str
    batch: int
    tokens: int
    seconds: float
    passes: float | None = None
    passes_bfloat16: float | None = None
    times: float | None = None
    extrapolated: bool = False


class CalibrationMemory(Config):
    """Peak memory of INT4-AWQ in MB, ours rounded to the nearest and compensated, ModelOpt's over its batch sizes."""

    tokens: int
    trtforge: int
    compensated: int | None = None
    modelopt_float32: tuple[int, int]
    modelopt_bfloat16: tuple[int, int]


class Calibration(Measured):
    """One model in windows of `window` tokens."""

    model: str
    window: int
    ways: tuple[Calibrated, ...]
    memory: CalibrationMemory | None = None


class Built(Config):
    """What a recipe's own report says. `increase` as a fraction; `compression` of the quantised linears."""

    recipe: str
    note: str = ""
    perplexity: float
    increase: float
    compression: float | None = None


class FormatQuality(Config):
    """Increase of perplexity over float32, as a fraction, and mean KL divergence from it in nats.

    None where ModelOpt has no such format on a CPU, or where a divergence was not recorded.
    """

    format: str
    rounding: str | None = None
    increase: float
    modelopt: float | None = None
    kl: float | None = None
    modelopt_kl: float | None = None
    top1: float


class Quality(Measured):
    """The demo model on its held-out text. `tokens` are predicted; `perplexity` is the float32 reference's."""

    tokens: int
    perplexity: float
    builds: tuple[Built, ...]
    formats: tuple[FormatQuality, ...]


class Spread(Config):
    """Of several calibration seeds."""

    median: float
    least: float
    most: float


class DomainWay(Config):
    """One way to quantise. Mean KL divergence in nats and increase of perplexity as a fraction, both against float32.

    `group` 0: the format has none.
    """

    format: str
    group: int
    way: str
    kl: Spread
    kl_other: Spread
    increase: Spread
    increase_other: Spread


class Domains(Measured):
    """A model on held-out text of the calibration's domain and of another; `runs` calibrations."""

    model: str
    calibrated: int
    judged: int
    ways: tuple[DomainWay, ...]


class Record(Config):
    """The whole file. Benchmarks that were measured on several machines have the last measured first."""

    planning: Planning | None = None
    conversion: tuple[Conversion, ...]
    calibration: tuple[Calibration, ...]
    quality: Quality
    domains: tuple[Domains, ...] = ()
    inflight: InFlight
    decode: tuple[Decode, ...] = ()
    latency: tuple[Latency, ...] = ()
    families: tuple[Families, ...] = ()
    gpu: Gpu | None = None
    serving: Serving
    gateway: Gateway | None = None
    attacks: tuple[Attack, ...] = ()


def read_record() -> Record:
    """The figures of the file."""
    return Record.model_validate_json(RECORD.read_text())


def write_record(record: Record) -> None:
    """Replace the file."""
    RECORD.write_text(
        json.dumps(record.model_dump(mode="json", exclude_defaults=True), indent=1, ensure_ascii=False) + "\n"
    )


def rounded(seconds: float) -> float:
    """Three or four digits, which is more than such a machine repeats."""
    return round(seconds, 2 if seconds < 10 else 1 if seconds < 100 else 0)


def with_calibration(known: tuple[Calibration, ...], measured: Calibration) -> tuple[Calibration, ...]:
    """`known` with one model's figures replaced, or added at the end."""
    by_model = {(each.model, each.window): each for each in known}
    by_model[measured.model, measured.window] = measured
    return tuple(by_model.values())


_ORDER = ("int4_awq", "w4a8_awq", "nvfp4", "int4_wo", "fp8 KV cache")


def with_machine(known: tuple[OnMachine, ...], measured: OnMachine) -> tuple[OnMachine, ...]:
    """`known` with the figures of one machine replaced, or added; they come first."""
    return (measured, *(each for each in known if each.machine != measured.machine))


def with_domains(known: tuple[Domains, ...], measured: Domains) -> tuple[Domains, ...]:
    """`known` with one model's figures replaced, or added at the end; ways that were not measured are kept."""
    before = {each.model: each for each in known}
    ways = {(each.format, each.group, each.way): each for each in measured.ways}
    if measured.model in before:
        ways = {(each.format, each.group, each.way): each for each in before[measured.model].ways} | ways
    ordered = sorted(ways.values(), key=lambda each: (_ORDER.index(each.format), each.group))
    return tuple((before | {measured.model: measured.model_copy(update={"ways": tuple(ordered)})}).values())


def with_attacks(known: tuple[Attack, ...], reported: tuple[Attack, ...]) -> tuple[Attack, ...]:
    """`known` with attacks replaced by later reports of the same name, or added at the end."""
    return tuple(({each.name: each for each in known} | {each.name: each for each in reported}).values())
