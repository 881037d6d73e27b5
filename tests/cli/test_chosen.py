"""What `build`, `init` and `run` take: recipes, models, builds; and the options that choose formats and layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import DEMO_MODEL
from tests.pipeline.records import full, written
from trtforge.cli.chosen import Choice, choose, choose_each, is_model, located
from trtforge.core.errors import ForgeError, UsageError
from trtforge.core.recipe import load_recipe
from trtforge.pipeline.report import StageReport


def test_models_are_told_from_recipes_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "mine.yaml").write_text("name: x")
    monkeypatch.chdir(tmp_path)
    assert is_model(str(DEMO_MODEL))
    assert is_model("Qwen/Qwen2.5-7B")
    for other in ("demo-fp32", "mine.yaml", "here", "here/model", "./a/b", "/a/b", "a/b/c"):
        assert not is_model(other)


def test_what_ships_is_found_from_any_directory(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert located("recipes/demo-model") == str(DEMO_MODEL)
    assert located("recipes/demo-fp32.yaml") == "demo-fp32"
    for other in ("recipes/none", "recipes/../recipes/demo-model", "demo-fp32", "other/demo-model", "recipes"):
        assert located(other) in (other, str(DEMO_MODEL.parent))
    assert choose("recipes/demo-fp32.yaml", Choice()).lock_directory == Path()
    for words in (("build", "recipes/demo-model", "--dry-run"), ("plan", "recipes/demo-model"),
                  ("inspect", "recipes/demo-model"), ("build", "recipes/demo-fp32.yaml", "--dry-run")):  # fmt: skip
        status, _, errors = run(*words)
        assert status == 0, errors
    (tmp_path / "recipes" / "demo-model").mkdir(parents=True)
    assert located("recipes/demo-model") == "recipes/demo-model"


def test_options_override_a_recipe() -> None:
    found = choose("demo-fp32", Choice(quant="fp8", tp=2, gpu="l4"), ("engine.max_batch_size=3",))
    recipe = found.recipe
    assert (recipe.quantization.format, recipe.parallel.tp, recipe.engine.target.gpu) == ("fp8", 2, "l4")
    assert recipe.engine.max_batch_size == 3
    assert (found.out, found.text) == (Path("build/demo-fp32"), None)
    assert found.named == (
        "demo-fp32 --set quantization.format=fp8 --set parallel.tp=2 --set engine.target.gpu=l4 "
        "--set engine.max_batch_size=3"
    )
    with pytest.raises(UsageError, match="--goal applies to models"):
        choose("demo-fp32", Choice(goal="memory"))


def test_a_models_recipe_is_kept_with_its_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = choose(str(DEMO_MODEL), Choice(quant="int4_awq"), ("gate.samples=8",))
    assert (found.out, found.recipe.gate.samples) == (Path("build/demo-model-int4_awq"), 8)
    assert found.command == (
        f"trtforge build {DEMO_MODEL} --quant int4_awq --set gate.samples=8 --out build/demo-model-int4_awq"
    )
    assert not Path("build").exists()
    path = found.write()
    assert path == Path("build/demo-model-int4_awq/recipe.yaml")
    again = choose("build/demo-model-int4_awq", Choice())
    assert (again.recipe, again.out) == (found.recipe, found.out)
    assert choose(str(path), Choice()).recipe == found.recipe


def test_options_do_not_replace_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    choose(str(DEMO_MODEL), Choice(quant="int4_awq")).write()
    build = "build/demo-model-int4_awq"
    assert choose(build, Choice(quant="int4_awq")).out == Path(build)
    with pytest.raises(ForgeError, match=f"{build} was built without --quant fp8, --set gate.samples=8") as caught:
        choose(build, Choice(quant="fp8"), ("gate.samples=8",))
    assert caught.value.hint == f"Add --out DIR for another build, or change {build}/recipe.yaml."
    other = choose(build, Choice(quant="fp8"), out=Path("other"))
    assert (other.out, other.recipe.quantization.format) == (Path("other"), "fp8")
    each = choose_each(build, ("fp8", "int8_sq"), Choice())
    assert [found.out for found in each.values()] == [Path(build, "fp8"), Path(build, "int8_sq")]
    named = choose_each("demo-fp32", ("fp8",), Choice(), ("name=mine",))
    assert [found.out for found in named.values()] == [Path("build/mine/fp8")]


def test_overridden_data_is_found_from_the_build_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("text")
    found = choose(str(DEMO_MODEL), Choice(quant="fp8"), ("quantization.calibration.data=mine.txt",))
    assert found.recipe.quantization.calibration.data == str(tmp_path / "mine.txt")
    found.write()
    assert choose(str(found.out), Choice()).recipe == found.recipe


def test_a_derived_recipe_is_written_where_a_link_leads(tmp_path: Path) -> None:
    """As the stages do, which make the directory."""
    (tmp_path / "out").symlink_to("disk/build")
    found = choose(str(DEMO_MODEL), Choice(quant="int4_awq"), out=tmp_path / "out")
    found.write()
    assert (tmp_path / "disk" / "build" / "recipe.yaml").read_text() == found.text


def test_an_edited_recipe_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = choose(str(DEMO_MODEL), Choice())
    path = found.write()
    assert path is not None
    changed = choose(str(DEMO_MODEL), Choice(), ("gate.samples=8",))
    assert changed.write() == path  # what was derived may be derived again
    assert choose(str(path), Choice()).recipe.gate.samples == 8
    edited = path.read_text().replace("samples: 8", "samples: 9")
    for text in (edited, "name: mine\nmodel: {source: x}\n"):
        path.write_text(text)
        for refused in (found.require_own, found.write):
            with pytest.raises(ForgeError, match="is not a recipe that trtforge derived, or was edited"):
                refused()
        assert path.read_text() == text
    assert [each.name for each in path.parent.iterdir()] == ["recipe.yaml"]


def test_a_recipe_takes_the_place_of_an_earlier_one_when_a_stage_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[object] = []
    first = choose(str(DEMO_MODEL), Choice(), out=Path("build"))
    started, _ = first.written_during(calls.append, calls.append)
    started("calibrate")
    assert (first.path.read_text(), calls) == (first.text, ["calibrate"]), "there was none"
    second = choose(str(DEMO_MODEL), Choice(quant="int8_wo"), out=Path("build"))
    started, finished = second.written_during(calls.append, calls.append)
    started("convert")
    assert first.path.read_text() == first.text
    stage = StageReport("convert", None, 0, 0.0, 0, False, "written")
    finished(stage)
    assert (first.path.read_text(), calls[-2:]) == (second.text, ["convert", stage])
    first.path.write_text("edited")
    started("package")
    finished(stage)
    assert first.path.read_text() == "edited", "it is written once"


def test_a_build_that_is_refused_leaves_the_recipe_of_the_earlier_one(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    earlier = choose(str(DEMO_MODEL), Choice(), out=Path("build"))
    earlier.write()
    for out in ("build", "fresh"):
        status, _, errors = run("build", str(DEMO_MODEL), "--out", out, "--set", "model.source=nothing")
        assert (status, "no such directory" in errors) == (1, True)
    assert earlier.path.read_text() == earlier.text
    assert not Path("fresh", "recipe.yaml").exists()


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="contains neither a model nor a build"):
        choose(str(tmp_path), Choice())
    build = written(tmp_path / "build", full())
    with pytest.raises(ForgeError, match="is a build that does not contain its recipe") as caught:
        choose(str(build), Choice(quant="fp8"))
    assert caught.value.hint == "Give the recipe and --out DIR.", "run refuses it without a repository"
    (build / "repository").mkdir()
    with pytest.raises(ForgeError, match="is a build that does not contain its recipe") as caught:
        choose(str(build), Choice(quant="fp8"))
    assert caught.value.hint == f"Give the recipe and --out DIR, or run it as it is: `trtforge run {build}`."
    with pytest.raises(ForgeError) as caught:
        choose("demo-int4", Choice())
    assert "demo-int4awq" in caught.value.hint


def test_a_dry_run_of_a_model_writes_nothing(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = run("build", DEMO_MODEL, "--quant", "int4_awq", "--dry-run", "--json")
    plan = json.loads(out)
    assert (status, plan["recipe"]) == (0, "demo-model-int4_awq")
    assert plan["stages"]["calibrate"]["format"] == "int4_awq"
    assert list(tmp_path.iterdir()) == []


def test_init_writes_a_recipe_with_reasons(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, _ = run("init", "Qwen/Qwen2.5-7B-Instruct", "--gpu", "h100-80gb", "--goal", "quality")
    assert (status, out) == (
        0, "Qwen2.5-7B-Instruct.yaml written; next: trtforge build Qwen2.5-7B-Instruct.yaml\n"
    )  # fmt: skip
    text = Path("Qwen2.5-7B-Instruct.yaml").read_text()
    assert text.startswith("# trtforge build Qwen2.5-7B-Instruct.yaml\n")
    assert "typical loss of accuracy: none by weights" in text
    assert run("recipes", "validate", "Qwen2.5-7B-Instruct.yaml")[0] == 0
    status, _, err = run("init", "Qwen/Qwen2.5-7B-Instruct", "--gpu", "h100-80gb", "--goal", "quality")
    assert status == 1
    assert "Qwen2.5-7B-Instruct.yaml: File exists" in err
    status, out, _ = run("init", DEMO_MODEL, "mine.yaml", "--json")
    values = json.loads(out)
    assert (status, values["recipe"], values["next"]) == (0, "mine.yaml", "trtforge build mine.yaml")
    assert yaml.safe_load(Path("mine.yaml").read_text())["name"] == "mine"


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("init", "demo-fp32"), 1, "demo-fp32: neither a model directory"),
        (("init", DEMO_MODEL, "--goal", "speed"), 2, "speed is not a goal: latency, throughput, memory, quality"),
        (("run", DEMO_MODEL, "--quant", "fp8,none"), 2, "run takes one format"),
        (("build", DEMO_MODEL, "--quant", "fp8,none", "--dry-run"), 2, "--dry-run with several formats"),
        (("build", DEMO_MODEL, "--quant", "fp9"), 2, "fp9 is not a format"),
        (("chat", "--url", "127.0.0.1:1", "--build", "build/x"), 2, "--url cannot be combined with --build"),
        (("infer", "hello", "--build", "nowhere"), 1, "nowhere"),
    ],
)
def test_wrong_usage_is_named(run: Any, words: tuple[str, ...], status: int, message: str) -> None:
    code, _, err = run(*words)
    assert code == status
    assert message in err
    assert "hint: " in err


@pytest.mark.parametrize("words", [(DEMO_MODEL,), ("demo-fp32",), ("demo-fp32", "--quant", "none,int8_wo")])
@pytest.mark.parametrize("below", ["", "/build"])
def test_a_file_is_no_build_directory(run: Any, tmp_path: Path, words: tuple[str | Path, ...], below: str) -> None:
    (tmp_path / "README.md").write_text("Hello")
    status, out, errors = run("build", *words, "--out", f"{tmp_path}/README.md{below}")
    assert (status, out) == (1, "")
    assert errors.splitlines() == [
        f"error: {tmp_path}/README.md is a file, not a directory",
        "hint: Choose another directory.",
    ]


@pytest.mark.parametrize("words", [("init", DEMO_MODEL), ("recipes", "copy", "demo-fp32")])
def test_a_recipe_that_cannot_be_written_says_where(run: Any, words: tuple[str | Path, ...]) -> None:
    status, out, errors = run(*words, "/proc/x.yaml")
    assert (status, out) == (1, "")
    assert errors == "error: /proc/x.yaml: no new files can be created in /proc\nhint: Choose another directory.\n"


@pytest.mark.parametrize("words", [("init", DEMO_MODEL), ("recipes", "copy", "demo-fp32")])
@pytest.mark.parametrize("name", ["two\nlines", "x" * 150])
def test_a_recipe_of_any_file_name_is_valid(run: Any, tmp_path: Path, words: tuple[str | Path, ...], name: str) -> None:
    file = tmp_path / f"{name}.yaml"
    assert run(*words, file)[0] == 0
    assert load_recipe(file).name == name.replace("\n", "-")[:100]


@pytest.mark.parametrize("name", ["plain dir", "a, b: #c", "back\\1slash", "it's", 'say "x"', "two\nlines", "ä 漢"])
def test_a_copied_recipe_finds_its_model_in_any_directory(run: Any, tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    (place / "model").mkdir(parents=True)
    (place / "held.txt").touch()
    (place / "recipe.yaml").write_text(
        'name: x\nmodel: {source: ./model, revision: main}\ngate: {data: "./held.txt"}\n'
    )
    assert run("recipes", "copy", place / "recipe.yaml", tmp_path / "mine.yaml")[0] == 0
    copied = load_recipe(tmp_path / "mine.yaml")
    assert (copied.model.source, copied.gate.data) == (str(place / "model"), str(place / "held.txt"))
