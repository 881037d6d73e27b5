"""What `trtforge inspect` tells of a model, a build, an artifact and of directories of others."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from tests.conftest import DEMO_MODEL, MakeHf
from trtforge.cli.app import app
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError, Repair
from trtforge.pipeline.description import describe


def printed(directory: Path) -> list[str]:
    done = CliRunner().invoke(app, ["inspect", str(directory)])
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_a_model_is_described_with_its_formats(tmp_path: Path) -> None:
    found = describe(DEMO_MODEL, tensors=False)
    with safe_open(DEMO_MODEL / "model.safetensors", "np") as file:
        elements = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    total = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in elements)
    expected = {
        "kind": "hugging face checkpoint",
        "family": "llama",
        "dtype": "bfloat16",
        "parameters": total,
        "layers": 4,
        "heads": 8,
        "kv_heads": 2,
        "head_size": 32,
        "context": 2048,
        "vocabulary": 2048,
        "kv_bytes_per_token": 2 * 2 * 32 * 4 * 2,
        "tokenizer": True,
    }
    assert {key: found[key] for key in expected} == expected
    sizes = {each["format"]: each for each in found["formats"]}
    assert list(sizes) == [
        *("none", "fp8", "fp8_rowwise", "int4_awq", "w4a8_awq", "int8_sq", "int8_wo", "int4_wo", "nvfp4"),
    ]
    for name in ("none", "fp8_rowwise"):
        made = convert(ConvertConfig(quant=name), DEMO_MODEL, tmp_path / name).path / "rank0.safetensors"
        assert sizes[name]["bytes"] == pytest.approx(made.stat().st_size, rel=0.01)
    assert (sizes["fp8"]["calibration"], sizes["int8_wo"]["calibration"]) == (True, False)


def test_what_is_printed_is_for_people(tmp_path: Path) -> None:
    lines = printed(DEMO_MODEL)
    assert lines[0] == "recipes/demo-model: Hugging Face checkpoint"
    assert "  parameters    4.07 M" in lines
    assert "  heads         8 of size 32, 2 KV heads" in lines
    assert "                int4_awq      3.72 MB   needs a calibration" in lines
    convert(ConvertConfig(tp=2), DEMO_MODEL, tmp_path / "build" / "checkpoint")
    for directory in (DEMO_MODEL, tmp_path / "build", tmp_path / "build" / "checkpoint"):
        others = printed(directory)[1:]
        assert all(len(line) <= 80 and line == line.rstrip() for line in others), directory
    assert any(line.startswith("  checkpoint/   ") for line in printed(tmp_path / "build"))


def test_a_model_without_weights_and_one_that_is_not_supported(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(DEMO_MODEL / "config.json", tmp_path / "bare")
    found = describe(tmp_path / "bare", tensors=False)
    assert (found["bytes"], found["tokenizer"], found["layers"]) == (None, False, 4)
    assert "  weights       not in this directory" in printed(tmp_path / "bare")
    values = json.loads((DEMO_MODEL / "config.json").read_text()) | {"architectures": ["NoSuchModel"]}
    (tmp_path / "bare" / "config.json").write_text(json.dumps(values))
    found = describe(tmp_path / "bare", tensors=False)
    assert (found["family"], found["formats"]) == ("not supported", [])


@pytest.mark.parametrize(
    ("changes", "problem", "method"),
    [
        ({"quantization_config": {"load_in_4bit": True}}, "quant_method bitsandbytes is not converted", "bitsandbytes"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_type 'spiral' is not known", "none"),
        ({"hidden_act": "xx"}, "hidden_act xx cannot be converted", "none"),
    ],
)
def test_a_model_that_cannot_be_converted_is_described_with_its_problem(
    tmp_path: Path, edit_config: Any, changes: dict[str, Any], problem: str, method: str
) -> None:
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    edit_config(model, **changes)
    found = describe(model, tensors=False)
    assert (found["architecture"], found["family"], found["dtype"]) == ("LlamaForCausalLM", "llama", "bfloat16")
    assert (found["quantization"], found["tensors_stored"], found["tokenizer"]) == (method, 39, True)
    assert found["formats"] == []
    assert problem in found["problem"]
    lines = printed(model)
    first = next(number for number, line in enumerate(lines) if line.startswith("  problem       "))
    assert problem in " ".join(line.strip() for line in lines[first:])
    assert not any(line.startswith("  formats") for line in lines)


def test_a_model_that_can_be_converted_has_no_problem() -> None:
    assert "problem" not in describe(DEMO_MODEL, tensors=False)


def test_directories_of_others_are_named(make_hf: MakeHf, tmp_path: Path) -> None:
    made = convert(ConvertConfig(), make_hf(), tmp_path / "made").path
    (made / "forge.json").unlink()
    assert describe(made, tensors=False)["kind"] == "TensorRT-LLM checkpoint that trtforge did not write"
    (tmp_path / "theirs" / "ensemble").mkdir(parents=True)
    (tmp_path / "theirs" / "ensemble" / "config.pbtxt").touch()
    found: dict[str, Any] = describe(tmp_path / "theirs", tensors=False)
    assert found == {"kind": "Triton model repository that trtforge did not write", "models": ["ensemble"]}
    assert printed(tmp_path / "theirs")[1] == "  models        ensemble"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ForgeError, match="neither a trtforge artifact nor a checkpoint"):
        describe(tmp_path / "empty", tensors=False)


def test_the_directory_of_a_file_is_proposed_only_if_it_can_be_described(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("Hello")
    with pytest.raises(ForgeError, match=r"README\.md is a file") as caught:
        describe(tmp_path / "README.md", tensors=False)
    hint = "Give the directory of an artifact, a build or a model."
    assert (caught.value.hint, caught.value.repair) == (hint, None)
    with pytest.raises(ForgeError, match=r"config\.json is a file") as caught:
        describe(DEMO_MODEL / "config.json", tensors=False)
    assert (caught.value.hint, caught.value.repair) == (
        "Give its directory.", Repair(str(DEMO_MODEL / "config.json"), str(DEMO_MODEL))
    )  # fmt: skip
