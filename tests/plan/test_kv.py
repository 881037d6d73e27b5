"""KV bytes and pools, exactly as TensorRT-LLM's logs have them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.models import LLAMA_8B, LLAMA_70B, known
from trtforge.core.parallel import Parallel
from trtforge.formats.hf import HfConfig
from trtforge.models.families.deepseek_v2 import FAMILY as DEEPSEEK
from trtforge.plan.kv import blocks_of, bytes_per_token, pool_tokens, requests_that_fit

GIB = 1 << 30


# What the KV cache manager logged: TensorRT-LLM issues 1400, 2894 and 1188, tensorrtllm_backend issue 625.
@pytest.mark.parametrize(
    ("hub_id", "tokens", "nbytes"),
    [
        ("meta-llama/Llama-2-7b-hf", 132_608, 69_524_783_104),
        ("Qwen/Qwen2-7B", 481_792, 25.73 * GIB),
        ("Qwen/Qwen2.5-0.5B", 395_776, 4.53 * GIB),
    ],
)
def test_bytes_of_a_pool(hub_id: str, tokens: int, nbytes: float) -> None:
    assert tokens * bytes_per_token(known(hub_id).facts.sizes, 2) == pytest.approx(nbytes, abs=0.005 * GIB)
    if isinstance(nbytes, int):
        assert tokens * bytes_per_token(known(hub_id).facts.sizes, 2) == nbytes


def test_blocks_of_a_pool_are_rounded_up() -> None:
    """TensorRT-LLM issue 2268: Qwen1.5-7B, 21.89 GiB free, fraction 0.9, blocks of 64 tokens: 631 of them."""
    per_token = bytes_per_token(known("Qwen/Qwen1.5-7B").facts.sizes, 2)
    assert per_token == 524_288
    pool = int(0.9 * 21.89 * GIB)
    assert pool / per_token / 64 == pytest.approx(630.43, abs=0.005)
    assert pool_tokens(pool, per_token, 64) == 631 * 64


def test_a_token_of_llama_70b() -> None:
    sizes = known(LLAMA_70B).facts.sizes
    assert bytes_per_token(sizes, 2) == 327_680
    assert bytes_per_token(sizes, 1) == 163_840


@pytest.mark.parametrize(
    ("tp", "pp", "share"), [(1, 1, 1), (2, 1, 2), (8, 1, 8), (16, 1, 8), (32, 1, 8), (4, 2, 8), (1, 4, 4)]
)
def test_ranks_share_the_cache_until_each_has_one_head(tp: int, pp: int, share: int) -> None:
    sizes = known(LLAMA_8B).facts.sizes
    assert bytes_per_token(sizes, 2, Parallel(tp=tp, pp=pp)) * share == bytes_per_token(sizes, 2)


def test_latent_attention_keeps_one_vector_a_layer_on_every_rank() -> None:
    config = {
        "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 60, "num_attention_heads": 128,
        "vocab_size": 102400, "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1,
    }  # fmt: skip
    sizes = DEEPSEEK.facts(HfConfig(config, Path("config.json"))).sizes
    assert bytes_per_token(sizes, 2) == 60 * (512 + 64) * 2
    assert bytes_per_token(sizes, 2, Parallel(tp=8)) == 60 * (512 + 64) * 2
    assert bytes_per_token(sizes, 2, Parallel(tp=8, pp=2)) == 30 * (512 + 64) * 2


@given(st.integers(0, 10**12), st.integers(1, 10**6), st.sampled_from([16, 32, 64, 128]))
def test_a_pool_is_whole_blocks_and_no_more_than_one_above_its_bytes(pool: int, per_token: int, block: int) -> None:
    tokens = pool_tokens(pool, per_token, block)
    assert tokens % block == 0
    assert (tokens - block) * per_token <= pool


@given(st.integers(0, 10**7), st.integers(1, 10**5), st.sampled_from([16, 32, 64]))
def test_as_many_requests_as_have_whole_blocks(tokens: int, length: int, block: int) -> None:
    fits = requests_that_fit(tokens, length, block)
    each = blocks_of(length, block) * block
    assert fits * each <= tokens < (fits + 1) * each
