"""What the plan says that drafters take beside the embedded engine is what loaded ones keep."""

from pathlib import Path
from typing import cast

import pytest

from tests.runtime.eagle_networks import write_network
from tests.runtime.planned_memory import (
    BATCH,
    BLOCK,
    CLOSE,
    build,
    kept,
    open_with_drafter,
    planned,
    recipe,
    write_llama,
)
from tests.runtime.test_medusa import write_heads
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.runtime.decoder import kv_capacity
from trtforge.runtime.draft_model import DraftModel
from trtforge.runtime.drafters import open_drafter
from trtforge.runtime.linears.kernels import DTYPES
from trtforge.runtime.medusa import MedusaDrafter
from trtforge.runtime.ranks.rank_group import RankGroup


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model of `llama`: its vocabulary, half of its layers."""
    sizes = {"intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    return write_llama(tmp_path_factory.mktemp("smaller"), seed=1, **sizes)


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
    source = open_with_drafter(asked, tmp_path / "out")
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
    source = open_with_drafter(asked, tmp_path / "out")
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


def test_a_draft_engine_that_is_served_beside_the_engine_takes_as_much_as_one_in_it(
    llama: Path, smaller: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "draft"
    inside, beside = (
        recipe(llama, engine={"compute_dtype": "float32", **engine}, serving={"kv_cache_tokens": 512, **serving})
        for engine, serving in (
            ({"features": {"draft": {"engine": str(directory / "engine")}}}, {}),
            ({}, {"draft_engine": str(directory)}),
        )
    )
    missing = planned(beside)
    assert missing.warnings == (f"the draft engine is not in the plan: there is no engine in {directory} yet.",)
    build(recipe(smaller, engine={"compute_dtype": "float32"}), directory)
    found = planned(beside)
    assert found.warnings == ()
    assert found.memory == planned(inside).memory
    assert found.memory is not None
    assert missing.memory is not None
    assert found.memory.stages[0].draft > missing.memory.stages[0].draft == 0


@pytest.mark.parametrize(("heads", "tp"), [(None, 1), (2, 2), (3, 1)])
def test_medusa_heads_beside_the_model(llama: Path, heads: int | None, tp: int, tmp_path: Path) -> None:
    """Those that are loaded: one for each token of a chain, at most the four of the file."""
    directory = write_heads(tmp_path / "heads", layers=2, sizes=(256, 509))
    features = {"medusa": {"model": str(directory), "heads": heads}}
    asked = recipe(llama, parallel={"tp": tp}, engine={"compute_dtype": "bfloat16", "features": features})
    found = planned(asked).memory
    assert found is not None
    source = open_with_drafter(asked, tmp_path / "out")
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


@pytest.mark.parametrize("pp", [1, 2])
def test_the_pool_leaves_memory_for_prompt_tables(
    llama: Path, pp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = {"max_prompt_embedding_table_size": 600}
    asked = recipe(llama, parallel={"pp": pp}, engine={"compute_dtype": "float32", "features": features})
    source = open_with_drafter(asked, tmp_path / "out")
    memory = planned(asked).memory
    assert memory is not None
    assert [stage.tables for stage in memory.stages] == [600 * 256 * 4, 0][:pp]
    free = pp * memory.stages[0].tables + pp * int(9.5 * memory.stages[0].kv_per_token * BLOCK)
    monkeypatch.setattr(kv_capacity, "free_memory", lambda device: free)
    ranks = ThreadRanks(source, 1)
    assert ranks.models[0].blocks_that_fit(1.0, None) == 9
    ranks.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_the_pool_leaves_memory_for_a_drafter(
    llama: Path, smaller: Path, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with little memory: weights and blocks of the draft model fit beside the model's blocks."""
    draft = build(recipe(smaller, engine={"compute_dtype": "float32"}), tmp_path / "draft")
    features = {"draft": {"engine": str(draft), "tokens": 4}}
    asked = recipe(llama, parallel={"tp": tp}, engine={"compute_dtype": "float32", "features": features})
    source = open_with_drafter(asked, tmp_path / "out")
    memory = planned(asked).memory
    assert memory is not None
    weights, a_block = tp * memory.stages[0].draft, tp * memory.stages[0].kv_per_token * BLOCK
    free = weights + int(9.5 * a_block)
    monkeypatch.setattr(kv_capacity, "free_memory", lambda device: free)
    ranks = ThreadRanks(source, 1)
    assert {model.blocks_that_fit(1.0, None) for model in ranks.models} == {9}
    assert {model.blocks_that_fit(1.0, 4 * BLOCK) for model in ranks.models} == {4}
    ranks.close()
