"""Small engines on the GPU, and what a reference on the CPU computes of the same checkpoints."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.runtime.checkpoints import Layout, tiny_llama, write_checkpoint, write_engine
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.core.device import UsableDevice
from trtforge.models.kernels import KernelName
from trtforge.runtime.linears.kernels import Kernels
from trtforge.runtime.ranks.source import Source, open_engine, open_model
from trtforge.runtime.scheduling.batch import Step

DEVICE: UsableDevice = "cuda"
BLOCK = 16
LENGTHS = (3, 40, 17, 9, 64)
"""Tokens in the cache of each sequence before single tokens are computed."""
NEW_TOKENS = 6
COLUMNS = -(-(max(LENGTHS) + NEW_TOKENS) // BLOCK)
_SHAPE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 256, "num_hidden_layers": 2}
_generator = torch.Generator().manual_seed(5)
TOKENS = torch.randint(3, 256, (len(LENGTHS), max(LENGTHS) + NEW_TOKENS), generator=_generator).tolist()


def model() -> LlamaForCausalLM:
    """A Llama whose sizes every kernel takes."""
    return tiny_llama(**_SHAPE)


def checkpoint_of(directory: Path, **layout: object) -> Path:
    """A checkpoint of `model` in a layout."""
    return write_checkpoint(model(), directory / "checkpoint", Layout(group_size=128, **layout))  # type: ignore[arg-type]


def gpu_engine(checkpoint: Path, out: Path, dtype: str, kernel: KernelName | None = None, **limits: int) -> Source:
    """The checkpoint compiled for the GPU, by default with the kernels for it."""
    kernels = None if kernel is None else Kernels(quantized=kernel)
    limits = {"tokens_per_block": BLOCK} | limits
    return open_engine(write_engine(checkpoint, out, dtype=dtype, kernels=kernels, device=DEVICE, **limits))


def reference_of(checkpoint: Path) -> Source:
    """The checkpoint by reference kernels in float32 on the CPU."""
    return open_model(checkpoint, "cpu", "float32")


def ranks_of(source: Source) -> ThreadRanks:
    """Its ranks, with room for all sequences."""
    return ThreadRanks(source, 1 + len(LENGTHS) * COLUMNS)


def decoded(ranks: ThreadRanks, block: int = BLOCK) -> Tensor:
    """float32 logits (NEW_TOKENS x sequences, vocabulary) of single tokens, after each sequence's context."""
    columns = -(-(max(LENGTHS) + NEW_TOKENS) // block)
    tables = 1 + np.arange(len(LENGTHS) * columns).reshape(len(LENGTHS), columns)
    for row, length in enumerate(LENGTHS):
        count = np.array([length])
        ranks.execute(Step(np.array([0]), count, np.array([1]), tables[row : row + 1], np.array(TOKENS[row][:length])))
    ones, found = np.ones(len(LENGTHS), dtype=np.int64), []
    for at in range(NEW_TOKENS):
        tokens = [TOKENS[row][length + at] for row, length in enumerate(LENGTHS)]
        logits = ranks.execute(Step(np.array(LENGTHS) + at, ones, ones, tables, np.array(tokens)))
        assert logits is not None
        found.append(logits.clone().cpu())  # the next step overwrites what a graph gave
    return torch.cat(found)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative to the reference's norm."""
    return float((found - expected).norm() / expected.norm())
