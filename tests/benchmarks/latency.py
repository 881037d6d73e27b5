"""Seconds that requests wait for, of the embedded engine on the random Llama of `decode`, its weights in bfloat16.

Until the first token of a loaded engine, of a prompt whose first thousand tokens are known or not, and between the
tokens of running requests while a long prompt is admitted, or restored from files. Every run is a process of its own:
`python -m tests.benchmarks.latency ENGINE` prints JSON. Imports are not timed.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from tests.benchmarks.by_field import by_field
from tests.benchmarks.decode import SHAPE, run_trtforge
from tests.benchmarks.synthetic import write_model
from trtforge.engine_process.requests import GenerationRequest, Output
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.kv_store import KvStoreOptions

PREFIX, OWN, PREFIXES = 1000, 24, 5
"""Tokens of a shared prefix and of what follows it; prefixes of a run."""
RUNNING, LONG, NEW = 8, 4096, 1500
"""Requests that run while a prompt of LONG tokens is admitted, and the tokens of each."""
_STEADY = 400
"""Tokens of each before the long prompt comes: about as many steps as admit it."""
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Measured:
    """Seconds. `load`: of Engine.load and its first token; `cold`, `warm`: to the first token of a prompt whose prefix
    is new or known; `long`, `long_alone`: to the long prompt's first token. Between tokens of running requests: `gap`
    and `worst_alone`, the median and the worst before and after the long prompt is admitted, because steps take longer
    as the requests grow; `most_gaps` and `worst_gap`, the 99th percentile and the worst meanwhile. `restored` and
    `worst_restored`: as `long` and `worst_gap`, of a long prompt whose KV blocks are in files."""

    load: float
    cold: float
    warm: float
    gap: float
    worst_alone: float
    most_gaps: float
    worst_gap: float
    long: float
    long_alone: float
    restored: float
    worst_restored: float


def measure(directory: Path, runs: int) -> Measured:
    """Medians of several runs."""
    write_model(directory / "model", SHAPE)
    run_trtforge("convert", str(directory / "model"), str(directory / "checkpoint"), "--quant", "none")
    limits = ("--max-batch-size", "32", "--max-seq-len", "8192")
    run_trtforge("compile", str(directory / "checkpoint"), str(directory / "engine"), *limits)
    return median([_run(directory / "engine") for _ in range(runs)])


def median(found: Sequence[Measured]) -> Measured:
    """Of every figure."""
    return by_field(statistics.median, found)


def gaps(times: Sequence[Sequence[float]], first: float, last: float) -> list[float]:
    """Seconds between successive tokens of each request that lie, at least in part, between `first` and `last`."""
    return [later - before for each in times for before, later in pairwise(each) if later > first and before < last]


def _run(engine: Path) -> Measured:
    command = (sys.executable, "-m", "tests.benchmarks.latency", str(engine))
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True, timeout=900)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


class Asker:
    """Sends requests of random tokens to an engine and keeps the times of their tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._rng, self._asked = engine, random.Random(0), 0

    def prompt(self, count: int) -> tuple[int, ...]:
        """Random tokens."""
        return tuple(self._rng.randrange(4, SHAPE.vocab) for _ in range(count))

    def ask(self, prompt: Sequence[int], new: int = 1) -> tuple[list[float], threading.Event]:
        """Submit a request; the times of the call and of its tokens so far, and its end."""
        times, done = [time.perf_counter()], threading.Event()

        def receive(output: Output) -> None:
            times.append(time.perf_counter())
            if output.finish_reason is not None:
                done.set()

        self._asked += 1
        self._engine.submit((GenerationRequest(str(self._asked), tuple(prompt), new), receive))
        return times, done

    def first_token(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token of a prompt alone."""
        times, done = self.ask(prompt)
        done.wait()
        return times[1] - times[0]

    def beside(self, prompt: Sequence[int]) -> tuple[list[float], list[float], float]:
        """Gaps of running requests without a long prompt and while it is admitted, and its first token."""
        running = [self.ask(self.prompt(128), NEW) for _ in range(RUNNING)]
        while min(len(times) for times, _ in running) < 2 + _STEADY:
            time.sleep(0.001)
        long, done = self.ask(prompt)
        for ended in (done, *(ended for _, ended in running)):
            ended.wait()
        every = [times[1:] for times, _ in running]
        assert min(times[-1] for times in every) > long[1], "the long prompt outlived the requests beside it"
        usual = gaps(every, max(times[0] for times in every), long[0])
        usual += gaps([[each for each in times if each >= long[1]] for times in every], long[1], max(map(max, every)))
        return usual, gaps(every, *long), long[1] - long[0]


def _restored(directory: Path) -> tuple[float, float]:
    """The worst gap of running requests while a prompt is restored that another engine stored, and its first token."""
    with tempfile.TemporaryDirectory() as blocks:
        options = EngineOptions(chunked_context=True, kv_store=KvStoreOptions(Path(blocks)))
        with Engine.load(directory, options) as engine:
            asker = Asker(engine)
            stored = asker.prompt(LONG)
            asker.first_token(stored)
        with Engine.load(directory, options) as engine:
            asker = Asker(engine)
            asker.prompt(LONG)
            asker.beside(asker.prompt(LONG))
            _, beside, first = asker.beside(stored)
    return max(beside), first


def main() -> None:
    """One run."""
    start = time.perf_counter()
    with Engine.load(Path(sys.argv[1])) as engine:
        asker = Asker(engine)
        asker.first_token(asker.prompt(16))
        load = time.perf_counter() - start
        cold, warm = [], []
        for _ in range(1 + PREFIXES):
            prefix = asker.prompt(PREFIX)
            for found in (cold, warm):
                found.append(asker.first_token((*prefix, *asker.prompt(OWN))))
        asker.beside(asker.prompt(LONG))  # compiles kernels for these shapes
        alone = asker.first_token(asker.prompt(LONG))
        usual, beside, long = asker.beside(asker.prompt(LONG))
    worst_restored, restored = _restored(Path(sys.argv[1]))
    found = Measured(
        load=load,
        cold=statistics.median(cold[1:]),
        warm=statistics.median(warm[1:]),
        gap=statistics.median(usual),
        worst_alone=max(usual),
        most_gaps=statistics.quantiles(beside, n=100)[-1],
        worst_gap=max(beside),
        long=long,
        long_alone=alone,
        restored=restored,
        worst_restored=worst_restored,
    )
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
