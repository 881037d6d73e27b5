"""Checkpoints with Medusa heads: engines of both backends draft with them, without being told where they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.compile.checkpoints import drafting, engine
from tests.runtime.checkpoints import tiny_llama
from tests.runtime.conftest import greedy
from tests.runtime.test_medusa import HEADS, right_heads, write_heads
from trtforge.compile.stage import CompileOptions, compile_engine, engine_plan_for
from trtforge.compile.tensorrt_plan import TensorRTPlan
from trtforge.compile.torch import TorchPlan
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.features import MedusaFeature
from trtforge.core.recipe import EngineConfig
from trtforge.engine_process.requests import GenerationRequest
from trtforge.formats.medusa import MEDUSA_FILE
from trtforge.runtime.engine import Engine
from trtforge.runtime.generate import generate_with

PROMPT = list(range(7, 30))


def converted(model: LlamaForCausalLM, heads: Path, base: Path, **options: Any) -> Path:
    model.save_pretrained(base / "hf")
    config = ConvertConfig.model_validate({"dtype": "float32"} | options)
    return convert(config, base / "hf", base / "checkpoint", drafting=MedusaFeature(model=str(heads))).path


def embedded(**features: Any) -> EngineConfig:
    return engine(backend="torch", device="cpu", max_batch_size=4, features=features)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_embedded_engine_drafts_with_the_checkpoints_heads(tmp_path: Path, tp: int) -> None:
    model = tiny_llama()
    (expected,) = greedy(model, [PROMPT], 24)
    heads = right_heads(model, PROMPT, expected, tmp_path / "heads")
    checkpoint = converted(model, heads, tmp_path, tp=tp)
    built = compile_engine(embedded(), checkpoint, tmp_path / "engine").path
    gathered, given = load_file(built / "medusa" / MEDUSA_FILE), load_file(heads / MEDUSA_FILE)
    assert gathered.keys() == given.keys()
    assert all(torch.equal(gathered[name], given[name]) for name in given)
    assert not any("medusa" in name for name in load_file(built / "rank0.safetensors"))
    found = json.loads((built / "config.json").read_text())
    assert found["pretrained_config"]["architecture"] == "MedusaForCausalLM"
    assert found["forge"]["features"]["medusa"]["heads"] == HEADS
    assert found["build_config"]["max_draft_len"] == HEADS
    with Engine.load(built) as loaded:
        (made,) = generate_with(loaded, [GenerationRequest("", tuple(PROMPT), 24)])
        statistics = loaded.statistics()
    assert made.tokens == expected
    # 24 tokens: the prompt's step gives 1, four steps give 5 each, the last one 3.
    assert statistics.iterations == 6
    assert (made.drafted_tokens, made.accepted_tokens) == (18, 18)
    assert (statistics.drafted_tokens, statistics.accepted_tokens) == (18, 18)


@pytest.mark.parametrize("quant", ["int8_wo", "fp8_rowwise"])
def test_answers_are_those_of_the_model_alone(tmp_path: Path, quant: str) -> None:
    checkpoint = converted(tiny_llama(), write_heads(tmp_path / "heads"), tmp_path, tp=2, quant=quant)
    plain = convert(
        ConvertConfig.model_validate({"dtype": "float32", "tp": 2, "quant": quant}), tmp_path / "hf", tmp_path / "plain"
    ).path
    tokens = []
    for directory in (checkpoint, plain):
        built = compile_engine(embedded(), directory, tmp_path / f"{directory.name}-engine").path
        with Engine.load(built) as loaded:
            made = generate_with(loaded, [GenerationRequest(str(n), (3, 4, 5 + n), 16) for n in range(3)])
        tokens.append([each.tokens for each in made])
        assert all((each.drafted_tokens > 0) == (directory == checkpoint) for each in made)
    assert tokens[0] == tokens[1]


def test_fewer_heads_and_other_methods_may_be_asked_for(tmp_path: Path) -> None:
    checkpoint = drafting("medusa", dtype="bfloat16")

    def planned(**features: Any) -> TorchPlan:
        found = engine_plan_for(checkpoint, embedded(**features), tmp_path / "c", tmp_path / "o", CompileOptions())
        assert isinstance(found, TorchPlan)
        return found

    assert planned(medusa={"heads": 2}).build_config()["max_draft_len"] == 2
    assert planned(medusa={"draft_tokens": 3}).build_config()["max_draft_len"] == 3
    assert planned(ngram={"draft_tokens": 7}).beside is None
    with pytest.raises(ForgeError, match=r"medusa\.heads is 5, the checkpoint has 4"):
        planned(medusa={"heads": 5})
    with pytest.raises(ForgeError, match=r"medusa\.model: the checkpoint has heads of its own"):
        planned(medusa={"model": str(tmp_path)})
    with pytest.raises(ForgeError, match=r"medusa\.choices: not supported by the torch backend"):
        planned(medusa={"choices": [[0]]})
    checkpoint = drafting("medusa", mapping={"world_size": 2, "tp_size": 1, "pp_size": 2})
    with pytest.raises(ForgeError, match="the heads read what the last layer gives, and pp is 2"):
        planned()


def test_a_tensorrt_engine_is_built_for_the_checkpoints_heads(tmp_path: Path) -> None:
    config = engine(backend="tensorrt_llm", target={"tensorrt_llm": "1.2.1"})
    found = engine_plan_for(drafting("medusa"), config, tmp_path / "c", tmp_path / "o", CompileOptions())
    assert isinstance(found, TensorRTPlan)
    assert "--max_draft_len 63 --speculative_decoding_mode medusa " in " ".join(found.commands[0].argv)
    assert found.as_json()["features"]["medusa"]["heads"] == 4
    assert found.as_json()["runtime_keys"]["decoding_mode"] == "medusa"
    directory = {"medusa": {"model": str(tmp_path / "mine")}}  # a recipe's, converted before
    config = engine(backend="tensorrt_llm", target={"tensorrt_llm": "1.2.1"}, features=directory)
    found = engine_plan_for(drafting("medusa"), config, tmp_path / "c", tmp_path / "o", CompileOptions())
    assert isinstance(found, TensorRTPlan)
    assert "mine" not in found.build.features.model_dump_json()
    assert found.build.limits.verified_tokens == 64
