"""Tensor-parallel ranks and pipeline stages on two GPUs, by NCCL."""

from pathlib import Path

import pytest
import torch

from tests.gpu.engines import DEVICE, TOKENS, checkpoint_of, error
from tests.runtime.checkpoints import write_engine
from tests.runtime.runner import open_runner

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]


@pytest.mark.parametrize("quant", [None, "W4A16_AWQ"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
def test_two_ranks_give_the_logits_of_the_reference(layout: dict[str, int], quant: str | None, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, quant=quant, **layout)
    engine = write_engine(checkpoint, tmp_path / "engine", dtype="bfloat16", device=DEVICE)
    with open_runner(checkpoint, "cpu", "float32") as reference, open_runner(engine) as candidate:
        for tokens in (TOKENS[0], TOKENS[1][:5], TOKENS[2][:1]):
            assert error(candidate.logits(tokens), reference.logits(tokens)) < 0.06
    assert torch.cuda.device_count() > 1
