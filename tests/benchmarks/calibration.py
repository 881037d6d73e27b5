"""Calibration against one plain forward pass over the same tokens, and against NVIDIA ModelOpt on the same CPU.

The demo model and a random Llama of about 200 million parameters. Every run is a fresh process; variants take turns
and the medians are reported. ModelOpt runs on batches of 8 windows, as ours, and its AWQ also on one window at a time,
which is how TensorRT-LLM calls it (`calib_batch_size=1` of its models' `quantize`, `--batch_size 1` of quantize.py).
The 200 M model's AWQ by ModelOpt is measured once; what would take most of an hour is extrapolated from the time of its
batches, and marked so.
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

from trtforge.core.assets import asset_directory

LAYERS, VOCAB, LENGTH, BATCH = 14, 16384, 512, 8
DEMO_VOCAB = 2048
PEER_AWQ = "modelopt_int4_awq"
TOKENS = (4096, 32768)
WAYS = (
    ("forward", BATCH),
    ("fp8", BATCH),
    ("int4_awq", BATCH),
    ("modelopt_fp8", BATCH),
    (PEER_AWQ, BATCH),
    (PEER_AWQ, 1),
)
_MOST_OF_PEER = 4096  # tokens that ModelOpt's AWQ gets of the large model


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


def measure_demo(directory: Path, runs: int, tokens: Sequence[int]) -> list[Timed]:
    """Every way with the demo model; its tokens are made below `directory`."""
    model = asset_directory("recipes") / "demo-model"
    return [timed for count in tokens for timed in _measured(model, directory, DEMO_VOCAB, count, runs, runs)]


def measure_large(directory: Path, runs: int, tokens: Sequence[int]) -> list[Timed]:
    """Every way with a model of 200 million parameters, which is made below `directory`."""
    model = directory / "model"
    _write_model(model, LAYERS)
    peers: dict[int, Run] = {}
    found: list[Timed] = []
    for count in tokens:
        found += _measured(model, directory, VOCAB, count, runs, 1 if count <= _MOST_OF_PEER else 0)
        if count > _MOST_OF_PEER:
            found += _extrapolated(model, directory, count, peers)
    return found


def _measured(model: Path, directory: Path, vocab: int, count: int, runs: int, peer_runs: int) -> Iterator[Timed]:
    ids = _ids(directory, vocab, count)
    results: dict[tuple[str, int], list[Run]] = {way: [] for way in WAYS if way[0] != PEER_AWQ or peer_runs}
    for run in range(runs):
        for kind, batch in results:
            if run < (peer_runs if kind == PEER_AWQ else runs):
                results[kind, batch].append(_run(kind, model, ids, directory / "out", batch))
    for (kind, batch), done in results.items():
        seconds = statistics.median(run.seconds for run in done)
        yield Timed(kind, batch, count, seconds, max(run.rss for run in done))


def _extrapolated(model: Path, directory: Path, count: int, peers: dict[int, Run]) -> Iterator[Timed]:
    for kind, batch in WAYS:
        if kind == PEER_AWQ:
            if batch not in peers:
                ids = _ids(directory, VOCAB, _MOST_OF_PEER)
                peers[batch] = _run(kind, model, ids, directory / "out", batch)
            seconds = extrapolate(peers[batch].seconds, peers[batch].passes, count // LENGTH // batch)
            yield Timed(kind, batch, count, seconds, peers[batch].rss, extrapolated=True)


def extrapolate(seconds: float, passes: list[list[float]], batches: int) -> float:
    """What `batches` batches would take, from a run of fewer in as many passes: what is outside of them stays."""
    outside = seconds - sum(map(sum, passes))
    return outside + sum(batches * statistics.median(one) for one in passes)


def _ids(directory: Path, vocab: int, count: int) -> Path:
    path = directory / f"{vocab}-{count}.safetensors"
    generator = torch.Generator().manual_seed(0)
    save_file({"input_ids": torch.randint(0, vocab, (count // LENGTH, LENGTH), generator=generator)}, path)
    return path


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
