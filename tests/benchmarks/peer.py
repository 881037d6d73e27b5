"""`python -m tests.benchmarks.peer SOURCE OUT TP`: a Llama the usual way: load it with transformers, split, save ranks.

What TensorRT-LLM's `convert_checkpoint.py` does for Llama, without its digests, checks and configuration.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
ROW = ("o_proj", "down_proj")


def main(source: Path, out: Path, tp: int) -> None:
    """Write `rank{N}.safetensors`."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, low_cpu_mem_usage=True)
    out.mkdir()
    for rank in range(tp):
        tensors = {name: _share(name, tensor, rank, tp) for name, tensor in model.state_dict().items()}
        for layer in range(model.config.num_hidden_layers):
            prefix = f"model.layers.{layer}.self_attn."
            parts = [tensors.pop(f"{prefix}{part}_proj.weight") for part in "qkv"]
            tensors[f"{prefix}qkv.weight"] = torch.cat(parts)
        save_file(tensors, out / f"rank{rank}.safetensors")


def _share(name: str, tensor: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module in COLUMN:
        return tensor.chunk(tp, dim=0)[rank].contiguous()
    if module in ROW:
        return tensor.chunk(tp, dim=1)[rank].contiguous()
    return tensor


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
