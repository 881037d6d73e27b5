"""The embedded engine's speed on networks of other families than Llama, beside `transformers` on the same weights.

Random networks of 180 to 350 M parameters in bfloat16, as few layers and as narrow as a benchmark on two cores wants,
with what sets the families apart: experts, latent attention, attention sinks, linear attention, sliding windows.
Prompts, numbers of requests and processes are those of `decode`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks import decode

OURS = "bfloat16"
_COMMON: dict[str, Any] = {
    "vocab_size": decode.SHAPE.vocab,
    "hidden_size": decode.SHAPE.hidden,
    "num_attention_heads": decode.SHAPE.heads,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = _COMMON | {"num_key_value_heads": decode.SHAPE.kv_heads, "head_dim": decode.SHAPE.head_size}
_EXPERTS: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}


@dataclass(frozen=True)
class Compared:
    """A network of so many million parameters, by the engine and by `transformers`."""

    name: str
    millions: int
    ours: decode.Measured
    transformers: decode.Measured


def measure(directory: Path, runs: int) -> list[Compared]:
    """Every network `runs` times by both, in turns."""
    found = []
    for name, write in NETWORKS.items():
        own = directory / name
        millions = write(own / "model")
        decode.run_trtforge("convert", str(own / "model"), str(own / "checkpoint"))
        limits = ("--max-batch-size", str(decode.BATCHES[-1]), "--max-seq-len", "512")
        decode.run_trtforge("compile", str(own / "checkpoint"), str(own / OURS), "--backend", "torch", *limits)
        rates: dict[str, list[decode.Rates]] = {OURS: [], decode.TRANSFORMERS: []}
        for _ in range(runs):
            for way, known in rates.items():
                known.append(decode.run(way, own))
        measured = [decode.median(way, known) for way, known in rates.items()]
        found.append(Compared(name, millions, *measured))
    return found


def _written(config: Any, directory: Path) -> int:
    """Write a random network of this configuration; its million parameters."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return round(sum(each.numel() for each in model.parameters()) / 1e6)


def _qwen3_moe(directory: Path) -> int:
    from transformers import Qwen3MoeConfig

    return _written(Qwen3MoeConfig(**_GROUPED, **_EXPERTS, num_hidden_layers=12, norm_topk_prob=True), directory)


def _gpt_oss(directory: Path) -> int:
    from transformers import GptOssConfig

    sizes = {"num_hidden_layers": 8, "intermediate_size": 1024, "sliding_window": 128}
    return _written(GptOssConfig(**_GROUPED, **sizes, num_local_experts=8, num_experts_per_tok=2), directory)


def _deepseek_v3(directory: Path) -> int:
    from transformers import DeepseekV3Config

    heads = {"num_key_value_heads": decode.SHAPE.heads, "q_lora_rank": 384, "kv_lora_rank": 256}
    heads |= {"qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
    sizes = {"num_hidden_layers": 10, "intermediate_size": 2816, "moe_intermediate_size": 512}
    return _written(DeepseekV3Config(**_COMMON, **heads, **experts, **sizes, first_k_dense_replace=1), directory)


def _qwen3_next(directory: Path) -> int:
    from transformers import Qwen3NextConfig

    heads = {"linear_num_value_heads": 8, "linear_num_key_heads": 4}
    sizes = {"num_hidden_layers": 8, "shared_expert_intermediate_size": 512}
    return _written(Qwen3NextConfig(**_GROUPED, **_EXPERTS, **heads, **sizes), directory)


def _gemma3(directory: Path) -> int:
    from transformers import Gemma3TextConfig

    sizes = {"num_hidden_layers": 16, "intermediate_size": 2816, "sliding_window": 128}
    return _written(Gemma3TextConfig(**_GROUPED, **sizes), directory)


NETWORKS: dict[str, Callable[[Path], int]] = {
    "Qwen3-MoE": _qwen3_moe,
    "GPT-OSS": _gpt_oss,
    "DeepSeek-V3": _deepseek_v3,
    "Qwen3-Next": _qwen3_next,
    "Gemma 3": _gemma3,
}
"""Each writes a network of its family, and returns its million parameters."""
