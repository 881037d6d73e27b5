"""A recipe for TensorRT-LLM from checkpoint to model repository; only the builder itself is a stand-in."""

import json
from pathlib import Path

import pytest

from tests.compile.trtllm import MACHINE, Trtllm
from tests.conftest import DEMO_MODEL
from trtforge.compile.stage import CompileOptions
from trtforge.core.errors import LoggedError
from trtforge.core.manifest import open_artifact
from trtforge.core.progress import Silent
from trtforge.core.recipe import load_recipe
from trtforge.pipeline.build import Build
from trtforge.pipeline.stages import selected


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trtllm: Trtllm) -> Build:
    monkeypatch.setattr("trtforge.compile.stage.this_machine", lambda: MACHINE)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"name: demo\nmodel: {{source: {DEMO_MODEL}}}\nparallel: {{tp: 2}}\n"
        "engine: {backend: tensorrt_llm, max_batch_size: 4}\n"
    )
    return Build(load_recipe(path), tmp_path / "build", Silent(), options=CompileOptions(workers=2))


def run(build: Build, first: str, last: str) -> None:
    build.run(selected(build.recipe, first, last), started=lambda stage: None)  # type: ignore[arg-type]


def test_a_built_engine_is_packaged_for_tensorrt_llms_backend(build: Build) -> None:
    run(build, "convert", "convert")
    run(build, "compile", "package")
    engine = open_artifact(build.paths.engine, "engine")
    assert {"rank0.engine", "rank1.engine", "config.json"} <= engine.files.keys()
    repository = open_artifact(build.paths.repository, "repository")
    assert repository.identity.inputs["engine"] == engine.digest
    assert 'backend: "tensorrtllm"' in (build.paths.repository / "tensorrt_llm/config.pbtxt").read_text()
    report = json.loads(build.paths.report.read_text())
    assert [(stage["stage"], stage["cached"]) for stage in report["stages"]] == [("compile", False), ("package", False)]


def test_a_build_goes_on_with_the_ranks_that_are_missing(build: Build, trtllm: Trtllm) -> None:
    run(build, "convert", "convert")
    trtllm.behaves(waits_for={"1": "begun-0"}, fails={"1": "no"})
    build.options = CompileOptions(workers=1)
    with pytest.raises(LoggedError, match="rank 1"):
        run(build, "compile", "compile")
    trtllm.behaves()
    trtllm.forget()
    run(build, "compile", "compile")
    assert [call["rank"] for call in trtllm.calls("build")] == [1]
