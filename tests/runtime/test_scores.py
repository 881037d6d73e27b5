"""torch's attention of one query a row, which computes a group of one query head twice."""

import pytest
import torch

from trtforge.runtime.decoder.scores import FusedScores


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_one_query_of_a_group(group: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    queries, mask = torch.randn(3, 2, group, 16).to(dtype), torch.zeros(3, 1, 1, 7)
    mask[1, ..., 4:] = float("-inf")
    keys, values = torch.randn(2, 3, 2, 7, 16).to(dtype)
    scores = queries.float() @ keys.float().transpose(-1, -2) * 0.25 + mask
    expected = scores.softmax(-1) @ values.float()
    made = FusedScores(0.25).one_query(queries, keys, values, mask.to(dtype))
    assert made.shape == queries.shape
    assert float((made.float() - expected).abs().max() / expected.abs().max()) < tolerance
