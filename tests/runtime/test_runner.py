from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.runtime.checkpoints import Layout, write_checkpoint, write_engine
from tests.runtime.runner import open_runner
from trtforge.core.errors import ForgeError


@pytest.mark.parametrize(
    ("layout", "dtype", "tolerance"),
    [
        (Layout(), "float32", 1e-5),
        (Layout(quant="FP8"), "float32", 1e-5),
        (Layout(kv="FP8"), "float32", 1e-5),
        (Layout(quant="W4A16_AWQ"), "float32", 1e-5),
        (Layout(), "bfloat16", 0.03),
        (Layout(quant="FP8", kv="FP8"), "bfloat16", 0.3),
        (Layout(quant="W4A16_AWQ"), "bfloat16", 0.03),
    ],
    ids=lambda value: f"{value.quant}-{value.kv}" if isinstance(value, Layout) else str(value),
)
def test_an_engine_computes_what_its_checkpoint_does(
    llama: LlamaForCausalLM, tmp_path: Path, prompts: list[list[int]], layout: Layout, dtype: str, tolerance: float
) -> None:
    checkpoint = write_checkpoint(llama, tmp_path / "checkpoint", layout)
    engine = write_engine(checkpoint, tmp_path / "engine", dtype=dtype)
    with open_runner(checkpoint) as reference, open_runner(engine) as packed:
        expected, made = reference.logits(prompts[7]), packed.logits(prompts[7])
    assert made.dtype is torch.float32
    assert float((made - expected).norm() / expected.norm()) < tolerance


def test_logits_are_those_of_transformers(checkpoint: Path, llama: LlamaForCausalLM, prompts: list[list[int]]) -> None:
    with open_runner(checkpoint) as runner, torch.no_grad():
        for prompt in prompts:
            expected = llama(torch.tensor([prompt])).logits[0]
            made = runner.logits(prompt)
            assert float((made - expected).norm() / expected.norm()) < 1e-5


def test_an_engine_is_computed_only_as_it_was_compiled(engine_directory: Path) -> None:
    with pytest.raises(ForgeError, match="compiled for the compute type float32, not bfloat16"):
        open_runner(engine_directory, compute_dtype="bfloat16")
