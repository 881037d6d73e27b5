"""`trtforge build` of models that another tool quantised: the derived recipe builds, verifies and answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.conftest import DEMO_MODEL
from tests.quantized import AWQ, Pack, awq, compressed, fp8_static, quantized_demo
from trtforge import Engine, SamplingParams
from trtforge.pipeline.stages import STAGES

PROMPT = "Return the number of"
FP8 = compressed("float-quantized", "tensor", "tensor")
SOURCES: list[Any] = [pytest.param(awq(), AWQ, "int4_awq", id="awq"), pytest.param(fp8_static(), FP8, "fp8", id="fp8")]


@pytest.mark.parametrize(("pack", "values", "quant"), SOURCES)
def test_a_whole_build_of_the_derived_recipe(
    run: Any, tmp_path: Path, pack: Pack, values: dict[str, Any], quant: str
) -> None:
    source, out = quantized_demo(tmp_path / "hf", pack, values), tmp_path / "out"
    gate = ("--set", "gate.samples=2", "--set", "gate.perplexity_increase=1")
    command = ("build", source.directory, "--out", out, *gate)
    assert json.loads(run(*command, "--dry-run", "--json")[1])["stages"].keys() == {*STAGES[1:]}
    status, printed, errors = run(*command, "--json")
    assert status == 0, errors
    report = json.loads(printed)
    assert [stage["stage"] for stage in report["stages"]] == list(STAGES[1:])
    assert (report["deployment"]["quant"], report["verification"]["passed"]) == (quant, True)
    assert report["deployment"] == json.loads((out / "report.json").read_text())["deployment"]
    assert not (out / "calibration").exists()
    with Engine.load(out) as engine:
        answer = engine.generate(PROMPT, SamplingParams(max_tokens=4)).tokens
    ids = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(PROMPT).ids
    if quant == "int4_awq":  # no rounding of inputs
        with torch.inference_mode():
            expected = source.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=4)
        assert list(answer) == expected[0, len(ids) :].tolist()
    for first in ("calibrate", "convert", "verify", "compile", "package"):
        again = run(*command, "--json", "--from", first)
        assert again[0] == 0, again[2]
        assert all(stage["cached"] for stage in json.loads(again[1])["stages"])
