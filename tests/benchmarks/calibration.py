"""Calibration against one plain forward pass over the same tokens, and against NVIDIA ModelOpt on the same CPU.

A random Llama of about 200 million parameters. Every run is a fresh process; variants take turns and the medians are
reported. ModelOpt's AWQ is measured once; at 32k tokens, where it would take most of an hour, on a model of two such
layers, scaled by the number of layers and marked so.
"""

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, PEER_LAYERS, VOCAB, LENGTH = 14, 2, 16384, 512
PEER_AWQ = "modelopt_int4_awq"
TOKENS = (4096, 32768)


@dataclass(frozen=True)
class Timed:
    """One way at one number of tokens: median seconds, peak bytes. `extrapolated`: from fewer layers."""

    kind: str
    tokens: int
    seconds: float
    rss: int
    extrapolated: bool = False


def measure(directory: Path, runs: int, tokens: tuple[int, ...] = TOKENS) -> list[Timed]:
    """Make the models and the tokens below `directory`, and measure every way."""
    whole, short = directory / "model", directory / "short"
    _write_model(whole, LAYERS)
    _write_model(short, PEER_LAYERS)
    found: list[Timed] = []
    for count in tokens:
        ids = directory / f"{count}.safetensors"
        generator = torch.Generator().manual_seed(0)
        save_file({"input_ids": torch.randint(0, VOCAB, (count // LENGTH, LENGTH), generator=generator)}, ids)
        extrapolated = count > 8192
        plans = [(kind, whole, runs) for kind in ("forward", "fp8", "int4_awq", "modelopt_fp8")]
        plans.append((PEER_AWQ, short if extrapolated else whole, 1))
        results: dict[str, list[tuple[float, int]]] = {kind: [] for kind, _, _ in plans}
        for run in range(runs):
            for kind, model, wanted in plans:
                if run < wanted:
                    results[kind].append(_run(kind, model, ids, directory / "out"))
        for kind, model, _ in plans:
            seconds = statistics.median(seconds for seconds, _ in results[kind])
            factor = LAYERS / PEER_LAYERS if model is short else 1.0
            rss = max(rss for _, rss in results[kind])
            found.append(Timed(kind, count, seconds * factor, rss, model is short))
    return found


def _run(kind: str, model: Path, ids: Path, out: Path) -> tuple[float, int]:
    command = (sys.executable, "-W", "ignore", "-m", "tests.benchmarks.calibration_run", kind, model, ids, out)
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    return result["seconds"], result["rss"]


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
