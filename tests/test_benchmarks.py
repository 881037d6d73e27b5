"""The arithmetic of the benchmarks, which `make bench` runs, and the pages that are made of their figures."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import decode, families, gpu, inflight, latency, planning, recording
from tests.benchmarks.calibration import Timed, extrapolate
from tests.benchmarks.conversion import Conversion
from tests.benchmarks.conversion import Measured as Converted
from tests.benchmarks.limits import Limits
from tests.benchmarks.markdown import pages
from tests.benchmarks.quality import BuildQuality, Peer, Quality
from tests.benchmarks.record import (
    Decode,
    DecodeWay,
    Place,
    Record,
    read_record,
    with_calibration,
    with_domains,
    with_machine,
)
from tests.benchmarks.serving import CLIENT, Measured, Run
from trtforge.core.dtypes import dtype_named


def test_the_pages_show_the_recorded_figures() -> None:
    for path, text in pages(read_record()).items():
        assert path.read_text() == text, f"{path.name}: run python -m tests.benchmarks --markdown"


def test_other_figures_make_other_pages() -> None:
    record = read_record()
    inflight_engines = record.inflight.model_copy(update={"runs": 7})
    changed = pages(record.model_copy(update={"inflight": inflight_engines}))
    assert sum("medians of 7 interleaved runs" in text for text in changed.values()) == 1


def test_decoding_is_shown_in_times_of_openvino() -> None:
    """The best format of each at each number of requests; machines without OpenVINO do not count."""
    record = read_record()

    def measured(rates: dict[str, float]) -> Decode:
        ways = [
            DecodeWay(way=way, decode=dict.fromkeys(decode.BATCHES, rate), prefill=round(10 * rate))
            for way, rate in rates.items()
        ]
        return record.decode[0].model_copy(update={"ways": tuple(ways)})

    first = measured({"bfloat16": 30.0, "fp8": 40.0, "transformers, bfloat16": 99.0, "OpenVINO, int8": 20.0})
    second = measured({"int8_sq": 30.0, "OpenVINO, int8": 10.0, "OpenVINO, int4": 12.0})
    text = "\n".join(pages(record.model_copy(update={"decode": (first, second, measured({"bfloat16": 1.0}))})).values())
    spans = "2.0 to 2.5, 2.0 to 2.5, 2.0 to 2.5 times as fast"
    assert f"| {spans} | OpenVINO GenAI, each in its best format; 2 machines |" in text
    assert "| prompts, same model | 2.0 to 2.5 times as fast |" in text


def test_calibration_is_recorded_in_passes_and_in_times_of_ours() -> None:
    seconds = {"forward": 2.0, "forward_bfloat16": 1.0, "int4_awq": 3.0, "modelopt_int4_awq": 31.0}
    found = [Timed(kind, 8, 4096, taken, 500_000_000) for kind, taken in seconds.items()]
    recorded = {each.way: each for each in recording.calibrated(found, "demo", 512, 3).ways}
    assert (recorded["int4_awq"].passes, recorded["int4_awq"].passes_bfloat16) == (1.5, 3.0)
    assert recorded["modelopt_int4_awq"].times == pytest.approx(10.3)
    assert recorded["forward"].times is None


def test_one_model_measured_again_replaces_its_figures_only() -> None:
    record = read_record()
    again = record.calibration[0].model_copy(update={"runs": 9})
    assert [each.runs for each in with_calibration(record.calibration, again)] == [9, 1]


def test_ways_that_were_not_measured_again_stay() -> None:
    known = read_record().domains
    first = known[0].ways[0]
    again = first.model_copy(update={"kl": first.kl.model_copy(update={"median": 0.5})})
    added = first.model_copy(update={"way": "another"})
    measured = known[0].model_copy(update={"ways": (again, added)})
    found = with_domains(known, measured)
    assert found[1:] == known[1:]
    assert {each.way for each in found[0].ways} == {each.way for each in known[0].ways} | {"another"}
    assert len(found[0].ways) == len(known[0].ways) + 1
    assert again in found[0].ways
    assert first not in found[0].ways


def test_gaps_are_those_that_overlap_a_time() -> None:
    times = [[0.0, 1.0, 2.0, 5.0, 6.0], [0.5, 2.5, 4.0]]
    assert latency.gaps(times, 2.0, 5.0) == [3.0, 2.0, 1.5]


def test_every_benchmark_can_be_recorded_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "COMPUTE", "bfloat16")  # whatever this machine computes in
    record = read_record()
    runs = (Run(1000, 2.0, 0.1, {"stub": 3.0, CLIENT: 1.0}),)
    alone = (Run(1000, 1.0, 0.05, {"engine": 2.0}),)
    ways = [Converted(name, (seconds,), 5_000_000, 1) for name, seconds in zip("abcde", (1, 2, 3, 4, 5), strict=True)]
    rates = zip(inflight.VARIANTS, (9, 3, 6), strict=True)
    variants = [inflight.Measured(batching, 10, 4, (rate,)) for batching, rate in rates]
    decoded = [decode.Measured("int8_sq", {1: 50.0, 8: 200.0, 32: 400.0}, 900.0, (0.33, 0.38))]
    slower = decode.Measured("transformers", {1: 25.0, 8: 50.0, 32: 100.0}, 600.0)
    waited = latency.Measured(0.75, 0.5, 0.025, 0.02, 0.03, 0.05, 0.055, 3.0, 1.5, 0.3, 0.06)
    measured = {
        "decode": (recording.decoded(decoded, Limits(bandwidth=3e10, bfloat16=1e11, int8=2e11), 1),),
        "families": (recording.of_families([families.Compared("Mixed", 350, decoded[0], slower)], 1),),
        "latency": (recording.waited(waited, 1),),
        "planning": recording.planned([planning.Timed("trtforge plan x", 0.5, 70_000_000)], 1),
        "serving": recording.served({"demo": Measured(runs, alone)}, 1),
        "conversion": (recording.converted(Conversion(4_000_000_000, ways, ways[0]), 1),),
        "inflight": recording.batched({"demo": variants}, {inflight.STATIC: (4.0, 2.0, 3.0)}, 1),
        "quality": recording.judged(
            [Quality("int4_awq", "compensated", 0.01234, 0.00321, 0.9, Peer(0.02, 0.0042))],
            [BuildQuality("demo-int4awq", "", 61.0, 60.0, 100, 3.5)],
        ),
    }
    shown = pages(Record.model_validate(record.model_copy(update=measured).model_dump()))
    text = "".join(shown.values())
    for figure in (
        "500 tokens/s | 1,000 tokens/s | 50 %",
        "| int8_sq | 50 | 200 | 400 | 900 | 33 % | 38 % |",
        "| Mixed, 350 M | 50, 2.0 times | 200, 4.0 times | 400, 4.0 times | 900, 1.5 times |",
        "| `Engine.load` to the first token, without imports | 750 |",
        "| first token, prompt of a known prefix | 25 | 20.0 times as fast |",
        "| worst gap without the long prompt | 30 | 1.50 times |",
        "| 99th percentile of gaps while the long prompt is admitted | 50 | 2.50 times |",
        "| worst gap while the long prompt is admitted | 55 | 2.75 times |",
        "| worst gap while it is restored from files | 60 | 3.00 times |",
        "| first token of the long prompt beside them | 3,000 | 2.00 times |",
        "| first token of the long prompt from files beside them | 300 | 0.20 times |",
        "| 2.00 |",
        "in-flight 3.00 times",
        "static batches: 3 tokens/s; in flight 3.0 times",
        "int4_awq, compensated | +1.23 % | +2.00 % | 3.21e-03 | 4.20e-03 | 90.00 %",
        "+1.67 %",
        "0.50 | 70 MB",
    ):
        assert figure in text or figure in " ".join(text.split())


def test_machines_are_recorded_beside_each_other() -> None:
    known = read_record().latency
    other = known[0].model_copy(update={"machine": "another", "gap": 1.0})
    newer = other.model_copy(update={"gap": 2.0})
    assert with_machine(known, other) == (other, *known)
    assert with_machine(with_machine(known, other), newer) == (newer, *known)
    assert with_machine(with_machine(known, other), known[0]) == (known[0], other, *known[1:])


def test_decoding_is_shown_as_shares_of_what_the_machine_can() -> None:
    """16 layers of (1,536 + 1,024) x 1,024 and 3 x 1,024 x 2,816 weights, and an LM head of 8,192 x 1,024."""
    layers, head = 16 * 1024 * (1536 + 1024 + 3 * 2816), 8192 * 1024
    assert decode.multiply_adds_of_token() == layers + head
    cached = 16 * 2 * 4 * 64 * 2 * (128 + 32)
    assert decode.bytes_of_step("bfloat16") == 2 * (layers + head) + cached
    assert decode.bytes_of_step("OpenVINO, int8") == layers + 2 * head + cached
    assert decode.bytes_of_step("int4_awq") == layers * 0.53125 + 2 * head + cached
    assert decode.bytes_of_step("int4_awq, int8 activations") == decode.bytes_of_step("int4_awq")
    runs: list[decode.Rates] = [
        {"1": {"decode": alone}, "32": {"decode": together}} for alone, together in ((10, 100), (10, 100), (1, 99))
    ]
    itemsize = dtype_named(decode.COMPUTE).size
    bytes_, products = decode.bytes_of_step("bfloat16", itemsize=itemsize), decode.multiply_adds_of_token()
    limits = [Limits(times * 20 * bytes_, times * 400 * products, 1.0) for times in (1, 2, 0.1)]
    assert decode.shares("bfloat16", runs, limits) == pytest.approx((0.5, 0.25))
    step = decode.bytes_of_step("bfloat16", itemsize=itemsize, batch=32)
    assert step == pytest.approx(bytes_ + 31 * cached * itemsize / 2)
    fast_products = [Limits(step * 5, 1e6 * products, 1.0)] * 3
    assert decode.shares("bfloat16", runs, fast_products) == pytest.approx((2 * bytes_ / step, 100 / 32 / 5))
    products_of_types = Limits(1.0, bfloat16=20 * head, int8=10 * layers)
    assert decode.seconds_of_token("int8_sq", products_of_types) == pytest.approx(0.05 + 0.1)
    assert decode.seconds_of_token("int4_awq, int8 activations", products_of_types) == pytest.approx(0.05 + 0.1)
    assert decode.seconds_of_token("fp8", products_of_types) == pytest.approx((layers + head) / (20 * head))
    no_int8 = Limits(1.0, bfloat16=20 * (layers + head), int8=0.0)
    assert decode.seconds_of_token("int8_sq", no_int8) == pytest.approx(0.05)


def test_more_batches_take_longer_and_the_rest_does_not() -> None:
    passes = [[1.0, 1.0, 1.0, 5.0], [3.0, 2.0, 2.0, 2.0]]
    assert extrapolate(sum(map(sum, passes)) + 4.0, passes, 4) == pytest.approx(4.0 + 4 * 1.0 + 4 * 2.0)
    assert extrapolate(sum(map(sum, passes)) + 4.0, passes, 32) == pytest.approx(4.0 + 32 * 1.0 + 32 * 2.0)


def test_serving_is_compared_by_medians_and_the_client_is_counted_apart() -> None:
    served = tuple(
        Run(1000, seconds, first, {"stub": 3.0, CLIENT: 1.0}) for seconds, first in ((1, 0.2), (2, 0.1), (9, 9))
    )
    engine = tuple(Run(1000, seconds, 0.05, {"engine": 2.0}) for seconds in (1, 1, 5))
    measured = Measured(served, engine)
    assert measured.ratio == pytest.approx(0.5)
    assert measured.first_later == pytest.approx(0.15)
    assert served[0].cpu_seconds == pytest.approx(3.0)
    assert served[0].client_share == pytest.approx(0.25)
    assert engine[0].client_share == 0.0
    assert Run(1000, 2.0, 0.1, {"engine": 2.0}, busy=3.0).others == pytest.approx(0.5)


def test_gpu_shares_are_of_what_a_copy_moves_and_products_compute() -> None:
    """The 8B model: 6.98e9 weights in its layers, and an LM head of 128,256 x 4,096."""
    model = gpu.MODELS["8B"]
    layers, head = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336), 128256 * 4096
    cached = 32 * 2 * 8 * 128 * 2 * (128 + 32)
    assert decode.multiply_adds_of_token(model.shape) == layers + head
    assert decode.bytes_of_step("fp8", model.shape, 160) == layers + 2 * head + cached
    rates = gpu.Rates(alone=10.0, together=300.0, prompts=100.0)
    limits = gpu.Limits(40.0 * (2 * (layers + head) + cached), 200.0 * layers, 0.0)
    assert gpu.shares(gpu.Measured("8B", "bfloat16", rates, rates), model, limits) == pytest.approx((0.25, 0.5))
    twice = gpu.Limits(limits.bandwidth, limits.bfloat16, 2 * limits.bfloat16)
    fp8, int4 = (gpu.shares(gpu.Measured("8B", way, rates, rates), model, twice) for way in ("fp8", "int4_awq"))
    assert (fp8[1], int4[1]) == pytest.approx((0.25, 0.5))


def test_figures_of_a_gpu_are_shown_with_its_name_and_the_date() -> None:
    rates, peer = gpu.Rates(150.0, 6000.0, 40_000.0), gpu.Rates(30.0, 1500.0, 20_000.0)
    found = [gpu.Measured("8B", way, rates, peer) for way in ("bfloat16", "fp8")]
    place = Place(machine="NVIDIA H100 80GB HBM3", software="torch 2.13 with CUDA 13.0, transformers 5.23")
    record = read_record()
    assert "Not measured yet: no GPU was at hand." in "".join(pages(record.model_copy(update={"gpu": None})).values())
    limits = gpu.Limits(3e12, 4e14, 8e14)
    recorded = recording.on_gpu(found, gpu.MODELS, limits, place, "2026-11-23", 3)
    changed = Record.model_validate(record.model_copy(update={"gpu": recorded}).model_dump())
    text = " ".join("".join(pages(changed).values()).split())
    assert "NVIDIA H100 80GB HBM3; torch 2.13 with CUDA 13.0, transformers 5.23; medians of 3 interleaved runs." in text
    assert "| 8B, bfloat16 | 150 | 75 % | 6,000 | 4.0 times | 40,000 | 70 % |" in text
    assert "| 8B, fp8 | 150 | 40 % | 6,000 | 4.0 times | 40,000 | 35 % |" in text
    assert "Measured on 2026-11-23. The shares are of what a copy moves, 3000 GB/s" in text
    assert "400 trillion multiply-adds a second in bfloat16, 800 in FP8" in text


def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    found, limits = gpu.measure(tmp_path, gpu.TINY, ("bfloat16",), "cpu", 1)
    assert [(each.model, each.format) for each in found] == [("tiny", "bfloat16")]
    assert all(rate > 0 for each in found for rates in (each.rates, each.peer) for rate in vars(rates).values())
    assert min(limits.bandwidth, limits.bfloat16) > 0
    assert limits.fp8 == 0
    assert list(tmp_path.iterdir()) == []


def test_all_benchmarks_but_that_of_a_gpu_run_by_default() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", "--help"], capture_output=True, text=True, check=True
    )
    assert "gpu; all but gpu if none is given" in " ".join(done.stdout.split())
