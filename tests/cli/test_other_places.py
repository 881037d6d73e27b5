"""Directories of other programs, of other stages and at other places: each is taken, or refused with the way on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from tests.pipeline.records import full, quality, written
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import EngineConfig
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build directory of the demo model."""
    build = tmp_path_factory.mktemp("build") / "demo"
    convert(ConvertConfig(), DEMO_MODEL, build / "checkpoint")
    compile_engine(EngineConfig(backend="torch", max_seq_len=64), build / "checkpoint", build / "engine")
    package(PackageConfig(), build / "engine", None, build / "repository")
    return build


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A model repository as NVIDIA's template makes it."""
    for model in ("ensemble", "tensorrt_llm"):
        (tmp_path / "theirs" / model / "1").mkdir(parents=True)
        (tmp_path / "theirs" / model / "config.pbtxt").write_text(f'name: "{model}"\nbackend: "tensorrtllm"\n')
    return tmp_path / "theirs"


@pytest.mark.parametrize(
    "words", [("serve", "{}"), ("serve", "{}", "--dry-run"), ("package", "{}", "out"), ("compile", "{}", "out")]
)
def test_a_repository_of_others_is_refused(run: Any, foreign: Path, words: tuple[str, ...]) -> None:
    status, out, errors = run(*(word.format(foreign) for word in words))
    assert (status, out) == (1, "")
    assert f"error: {foreign} is not a trtforge " in errors
    assert f"`trtforge migrate {foreign} OUT` takes over its settings" in errors


def test_a_repository_of_others_is_not_run(run: Any, foreign: Path) -> None:
    status, _, errors = run("generate", foreign, "Hello")
    assert status == 1
    assert "It is a Triton model repository" in errors


def test_a_model_of_others_in_our_repository_is_named(run: Any, build: Path, foreign: Path, tmp_path: Path) -> None:
    shutil.copytree(build / "repository", tmp_path / "ours")
    shutil.copytree(foreign / "ensemble", tmp_path / "ours" / "theirs")
    status, _, errors = run("serve", tmp_path / "ours", "--dry-run")
    assert status == 1
    assert "has an unexpected file: theirs/config.pbtxt is not listed in its forge.json" in errors


def test_what_was_moved_works(run: Any, build: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "moved"
    shutil.copytree(build, moved)
    assert run("generate", moved / "repository", "Hello", "--max-tokens", "2")[0] == 0
    status, out, _ = run("serve", moved / "repository", "--dry-run", "--no-openai")
    assert status == 0
    assert str(build) not in out
    assert run("package", moved / "engine", tmp_path / "again")[0] == 0


def test_a_build_directory_stands_for_its_artifacts(run: Any, build: Path, tmp_path: Path) -> None:
    few = ("--samples", "1", "--seq-len", "16", "--data", DEMO_MODEL / "heldout.txt", "--json")
    status, out, _ = run("verify", build, "--against", DEMO_MODEL, *few)
    assert (status, json.loads(out)["passed"]) == (0, True)
    assert run("generate", build, "Hello", "--max-tokens", "2")[0] == 0
    assert run("compile", build, tmp_path / "engine", "--backend", "torch")[0] == 0
    assert run("package", build, tmp_path / "repository")[0] == 0
    assert run("serve", build, "--dry-run")[0] == 0
    status, _, errors = run("serve", build, "--dry-run", "--kv-cache-dir-bytes", "1GB")
    assert (status, "--kv-cache-dir-bytes without --kv-cache-dir has no effect" in errors) == (2, True)
    status, out, _ = run("plan", build, "--json")
    assert (status, json.loads(out)["legal"]) == (0, True)
    assert list(json.loads(run("inspect", build, "--json")[1])["artifacts"]) == ["checkpoint", "engine", "repository"]


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "{}", "--dry-run"),
        ("chat", "--build", "{}"),
        ("infer", "hi", "--build={}"),
        ("bench", "{}"),
        ("run", "{}"),
        ("inspect", "{}"),
        ("generate", "{}", "hi"),
        ("package", "{}", "out"),
        ("verify", "{}", "--against", "model"),
        ("migrate", "{}", "out"),
    ],
    ids=lambda words: words[0],
)
def test_a_directory_of_builds_names_them_and_the_command(run: Any, build: Path, words: tuple[str, ...]) -> None:
    status, out, errors = run(*(word.format(f"{build.parent}/") for word in words))
    works = " ".join(word.format(f"{build}/") for word in words)
    assert (status, out) == (1, "")
    assert errors.splitlines() == [
        f"error: {build.parent} is not a build: it holds the build demo",
        f"hint: Give one of them, such as {build}. Run `trtforge {works}`.",
    ]


@pytest.mark.parametrize("words", [("serve", "{}"), ("chat", "--build", "{}"), ("bench", "{}")])
def test_a_model_is_not_served_as_it_is(run: Any, words: tuple[str, ...]) -> None:
    status, out, errors = run(*(word.format(DEMO_MODEL) for word in words))
    assert (status, out) == (1, "")
    assert errors.startswith(f"error: {DEMO_MODEL} is a model, not a Triton model repository\nhint: ")
    assert f"`trtforge run {DEMO_MODEL}` builds, serves and asks it" in errors


def test_a_build_whose_gate_does_not_hold_says_so(run: Any, tmp_path: Path) -> None:
    found = quality(passed=False, failures=["top1_agreement is 0.9, the gate limit is 0.99"])
    build = written(tmp_path / "fp8", full(verification=found, next="trtforge verify x --layers"))
    status, out, errors = run("serve", build)
    assert (status, out) == (1, "")
    assert f"error: {build} has no repository: its quality gate failed (top1_agreement is 0.9, the" in errors
    assert "hint: Find the cause: `trtforge verify x --layers`." in errors
    assert f"error: {build} has no engine: its quality gate" in run("generate", build, "hi")[2]
    assert f"error: {build} has no repository: its quality gate" in run("run", build)[2]


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("serve", "engine"), "is the result of stage engine, repository is required", "package {}/engine REPOSITORY"),
        (
            ("package", "checkpoint", "o"),
            "is the result of stage checkpoint, engine is",
            "compile {}/checkpoint ENGINE",
        ),
        (("package", "repository", "o"), None, None),  # its engine is taken
        (("generate", "checkpoint", "Hello"), "is not an engine", "Run `trtforge compile {}/checkpoint ENGINE`"),
        (("convert", "checkpoint", "o"), "is a TensorRT-LLM checkpoint already", "`trtforge compile {}/checkpoint ENG"),
        (("convert", "engine", "o"), "is a TensorRT-LLM engine, not", "`trtforge package {}/engine REPOSITORY`"),
        (("inspect", "chekpoint"), "no such directory", "Did you mean {}/checkpoint? Run `trtforge inspect {}/check"),
    ],
)
def test_a_wrong_stage_is_told_the_way_on(
    run: Any, build: Path, tmp_path: Path, words: tuple[str, ...], error: str | None, hint: str | None
) -> None:
    command, place, *others = words
    status, _, errors = run(command, build / place, *(tmp_path / word if word == "o" else word for word in others))
    assert status == (0 if error is None else 1)
    assert (error or "") in errors
    assert (hint or "").replace("{}", str(build)) in errors


@pytest.mark.parametrize("source", ["./none", "../none", "/none", "a/b/c", "none", "here/none"])
def test_a_path_that_does_not_exist_is_no_hub_id(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "nine").mkdir(parents=True)
    status, _, errors = run("convert", source, "out")
    assert status == 1
    assert errors.startswith(f"error: {source}: no such directory\n")
    if source == "here/none":
        assert "Run `trtforge convert here/nine out`." in errors


def test_a_checkpoint_of_others_is_taken_and_adopted(run: Any, build: Path, tmp_path: Path) -> None:
    theirs, engine = tmp_path / "theirs", tmp_path / "engine"
    shutil.copytree(build / "checkpoint", theirs)
    (theirs / "forge.json").unlink()
    options = ("--backend", "torch", "--max-seq-len", "64")
    note = f"{theirs} is a foreign checkpoint: trtforge did not write it, and uses its files as they are; "

    assert "foreign       it has no forge.json: `trtforge adopt` checks it and writes it\n" in run("inspect", theirs)[1]
    planned = json.loads(run("compile", theirs, engine, *options, "--dry-run")[1])
    assert planned["warnings"][0].startswith(note)
    status, out, errors = run("compile", theirs, engine, *options, "--json")
    assert (status, json.loads(out)["notes"]) == (0, planned["warnings"][:1])
    assert f"warning: {note}" in errors
    few = ("--samples", "1", "--seq-len", "16", "--data", DEMO_MODEL / "heldout.txt")
    status, _, errors = run("verify", theirs, "--against", DEMO_MODEL, *few)
    assert status == 0
    assert f"note: {theirs} is foreign: the digests of its source are not recorded" in errors

    status, out, _ = run("adopt", theirs, "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["stage"], found["cached"], found["next"]) == (
        "checkpoint",
        False,
        f"trtforge compile {theirs} ENGINE",
    )
    assert [text.partition(":")[0] for text in found["unknown"]] == [
        "the model that it was made from",
        "the program that wrote it",
    ]
    again = json.loads(run("compile", theirs, engine, *options, "--json")[1])
    assert again["cached"]
    assert "notes" not in again
    shown = json.loads(run("inspect", theirs, "--json")[1])
    assert (shown["kind"], shown["foreign"], shown["digest"]) == ("checkpoint", True, found["digest"])
    assert "foreign       adopted: its files have digests, its source is not recorded\n" in run("inspect", theirs)[1]
    status, out, _ = run("adopt", theirs)
    assert (status, out.splitlines()[0][-len("MB") :]) == (0, "MB")
    assert "has its manifest already: " in out
    assert run("generate", engine, "Hello", "--max-tokens", "2")[0] == 0


def test_a_bad_checkpoint_is_not_adopted(run: Any, build: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(build / "checkpoint", theirs)
    for name in ("forge.json", "rank0.safetensors"):
        (theirs / name).unlink()
    status, out, errors = run("adopt", theirs)
    assert (status, out) == (1, "")
    assert errors.startswith(
        f"error: {theirs}/rank0.safetensors is missing: config.json says 1 rank (tp 1, pp 1)\nhint: "
    )
    assert not (theirs / "forge.json").exists()
