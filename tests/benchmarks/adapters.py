"""What LoRA adapters cost: `python -m tests.benchmarks.adapters [DIRECTORY]`.

A random Llama of 200 M parameters in bfloat16, sixteen requests at once: without adapters, all with the same one, and
each with its own. Rates are medians of runs in turns, those of decoding without what the prompts took.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.benchmarks.decode import SHAPE, run_trtforge
from tests.benchmarks.synthetic import write_model
from trtforge.engine_process.requests import GenerationRequest
from trtforge.runtime.engine import Engine, EngineOptions
from trtforge.runtime.generate import generate_with

COUNT, PROMPT_TOKENS, NEW_TOKENS, RUNS = 16, 128, 129, 7
KINDS = {"rank 8 of q and v": (8, ("q_proj", "v_proj")), "rank 16 of all layers": (16, ())}
_KEYS = SHAPE.kv_heads * SHAPE.head_size
_SIZES = {
    "self_attn.q_proj": (SHAPE.hidden, SHAPE.hidden),
    "self_attn.k_proj": (_KEYS, SHAPE.hidden),
    "self_attn.v_proj": (_KEYS, SHAPE.hidden),
    "self_attn.o_proj": (SHAPE.hidden, SHAPE.hidden),
    "mlp.gate_proj": (SHAPE.intermediate, SHAPE.hidden),
    "mlp.up_proj": (SHAPE.intermediate, SHAPE.hidden),
    "mlp.down_proj": (SHAPE.hidden, SHAPE.intermediate),
}


@dataclass(frozen=True)
class Compared:
    """Tokens per second, prompts and answers: of the model alone, with one adapter, and with sixteen."""

    kind: str
    phase: str
    plain: float
    one: float
    sixteen: float


def measure(directory: Path, runs: int = RUNS) -> list[Compared]:
    """All kinds of adapters, decoding and prompts."""
    write_model(directory / "model", SHAPE)
    run_trtforge("convert", str(directory / "model"), str(directory / "checkpoint"))
    found = []
    for kind, (rank, chosen) in KINDS.items():
        adapters = [str(_adapter(directory / f"r{rank}-{n}", n, rank, chosen)) for n in range(COUNT)]
        engine = directory / f"engine-r{rank}"
        limits = ("--max-batch-size", str(COUNT), "--max-seq-len", "512", "--compute-dtype", "bfloat16")
        feature = ("--feature", f"lora.adapters={json.dumps(adapters)}")
        run_trtforge("compile", str(directory / "checkpoint"), str(engine), "--backend", "torch", *limits, *feature)
        with Engine.load(engine, EngineOptions(kv_reuse=False)) as loaded:
            found += _compared(loaded, kind, runs)
    return found


def _compared(engine: Engine, kind: str, runs: int) -> list[Compared]:
    rates: dict[str, dict[int, list[float]]] = {"decode": {}, "prompts": {}}
    for _ in range(runs + 1):
        for adapters in (0, 1, COUNT):
            times = [_seconds(engine, adapters, new) for new in (1, NEW_TOKENS)]
            rates["prompts"].setdefault(adapters, []).append(COUNT * PROMPT_TOKENS / times[0])
            rates["decode"].setdefault(adapters, []).append(COUNT * (NEW_TOKENS - 1) / (times[1] - times[0]))
    return [
        Compared(kind, phase, *(statistics.median(values[1:]) for values in found.values()))
        for phase, found in rates.items()
    ]


def _seconds(engine: Engine, adapters: int, new: int) -> float:
    """Time that one answer to each request takes."""
    rng = random.Random(0)
    requests = [
        GenerationRequest(
            str(number),
            tuple(rng.randrange(SHAPE.vocab) for _ in range(PROMPT_TOKENS)),
            new,
            lora_task_id=1 + number % adapters if adapters else None,
        )
        for number in range(COUNT)
    ]
    start = time.perf_counter()
    generate_with(engine, requests)
    return time.perf_counter() - start


def _adapter(out: Path, seed: int, rank: int, chosen: tuple[str, ...]) -> Path:
    """A random adapter in PEFT's files."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(SHAPE.layers):
        for name, (outputs, inputs) in _SIZES.items():
            if not chosen or name.rpartition(".")[2] in chosen:
                place = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{place}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.02
                tensors[f"{place}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.02
    out.mkdir(parents=True, exist_ok=True)
    modules = list(chosen) or [name.rpartition(".")[2] for name in _SIZES]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (out / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, out / "adapter_model.safetensors")
    return out


def main() -> None:
    """Print a line for each kind and phase."""
    with tempfile.TemporaryDirectory(prefix="trtforge-bench-") as directory:
        for each in measure(Path(sys.argv[1] if len(sys.argv) > 1 else directory)):
            print(
                f"{each.kind}, {each.phase}: {each.plain:.0f} tokens/s without, one adapter "
                f"{each.one / each.plain:.0%}, {COUNT} adapters {each.sixteen / each.plain:.0%} of it"
            )


if __name__ == "__main__":
    main()
