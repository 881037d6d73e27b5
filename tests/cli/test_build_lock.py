"""`trtforge build` with a lock beside the recipe: written, followed, and refused with --locked."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import DEMO_MODEL
from trtforge.cli.app import app
from trtforge.core.errors import ForgeError, UsageError
from trtforge.pipeline.lock import LockedBuild, LockedEngine, LockedModel, read_locked, write_locked


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with a model, samples and a recipe that calibrates in a second."""
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (tmp_path / "samples.txt").write_text("Return the number of items.\n" * 20)
    (tmp_path / "mine.yaml").write_text(
        "name: mine\n"
        "model: {source: model}\n"
        "quantization:\n"
        "  format: int4_awq\n"
        "  calibration: {data: samples.txt, samples: 2, sequence_length: 16}\n"
    )
    return tmp_path


def build(project: Path, *options: str) -> str:
    arguments = ["build", str(project / "mine.yaml"), "--out", str(project / "out"), "--to", "convert", *options]
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    return result.stdout


def test_build_is_locked_beside_the_recipe_and_repeated(project: Path) -> None:
    build(project, "--update-lock")
    locked = read_locked(project / "forge.lock", "mine")
    assert locked is not None
    assert (locked.model.source, locked.model.commit, locked.engine) == ("model", None, LockedEngine(backend="torch"))
    assert set(locked.data) == {"calibration"}

    before = (project / "forge.lock").read_bytes()
    report = json.loads(build(project, "--locked"))
    assert [stage["origin"] for stage in report["stages"]] == ["already right", "already right"]
    build(project, "--update-lock")
    assert (project / "forge.lock").read_bytes() == before


def test_model_that_changed_is_refused(project: Path) -> None:
    build(project, "--update-lock")
    path = project / "model" / "generation_config.json"
    path.write_text("{}")
    with pytest.raises(
        ForgeError, match=r"mine would not be built as locked: model\.digest: locked \w{64}, found \w{64}"
    ):
        build(project, "--locked")


@pytest.mark.parametrize("option", ["--update-lock", "--locked"])
def test_data_that_is_not_there_is_not_left_out_of_the_lock(project: Path, option: str) -> None:
    build(project, "--update-lock", "--set", "gate.data=samples.txt")
    before = (project / "forge.lock").read_bytes()
    with pytest.raises(ForgeError, match=r"nowhere\.txt: no such file"):
        build(project, option, "--set", "gate.data=nowhere.txt", "--to", "calibrate")
    assert (project / "forge.lock").read_bytes() == before


def test_a_model_elsewhere_is_no_difference(project: Path) -> None:
    """Its content counts, also where its weights are not read for a digest."""
    build(project, "--update-lock")
    text = (project / "forge.lock").read_text()
    (project / "forge.lock").write_text(text.replace("source: model", "source: ../elsewhere/model"))
    arguments = ["build", str(project / "mine.yaml"), "--out", str(project / "out"), "--to", "convert", "--json"]
    assert "warning" not in CliRunner().invoke(app, arguments).stderr
    build(project, "--locked")


def test_samples_that_changed_are_refused(project: Path) -> None:
    build(project, "--update-lock")
    (project / "samples.txt").write_text("Other samples.\n" * 20)
    with pytest.raises(ForgeError, match=r"data\.calibration: locked"):
        build(project, "--locked", "--dry-run")


def test_build_without_the_option_warns(project: Path) -> None:
    build(project, "--update-lock")
    text = (project / "forge.lock").read_text()
    (project / "forge.lock").write_text(text.replace("backend: torch", "backend: tensorrt_llm"))
    arguments = ["build", str(project / "mine.yaml"), "--out", str(project / "out"), "--to", "convert", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert f"warning: {project / 'forge.lock'}: engine.backend: locked tensorrt_llm, found torch" in result.stderr


def test_builds_of_several_formats_follow_the_lock(project: Path) -> None:
    """Each difference is said once."""
    build(project, "--update-lock", "--lock", str(project / "other.lock"))
    text = (project / "other.lock").read_text()
    (project / "other.lock").write_text(text.replace("backend: torch", "backend: tensorrt_llm"))
    arguments = ["build", str(project / "mine.yaml"), "--out", str(project / "out"), "--to", "convert"]
    lock = ["--lock", str(project / "other.lock")]
    result = CliRunner().invoke(app, [*arguments, "--quant", "int8_wo,none", *lock])
    assert result.exit_code == 0
    said = f"warning: {project / 'other.lock'}: engine.backend: locked tensorrt_llm, found torch"
    assert result.stderr.replace("\n", " ").count(said) == 1
    following = json.loads(CliRunner().invoke(app, [*arguments, *lock, "--json"]).stdout)["next"]
    assert following.endswith(f"--lock {project / 'other.lock'} --out {project / 'out'} --from verify")


def test_lock_may_lie_elsewhere_and_the_model_too(project: Path) -> None:
    build(project, "--update-lock", "--lock", str(project / "locks.yaml"))
    assert not (project / "forge.lock").exists()
    (project / "ci").mkdir()
    shutil.move(project / "locks.yaml", project / "ci" / "locks.yaml")
    build(project, "--locked", "--lock", str(project / "ci" / "locks.yaml"))


def test_recipe_that_is_not_locked_is_refused(project: Path) -> None:
    with pytest.raises(ForgeError, match=r"--locked: .*forge\.lock does not exist") as caught:
        build(project, "--locked")
    assert caught.value.hint == "Build with --update-lock once, and commit the file."
    other = LockedBuild(model=LockedModel(source="a/b"), engine=LockedEngine(backend="torch"), versions={})
    write_locked(project / "forge.lock", "other", other)
    with pytest.raises(ForgeError, match=r"--locked: .*forge\.lock has no entry for mine"):
        build(project, "--locked")


@pytest.mark.parametrize("other", ["--locked", "--dry-run"])
def test_options_that_contradict_one_another_are_refused(project: Path, other: str) -> None:
    with pytest.raises(UsageError, match=f"--update-lock with {other}"):
        build(project, "--update-lock", other)
    assert not (project / "forge.lock").exists()
