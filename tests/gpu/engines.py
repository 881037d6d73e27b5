"""Small engines on the GPU, and what a reference on the CPU computes of the same checkpoints.

TRTFORGE_TEST_DEVICE=cpu runs test_features.py on a machine without a GPU. With `interpreter` the CPU computes as a GPU
does: without the kernels in C++, attention by the Triton kernels, with a repeated computation in place of each graph,
and with steps that begin before the tokens of the previous step are known.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.runtime.checkpoints import Layout, tiny_llama, write_checkpoint, write_engine
from tests.runtime.cuda.captures import repeated
from tests.runtime.cuda.kernels import paged
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.core.device import UsableDevice
from trtforge.core.dtypes import ModelDtype
from trtforge.models.kernels import KernelName
from trtforge.runtime.decoder import kv_cache
from trtforge.runtime.linears.kernels import Kernels
from trtforge.runtime.native.compiler import VARIABLE
from trtforge.runtime.ranks import rank_model
from trtforge.runtime.ranks.rank_group import RankGroup
from trtforge.runtime.ranks.source import DEFAULT_TOKENS_PER_BLOCK, Source, open_engine, open_model
from trtforge.runtime.scheduling.batch import Step

_ASKED = os.environ.get("TRTFORGE_TEST_DEVICE", "cuda")
DEVICE: UsableDevice = "cuda" if _ASKED == "cuda" else "cpu"
INTERPRETED = _ASKED == "interpreter"
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


@contextmanager
def computing_on_device() -> Iterator[None]:
    """Engines for DEVICE are loaded and closed within this."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setenv(VARIABLE, "torch")
            patch.setattr(kv_cache, "paged_attention_for", lambda device: paged())
            patch.setattr(rank_model, "graph_capture_for", lambda *_: repeated)
            patch.setattr(RankGroup, "computes_ahead", property(lambda self: True, lambda self, value: None), False)
        yield


def is_as_near_as_the_cpu(
    checkpoint: Path,
    out: Path,
    dtype: ModelDtype,
    kernel: KernelName | None = None,
    *,
    vocabulary: int = 256,
    most: float = 1.5,
) -> bool:
    """Whether the GPU's logits are as near to float32's as those of reference kernels in the same type, or at most
    `most` times as far.

    Rounded activations tip over where sums differ in their last bits, so the distance itself may be large.
    """
    found = []
    for source in (reference_of(checkpoint), open_model(checkpoint, "cpu", dtype)):
        ranks = ranks_of(source)
        found.append(decoded(ranks, DEFAULT_TOKENS_PER_BLOCK, vocabulary))
        ranks.close()
    with computing_on_device():
        ranks = ranks_of(gpu_engine(checkpoint, out, dtype, kernel))
        made = decoded(ranks, BLOCK, vocabulary)
        ranks.close()
    exact, by_cpu = found
    return error(made, exact) < most * error(by_cpu, exact) + 0.01


def decoded(ranks: ThreadRanks, block: int = BLOCK, vocabulary: int = 256) -> Tensor:
    """float32 logits (NEW_TOKENS x sequences, vocabulary) of single tokens, after each sequence's context."""
    columns = -(-(max(LENGTHS) + NEW_TOKENS) // block)
    tables = 1 + np.arange(len(LENGTHS) * columns).reshape(len(LENGTHS), columns)
    for row, length in enumerate(LENGTHS):
        count = np.array([length])
        ranks.execute(
            Step(
                np.array([0]), count, np.array([1]), tables[row : row + 1], np.array(TOKENS[row][:length]) % vocabulary
            )
        )
    ones, found = np.ones(len(LENGTHS), dtype=np.int64), []
    for at in range(NEW_TOKENS):
        tokens = [TOKENS[row][length + at] for row, length in enumerate(LENGTHS)]
        logits = ranks.execute(Step(np.array(LENGTHS) + at, ones, ones, tables, np.array(tokens) % vocabulary))
        assert logits is not None
        found.append(logits.clone().cpu())  # the next step overwrites what a graph gave
    return torch.cat(found)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative to the reference's norm."""
    return float((found - expected).norm() / expected.norm())
