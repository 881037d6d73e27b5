"""The embedded engine on CUDA: the same tokens and nearly the same logits as on the CPU. `make test-gpu`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import MakeHf
from tests.runtime.runner import open_runner
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.progress import Silent
from trtforge.core.recipe import EngineConfig
from trtforge.engine_process.requests import GenerationRequest
from trtforge.formats.hf import open_checkpoint
from trtforge.runtime.generate import generate
from trtforge.verify.layers import compare_by_layer

pytestmark = pytest.mark.gpu

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = [5, 17, 3, 88, 41, 2, 60, 9]


def engine(source: Path, tmp_path: Path, quant: str, dtype: str, device: str) -> Path:
    """An engine of `source` for `device`."""
    calibration = None
    if quant != "none":
        tokens = torch.randint(0, 97, (8, 32), generator=torch.Generator().manual_seed(1))
        save_file({"input_ids": tokens}, tmp_path / "ids.safetensors")
        data = {"data": str(tmp_path / "ids.safetensors"), "samples": 8, "sequence_length": 32}
        config = CalibrateConfig.parse({"format": quant, "data": data, "device": "cpu"}, "test")
        calibration = calibrate(config, source, tmp_path / "calibration").path
    checkpoint = convert(ConvertConfig(quant=quant, dtype=dtype), source, tmp_path / "ck", calibration=calibration).path
    config = EngineConfig(backend="torch", device=device, compute_dtype=dtype, max_seq_len=128, tokens_per_block=16)
    return compile_engine(config, checkpoint, tmp_path / device).path


def test_float32_tokens_are_those_of_transformers(make_hf: MakeHf, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = make_hf(**SHAPE)
    built = engine(source, tmp_path, "none", "float32", "cuda")
    prompts = [tuple(IDS[:length]) for length in range(1, 9)]
    answers = generate(built, [GenerationRequest(str(i), prompt, 24) for i, prompt in enumerate(prompts)])
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, do_sample=False, max_new_tokens=24, eos_token_id=None)[0, len(prompt) :]
        assert list(answer.tokens) == expected.tolist()


@pytest.mark.parametrize(("quant", "tolerance"), [("none", 0.02), ("fp8", 0.05), ("int4_awq", 0.05)])
def test_kernels_agree_with_the_reference(make_hf: MakeHf, tmp_path: Path, quant: str, tolerance: float) -> None:
    built = engine(make_hf(dtype=torch.bfloat16, **SHAPE), tmp_path, quant, "bfloat16", "cuda")
    with open_runner(tmp_path / "ck", "cpu", "float32") as reference, open_runner(built) as candidate:
        expected, found = reference.logits(IDS), candidate.logits(IDS)
    assert float((found - expected).norm() / expected.norm()) < tolerance


def test_an_engine_on_the_gpu_is_compared_layer_by_layer(make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf(dtype=torch.bfloat16, **SHAPE)
    built = engine(source, tmp_path, "none", "bfloat16", "cuda")
    _, errors = compare_by_layer(built, open_checkpoint(source), [IDS, IDS[:5]], Silent(), layers=True)
    assert errors
    assert max(layer.error for layer in errors) < 0.02
