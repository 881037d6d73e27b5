"""Checkpoints with Medusa heads or an EAGLE network: what is the same for both."""

from pathlib import Path

import pytest

from tests.compile.checkpoints import drafting, engine
from tests.compile.drafting_checkpoints import answers, converted
from tests.runtime.checkpoints import tiny_llama
from tests.runtime.eagle_networks import write_network
from tests.runtime.test_medusa import write_heads
from trtforge.compile.stage import CompileOptions, engine_plan_for
from trtforge.compile.tensorrt_plan import TensorRTPlan
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.features import Drafting, EagleFeature, MedusaFeature


def written(method: str, directory: Path) -> Drafting:
    """Heads or a network of random numbers."""
    if method == "medusa":
        return MedusaFeature(model=str(write_heads(directory)))
    return EagleFeature(model=str(write_network(directory, "eagle")))


@pytest.mark.parametrize("quant", ["int8_wo", "fp8_rowwise"])
@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_answers_are_those_of_the_model_alone(tmp_path: Path, method: str, quant: str) -> None:
    checkpoint = converted(tiny_llama(), written(method, tmp_path / method), tmp_path, tp=2, quant=quant)
    config = ConvertConfig.model_validate({"dtype": "float32", "tp": 2, "quant": quant})
    plain = convert(config, tmp_path / "hf", tmp_path / "plain").path
    with_drafts, alone = (answers(each, tmp_path / f"{each.name}-engine") for each in (checkpoint, plain))
    assert all(each.drafted_tokens > 0 for each in with_drafts)
    assert all(each.drafted_tokens == 0 for each in alone)
    assert [each.tokens for each in with_drafts] == [each.tokens for each in alone]


@pytest.mark.parametrize(("method", "number"), [("medusa", "heads"), ("eagle", "depth")])
def test_a_tensorrt_engine_is_built_for_what_the_checkpoint_has(tmp_path: Path, method: str, number: str) -> None:
    config = engine(backend="tensorrt_llm", target={"tensorrt_llm": "1.2.1"})
    found = engine_plan_for(drafting(method), config, tmp_path / "c", tmp_path / "o", CompileOptions())
    assert isinstance(found, TensorRTPlan)
    assert f"--max_draft_len 63 --speculative_decoding_mode {method} " in " ".join(found.commands[0].argv)
    assert found.as_json()["features"][method][number] == 4
    assert found.as_json()["runtime_keys"]["decoding_mode"] == method
    directory = {method: {"model": str(tmp_path / "mine")}}  # a recipe's, converted before
    config = engine(backend="tensorrt_llm", target={"tensorrt_llm": "1.2.1"}, features=directory)
    found = engine_plan_for(drafting(method), config, tmp_path / "c", tmp_path / "o", CompileOptions())
    assert isinstance(found, TensorRTPlan)
    assert "mine" not in found.build.features.model_dump_json()
    assert found.build.limits.verified_tokens == 64
