import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as build_coarse_alibi_tensor

from trtforge.runtime.decoder.alibi import Alibi


@pytest.mark.parametrize("coarse", [False, True], ids=["bloom", "falcon"])
@pytest.mark.parametrize("heads", [1, 4, 6, 32, 71])
def test_the_bias_is_that_of_transformers(heads: int, coarse: bool) -> None:
    """Falcon's beyond position 256, where bfloat16 cannot tell every position."""
    build = build_coarse_alibi_tensor if coarse else build_alibi_tensor
    expected = build(torch.ones(1, 600, dtype=torch.long), heads, torch.float32).view(heads, 600)
    made = Alibi(heads, 0, heads, 1.0, coarse, torch.device("cpu")).bias(600)
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=0)


def test_a_rank_has_the_slopes_of_its_own_heads() -> None:
    whole = Alibi(12, 0, 12, 0.5, False, torch.device("cpu")).bias(9)
    assert torch.equal(Alibi(12, 6, 3, 0.5, False, torch.device("cpu")).bias(9), whole[6:9])
