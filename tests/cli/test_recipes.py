"""`trtforge recipes` as a user types it."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.conftest import DEMO_MODEL
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


def test_a_copy_whose_name_begins_as_options_do_can_be_built(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = run("recipes", "copy", "demo-fp8", "--", "-mine.yaml")
    assert (status, out) == (0, "-mine.yaml written; next: trtforge build ./-mine.yaml\n")
    assert "\n# trtforge build ./-mine.yaml" in (tmp_path / "-mine.yaml").read_text()
    assert run("build", "./-mine.yaml", "--dry-run")[0] == 0


def test_the_recipes_of_the_demo_model_are_listed_and_valid(run: Any) -> None:
    listed = json.loads(run("recipes", "list", "--json")[1])["recipes"]
    assert {"demo-int4awq", "demo-fp8", "demo-fp32", "demo-tp2", "demo-pp2"} <= {recipe["name"] for recipe in listed}
    assert "format: int4_awq" in run("recipes", "show", "demo-int4awq")[1]
    assert run("recipes", "validate", "demo-tp2")[0] == 0


def test_copied_recipe_still_finds_its_model(run: Any, tmp_path: Path) -> None:
    assert run("recipes", "copy", "demo-fp8", tmp_path / "mine.yaml")[0] == 0
    values = json.loads(run("recipes", "show", tmp_path / "mine.yaml", "--json")[1])
    assert values["model"]["source"] == str(DEMO_MODEL)
    assert Path(values["gate"]["data"]).is_file()
    status, _, errors = run("recipes", "copy", "demo-fp8", tmp_path / "mine.yaml")
    assert status == 1
    assert "File exists" in errors


def test_a_recipe_that_a_copy_would_change_is_not_copied(run: Any, tmp_path: Path) -> None:
    recipe, copy = tmp_path / "recipe.yaml", tmp_path / "mine.yaml"
    recipe.write_text("name: &n x\nmodel: {source: m, revision: *n}\n")
    status, printed, errors = run("recipes", "copy", recipe, copy)
    assert (status, printed) == (1, "")
    assert errors.splitlines() == [
        f"error: {recipe} cannot be copied: model.revision would be wrong in the copy",
        "hint: If an alias (*NAME) gives the value, write the value in its place, then copy again.",
    ]
    assert not copy.exists()


def test_unknown_recipe_names_the_nearest(run: Any) -> None:
    status, _, errors = run("build", "demo-int4")
    assert status == 1
    assert "Did you mean demo-int4awq?" in errors


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (
            ("recipes", "validate", "nofile.yaml"),
            "nofile.yaml: no such file or directory",
            "Give a recipe file, or a name from `trtforge recipes list`.",
        ),
        (
            ("build", "nope"),
            "nope: no such file or directory, and no recipe of this name ships with trtforge",
            "Give a model's directory or hub id, a build, or a name from `trtforge recipes list`.",
        ),
        (
            ("build", "demo-model-none.yaml"),
            "demo-model-none.yaml: no such file or directory",
            "Give a model's directory or hub id, a build, or a name from `trtforge recipes list`.",
        ),
        (
            ("recipes", "show", "qwen3"),
            "qwen3: no such file or directory, and no recipe of this name ships with trtforge",
            "Give a recipe file, or a name from `trtforge recipes list`, such as qwen3-30b-a3b-fp8, qwen3-32b-fp8, "
            "qwen3-8b-fp8.",
        ),
        (
            ("build", "demo-fp8.yaml", "--dry-run"),
            "demo-fp8.yaml: no such file or directory",
            "Did you mean demo-fp8? Run `trtforge build demo-fp8 --dry-run`.",
        ),
        (
            ("build", DEMO_MODEL / "config.json"),
            f"{DEMO_MODEL / 'config.json'} is a file of a model, not a recipe",
            f"Give the model's directory. Run `trtforge build {DEMO_MODEL}`.",
        ),
        (
            ("recipes", "validate", DEMO_MODEL / "config.json"),
            f"{DEMO_MODEL / 'config.json'} is a file of a model, not a recipe",
            f"`trtforge init {DEMO_MODEL}` writes a recipe for the model.",
        ),
        (
            ("recipes", "validate", "."),
            ". is a directory, not a recipe",
            "Give a recipe file, or a name from `trtforge recipes list`.",
        ),
    ],
)
def test_what_is_no_recipe_is_said_and_only_what_is_close_is_proposed(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str | Path, ...], error: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status, printed, errors = run(*words)
    assert (status, printed) == (1, "")
    assert errors.splitlines() == [f"error: {error}", f"hint: {hint}"]


def test_schema_is_json_schema(run: Any) -> None:
    schema = json.loads(run("recipes", "schema")[1])
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["required"] == ["name", "model"]
