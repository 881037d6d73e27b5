"""Networks that are computed by the Triton kernels where there are any give transformers' logits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.runtime.checkpoints import Layout, tiny_llama, write_checkpoint, write_engine
from tests.runtime.converted import LONG, Families
from tests.runtime.cuda.kernels import DEVICE, EVERY, fused, paged, products, rounding
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.core.dtypes import ModelDtype
from trtforge.models.kernels import KernelName
from trtforge.runtime.cuda import fused as fused_kernels
from trtforge.runtime.cuda.fused import FusedKernels
from trtforge.runtime.decoder import kv_cache, layer, mlp
from trtforge.runtime.linears import byte_cuda, fp8_linear, int4_tiled, linear, nvfp4_tiled
from trtforge.runtime.linears.kernels import Kernels
from trtforge.runtime.native.compiler import VARIABLE
from trtforge.runtime.ranks.source import open_engine, open_model
from trtforge.runtime.scheduling.batch import Step

ROWS, BLOCKS_EACH = 3, 2
FAMILIES = ("llama", "gpt_oss", "deepseek_v2", *(("gemma2", "qwen2_window", "bloom", "llama4") if EVERY else ()))


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU computes as CUDA does: without the kernels in C++, with those in Triton's language."""
    monkeypatch.setenv(VARIABLE, "torch")
    monkeypatch.setattr(kv_cache, "paged_attention_for", lambda device: paged())
    monkeypatch.setattr(fused_kernels, "fused_for", lambda device, dtype: fused())
    monkeypatch.setattr(fp8_linear, "fused_for", lambda device, dtype: fused())
    for module in (linear, fp8_linear):
        monkeypatch.setattr(module, "products_for", lambda device: products())
    for module in (byte_cuda, int4_tiled, nvfp4_tiled):
        monkeypatch.setattr(module, "products_for", lambda device: products())
        monkeypatch.setattr(module, "rounding_for", lambda device: rounding())


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("name", FAMILIES)
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
    for at in range(2):
        tokens = np.array([LONG[row + length + at] for row, length in enumerate(lengths)])
        made = ranks.execute(Step(np.array(lengths) + at, ones, ones, tables, tokens))
    assert made is not None
    for row, length in enumerate(lengths):
        expected = family.logits(LONG[row : row + length + 2])[-1]
        assert (made[row].cpu() - expected).abs().max() <= 2e-5 * expected.abs().max()
    # Two tokens of each sequence, as drafts are: the second one attends to the first one.
    starts = np.repeat(np.array(lengths) + 2, 2) + np.array([0, 1] * ROWS)
    tokens = np.array([LONG[at + row // 2] for row, at in enumerate(starts)])
    twice = np.ones(2 * ROWS, dtype=np.int64)
    made = ranks.execute(Step(starts, twice, twice, np.repeat(tables, 2, axis=0), tokens))
    assert made is not None
    for row, length in enumerate(lengths):
        expected = family.logits(LONG[row : row + length + 4])[-2:]
        found = made[2 * row : 2 * row + 2].cpu()
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    ranks.close()


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("dtype", ["bfloat16", *(("float32",) if EVERY else ())])
def test_what_computes_the_inputs_of_fp8_layers_rounds_them_too(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, gates, and attention of single tokens: the logits are those of rounding afterwards."""
    monkeypatch.setattr(layer, "load_mlp", mlp._load_mlp)  # as on a GPU, of all tokens at once
    model = tiny_llama(hidden_size=64, num_hidden_layers=2)
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", Layout(quant="FP8", kv="FP8"))
    kernels = Kernels(quantized="fp8_scaled_mm")
    source = open_engine(write_engine(checkpoint, tmp_path / "engine", dtype=dtype, kernels=kernels))
    tables, ones = np.arange(12).reshape(1, -1), np.array([1])
    rounded, quantize = [0], FusedKernels.quantize

    def counted(self: FusedKernels, values: Tensor, scale: Tensor) -> Tensor:
        rounded[0] += 1
        return quantize(self, values, scale)

    monkeypatch.setattr(FusedKernels, "quantize", counted)
    found, counts = [], []
    for own_scale in (True, False):
        if not own_scale:
            monkeypatch.setattr(fp8_linear.ScaledMatmul, "input_scale", None)
        ranks = ThreadRanks(source, 12)
        for count, position in ((40, 0), (1, 40)):
            tokens = np.array(LONG[position:][:count])
            before = rounded[0]
            made = ranks.execute(Step(np.array([position]), np.array([count]), ones, tables, tokens))
            assert made is not None
            found.append(made)
            counts.append(rounded[0] - before)
        ranks.close()
    assert all(torch.equal(one, other) for one, other in zip(found[:2], found[2:], strict=True))
    layers = source.config.num_hidden_layers
    assert counts == [layers, 0, 4 * layers, 4 * layers]


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize(
    ("quant", "kernel"),
    [
        ("W8A16", "int8_codes_cuda"),
        ("W8A8_SQ_PER_CHANNEL", "int8_sq_codes_cuda"),
        ("FP8", "fp8_codes_cuda"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "fp8_rowwise_codes_cuda"),
        ("NVFP4", "nvfp4_packed_cuda"),
        ("W4A8_AWQ", "w4a8_packed_cuda"),
    ],
)
def test_engines_whose_weights_stay_codes(quant: str, kernel: KernelName, tmp_path: Path) -> None:
    """As near to the reference in float32 as reference kernels in bfloat16."""
    model = tiny_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    checkpoint = write_checkpoint(model, tmp_path / "checkpoint", Layout(quant=quant))
    engine = write_engine(checkpoint, tmp_path / "engine", dtype="bfloat16", kernels=Kernels(quantized=kernel))
    dtypes: tuple[ModelDtype, ...] = ("float32", "bfloat16")
    sources = [open_model(checkpoint, "cpu", dtype) for dtype in dtypes] + [open_engine(engine)]
    found = []
    for source in sources:
        ranks = ThreadRanks(source, 12)
        columns = 64 // source.tokens_per_block
        for count, position in ((9, 0), (1, 9)):
            made = ranks.execute(
                Step(
                    np.array([position]),
                    np.array([count]),
                    np.array([1]),
                    np.arange(columns).reshape(1, -1),
                    np.array(LONG[position:][:count]),
                )
            )
        assert made is not None
        found.append(made.float().cpu())
        ranks.close()
    exact, by_torch, by_kernels = found
    assert (by_kernels - exact).norm() < 1.5 * (by_torch - exact).norm() + 0.01 * exact.norm()
