"""Checkpoints with EAGLE networks: engines of both backends draft with them, without being told where they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.compile.drafting_checkpoints import answers, converted, embedded
from tests.runtime.checkpoints import tiny_llama
from tests.runtime.conftest import greedy
from tests.runtime.eagle_networks import right_network, write_network
from trtforge.compile.stage import CompileOptions, compile_engine, engine_plan_for
from trtforge.compile.torch import TorchPlan
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.features import EagleFeature
from trtforge.engine_process.requests import GenerationRequest
from trtforge.runtime.engine import Engine
from trtforge.runtime.generate import generate_with

PROMPT = list(range(7, 30))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_embedded_engine_drafts_with_the_checkpoints_network(tmp_path: Path, tp: int) -> None:
    model = right_network(tmp_path / "network", "eagle")
    (expected,) = greedy(model, [PROMPT], 24)
    checkpoint = converted(model, EagleFeature(model=str(tmp_path / "network")), tmp_path, tp=tp)
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


def test_a_network_beside_the_checkpoint_drafts_the_same(tmp_path: Path) -> None:
    network = write_network(tmp_path / "network", "eagle")
    checkpoint = converted(tiny_llama(), EagleFeature(model=str(network)), tmp_path)
    plain = convert(ConvertConfig(dtype="float32"), tmp_path / "hf", tmp_path / "plain").path
    found = []
    for directory, features in ((checkpoint, {}), (plain, {"eagle": {"model": str(network)}})):
        made = answers(directory, tmp_path / f"{directory.name}-engine", **features)
        found.append([(each.tokens, each.drafted_tokens, each.accepted_tokens) for each in made])
    assert found[0] == found[1]


def test_fewer_runs_and_other_methods_may_be_asked_for(tmp_path: Path) -> None:
    network = write_network(tmp_path / "network", "eagle")
    config = converted(tiny_llama(), EagleFeature(model=str(network)), tmp_path)

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
    assert planned(eagle={"choices": [[0], [0, 0], [1]]}).build_config()["max_draft_len"] == 3
