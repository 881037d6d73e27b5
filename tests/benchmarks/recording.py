"""What was measured, as the record has it: medians, rounded."""

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict

import torch

from tests.benchmarks import (
    calibration,
    conversion,
    decode,
    domains,
    families,
    gateway,
    gpu,
    inflight,
    latency,
    planning,
    quality,
    serving,
)
from tests.benchmarks.limits import Limits
from tests.benchmarks.record import (
    Attack,
    Built,
    Calibrated,
    Calibration,
    CalibrationMemory,
    Command,
    Conversion,
    Decode,
    DecodeWay,
    Domains,
    DomainWay,
    Families,
    FormatQuality,
    Gateway,
    GatewayWay,
    Gpu,
    GpuWay,
    InFlight,
    InFlightEngine,
    Latency,
    Network,
    Place,
    Planning,
    Quality,
    ServedEngine,
    Serving,
    Spread,
    Throughput,
    Way,
    rounded,
)
from trtforge.core.device import UsableDevice
from trtforge.machine.host import Host
from trtforge.machine.processor import processor_name, read_instruction_sets

MODELS = {"demo": "The demo model", "large": "A random Llama of 200 M"}
_MB = 1e6
_MEMORY_AT = 4096  # tokens
_INSTRUCTIONS = {"amx_int8": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}
_ZEN_5 = {"avx512_bf16", "avx512_vp2intersect"}
"""What no older processor of AMD has: they multiply half as many numbers a cycle."""


class _Place(TypedDict):
    machine: str
    software: str


def machine() -> str:
    """Cores, their name, and the best instructions that they have: processors of one name differ in them."""
    found, name = read_instruction_sets(Host()), processor_name(Host()) or platform.processor()
    level = next((level for flag, level in _INSTRUCTIONS.items() if flag in found), "")
    more = ", Zen 5" if name.startswith("AMD") and found >= _ZEN_5 else ""
    return f"{os.cpu_count()} cores of {name} ({level}{more})" if level else f"{os.cpu_count()} cores of {name}"


def attacked(path: Path) -> tuple[Attack, ...]:
    """The reports in a file of `python -m tests.assault --json`; those of one name as one."""
    found: dict[str, Attack] = {}
    for line in path.read_text().splitlines():
        report = json.loads(line)
        name, before = report["name"], found.get(report["name"])
        failed = tuple(check["what"] for check in report["checks"] if not check["passed"])
        found[name] = Attack(
            **_place(),
            name=name,
            checks=len(report["checks"]) + (before.checks if before else 0),
            failed=(before.failed if before else ()) + failed,
            rows=(before.rows if before else ()) + tuple(report["rows"]),
        )
    return tuple(found.values())


def decoded(found: Sequence[decode.Measured], limits: Limits, runs: int) -> Decode:
    """The benchmark `decode`."""
    ways = []
    for each in found:
        bandwidth, limit = each.shares
        shares = {"bandwidth": round(bandwidth, 3), "limit": round(limit, 3)}
        ways.append(_rates(each).model_copy(update=shares))
    return Decode(
        **_place(f"transformers {_release('transformers')}"),
        runs=runs,
        ways=tuple(ways),
        read_gb=rounded(limits.bandwidth / 1e9),
        bfloat16_giga=rounded(limits.bfloat16 / 1e9),
        int8_giga=rounded(limits.int8 / 1e9),
    )


def of_families(found: Sequence[families.Compared], runs: int) -> Families:
    """The benchmark `families`."""
    networks = tuple(
        Network(name=each.name, millions=each.millions, ours=_rates(each.ours), transformers=_rates(each.transformers))
        for each in found
    )
    return Families(**_place(f"transformers {_release('transformers')}"), runs=runs, networks=networks)


def _rates(measured: decode.Measured) -> DecodeWay:
    rates = {batch: rounded(rate) for batch, rate in measured.decode.items()}
    return DecodeWay(way=measured.way, decode=rates, prefill=round(measured.prefill))


def waited(found: latency.Measured, runs: int) -> Latency:
    """The benchmark `latency`."""
    return Latency(**_place(), runs=runs, **{name: rounded(seconds * 1000) for name, seconds in asdict(found).items()})


def planned(found: Sequence[planning.Timed], runs: int) -> Planning:
    """The benchmark `planning`."""
    commands = tuple(
        Command(command=each.command, seconds=rounded(each.seconds), peak_mb=round(each.rss / _MB)) for each in found
    )
    return Planning(**_place(), runs=runs, commands=commands)


def converted(found: conversion.Conversion, runs: int) -> Conversion:
    """The benchmark `conversion`."""
    copy = found.measured[0].seconds
    ways = tuple(
        Way(
            name=way.name,
            seconds=round(way.seconds, 1),
            times_copy=round(way.seconds / copy, 2),
            peak_mb=round(way.rss / _MB),
        )
        for way in found.measured
    )
    planning_405b = round(found.plan_405b.seconds, 2)
    gigabytes = round(found.size / 1e9, 1)
    return Conversion(**_place(), runs=runs, gigabytes=gigabytes, ways=ways, plan_405b_seconds=planning_405b)


def calibrated(found: Sequence[calibration.Timed], model: str, window: int, runs: int) -> Calibration:
    """The benchmark `calibration` of one model."""
    seconds = {(run.kind, run.tokens): run.seconds for run in found}
    ways = []
    for run in found:
        ours = run.kind in calibration.OURS
        peer_of = run.kind.removeprefix("modelopt_").removesuffix("_bfloat16")
        passes = run.seconds / seconds["forward", run.tokens]
        in_bfloat16 = run.seconds / seconds["forward_bfloat16", run.tokens]
        ways.append(
            Calibrated(
                way=run.kind,
                batch=run.batch,
                tokens=run.tokens,
                seconds=rounded(run.seconds),
                passes=round(passes, 2) if ours else None,
                passes_bfloat16=round(in_bfloat16, 1) if run.kind.startswith("int4_awq") else None,
                times=round(run.seconds / seconds[peer_of, run.tokens], 1)
                if run.kind.startswith(calibration.PEER_AWQ)
                else None,
                extrapolated=run.extrapolated,
            )
        )
    place = _place(f"ModelOpt {_release('nvidia-modelopt')}")
    memory = _memory(found) if model == "large" else None
    return Calibration(**place, runs=runs, model=MODELS[model], window=window, ways=tuple(ways), memory=memory)


def _memory(found: Sequence[calibration.Timed]) -> CalibrationMemory | None:
    peaks: dict[str, list[int]] = {}
    for run in found:
        if run.tokens == _MEMORY_AT:
            peaks.setdefault(run.kind, []).append(round(run.rss / _MB))
    if not peaks:
        return None
    float32, bfloat16 = peaks[calibration.PEER_AWQ], peaks[f"{calibration.PEER_AWQ}_bfloat16"]
    return CalibrationMemory(
        tokens=_MEMORY_AT,
        trtforge=max(peaks["int4_awq"]),
        compensated=max(peaks["int4_awq_compensated"]),
        modelopt_float32=(min(float32), max(float32)),
        modelopt_bfloat16=(min(bfloat16), max(bfloat16)),
    )


def judged(formats: Sequence[quality.Quality], builds: Sequence[quality.BuildQuality]) -> Quality:
    """The benchmark `quality`."""
    found = tuple(
        FormatQuality(
            format=each.format,
            rounding=each.rounding,
            increase=round(each.increase, 4),
            modelopt=None if each.peer is None else round(each.peer.increase, 4),
            kl=float(f"{each.kl:.3g}"),
            modelopt_kl=None if each.peer is None else float(f"{each.peer.kl:.3g}"),
            top1=round(each.top1, 4),
        )
        for each in formats
    )
    built = tuple(
        Built(
            recipe=each.recipe,
            note=each.note,
            perplexity=round(each.perplexity, 3),
            increase=round(each.perplexity / each.reference - 1, 4),
            compression=None if each.compression is None else round(each.compression, 2),
        )
        for each in builds
    )
    return Quality(
        **_place(f"ModelOpt {_release('nvidia-modelopt')}"),
        runs=1,
        tokens=builds[0].tokens,
        perplexity=round(builds[0].reference, 3),
        builds=built,
        formats=found,
    )


def compared(case: domains.Domains, found: Sequence[domains.Found]) -> Domains:
    """The benchmark `quality` in and out of a model's domain."""

    def spread(values: Sequence[float]) -> Spread:
        median, least, most = (float(f"{value:.3g}") for value in domains.spread(values))
        return Spread(median=median, least=least, most=most)

    ways = tuple(
        DomainWay(
            format=each.format,
            group=each.group,
            way=each.way,
            kl=spread(each.kl[0]),
            kl_other=spread(each.kl[1]),
            increase=spread(each.increase[0]),
            increase_other=spread(each.increase[1]),
        )
        for each in found
    )
    return Domains(
        **_place(f"ModelOpt {_release('nvidia-modelopt')}"),
        runs=len(domains.SEEDS),
        model=case.name,
        calibrated=domains.SAMPLES * domains.LENGTH,
        judged=domains.JUDGED * domains.LENGTH,
        ways=ways,
    )


def batched(
    found: Mapping[str, Sequence[inflight.Measured]], peers: Mapping[str, Sequence[float]], runs: int
) -> InFlight:
    """The benchmark `inflight`."""
    engines = tuple(
        InFlightEngine(
            engine=name,
            **{each.batching: Throughput(rate=round(each.rate), steps=each.steps) for each in results},
        )
        for name, results in found.items()
    )
    transformers = {way: round(statistics.median(rates)) for way, rates in peers.items()}
    return InFlight(**_place(), runs=runs, engines=engines, transformers=transformers)


def served(found: Mapping[str, serving.Measured], runs: int) -> Serving:
    """The benchmark `serving`."""
    engines, shares, more = [], [], []
    for name, both in found.items():
        ways = (both.served, both.in_process)
        rate, rate_in_process = (round(statistics.median(run.rate for run in way)) for way in ways)
        first, first_in_process = (round(statistics.median(run.first for run in way) * 1000) for way in ways)
        engines.append(
            ServedEngine(
                engine=name,
                rate=rate,
                rate_in_process=rate_in_process,
                first_token_ms=first,
                first_token_in_process_ms=first_in_process,
            )
        )
        shares.append(round(statistics.median(run.client_share for run in both.served), 2))
        through, alone = (statistics.median(run.cpu_seconds for run in way) for way in ways)
        more.append(round(through - alone, 2))
    return Serving(
        **_place(f"Triton of nvidia-pytriton {_release('nvidia-pytriton')}"),
        runs=runs,
        engines=tuple(engines),
        client_share=(min(shares), max(shares)),
        more_cpu_seconds=(min(more), max(more)),
    )


def passed_on(found: gateway.Gateway, runs: int) -> Gateway:
    """The benchmark `gateway`."""
    ways = {
        name: GatewayWay(p50_ms=round(way.p50 * 1000, 2), rate=round(way.rate))
        for name, way in (("gateway", found.gateway), ("proxy", found.proxy))
    }
    packages = ", ".join(f"{name} {_release(name)}" for name in ("fastapi", "uvicorn", "grpcio"))
    return Gateway(machine=machine(), software=packages, runs=runs, events=round(found.events), **ways)


def on_gpu(
    found: Sequence[gpu.Measured],
    models: Mapping[str, gpu.Model],
    limits: gpu.Limits,
    place: Place,
    date: str,
    runs: int,
) -> Gpu:
    """The benchmark `gpu`."""
    ways = []
    for each in found:
        bandwidth, products = gpu.shares(each, models[each.model], limits)
        ways.append(
            GpuWay(
                model=each.model,
                format=each.format,
                alone=rounded(each.rates.alone),
                bandwidth=round(bandwidth, 3),
                together=rounded(each.rates.together),
                transformers=rounded(each.peer.together),
                prompts=round(each.rates.prompts),
                products=round(products, 3),
            )
        )
    return Gpu(
        machine=place.machine,
        software=place.software,
        runs=runs,
        date=date,
        ways=tuple(ways),
        copy_gb=rounded(limits.bandwidth / 1e9),
        bfloat16_tera=rounded(limits.bfloat16 / 1e12),
        fp8_tera=rounded(limits.fp8 / 1e12),
    )


def place_of(device: UsableDevice) -> Place:
    """The GPU and its software; of a CPU as for other benchmarks."""
    peer = f"transformers {_release('transformers')}"
    if device == "cpu":
        return Place(**_place(peer))
    torch_release = ".".join(torch.__version__.split(".")[:2])
    return Place(
        machine=torch.cuda.get_device_name(), software=f"torch {torch_release} with CUDA {torch.version.cuda}, {peer}"
    )


def _place(*software: str) -> _Place:
    torch_release = ".".join(torch.__version__.split(".")[:2])
    return {"machine": machine(), "software": ", ".join((f"torch {torch_release} on the CPU", *software))}


def _release(package: str) -> str:
    return ".".join(version(package).split(".")[:2])
