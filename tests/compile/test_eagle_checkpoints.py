"""Checkpoints with EAGLE networks: engines of both backends draft with them, without being told where they are."""

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
from tests.runtime.eagle_networks import right_network, write_network
from trtforge.compile.stage import CompileOptions, compile_engine, engine_plan_for
from trtforge.compile.tensorrt_plan import TensorRTPlan
from trtforge.compile.torch import TorchPlan
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.features import EagleFeature
from trtforge.core.recipe import EngineConfig
from trtforge.engine_process.requests import GenerationRequest
from trtforge.runtime.engine import Engine
from trtforge.runtime.generate import generate_with

PROMPT = list(range(7, 30))


def converted(model: LlamaForCausalLM, network: Path, base: Path, **options: Any) -> Path:
    model.save_pretrained(base / "hf")
    config = ConvertConfig.model_validate({"dtype": "float32"} | options)
    return convert(config, base / "hf", base / "checkpoint", drafting=EagleFeature(model=str(network))).path


def embedded(**features: Any) -> EngineConfig:
    return engine(backend="torch", device="cpu", max_batch_size=4, features=features)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_embedded_engine_drafts_with_the_checkpoints_network(tmp_path: Path, tp: int) -> None:
    model = right_network(tmp_path / "network", "eagle")
    (expected,) = greedy(model, [PROMPT], 24)
    checkpoint = converted(model, tmp_path / "network", tmp_path, tp=tp)
    built = compile_engine(embedded(), checkpoint, tmp_path / "engine").path
    gathered = load_file(built / "eagle" / "model.safetensors")
    given = load_file(tmp_path / "network" / "model.safetensors")
    assert gathered.keys() == given.keys()
    assert all(torch.equal(gathered[name], given[name]) for name in given)
    assert not any("eagle" in name for name in load_file(built / "rank0.safetensors"))
    found = json.loads((built / "config.json").read_text())
    assert found["pretrained_config"]["architecture"] == "EagleForCausalLM"
    assert found["forge"]["features"]["eagle"]["model"] == "eagle"
    assert found["build_config"]["max_draft_len"] == 4
    with Engine.load(built) as loaded:
        (made,) = generate_with(loaded, [GenerationRequest("", tuple(PROMPT), 24)])
        statistics = loaded.statistics()
    assert made.tokens == expected
    # 24 tokens: the prompt's step gives 1, four steps give 5 each, the last one 3.
    assert statistics.iterations == 6
    assert (made.drafted_tokens, made.accepted_tokens) == (18, 18)


@pytest.mark.parametrize("quant", ["int8_wo", "fp8_rowwise"])
def test_answers_are_those_of_the_model_alone(tmp_path: Path, quant: str) -> None:
    network = write_network(tmp_path / "network", "eagle")
    checkpoint = converted(tiny_llama(), network, tmp_path, tp=2, quant=quant)
    config = ConvertConfig.model_validate({"dtype": "float32", "tp": 2, "quant": quant})
    plain = convert(config, tmp_path / "hf", tmp_path / "plain").path
    tokens = []
    for directory in (checkpoint, plain):
        built = compile_engine(embedded(), directory, tmp_path / f"{directory.name}-engine").path
        with Engine.load(built) as loaded:
            made = generate_with(loaded, [GenerationRequest(str(n), (3, 4, 5 + n), 16) for n in range(3)])
        tokens.append([each.tokens for each in made])
        assert all((each.drafted_tokens > 0) == (directory == checkpoint) for each in made)
    assert tokens[0] == tokens[1]


def test_a_network_beside_the_checkpoint_drafts_the_same(tmp_path: Path) -> None:
    network = write_network(tmp_path / "network", "eagle")
    checkpoint = converted(tiny_llama(), network, tmp_path)
    plain = convert(ConvertConfig(dtype="float32"), tmp_path / "hf", tmp_path / "plain").path
    found = []
    for directory, features in ((checkpoint, {}), (plain, {"eagle": {"model": str(network)}})):
        built = compile_engine(embedded(**features), directory, tmp_path / f"{directory.name}-engine").path
        with Engine.load(built) as loaded:
            made = generate_with(loaded, [GenerationRequest(str(n), (3, 4, 5 + n), 16) for n in range(3)])
        found.append([(each.tokens, each.drafted_tokens, each.accepted_tokens) for each in made])
    assert found[0] == found[1]


def test_fewer_runs_and_other_methods_may_be_asked_for(tmp_path: Path) -> None:
    config = converted(tiny_llama(), write_network(tmp_path / "network", "eagle"), tmp_path)

    def planned(**features: Any) -> TorchPlan:
        from trtforge.formats.trtllm import read_checkpoint_config

        model = read_checkpoint_config(config)
        found = engine_plan_for(model, embedded(**features), config, tmp_path / "o", CompileOptions())
        assert isinstance(found, TorchPlan)
        return found

    assert planned(eagle={"depth": 2}).build_config()["max_draft_len"] == 2
    assert planned(eagle={"draft_tokens": 3}).build_config()["max_draft_len"] == 3
    assert planned(ngram={"draft_tokens": 7}).beside is None
    with pytest.raises(ForgeError, match=r"eagle\.model: the checkpoint has a network of its own"):
        planned(eagle={"model": str(tmp_path)})
    with pytest.raises(ForgeError, match=r"eagle\.choices: not supported by the torch backend"):
        planned(eagle={"choices": [[0]]})


def test_a_tensorrt_engine_is_built_for_the_checkpoints_networks(tmp_path: Path) -> None:
    config = engine(backend="tensorrt_llm", target={"tensorrt_llm": "1.2.1"})
    found = engine_plan_for(drafting("eagle"), config, tmp_path / "c", tmp_path / "o", CompileOptions())
    assert isinstance(found, TensorRTPlan)
    assert "--max_draft_len 63 --speculative_decoding_mode eagle " in " ".join(found.commands[0].argv)
    assert found.as_json()["features"]["eagle"]["depth"] == 4
    assert found.as_json()["runtime_keys"]["decoding_mode"] == "eagle"
    directory = {"eagle": {"model": str(tmp_path / "mine")}}  # a recipe's, converted before
    config = engine(backend="tensorrt_llm", target={"tensorrt_llm": "1.2.1"}, features=directory)
    found = engine_plan_for(drafting("eagle"), config, tmp_path / "c", tmp_path / "o", CompileOptions())
    assert isinstance(found, TensorRTPlan)
    assert "mine" not in found.build.features.model_dump_json()
    assert found.build.limits.verified_tokens == 64
