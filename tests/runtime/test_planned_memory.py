"""What the plan says the embedded engine keeps is what a loaded one keeps: bytes of tensors, not of the process."""

from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.families import TINY
from tests.runtime.conftest import greedy
from tests.runtime.converted import Families
from tests.runtime.eagle_networks import write_network
from tests.runtime.test_medusa import write_heads
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.core.progress import Silent
from trtforge.core.recipe import Recipe
from trtforge.engine_process.requests import GenerationRequest
from trtforge.formats.shards import read_header
from trtforge.formats.trtllm import rank_file, read_checkpoint_config
from trtforge.machine.host import Host
from trtforge.machine.processor import Processor
from trtforge.pipeline.build import Build
from trtforge.pipeline.stages import selected
from trtforge.plan.evaluate import evaluate
from trtforge.plan.evaluation import Evaluation
from trtforge.plan.model import find_model
from trtforge.plan.request import request_of
from trtforge.runtime.decoder import kv_capacity
from trtforge.runtime.draft_model import DraftModel
from trtforge.runtime.drafters import open_drafter, with_drafter
from trtforge.runtime.engine import Engine
from trtforge.runtime.generate import generate_with
from trtforge.runtime.linears.int8 import multiplies_int8
from trtforge.runtime.linears.kernels import DTYPES, choose_kernels
from trtforge.runtime.linears.packing import pack_rank
from trtforge.runtime.linears.weights import Weights
from trtforge.runtime.medusa import MedusaDrafter
from trtforge.runtime.options import EngineOptions
from trtforge.runtime.ranks.distributed import Distributed
from trtforge.runtime.ranks.rank_group import RankGroup
from trtforge.runtime.ranks.rank_model import RankModel
from trtforge.runtime.ranks.source import open_engine

BATCH, LENGTH, BLOCK = 6, 72, 16
WINDOWED = [
    *((name, True) for name in ("mistral", "starcoder2", "phi3")),
    *((name, False) for name in ("qwen2_window", "gemma2", "gemma3")),
]
"""Families with windows, and whether every layer has one."""
CLOSE = 0.05


def recipe(source: Path, **values: Any) -> Recipe:
    limits = {"backend": "torch", "device": "cpu", "max_batch_size": BATCH, "max_seq_len": LENGTH}
    engine = limits | {"tokens_per_block": BLOCK} | values.pop("engine", {})
    return Recipe.parse({"name": "planned", "model": {"source": str(source)}, "engine": engine, **values}, "test")


def planned(asked: Recipe) -> Evaluation:
    model = find_model(asked.model.source)
    found = evaluate(model, request_of(asked, model, {}))
    assert found.problems == ()
    return found


def tensors_in(found: object, seen: set[int]) -> Iterator[Tensor]:
    """The tensors that an object keeps alive: in its fields, in containers, and in what its functions close over.

    Without the buffers for exchanges between ranks, which do not grow with the model.
    """
    if id(found) in seen or isinstance(found, type | ModuleType | str | bytes | int | float | Distributed | None):
        return
    seen.add(id(found))
    inside: list[object] = []
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, FunctionType):
        inside = [cell.cell_contents for cell in found.__closure__ or ()]
    elif isinstance(found, MethodType):
        inside = [found.__self__]
    elif isinstance(found, dict):
        inside = list(found.values())
    elif isinstance(found, list | tuple | set | frozenset):
        inside = list(found)
    else:
        inside = list(getattr(found, "__dict__", {}).values())
    for one in inside:
        yield from tensors_in(one, seen)


def kept(*parts: object) -> int:
    """Bytes of all tensors in `parts`, storage that two of them share once."""
    seen: set[int] = set()
    sizes = {}
    for tensor in (tensor for part in parts for tensor in tensors_in(part, seen)):
        opaque = tensor.layout is not torch.strided  # oneDNN's blocked weights have no address
        sizes[id(tensor) if opaque else tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def build(asked: Recipe, out: Path) -> Path:
    run = Build(asked, out, Silent())
    stages = tuple(stage for stage in selected(asked, "calibrate", "compile") if stage != "verify")
    run.run(stages, started=lambda _: None)
    return run.paths.engine


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that weights outweigh rotary tables: 4 layers, hidden 256."""
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=509, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    ids = torch.randint(0, 509, (8, 32), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, directory / "calibration.safetensors")
    return directory


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model of `llama`: its vocabulary, half of its layers."""
    directory = tmp_path_factory.mktemp("smaller")
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=509, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


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


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_eagle_network_beside_the_model(llama: Path, kind: str, dtype: str, tmp_path: Path) -> None:
    """Its weights, its layer of the KV cache with quantised layers before it, and the blocks that its chains take."""
    config = {"hidden_size": 256, "vocab_size": 509, "num_attention_heads": 16}
    network = write_network(tmp_path / "network", kind, config)
    calibration = {"data": str(llama / "calibration.safetensors"), "samples": 8, "sequence_length": 32}
    features = {kind: {"model": str(network), "draft_tokens": 18}}
    plain, asked = (
        recipe(
            llama,
            quantization={"kv_cache": "int8", "calibration": calibration},
            engine={"compute_dtype": dtype, **more},
        )
        for more in ({}, {"features": features})
    )
    found, without = planned(asked).memory, planned(plain).memory
    assert found is not None
    assert without is not None
    assert found.kv_tokens == without.kv_tokens == BATCH * 80
    source = open_engine(build(asked, tmp_path / "out"))
    source = with_drafter(source, source.forge.features.of_torch)
    ranks = ThreadRanks(source, found.kv_tokens // BLOCK)
    (model,) = ranks.models
    spare = BATCH * 2 * BLOCK * 2 * 4 * 16 * DTYPES[dtype].itemsize  # 17 tokens beyond a sequence's blocks
    seen = kept(model._decoder)
    assert kept(model._network, model._decoder) - seen - kept(model._cache[-1]) == pytest.approx(
        found.stages[0].draft - spare, rel=CLOSE
    )
    assert kept(model._cache) == found.stages[0].kv_pool + spare
    assert model.blocks_that_fit(0.9, None) * BLOCK == found.kv_tokens
    ranks.close()


@pytest.mark.parametrize(
    ("quant", "kv_cache", "dtype", "tp"),
    [("none", "none", "float32", 1), ("int8_wo", "none", "bfloat16", 2), ("int4_awq", "fp8", "bfloat16", 1)],
)
def test_a_draft_model_beside_the_model(
    llama: Path, smaller: Path, quant: str, kv_cache: str, dtype: str, tp: int, tmp_path: Path
) -> None:
    """Its weights and a KV cache for as many tokens as the model's; ranks of a CPU count equal parts of both."""
    calibration = {"data": str(llama / "calibration.safetensors"), "samples": 8, "sequence_length": 32}
    formats = {"format": quant, "kv_cache": kv_cache, "calibration": calibration}
    draft = build(recipe(smaller, quantization=formats, engine={"compute_dtype": dtype}), tmp_path / "draft")
    features = {"draft": {"engine": str(draft), "tokens": 4}}
    plain, asked = (
        recipe(llama, parallel={"tp": tp}, engine={"compute_dtype": "float32", **more})
        for more in ({}, {"features": features})
    )
    found, without = planned(asked).memory, planned(plain).memory
    assert found is not None
    assert without is not None
    source = open_engine(build(asked, tmp_path / "out"))
    source = with_drafter(source, source.forge.features.of_torch)
    ranks = ThreadRanks(source, found.kv_tokens // BLOCK)
    drafter = open_drafter(source.forge.features.of_torch, source, cast(RankGroup, ranks))
    assert isinstance(drafter, DraftModel)
    own = drafter._ranks._model
    assert kept(own._decoder) == pytest.approx(tp * found.stages[0].draft, rel=CLOSE)
    assert kept(own._cache) == tp * (found.stages[0].kv_pool - without.stages[0].kv_pool)
    assert without.stages[0].draft == 0
    drafter.close()
    ranks.close()


def test_a_draft_model_that_is_not_compiled_yet(llama: Path, smaller: Path, tmp_path: Path) -> None:
    """As large as its engine without quantisation if `model` names it, else a warning."""
    engine = tmp_path / "draft" / "engine"
    named, unnamed = (
        recipe(llama, engine={"compute_dtype": "float32", "features": {"draft": {"engine": str(engine), **more}}})
        for more in ({"model": str(smaller)}, {})
    )
    before, unknown = planned(named).memory, planned(unnamed)
    assert build(recipe(smaller, engine={"compute_dtype": "float32"}), tmp_path / "draft") == engine
    after = planned(unnamed)
    assert before == after.memory
    assert before is not None
    assert before.stages[0].draft > 0
    assert unknown.memory is not None
    assert unknown.memory.stages[0].draft == 0
    assert unknown.warnings == (
        f"the draft model is not in the plan: there is no engine in {engine} yet. Name the model with "
        "engine.features.draft.model.",
    )
    assert after.warnings == ()


@pytest.mark.parametrize(("heads", "tp"), [(None, 1), (2, 2), (3, 1)])
def test_medusa_heads_beside_the_model(llama: Path, heads: int | None, tp: int, tmp_path: Path) -> None:
    """Those that are loaded: one for each token of a chain, at most the four of the file."""
    directory = write_heads(tmp_path / "heads", layers=2, sizes=(256, 509))
    features = {"medusa": {"model": str(directory), "heads": heads}}
    asked = recipe(llama, parallel={"tp": tp}, engine={"compute_dtype": "bfloat16", "features": features})
    found = planned(asked).memory
    assert found is not None
    source = open_engine(build(asked, tmp_path / "out"))
    source = with_drafter(source, source.forge.features.of_torch)
    ranks = ThreadRanks(source, found.kv_tokens // BLOCK)
    drafter = open_drafter(source.forge.features.of_torch, source, cast(RankGroup, ranks))
    assert isinstance(drafter, MedusaDrafter)
    assert kept(drafter._heads) == tp * found.stages[0].draft
    ranks.close()


def test_medusa_heads_that_are_not_there_yet(llama: Path, tmp_path: Path) -> None:
    """Of TensorRT-LLM's default of four heads with a layer each."""
    features = {"medusa": {"model": str(tmp_path / "heads")}}
    asked = recipe(llama, engine={"compute_dtype": "float32", "features": features})
    before = planned(asked).memory
    write_heads(tmp_path / "heads", sizes=(256, 509))
    assert before == planned(asked).memory
    assert before is not None
    assert before.stages[0].draft == 4 * 4 * (256 * 256 + 256 + 256 * 509)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_pool_leaves_memory_for_a_drafter(
    llama: Path, smaller: Path, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with little memory: weights and blocks of the draft model fit beside the model's blocks."""
    draft = build(recipe(smaller, engine={"compute_dtype": "float32"}), tmp_path / "draft")
    features = {"draft": {"engine": str(draft), "tokens": 4}}
    asked = recipe(llama, parallel={"tp": tp}, engine={"compute_dtype": "float32", "features": features})
    source = open_engine(build(asked, tmp_path / "out"))
    source = with_drafter(source, source.forge.features.of_torch)
    memory = planned(asked).memory
    assert memory is not None
    weights, a_block = tp * memory.stages[0].draft, tp * memory.stages[0].kv_per_token * BLOCK
    free = weights + int(9.5 * a_block)
    monkeypatch.setattr(kv_capacity, "free_memory", lambda device: free)
    ranks = ThreadRanks(source, 1)
    assert {model.blocks_that_fit(1.0, None) for model in ranks.models} == {9}
    assert {model.blocks_that_fit(1.0, 4 * BLOCK) for model in ranks.models} == {4}
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
    assert {len(layer) for layer in ranks.cache} <= {60, 22}
    assert sum(layer.nbytes for layer in ranks.cache) == memory.stages[0].kv_pool
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
