"""Calibration against one plain forward pass over the same tokens, and against NVIDIA ModelOpt on the same CPU.

The demo model and a random Llama of about 200 million parameters, on windows of 512 tokens. Every run is a fresh
process; variants take turns and the medians are reported. The forward pass and ModelOpt run on batches of 8 windows
(ours on as many as 1,024 tokens are), and ModelOpt's AWQ also on one window at a time, which is how TensorRT-LLM calls
it (`calib_batch_size=1` of its models' `quantize`, `--batch_size 1` of quantize.py). They compute in float32, in which
ModelOpt's results are compared with ours, and also in bfloat16, the type of both models. The 200 M model's AWQ by
ModelOpt is measured once, on few batches: more of them are extrapolated from the time that they took, and marked so.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from trtforge.calibrate.stage import TOKENS_AT_ONCE
from trtforge.core.assets import asset_directory

LAYERS, VOCAB, BATCH = 14, 16384, 8
DEMO_VOCAB = 2048
PEER_AWQ, OURS = "modelopt_int4_awq", ("fp8", "int4_awq", "int4_awq_compensated")
TOKENS, WINDOWS = (4096, 32768), (512,)
WAYS = (
    ("forward", BATCH),
    ("forward_bfloat16", BATCH),
    ("fp8", BATCH),
    ("int4_awq", BATCH),
    ("int4_awq_compensated", BATCH),
    ("modelopt_fp8", BATCH),
    (PEER_AWQ, BATCH),
    (PEER_AWQ, 1),
    (f"{PEER_AWQ}_bfloat16", BATCH),
    (f"{PEER_AWQ}_bfloat16", 1),
)
_PEER_BATCHES, _PEER_TOKENS = 8, 4096  # that ModelOpt's AWQ gets of the large model at most


@dataclass(frozen=True)
class Timed:
    """One way at one number of tokens: median seconds, peak bytes. `extrapolated`: from fewer tokens."""

    kind: str
    batch: int
    tokens: int
    seconds: float
    rss: int
    extrapolated: bool = False


@dataclass(frozen=True)
class Run:
    """What one process reported."""

    seconds: float
    rss: int
    passes: list[list[float]]


def measure_demo(directory: Path, runs: int, tokens: Sequence[int], window: int) -> list[Timed]:
    """Every way with the demo model; its tokens are made below `directory`."""
    model = asset_directory("recipes") / "demo-model"
    work = _Work(model, directory, DEMO_VOCAB, window)
    return [timed for count in tokens for timed in _measured(work, count, runs, WAYS)]


def measure_large(directory: Path, runs: int, tokens: Sequence[int], window: int) -> list[Timed]:
    """Every way with a model of 200 million parameters, which is made below `directory`."""
    model = directory / "model"
    if not model.exists():
        _write_model(model, LAYERS)
    work = _Work(model, directory, VOCAB, window)
    peers = [way for way in WAYS if way[0].startswith(PEER_AWQ)]
    measured = {way: _peer(work, way, max(tokens)) for way in peers}
    found: list[Timed] = []
    for count in tokens:
        found += _measured(work, count, runs, [way for way in WAYS if way not in peers])
        for (kind, batch), (run, seen) in measured.items():
            seconds = run.seconds if seen == count else extrapolate(run.seconds, run.passes, count // window // batch)
            found.append(Timed(kind, batch, count, seconds, run.rss, extrapolated=seen != count))
    return found


@dataclass(frozen=True)
class _Work:
    """A model and what it is calibrated on: random ids, in windows of `window` tokens."""

    model: Path
    directory: Path
    vocab: int
    window: int

    def run(self, kind: str, batch: int, count: int) -> Run:
        """One way on `count` tokens."""
        path = self.directory / f"{self.vocab}-{count}-{self.window}.safetensors"
        generator = torch.Generator().manual_seed(0)
        shape = (count // self.window, self.window)
        save_file({"input_ids": torch.randint(0, self.vocab, shape, generator=generator)}, path)
        return _run(kind, self.model, path, self.directory / "out", batch)


def _measured(work: _Work, count: int, runs: int, ways: Sequence[tuple[str, int]]) -> Iterator[Timed]:
    results: dict[tuple[str, int], list[Run]] = {way: [] for way in ways}
    for _ in range(runs):
        for kind, batch in ways:
            results[kind, batch].append(work.run(kind, batch, count))
    for (kind, batch), done in results.items():
        seconds = statistics.median(run.seconds for run in done)
        held = batch if kind not in OURS else max(1, min(batch, TOKENS_AT_ONCE // work.window))
        yield Timed(kind, held, count, seconds, max(run.rss for run in done))


def _peer(work: _Work, way: tuple[str, int], most: int) -> tuple[Run, int]:
    """One run on a few batches, and on how many tokens."""
    kind, batch = way
    count = min(most, _PEER_TOKENS, _PEER_BATCHES * batch * work.window)
    return work.run(kind, batch, count), count


def extrapolate(seconds: float, passes: list[list[float]], batches: int) -> float:
    """What `batches` batches would take, from a run of fewer in as many passes: what is outside of them stays."""
    outside = seconds - sum(map(sum, passes))
    return outside + sum(batches * statistics.median(one) for one in passes)


def _run(kind: str, model: Path, ids: Path, out: Path, batch: int) -> Run:
    command = (sys.executable, "-W", "ignore", "-m", "tests.benchmarks.calibration_run", kind, model, ids, out, batch)
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def _write_model(directory: Path, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
