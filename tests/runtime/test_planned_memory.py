"""What the plan says the embedded engine keeps is what a loaded one keeps: bytes of tensors, not of the process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import MixtralConfig, MixtralForCausalLM

from tests.families import TINY
from tests.runtime.conftest import greedy
from tests.runtime.converted import Families
from tests.runtime.planned_memory import BATCH, BLOCK, CLOSE, LENGTH, build, kept, planned, recipe, write_llama
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.engine_process.requests import GenerationRequest
from trtforge.formats.shards import read_header
from trtforge.formats.trtllm import rank_file, read_checkpoint_config
from trtforge.machine.host import Host
from trtforge.machine.processor import Processor
from trtforge.models import kernels as kernel_choice
from trtforge.models.kernels import screen_bytes
from trtforge.runtime.engine import Engine
from trtforge.runtime.generate import generate_with
from trtforge.runtime.linears.int8 import multiplies_int8
from trtforge.runtime.linears.kernels import choose_kernels
from trtforge.runtime.linears.packing import pack_rank
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.options import EngineOptions
from trtforge.runtime.ranks.rank_group import RankGroup
from trtforge.runtime.ranks.rank_model import RankModel
from trtforge.runtime.ranks.source import open_engine

WINDOWED = [
    *((name, True) for name in ("mistral", "starcoder2", "phi3")),
    *((name, False) for name in ("qwen2_window", "gemma2", "gemma3")),
]
"""Families with windows, and whether every layer has one."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("quant", "kv_cache", "dtype", "tp", "pp"),
    [
        ("none", "none", "float32", 1, 1),
        ("none", "none", "bfloat16", 2, 1),
        ("none", "int8", "float32", 1, 2),
        ("fp8", "fp8", "bfloat16", 1, 1),
        ("fp8", "fp8", "float32", 2, 1),
        ("fp8_rowwise", "none", "float16", 1, 1),
        ("int4_awq", "none", "bfloat16", 1, 1),
        ("int4_awq", "fp8", "float32", 2, 1),
        ("w4a8_awq", "fp8", "bfloat16", 1, 1),
        ("int8_sq", "none", "float32", 1, 1),
        ("int8_sq", "fp8", "bfloat16", 2, 1),
        ("int8_wo", "none", "bfloat16", 1, 1),
        ("int4_wo", "none", "bfloat16", 1, 1),
        ("nvfp4", "fp8", "bfloat16", 1, 1),
        ("nvfp4", "none", "float32", 2, 1),
    ],
)
def test_weights_and_pool_of_a_loaded_engine(
    llama: Path, quant: str, kv_cache: str, dtype: str, tp: int, pp: int, tmp_path: Path
) -> None:
    calibration = {"data": str(llama / "calibration.safetensors"), "samples": 8, "sequence_length": 32}
    asked = recipe(
        llama,
        quantization={"format": quant, "kv_cache": kv_cache, "calibration": calibration},
        parallel={"tp": tp, "pp": pp},
        engine={"compute_dtype": dtype},
    )
    found = planned(asked)
    assert found.memory is not None
    assert found.embedded is not None
    source = open_engine(build(asked, tmp_path / "out"))
    assert (source.forge.compute_dtype, source.forge.kernels.quantized) == (dtype, found.embedded.kernel)
    ranks = ThreadRanks(source, found.memory.kv_tokens // BLOCK)
    try:
        for model in ranks.models:
            stage = found.memory.stages[source.spec(model._decoder.spec.rank.index).rank.pp_rank]
            _compare(model, stage.weights, stage.kv_pool)
            assert model.blocks_that_fit(0.9, None) * BLOCK == found.memory.kv_tokens
    finally:
        ranks.close()


def _compare(model: RankModel, weights: int, pool: int) -> None:
    assert kept(model._decoder) == pytest.approx(weights, rel=CLOSE)
    assert kept(model._cache) == pool


@pytest.mark.parametrize(("dtype", "tp"), [("float32", 1), ("bfloat16", 1), ("bfloat16", 2)])
def test_what_screens_a_large_lm_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, tp: int) -> None:
    monkeypatch.setattr(kernel_choice, "_SCREENED_BYTES", 0)
    llama = write_llama(tmp_path / "llama", vocab_size=8192)
    asked = recipe(llama, parallel={"tp": tp}, engine={"compute_dtype": dtype})
    found = planned(asked)
    assert found.memory is not None
    ranks = ThreadRanks(open_engine(build(asked, tmp_path / "out")), found.memory.kv_tokens // BLOCK)
    try:
        for model in ranks.models:
            assert kept(model._decoder) == pytest.approx(found.memory.stages[0].weights, rel=CLOSE)
            assert model._decoder.head is not None
            assert kept(model._decoder.head._screened) == screen_bytes(8192 // tp, 256) + 2 * 8192 // tp * 256
    finally:
        ranks.close()


def test_layers_that_a_recipe_leaves_unquantised(llama: Path, tmp_path: Path) -> None:
    calibration = {"data": str(llama / "calibration.safetensors"), "samples": 8, "sequence_length": 32}
    quantization = {"format": "int8_sq", "exclude_modules": ["*.down_proj"], "calibration": calibration}
    asked = recipe(llama, quantization=quantization, engine={"compute_dtype": "float32"})
    memory = planned(asked).memory
    assert memory is not None
    engine = build(asked, tmp_path / "out")
    written = sum(tensor.spec.nbytes for tensor in read_header(engine / rank_file(0)))
    assert written == pytest.approx(memory.weights, rel=CLOSE)


def test_the_pool_of_an_engine_that_serves(llama: Path, tmp_path: Path) -> None:
    asked = recipe(llama)
    found = planned(asked)
    assert found.memory is not None
    assert found.memory.kv_tokens == BATCH * 80  # whole blocks of each request
    with Engine.load(build(asked, tmp_path / "out")) as engine:
        assert engine.statistics().kv_blocks_max * BLOCK == found.memory.kv_tokens


@pytest.mark.parametrize(("name", "everywhere"), WINDOWED)
def test_the_blocks_of_an_engine_with_windows(families: Families, name: str, everywhere: bool, tmp_path: Path) -> None:
    """Full-length requests, as many at once as the plan says: 5 blocks each, or where every layer has a window its
    block and one that is only in part behind it."""
    families(name).checkpoint()
    asked = recipe(families(name).directory / "hf", serving={"kv_cache_tokens": 11 * BLOCK})
    found = planned(asked)
    assert found.memory is not None
    fits, each = (5, 2) if everywhere else (2, 5)
    assert (found.memory.windows is not None, found.full_length_requests) == (everywhere, fits)
    used: list[tuple[int, int]] = []
    options = EngineOptions(kv_cache_tokens=asked.serving.kv_cache_tokens, kv_reuse=False, chunked_context=True)
    with Engine.load(build(asked, tmp_path / "out"), options) as engine:
        engine.after_steps(lambda: used.append(counted(engine)))
        assert engine.statistics().kv_blocks_max * BLOCK == found.memory.kv_tokens
        requests = [GenerationRequest(str(n), tuple(range(3, 43)), LENGTH - 40) for n in range(6)]
        generate_with(engine, requests)
    assert max(running for running, _ in used) == fits
    assert max(blocks for _, blocks in used) <= found.memory.kv_tokens // BLOCK
    assert max(blocks for running, blocks in used if running == fits) == fits * each


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("name", [name for name, everywhere in WINDOWED if not everywhere])
def test_the_blocks_of_layers_with_windows(families: Families, name: str, pp: int, tmp_path: Path) -> None:
    """Two requests of 30 blocks; where the window has 4 blocks 3 more for each, and 8 for the tokens of a step."""
    family = families(name)
    family.checkpoint()
    engine = {"tokens_per_block": 4, "max_batch_size": 2, "max_seq_len": 120, "max_num_tokens": 32}
    engine |= {"compute_dtype": "float32"}
    model = {"source": str(family.directory / "hf"), "dtype": "float32"}
    asked = recipe(family.directory / "hf", model=model, engine=engine, parallel={"pp": pp})
    memory = planned(asked).memory
    assert memory is not None
    directory = build(asked, tmp_path / "out")
    ranks = RankGroup(open_engine(directory), memory=EngineOptions().kv_memory)
    assert (ranks.num_blocks, ranks.num_window_blocks) == (60, 22)
    assert {len(layer) for layer in ranks._model.cache} <= {60, 22}
    assert sum(layer.nbytes for layer in ranks._model.cache) == memory.stages[0].kv_pool
    ranks.close()
    prompts = [[3 + (start + index * 7) % 120 for index in range(90)] for start in range(3)]
    requests = [GenerationRequest(str(start), tuple(prompt), 28) for start, prompt in enumerate(prompts)]
    with Engine.load(directory) as loaded:
        made = generate_with(loaded, requests)
        assert loaded.statistics().kv_window_blocks_max == 22
    assert [generation.tokens for generation in made] == greedy(family.model, prompts, 28)


def counted(engine: Engine) -> tuple[int, int]:
    """Requests that have blocks, and their blocks."""
    statistics = engine.statistics()
    return statistics.active_requests - statistics.waiting_requests, statistics.kv_blocks_used


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", TINY)
def test_every_family_to_the_byte(families: Families, name: str, tp: int) -> None:
    """As packed in bfloat16, which is not the type of these checkpoints."""
    checkpoint = families(name).checkpoint(tp=tp)
    config = read_checkpoint_config(checkpoint)
    asked = recipe(
        families(name).directory / "hf",
        model={"source": str(families(name).directory / "hf"), "dtype": "float32"},
        parallel={"tp": tp},
        engine={"compute_dtype": "bfloat16"},
    )
    memory = planned(asked).memory
    assert memory is not None
    kernels = choose_kernels("none", 128, "cpu", "bfloat16")
    for rank in range(tp):
        packed = pack_rank(config, rank, Weights.open(checkpoint, rank), kernels, torch.bfloat16)
        assert sum(tensor.nbytes for tensor in packed.values()) == memory.stages[0].weights


@pytest.mark.parametrize("quant", ["none", "fp8", "int4_awq", "int8_wo"])
def test_experts(quant: str, tmp_path: Path) -> None:
    source = tmp_path / "hf"
    config = MixtralConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, vocab_size=131, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
    asked = recipe(
        source,
        quantization={"format": quant, "calibration": _tokens(tmp_path)},
        engine={"compute_dtype": "bfloat16"},
    )
    memory = planned(asked).memory
    assert memory is not None
    engine = build(asked, tmp_path / "out")
    written = sum(tensor.spec.nbytes for tensor in read_header(engine / rank_file(0)))
    assert written == pytest.approx(memory.weights, rel=CLOSE)


def _tokens(directory: Path) -> dict[str, Any]:
    ids = torch.randint(0, 131, (32, 64), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, directory / "tokens.safetensors")
    return {"data": str(directory / "tokens.safetensors"), "samples": 32, "sequence_length": 64}


def test_the_plan_reads_the_same_cpu_as_the_engine() -> None:
    assert Processor.of(Host()).vnni == multiplies_int8()
