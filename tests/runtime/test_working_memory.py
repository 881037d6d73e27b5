"""The GPU memory that is kept for steps: a layer's intermediate results, the logits, and the logits of graphs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.runtime.checkpoints import write_engine
from tests.runtime.test_speculation import KeptRanks
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.architecture.spec_parts import MoeSpec
from trtforge.runtime.decoder import kv_capacity
from trtforge.runtime.decoder.working_memory import graph_logits_bytes, step_bytes
from trtforge.runtime.linears.linear import Placement
from trtforge.runtime.ranks.source import open_engine
from trtforge.runtime.scheduling.batch_limits import BatchLimits

LIMITS = BatchLimits(max_batch_size=32, max_num_tokens=8192, max_input_len=8191, max_seq_len=8192)


@pytest.fixture
def llama_8b(checkpoint: Path) -> DecoderSpec:
    return replace(
        DecoderSpec.of(read_checkpoint_config(checkpoint), 0),
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        intermediate_size=14336,
        vocab_size=128256,
    )


def test_llama_8b(llama_8b: DecoderSpec) -> None:
    """51,200 numbers of each token: the hidden size of 4,096 twice, and three times the MLP's 14,336."""
    logits = 32 * 128256 * 4
    assert step_bytes(llama_8b, torch.bfloat16, LIMITS) == 8192 * 51200 * 2 + logits
    assert step_bytes(llama_8b, torch.float32, LIMITS) == 8192 * 51200 * 4 + logits
    assert graph_logits_bytes(llama_8b, LIMITS) == (1 + 2 + 4 + 8 + 16 + 32) * 128256 * 4


def test_attention_that_is_wider_than_the_mlp(llama_8b: DecoderSpec) -> None:
    spec = replace(llama_8b, intermediate_size=3000)
    assert step_bytes(spec, torch.float16, LIMITS) == 8192 * (8192 + 6144 + 4096) * 2 + 32 * 128256 * 4


def test_experts(llama_8b: DecoderSpec) -> None:
    moe = MoeSpec(64, 0, 64, 4, 1000, renormalize=True, groups=1, top_groups=1, scaling=1.0, shared_size=500)
    spec = replace(llama_8b, moe=moe)
    assert step_bytes(spec, torch.float16, LIMITS) == 8192 * (8192 + 4 * (4096 + 3000) + 1500) * 2 + 32 * 128256 * 4


def test_only_the_last_stage_has_logits(llama_8b: DecoderSpec) -> None:
    spec = replace(llama_8b, pp=2)
    assert step_bytes(spec, torch.bfloat16, LIMITS) == 8192 * 51200 * 2
    assert graph_logits_bytes(spec, LIMITS) == 0


def test_ranks_share_the_vocabulary_of_graphs(llama_8b: DecoderSpec) -> None:
    assert graph_logits_bytes(replace(llama_8b, tp=4), LIMITS) == 63 * 32064 * 4


def test_steps_on_a_gpu_leave_less_memory_for_blocks(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of 4 tokens has 4,096 bytes: 4 layers, and 2 heads of 16 for keys and for values in float32."""
    monkeypatch.setattr(kv_capacity, "free_memory", lambda device: 1 << 20)
    source = open_engine(write_engine(checkpoint, tmp_path / "engine", tokens_per_block=4))
    ranks = KeptRanks(source, 8)
    model = ranks.models[0]
    fitting = model.blocks_that_fit(1.0, 10_000)
    model._place = Placement(torch.device("cuda", 0), torch.float32)
    kept = step_bytes(model._decoder.spec, torch.float32, source.limits)
    assert 0 < kept < 1 << 20
    assert (fitting, model.blocks_that_fit(1.0, 10_000)) == (256, ((1 << 20) - kept) // 4096)
    ranks.end()
