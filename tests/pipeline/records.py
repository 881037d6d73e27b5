"""Reports to render: one with everything that a report can have, one with the least."""

import json
from pathlib import Path
from typing import Any

from trtforge.pipeline.record import Record
from trtforge.pipeline.speed import Measured

LAYERS = 32


def full(**changes: Any) -> Record:
    """A verified FP8 build of an 8B model with every section's facts; `changes` replace top-level keys."""
    return Record.parse(_FULL | changes, "test")


def least() -> Record:
    """What a report of an older version had, of a build that only packaged."""
    stage = _stage("package", "build/llama/repository", 9_080_000_000, 1.5)
    return Record.parse(
        {"recipe": "llama", "stages": [stage], "verification": None, "compression": None, "next": "trtforge serve x"},
        "test",
    )


def written(directory: Path, record: Record) -> Path:
    """A build directory with this report."""
    directory.mkdir(parents=True)
    (directory / "report.json").write_text(json.dumps(record.model_dump(mode="json")))
    return directory


def measured(**changes: Any) -> Measured:
    """A measured speed; `changes` replace top-level keys."""
    return Measured.parse(_MEASURED | changes, "test")


def quality(*, passed: bool = True, **changes: Any) -> dict[str, Any]:
    """The verification of `full`."""
    failures = [] if passed else ["perplexity_increase is 0.05, the gate limit is 0.02"]
    found = {
        "passed": passed,
        "perplexity": {"reference": 6.0123, "candidate": 6.0339 if passed else 6.3129, "increase": 0.0036 if passed
                       else 0.05},
        "kl_mean": 0.00521,
        "top1_agreement": 0.9641,
        "max_abs_logit_error": 0.81,
        "tokens": 32_704,
        "tensors_checked": 611,
        "failures": failures,
        "layers": [{"layer": n, "error": 0.001 * (n + 1), "added": 0.001} for n in range(LAYERS)],
        "worst_layer": 17,
    }  # fmt: skip
    return found | changes


def _stage(name: str, artifact: str | None, size: int, seconds: float, origin: str = "written") -> dict[str, Any]:
    return {
        "stage": name,
        "artifact": artifact,
        "bytes": size,
        "seconds": seconds,
        "peak_memory": 5_310_000_000,
        "cached": origin != "written",
        "origin": origin,
    }


_MEASURED: dict[str, Any] = {
    "speed": {
        "prompt_tokens": 140,
        "answer_tokens": 64,
        "levels": [
            {"concurrency": 1, "requests": 16, "tokens": 1024, "seconds": 8.0, "tokens_per_second": 128.0,
             "first_text_ms": 21.4, "next_token_ms": 7.6},
            {"concurrency": 32, "requests": 32, "tokens": 2048, "seconds": 1.0, "tokens_per_second": 2048.0,
             "first_text_ms": 118.6, "next_token_ms": 13.25},
        ],
    },
    "repository": "0" * 64,
    "machine": "16 cores of AMD EPYC, 1 x NVIDIA H100 80GB HBM3",
    "busy": 0.31,
    "trtforge": "0.1.0",
    "measured": "2026-01-31T12:40:00+00:00",
}  # fmt: skip

_FULL: dict[str, Any] = {
    "recipe": "llama-3.1-8b-fp8",
    "stages": [
        _stage("calibrate", "build/llama-3.1-8b-fp8/calibration", 1_240_000, 212.4, "from the cache"),
        _stage("convert", "build/llama-3.1-8b-fp8/checkpoint", 9_080_000_000, 14.2),
        _stage("verify", None, 0, 388.0),
        _stage("compile", "build/llama-3.1-8b-fp8/engine", 9_120_000_000, 745.9),
        _stage("package", "build/llama-3.1-8b-fp8/repository", 9_140_000_000, 3.1),
    ],
    "verification": quality(),
    "compression": 1.99,
    "next": "trtforge serve build/llama-3.1-8b-fp8/repository",
    "out": "build/llama-3.1-8b-fp8",
    "model": {
        "name": "meta-llama/Llama-3.1-8B-Instruct",
        "family": "llama",
        "parameters": 8_030_261_248,
        "source_bytes": 16_060_556_376,
    },
    "deployment": {
        "quant": "fp8",
        "group_size": None,
        "kv_cache": "fp8",
        "dtype": "bfloat16",
        "tp": 2,
        "pp": 2,
        "ep": 1,
        "hardware": "4 x h100-80gb",
    },
    "gate": {
        "perplexity_increase": 0.02,
        "top1_agreement": 0.95,
        "kl_mean": None,
        "data": "hf:abisee/cnn_dailymail:3.0.0:test",
        "samples": 64,
        "sequence_length": 512,
    },
    "memory": [
        {
            "name": f"ranks {2 * stage} to {2 * stage + 1}",
            "gpus": 2,
            "capacity": 85_000_000_000,
            "parts": {
                "weights": 4_600_000_000 + stage * 700_000_000,
                "kv_pool": 66_000_000_000,
                "activations": 2_100_000_000,
                "logits": 33_000_000,
                "decoder": 207_000_000,
                "runtime": 1_500_000_000,
            },
        }
        for stage in range(2)
    ],
    "estimates": {
        "note": "estimates of a roofline model with assumed efficiencies, not measurements",
        "prompt": 1024,
        "output": 256,
        "curve": [
            {
                "concurrency": 1 << bit,
                "ttft_ms": 31.0 + 4.5 * bit,
                "tpot_ms": 5.1 + 0.2 * (1 << bit),
                "tokens_per_second": 1000 * (1 << bit) / (5.1 + 0.2 * (1 << bit)),
            }
            for bit in range(8)
        ],
    },
    "engine_bytes": 9_120_000_000,
    "calibration": [
        {
            "layer": n,
            "input_amax": 12.0 + (n * 7) % 11,
            "input_amax_of": "mlp.down_proj",
            "output_error": 0.002 + 0.0003 * ((n * 5) % 13),
            "output_error_of": "self_attn.o_proj",
        }
        for n in range(LAYERS)
    ],
    "sensitivity": [{"modules": [f"model.layers.{n}.mlp.down_proj"], "error": 0.02 / (n + 1)} for n in range(LAYERS)],
    "versions": {"trtforge": "0.1.0", "python": "3.11.2", "torch": "2.13.0", "transformers": "5.1.0"},
    "warnings": ["max_batch_size 128 needs more KV cache than fits at full length: <b>64</b> requests run at once"],
    "settings": {
        "name": "llama-3.1-8b-fp8",
        "model": {"source": "meta-llama/Llama-3.1-8B-Instruct"},
        "quantization": {"format": "fp8", "kv_cache": "fp8"},
        "parallel": {"tp": 2, "pp": 2},
    },
    "finished": "2026-01-31T12:34:56+00:00",
}
