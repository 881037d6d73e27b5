"""Tokens a second and time to first token through Triton, beside the engine in this process, in one run.

Both get the same prompts, as many at once, greedy, with the model's own end ids. The client through Triton is
`serving_client`: a process that writes down what its socket receives and reads it after the last answer, so that it
takes as little as possible of the cores that the server needs. Other work on the machine slows one process more than
several, so the ratio is only right where there is little of it; CPU seconds for 1,000 tokens hold in any case.
"""

import json
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.assault.server import AssaultError, Server, serving
from tests.benchmarks.serving_client import machine_busy
from trtforge.core.assets import asset_directory
from trtforge.engine_process.requests import GenerationRequest, Output
from trtforge.runtime.engine import Engine

STREAMS, REQUESTS, MAX_TOKENS = 32, 128, 128
RUNS = 9  # more than elsewhere: a first token that comes milliseconds later is less than the noise of one run
CLIENT = "client"
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Run:
    """One way, once. `first` in seconds, the median; `cpu`: seconds by process, the client's too."""

    tokens: int
    seconds: float
    first: float
    cpu: Mapping[str, float]
    busy: float = 0.0
    """CPU seconds of the whole machine meanwhile."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the server or the engine for 1,000 tokens, without the client's."""
        return sum(seconds for name, seconds in self.cpu.items() if name != CLIENT) / self.tokens * 1000

    @property
    def others(self) -> float:
        """CPU seconds of other work, for each second of the run."""
        return max(0.0, self.busy - sum(self.cpu.values())) / self.seconds

    @property
    def client_share(self) -> float:
        """The client's part of all CPU seconds."""
        return self.cpu.get(CLIENT, 0.0) / sum(self.cpu.values())


@dataclass(frozen=True)
class Measured:
    """All runs of both ways, in pairs."""

    served: tuple[Run, ...]
    in_process: tuple[Run, ...]

    @property
    def ratio(self) -> float:
        """How much of the engine's rate comes through Triton."""
        return statistics.median(run.rate for run in self.served) / statistics.median(
            run.rate for run in self.in_process
        )

    @property
    def first_later(self) -> float:
        """Seconds by which the median first token comes later through Triton."""
        return statistics.median(run.first for run in self.served) - statistics.median(
            run.first for run in self.in_process
        )


def measure(repository: Path, runs: int) -> Measured:
    """Each way `runs` times in turns, after both have computed every prompt once: all runs find them in the cache."""
    engine_directory = repository / "tensorrt_llm" / "1" / "engine"
    prompts = texts(REQUESTS)
    served, in_process = [], []
    with serving(repository) as server, Engine.load(engine_directory) as engine:
        if any("kernels are not available" in line for line in server.errors):
            raise AssaultError(f"the server computes without its kernels: {server.errors[-5:]}")
        ids = tokenized(repository, prompts)
        through_triton(server, prompts)
        through_engine(engine, ids)
        for _ in range(runs):
            served.append(through_triton(server, prompts))
            in_process.append(through_engine(engine, ids))
    return Measured(tuple(served), tuple(in_process))


def texts(count: int) -> list[str]:
    """Prompts from the demo model's held-out text, of about 30 to 60 tokens, no two with the same beginning."""
    text = (asset_directory("recipes") / "demo-model" / "heldout.txt").read_text().replace("\f", " ")
    step = len(text) // count
    return [text[number * step :][: 100 + number % 100] for number in range(count)]


def tokenized(repository: Path, prompts: Sequence[str]) -> list[tuple[int, ...]]:
    """The prompts as `preprocessing` makes them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(repository / "preprocessing" / "1" / "tokenizer" / "tokenizer.json"))
    return [tuple(tokenizer.encode(prompt).ids) for prompt in prompts]


def through_triton(server: Server, prompts: Sequence[str]) -> Run:
    """All prompts through `ensemble`, streamed. Raises AssaultError if an answer is an error."""
    before = {pid: process.cpu for pid, process in server.tree.sample().items()}
    request = {"prompts": prompts, "streams": STREAMS, "max_tokens": MAX_TOKENS}
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.serving_client", server.grpc],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=_ROOT,
    )
    if done.returncode != 0:
        raise AssaultError(f"the client failed: {done.stderr[-2000:]}\nserver: {server.running} {server.errors[-5:]}")
    result = json.loads(done.stdout)
    cpu = {process.name: process.cpu - before.get(pid, 0.0) for pid, process in server.tree.sample().items()}
    cpu[CLIENT] = result["cpu"]
    return Run(result["tokens"], result["seconds"], statistics.median(result["first"]), cpu, result["busy"])


def through_engine(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> Run:
    """The same prompts, as many in flight, handed to the engine by this process."""
    outputs: queue.SimpleQueue[tuple[float, Output]] = queue.SimpleQueue()
    waiting = iter(enumerate(prompts))
    asked: dict[str, float] = {}
    first: dict[str, float] = {}
    tokens = done = 0

    def submit() -> None:
        number, prompt = next(waiting, (0, ()))
        if prompt:
            asked[str(number)] = time.perf_counter()
            request = GenerationRequest(str(number), prompt, MAX_TOKENS, end_ids=frozenset((1, 3)))
            engine.submit((request, lambda output: outputs.put((time.perf_counter(), output))))

    busy, cpu, start = machine_busy(), time.process_time(), time.perf_counter()
    for _ in range(min(STREAMS, len(prompts))):
        submit()
    while done < len(prompts):
        moment, output = outputs.get(timeout=120)
        if output.error is not None:
            raise output.error
        if output.tokens:
            first.setdefault(output.request_id, moment - asked[output.request_id])
        tokens += len(output.tokens)
        if output.finish_reason is not None:
            done += 1
            submit()
    seconds = time.perf_counter() - start
    used = {"engine": time.process_time() - cpu}
    return Run(tokens, seconds, statistics.median(first.values()), used, machine_busy() - busy)
