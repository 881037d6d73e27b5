"""`trtforge plan` of a TensorRT-LLM checkpoint, whose layout and formats are fixed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from tests.plan.test_checkpoints import bare
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.plan.checkpoint_model import model_to_plan


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "checkpoint"
    return bare(convert(ConvertConfig(tp=2, quant="int8_wo", exclude_modules=("*.0.*",)), DEMO_MODEL, out).path)


def planned(run: Any, *words: object) -> Any:
    status, out, errors = run("plan", *words, "--json")
    assert (status, errors) == (0, "")
    return json.loads(out)


def test_a_checkpoint_is_planned_as_its_model_is(run: Any, made: Path) -> None:
    gpu = ("--gpu", "h100-80gb", "--target-version", "1.2.1")
    found = planned(run, made, *gpu)
    assert found["choice"] | {"tp": 2, "quant": "int8_wo", "kv_cache": "none"} == found["choice"]
    whole = planned(run, DEMO_MODEL, *gpu, "--tp", "2", "--quant", "int8_wo", "--dtype", found["choice"]["dtype"])
    for key in ("kv_per_token", "activations", "logits", "decoder", "runtime"):
        assert found["memory"][key] == whole["memory"][key]
    assert found["memory"]["weights"] > whole["memory"]["weights"]  # the first layer is not quantised
    assert found["limits"] == whole["limits"]
    assert found["peaks"]["calibration_gpu"] is None
    assert found["notes"][0].startswith(f"{made} is a foreign checkpoint: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tp", "4"), "--tp 4: {} is a checkpoint, made with --tp 2"),
        (("--quant", "fp8"), "--quant fp8: {} is a checkpoint, made with --quant int8_wo"),
        (("--alternatives",), "--alternatives: {} is a checkpoint, whose layout and formats are fixed"),
    ],
)
def test_what_a_checkpoint_decides_is_not_planned_otherwise(
    run: Any, made: Path, words: tuple[str, ...], message: str
) -> None:
    status, out, errors = run("plan", made, *words)
    assert (status, out) == (2, "")
    assert f"error: {message.format(made)}\n" in errors
    assert run("plan", made, "--tp", "2")[0] == 0


def test_a_checkpoint_that_cannot_be_planned_is_refused(run: Any, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "other")
    values = json.loads((made / "config.json").read_text())
    other = values | {"architecture": "ChatGLMForCausalLM"}
    (tmp_path / "other" / "config.json").write_text(json.dumps(other))
    with pytest.raises(ForgeError, match="architecture ChatGLMForCausalLM is not supported"):
        model_to_plan(str(tmp_path / "other"))
    values["quantization"] |= {"quant_algo": "W8A8_SQ_PER_TENSOR_PLUGIN"}
    (tmp_path / "other" / "config.json").write_text(json.dumps(values))
    status, _, errors = run("plan", tmp_path / "other")
    assert status == 2
    assert "its quantisation is not among the formats that trtforge plans: W8A8_SQ_PER_TENSOR_PLUGIN" in errors
    (tmp_path / "other" / "config.json").write_text((made / "config.json").read_text())
    (tmp_path / "other" / "rank1.safetensors").unlink()
    status, _, errors = run("plan", tmp_path / "other")
    assert (status, "rank1.safetensors is missing" in errors) == (1, True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"moe": {"num_experts": 8, "top_k": 2}},
            "config.json says 8 experts, the rank files hold 0 layers with routers",
        ),
        ({"moe": {"num_experts": 8}}, "config.json: moe.top_k is not a whole number from 1"),
        ({"architecture": "DeepseekV2ForCausalLM"}, "config.json: kv_lora_rank is not a whole number from 1"),
    ],
)
def test_what_a_family_needs_must_be_there(run: Any, made: Path, tmp_path: Path, values: Any, message: str) -> None:
    shutil.copytree(made, tmp_path / "other")
    stated = json.loads((made / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(stated | values))
    status, out, errors = run("plan", tmp_path / "other")
    assert (status, out) == (1, "")
    assert message in errors
