from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CohereConfig, LlamaConfig, Phi3Config
from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from trtforge.core.errors import ForgeError
from trtforge.runtime.architecture.rotary import Rotary, RotarySpec
from trtforge.runtime.native.bindings import Native
from trtforge.runtime.native.compiler import VARIABLE

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + step / 20 for step in range(16)],
    "long_factor": [1.0 + step for step in range(16)],
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
        LLAMA3,
        YARN,
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        YARN | {"attention_factor": 1.25},
        YARN | {"factor": None},
        LONGROPE,
        LONGROPE | {"factor": 8.0},
        LONGROPE | {"attention_factor": 1.25},
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
    Rotary(spec, 256, CPU).at(positions, torch.float32).turn(heads)
    torch.testing.assert_close(heads, expected, rtol=1e-4, atol=5e-5)


def test_an_interleaved_rotation_equals_that_of_transformers() -> None:
    config = CohereConfig(hidden_size=128, num_attention_heads=4, max_position_embeddings=256, rope_theta=10000.0)
    positions = torch.arange(256)
    query, key = torch.randn(1, 4, 256, 32), torch.randn(1, 2, 256, 32)
    cos, sin = CohereRotaryEmbedding(config)(query, positions.unsqueeze(0))
    expected = torch.cat(apply_interleaved(query, key, cos, sin), dim=1)[0].transpose(0, 1)
    heads = torch.cat((query, key), dim=1)[0].transpose(0, 1).contiguous()
    spec = RotarySpec(dim=32, base=10000.0, max_positions=256, interleaved=True)
    Rotary(spec, 256, CPU).at(positions, torch.float32).turn(heads)
    torch.testing.assert_close(heads, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize(
    ("longest", "length", "computed_as"),
    [(64, 0, 64), (256, 0, 256), (256, 64, 64), (256, 65, 65)],
    ids=["short-engine", "long-engine", "known-to-be-short", "known-to-be-long"],
)
def test_longrope_depends_on_the_sequence_if_its_length_is_known(longest: int, length: int, computed_as: int) -> None:
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 64,
    }
    config = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 1.0, **scaling},
        pad_token_id=0,
    )
    cos, _ = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(computed_as).unsqueeze(0))
    made = Rotary(RotarySpec(8, 10000.0, 256, scaling), longest, CPU).at(torch.arange(64), torch.float32, length)
    torch.testing.assert_close(made.cos[:, 0], cos[0, :64], rtol=1e-4, atol=1e-5)


def test_longrope_without_its_factors_is_an_error() -> None:
    spec = RotarySpec(8, 10000.0, 256, {"rope_type": "longrope", "short_factor": [1.0], "long_factor": None})
    with pytest.raises(ForgeError, match="longrope of 8 rotated elements needs 4 short and long factors"):
        Rotary(spec, 64, CPU)


def test_only_the_first_dim_elements_of_a_head_are_rotated() -> None:
    heads = torch.randn(5, 2, 32)
    before = heads.clone()
    spec = RotarySpec(dim=8, base=10000.0, max_positions=64)
    Rotary(spec, 64, CPU).at(torch.arange(5), torch.float32).turn(heads)
    assert torch.equal(heads[..., 8:], before[..., 8:])
    assert not torch.equal(heads[1:, :, :8], before[1:, :, :8])


def test_an_unknown_scaling_is_an_error() -> None:
    spec = RotarySpec(dim=8, base=10000.0, max_positions=64, scaling={"type": "spiral"})
    with pytest.raises(ForgeError, match="rotary scaling spiral is not supported"):
        Rotary(spec, 64, CPU)


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
@settings(max_examples=30)
@given(
    positions=st.lists(st.integers(0, 10) | st.integers(0, 2**20), min_size=1, max_size=40),
    half=st.integers(1, 80),
    interleaved=st.booleans(),
)
def test_kernels_make_the_rotations_that_torch_makes(
    level: Native, dtype: torch.dtype, exact: float, positions: list[int], half: int, interleaved: bool
) -> None:
    """Of angles that both round to float32 in the same way."""
    rotary = Rotary(RotarySpec(2 * half, 10000.0, 4096, YARN, interleaved=interleaved), 4096, CPU)
    made = rotary.at(torch.tensor(positions), dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "torch")
        expected = rotary.at(torch.tensor(positions), dtype)
    assert made.kernels is level
    for own, other in ((made.cos, expected.cos), (made.sin, expected.sin)):
        assert own.shape == other.shape == (len(positions), 1, 2 * half)
        assert own.dtype is dtype
        torch.testing.assert_close(own, other, rtol=exact, atol=exact)
