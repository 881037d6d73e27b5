from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from trtforge.core.errors import ForgeError
from trtforge.runtime.rotary import Rotary, RotarySpec, rotate

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        LLAMA3,
        YARN,
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        YARN | {"attention_factor": 1.25},
    ],
)
def test_rotation_equals_that_of_transformers(scaling: dict[str, Any] | None) -> None:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10000.0, **(scaling or {"rope_type": "default"})},
    )
    positions = torch.arange(256)
    query, key = torch.randn(1, 4, 256, 32), torch.randn(1, 2, 256, 32)
    cos, sin = LlamaRotaryEmbedding(config)(query, positions.unsqueeze(0))
    expected = torch.cat(apply_rotary_pos_emb(query, key, cos, sin), dim=1)[0].transpose(0, 1)
    heads = torch.cat((query, key), dim=1)[0].transpose(0, 1).contiguous()
    spec = RotarySpec(dim=32, base=10000.0, max_positions=256, scaling=scaling)
    rotate(heads, *Rotary(spec, 256, CPU).cos_sin(positions, torch.float32))
    torch.testing.assert_close(heads, expected, rtol=1e-4, atol=5e-5)


def test_only_the_first_dim_elements_of_a_head_are_rotated() -> None:
    heads = torch.randn(5, 2, 32)
    before = heads.clone()
    spec = RotarySpec(dim=8, base=10000.0, max_positions=64)
    rotate(heads, *Rotary(spec, 64, CPU).cos_sin(torch.arange(5), torch.float32))
    assert torch.equal(heads[..., 8:], before[..., 8:])
    assert not torch.equal(heads[1:, :, :8], before[1:, :, :8])


def test_an_unknown_scaling_is_an_error() -> None:
    spec = RotarySpec(dim=8, base=10000.0, max_positions=64, scaling={"type": "longrope"})
    with pytest.raises(ForgeError, match="rotary scaling longrope is not known"):
        Rotary(spec, 64, CPU)
