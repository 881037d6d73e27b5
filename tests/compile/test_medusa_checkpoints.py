"""Checkpoints with Medusa heads: engines of both backends draft with them, without being told where they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.compile.checkpoints import drafting
from tests.compile.drafting_checkpoints import converted, embedded
from tests.runtime.checkpoints import tiny_llama
from tests.runtime.conftest import greedy
from tests.runtime.test_medusa import HEADS, right_heads
from trtforge.compile.stage import CompileOptions, compile_engine, engine_plan_for
from trtforge.compile.torch import TorchPlan
from trtforge.core.errors import ForgeError
from trtforge.core.features import MedusaFeature
from trtforge.engine_process.requests import GenerationRequest
from trtforge.formats.medusa import MEDUSA_FILE
from trtforge.runtime.engine import Engine
from trtforge.runtime.generate import generate_with

PROMPT = list(range(7, 30))


@pytest.mark.parametrize("tp", [1, 2])
def test_the_embedded_engine_drafts_with_the_checkpoints_heads(tmp_path: Path, tp: int) -> None:
    model = tiny_llama()
    (expected,) = greedy(model, [PROMPT], 24)
    heads = right_heads(model, PROMPT, expected, tmp_path / "heads")
    checkpoint = converted(model, MedusaFeature(model=str(heads)), tmp_path, tp=tp)
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
    assert planned(medusa={"choices": [[0], [0, 0], [1]]}).build_config()["max_draft_len"] == 3
    with pytest.raises(ForgeError, match="choices are 5 tokens deep, and 4 heads are used"):
        planned(medusa={"choices": [[0] * length for length in range(1, 6)]})
    checkpoint = drafting("medusa", mapping={"world_size": 2, "tp_size": 1, "pp_size": 2})
    with pytest.raises(ForgeError, match="the heads read the last layer's output: pp must be 1, not 2"):
        planned()
