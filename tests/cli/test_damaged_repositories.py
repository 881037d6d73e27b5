"""What is said of a repository that was changed: the command that writes it again."""

import itertools
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from tests.package.engines import torch_engine
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import files_below, open_artifact, record_of
from trtforge.core.remedy import remedy
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Of an engine without a tokenizer."""
    return package(PackageConfig(), torch_engine(tmp_path / "engine"), DEMO_MODEL, tmp_path / "out").path


def damage(repository: Path, file: str) -> str:
    """Change a file of a repository; the hint of what then opens it."""
    path = repository / file
    path.unlink()  # of an engine it is a hard link
    path.write_text("changed")
    with pytest.raises(ForgeError, match=r"repository .* is damaged: ") as caught:
        open_artifact(repository, "repository")
    return caught.value.hint


@pytest.mark.parametrize("own_tokenizer", [True, False])
@pytest.mark.parametrize("engine_is_beside", [True, False])
def test_the_hint_for_a_damaged_repository_is_the_command_that_writes_it_again(
    run: Any, tmp_path: Path, own_tokenizer: bool, engine_is_beside: bool
) -> None:
    """With its prefix and its settings, from an engine of the same build or from its own."""
    engine, repository = torch_engine(tmp_path / "engine"), tmp_path / "a repository"
    options = ["--name", "demo.", "--set", "serving.max_queue_size=7", "--set", "serving.streaming=false"]
    if own_tokenizer:
        shutil.copytree(DEMO_MODEL, engine / "tokenizer")
        manifest = open_artifact(engine, "engine")
        files = {name: record_of(engine / name) for name in files_below(engine)}
        manifest.model_copy(update={"files": files}).write(engine)
    tokenizer = [] if own_tokenizer else ["--tokenizer", DEMO_MODEL]
    assert run("package", engine, repository, *tokenizer, *options)[0] == 0
    written = {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()}
    if not engine_is_beside:
        shutil.rmtree(engine)
    hint = damage(repository, "demo.ensemble/config.pbtxt")
    _, *words = shlex.split(hint.split("`")[1])
    source = engine if engine_is_beside else repository / "demo.tensorrt_llm" / "1" / "engine"
    own = [] if own_tokenizer else ["--tokenizer", str(repository / "demo.preprocessing" / "1" / "tokenizer")]
    sets = ["--set", "serving.max_queue_size=7", "--set", "serving.streaming=false"]
    assert words == ["package", str(source), str(repository), *own, "--name", "demo.", *sets]
    assert run(*words)[0] == 0
    assert {path: path.read_bytes() for path in repository.rglob("*") if path.is_file()} == written


def test_a_damaged_part_is_not_what_a_repository_is_written_from(repository: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "engine")
    hint = damage(repository, "tensorrt_llm/1/engine/config.json")
    assert hint.startswith(f"`trtforge package ENGINE {repository} --tokenizer ")
    hint = damage(repository, "preprocessing/1/tokenizer/tokenizer_config.json")
    assert " --tokenizer DIR` " in hint


def test_an_engine_that_shares_the_damaged_file_is_compiled_first(repository: Path, tmp_path: Path) -> None:
    with (repository / "tensorrt_llm" / "1" / "engine" / "rank0.safetensors").open("r+b") as file:
        file.write(b"changed")
    with pytest.raises(ForgeError, match=r"repository .* is damaged: ") as caught:
        open_artifact(repository, "repository")
    expected = (
        f"Compile the engine again, whose file this is; then `trtforge package {tmp_path / 'engine'} {repository} "
    )
    assert caught.value.hint.startswith(expected)


def test_features_of_a_foreign_engine_and_its_draft_are_in_the_command(repository: Path) -> None:
    manifest = open_artifact(repository, "repository")
    identity = manifest.identity.with_inputs({"draft_engine": "0"})
    config = {"features": {"kv_reuse": False, "lookahead": {"window": 5}}, "serving": {"gpu_device_ids": "0"}}
    identity = identity.model_copy(update={"config": {"package": config}})
    hint = remedy(repository, manifest.model_copy(update={"identity": identity}), "x")
    words = shlex.split(hint.split("`")[1])
    settings = [f"{option} {value}" for option, value in itertools.pairwise(words) if option in ("--set", "--feature")]
    assert settings == [
        "--set serving.gpu_device_ids=0",
        "--set serving.draft_engine=DRAFT_ENGINE",
        "--feature kv_reuse=false",
        '--feature lookahead={"window": 5}',
    ]
