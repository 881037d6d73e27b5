"""`trtforge build RECIPE --quant F,F`: a build of each format, and their comparison."""

import json
from pathlib import Path
from typing import Any

from tests.cli.test_build_view import FEW, lines_of_log


def test_formats_are_built_in_turn_and_compared(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    gate = ["--set", "gate.perplexity_increase=0.1", *FEW]
    words = ["build", "demo-fp32", "--quant", "int8_wo,none", "--to", "compile", "--out", out, *gate]
    status, printed, said = run(*words)
    assert status == 0
    assert [stage for stage, text in lines_of_log(said) if text == "started"] == ["convert", "verify", "compile"] * 2
    assert said.count("Build demo-fp32\n") == 2
    assert printed.splitlines()[0].split() == ["int8_wo", "none"]
    assert printed.splitlines()[-1].startswith("next: trtforge build demo-fp32 --set quantization.format=int8_wo")
    assert printed.endswith(f" --out {out}/int8_wo --from package\n"), "the smallest"
    assert (out / "comparison.html").is_file()
    assert sorted(path.name for path in (out / "int8_wo").iterdir() if path.is_dir()) == [
        "checkpoint",
        "engine",
        "verification",
    ]

    status, printed, said = run(*words, "--json", "--set", "gate.kl_mean=1e-6")
    assert status == 1
    found = json.loads(printed)
    assert [(build["name"], build["gate"]) for build in found["builds"]] == [("int8_wo", "failed"), ("none", "passed")]
    assert found["comparison"] == str(out / "comparison.html")
    assert found["next"].endswith(f" --out {out}/none --from package"), "the gate holds for it"
    assert "error: 1 of 2 builds failed: int8_wo\n" in said


def test_formats_are_checked_before_the_first_build(run: Any, tmp_path: Path) -> None:
    for formats, message in (("int8_wo,fp6", "fp6 is not a format"), ("fp8,fp8", "fp8 is given twice")):
        status, printed, said = run("build", "demo-fp32", "--quant", formats, "--out", tmp_path / "out")
        assert (status, printed) == (2, "")
        assert message in said
    assert not (tmp_path / "out").exists()
