"""An engine is packaged only for what can run it; what nobody recorded is a warning."""

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.conftest import DEMO_MODEL
from tests.package.engines import H100, engine_config, tensorrt_engine, torch_engine
from trtforge.cli.app import app, main
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import open_artifact
from trtforge.formats.engine_target import EngineTarget
from trtforge.formats.triton import read_facts


def package(engine: Path, *options: str) -> Path:
    """Package by the command line; the repository."""
    out = engine.parent / "repository"
    arguments = ["package", str(engine), str(out), "--tokenizer", str(DEMO_MODEL), *options]
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    return out


def engine_of(tmp_path: Path, version: str = "1.2.1", **changes: str | None) -> Path:
    """An engine with what the build recorded."""
    recorded = H100.model_copy(update={"tensorrt_llm": version, **changes})
    return tensorrt_engine(tmp_path / "engine", version=version, target=recorded)


def test_repository_carries_what_the_engine_was_built_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    repository = package(engine_of(tmp_path), "--target-version", "1.2.1", "--gpu", "h100-80gb")
    assert read_facts(open_artifact(repository, "repository")).target == H100
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("recorded", "options", "message", "hint"),
    [
        (
            {},
            ["--target-version", "1.1.0"],
            "the engine was built with TensorRT-LLM 1.2.1, the target release has TensorRT-LLM 1.1.0",
            "An engine runs only with the release that built it: run `trtforge compile CHECKPOINT OUT --backend "
            "tensorrt_llm --target-version 1.1.0` there, or serve it with "
            "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3.",
        ),
        (
            {},
            ["--gpu", "l40s"],
            "the engine was built for SM 90, the target l40s has SM 89",
            "An engine runs only on the compute capability it was built for: run `trtforge compile CHECKPOINT OUT "
            "--backend tensorrt_llm` on that GPU, or use one with SM 90.",
        ),
        (
            {"tensorrt": "10.13.3.9"},
            ["--target-version", "1.2.1"],
            "the engine was built with TensorRT 10.13.3.9, the image "
            "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3 has TensorRT 10.14.1.48",
            "An engine loads only in the TensorRT version that built it: run `trtforge compile CHECKPOINT OUT "
            "--backend tensorrt_llm` there.",
        ),
    ],
)
def test_engine_for_another_target_is_refused(
    tmp_path: Path, recorded: dict[str, str], options: list[str], message: str, hint: str
) -> None:
    engine = engine_of(tmp_path, **recorded)
    with pytest.raises(ForgeError) as caught:
        package(engine, *options)
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert not (tmp_path / "repository").exists()


def test_another_gpu_of_the_same_compute_capability_is_no_obstacle(tmp_path: Path) -> None:
    assert (package(engine_of(tmp_path), "--gpu", "h200") / "forge.json").is_file()


def test_tensorrt_that_no_image_carries_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    package(engine_of(tmp_path, tensorrt="10.14.9.9"))
    assert caplog.messages == [
        "the engine was built with TensorRT 10.14.9.9, the image nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3 "
        "has TensorRT 10.14.1.48: an engine loads only in the TensorRT version that built it"
    ]


def test_image_on_which_sources_differ_gives_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    package(engine_of(tmp_path, "1.2.0", tensorrt="10.13.3.9"), "--target-version", "1.2.0")
    assert ["26.03-trtllm-python-py3 has TensorRT 10.14.1.48" in message for message in caplog.messages] == [True]


def test_engine_that_trtforge_did_not_build_is_packaged_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "config.json").write_text(json.dumps(engine_config(version="1.1.0")))
    (engine / "rank0.engine").write_bytes(b"plan")

    repository = package(engine)

    assert caplog.messages == [
        "the engine does not record its TensorRT and SM, so compatibility cannot be checked before the server loads it"
    ]
    assert read_facts(open_artifact(repository, "repository")).target == EngineTarget(tensorrt_llm="1.1.0")
    packed = repository / "tensorrt_llm" / "1" / "engine"
    assert (packed / "rank0.engine").read_bytes() == b"plan"
    assert open_artifact(packed, "engine").identity.versions == {"tensorrt_llm": "1.1.0"}
    assert not (engine / "forge.json").exists()


def test_program_shows_warnings_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engine_of(tmp_path, tensorrt=None)
    arguments = ["package", str(engine), str(tmp_path / "repository"), "--tokenizer", str(DEMO_MODEL), "--json"]
    monkeypatch.setattr("sys.argv", ["trtforge", *arguments])
    monkeypatch.setattr(logging.getLogger("trtforge"), "handlers", [])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert not ended.value.code
    assert said.err.startswith("warning: the engine does not record its TensorRT, so compatibility")
    assert json.loads(said.out)["origin"] == "written"


def test_foreign_engine_of_another_release_is_refused_too(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "config.json").write_text(json.dumps(engine_config(version="1.1.0")))
    (engine / "rank0.engine").write_bytes(b"plan")
    with pytest.raises(ForgeError, match=r"TensorRT-LLM 1\.1\.0, the target release has TensorRT-LLM 1\.2\.1"):
        package(engine, "--target-version", "1.2.1")


def test_directory_that_is_no_engine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    with pytest.raises(ForgeError, match="is not a trtforge engine"):
        package(tmp_path / "engine")


def test_embedded_engine_has_no_release_to_compare(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    repository = package(torch_engine(tmp_path / "engine"), "--target-version", "1.0.0", "--gpu", "l40s")
    assert read_facts(open_artifact(repository, "repository")).target == EngineTarget()
    assert caplog.messages == []


def test_the_target_decides_nothing_of_the_repository(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    first = (package(engine, "--gpu", "h100-80gb") / "forge.json").read_bytes()
    assert (package(engine, "--gpu", "h200") / "forge.json").read_bytes() == first
