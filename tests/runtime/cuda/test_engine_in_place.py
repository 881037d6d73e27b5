"""Networks that are computed by the Triton kernels where there are any give transformers' logits."""

import numpy as np
import pytest

from tests.runtime.converted import LONG, Families
from tests.runtime.cuda.kernels import DEVICE, fused, paged, products
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.runtime.cuda import fused as fused_kernels
from trtforge.runtime.decoder import kv_cache
from trtforge.runtime.linears import linear
from trtforge.runtime.native.bindings import VARIABLE
from trtforge.runtime.ranks.source import open_model
from trtforge.runtime.scheduling.batch import Step

ROWS, BLOCKS_EACH = 3, 2


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU computes as CUDA does: without the kernels in C++, with those in Triton's language."""
    monkeypatch.setenv(VARIABLE, "torch")
    monkeypatch.setattr(kv_cache, "paged_attention_for", lambda device: paged())
    monkeypatch.setattr(fused_kernels, "fused_for", lambda device, dtype: fused())
    monkeypatch.setattr(linear, "products_for", lambda device: products())


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_window", "bloom", "gpt_oss", "llama4", "deepseek_v2"])
def test_single_tokens_give_the_logits_of_transformers(families: Families, name: str) -> None:
    """A context of different length in each row, then single tokens of all rows."""
    family = families(name)
    source = open_model(family.checkpoint(), "cpu" if DEVICE.type == "cpu" else "cuda")
    ranks = ThreadRanks(source, 1 + ROWS * BLOCKS_EACH)
    assert ranks.models[0]._decoder.reads_in_place
    lengths = [3 + 5 * row for row in range(ROWS)]
    columns = -(-32 // source.tokens_per_block)
    tables = np.array([[1 + row * BLOCKS_EACH + column for column in range(columns)] for row in range(ROWS)])
    for row, length in enumerate(lengths):
        one = np.array([length])
        ranks.execute(Step(np.array([0]), one, one, tables[row : row + 1], np.array(LONG[row : row + length])))
    ones = np.ones(ROWS, dtype=np.int64)
    for at in range(4):
        tokens = np.array([LONG[row + length + at] for row, length in enumerate(lengths)])
        made = ranks.execute(Step(np.array(lengths) + at, ones, ones, tables, tokens))
    assert made is not None
    for row, length in enumerate(lengths):
        expected = family.logits(LONG[row : row + length + 4])[-1]
        assert (made[row].cpu() - expected).abs().max() <= 2e-5 * expected.abs().max()
    ranks.close()
