"""`trtforge recipes` as a user types it."""

import json
from pathlib import Path

import pytest

from trtforge.cli.app import main
from trtforge.core.assets import asset_directory


def printed(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.argv", ["trtforge", "recipes", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    return capsys.readouterr().out


def test_a_list_says_model_formats_layout_and_gpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    header, *rows = printed(["list"], capsys, monkeypatch).splitlines()
    assert header.split() == ["NAME", "MODEL", "WEIGHTS,", "KV", "LAYOUT", "GPUS"]
    assert [row.split()[0] for row in rows] == sorted(path.stem for path in asset_directory("recipes").glob("*.yaml"))
    found = {row.split()[0]: row.split("  ") for row in rows}
    words = [word for word in found["llama-3.1-405b-fp8"] if word]
    assert [word.strip() for word in words[1:]] == [
        "Llama-3.1-405B-Instruct", "fp8, fp8", "tp 8, pp 2", "16 x h100-80gb",
    ]  # fmt: skip
    assert "none needed" in found["demo-fp32"][-1]
    kept = {name for name, row in found.items() if "mxfp4, none" in [word.strip() for word in row]}
    assert kept == {"gpt-oss-20b-mxfp4", "gpt-oss-120b-mxfp4"}


def test_the_same_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = json.loads(printed(["list", "--json"], capsys, monkeypatch))["recipes"]
    (found,) = (recipe for recipe in recipes if recipe["name"] == "mixtral-8x7b-fp8")
    assert found == {
        "name": "mixtral-8x7b-fp8",
        "about": "Mixtral 8x7B Instruct in FP8 with an FP8 KV cache, every expert cut over two GPUs",
        "model": "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "format": "fp8",
        "published_format": None,
        "kv_cache": "fp8",
        "tp": 2,
        "pp": 1,
        "ep": 1,
        "gpu": "h100-80gb",
        "gpus": 2,
        "max_batch_size": 128,
        "max_seq_len": 9216,
    }
    published = {each["name"]: (each["format"], each["published_format"]) for each in recipes}
    assert published["gpt-oss-20b-mxfp4"] == ("none", "mxfp4")


def test_a_shipped_recipe_is_shown_copied_and_valid(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = printed(["show", "llama-3.1-8b-fp8"], capsys, monkeypatch)
    assert "# trtforge build llama-3.1-8b-fp8        1 x h100-80gb\n" in shown
    values = json.loads(printed(["show", "llama-3.1-8b-fp8", "--json"], capsys, monkeypatch))
    assert values["quantization"]["calibration"]["samples"] == 512
    copy = tmp_path / "mine.yaml"
    assert f"next: trtforge build {copy}" in printed(["copy", "llama-3.1-8b-fp8", str(copy)], capsys, monkeypatch)
    assert copy.read_text() == shown.replace("name: llama-3.1-8b-fp8", "name: mine").replace(
        "# trtforge build llama-3.1-8b-fp8", f"# trtforge build {copy}"
    )
    validated = printed(["validate", str(copy)], capsys, monkeypatch)
    assert validated == f"{copy} is valid: mine; next: trtforge build {copy} --dry-run\n"
