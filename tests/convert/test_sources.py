"""Sources that change under our hands are named; a source in the hub's cache is as good as a plain directory."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import SMALL_TOKENIZER, MakeHf
from tests.convert.test_resume import Until
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import EngineConfig
from trtforge.formats.chat_template import TOOL_TEMPLATE_FILE
from trtforge.formats.hf import TOKENIZER_DIRECTORY
from trtforge.formats.special_tokens import read_special_tokens
from trtforge.plan.model import find_model

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


def replace(path: Path) -> None:
    other = path.with_name("new")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(0, path.stat().st_mtime_ns))
    other.replace(path)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


@pytest.fixture
def source(make_hf: MakeHf) -> Path:
    made = make_hf()
    (made / TOKENIZER).write_text(SMALL_TOKENIZER)
    for path in made.iterdir():
        os.utime(path, ns=(0, 1_000_000_000))
    return made


@pytest.mark.parametrize("name", [WEIGHTS, TOKENIZER])
def test_a_link_to_nothing_is_named(source: Path, tmp_path: Path, name: str) -> None:
    """As in a copy of a hub snapshot without its blobs: the checkpoint would lack the tokenizer."""
    (source / name).unlink()
    (source / name).symlink_to("../../blobs/0123")
    with pytest.raises(ForgeError) as caught:
        convert(ConvertConfig(), source, tmp_path / "out")
    assert caught.value.message == f"{source / name} is a link to a file that does not exist"
    assert "cp -rL" in caught.value.hint


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, TOKENIZER])
@pytest.mark.parametrize("change", [rewrite, replace])
def test_a_file_that_changes_meanwhile_is_named(
    source: Path, tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    convert(ConvertConfig(), source, tmp_path / "out")
    before = (tmp_path / "out/forge.json").read_bytes()
    progress = Until(0.5, lambda: change(source / name))
    with pytest.raises(ForgeError, match=rf"{name} changed while it was read") as caught:
        convert(ConvertConfig(tp=2), source, tmp_path / "out", progress=progress)
    assert "Make sure that nothing writes to the source" in caught.value.hint
    assert (tmp_path / "out/forge.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_weights_have_the_dtype_that_config_json_leaves_out(make_hf: MakeHf, tmp_path: Path, shard_size: str) -> None:
    """openai/gpt-oss-20b and bigscience/bloom-560m name none; transformers takes that of the weights."""
    source = make_hf(dtype=torch.bfloat16, shard_size=shard_size)
    values = json.loads((source / CONFIG).read_text())
    for key in ("dtype", "torch_dtype"):
        values.pop(key, None)
    (source / CONFIG).write_text(json.dumps(values))
    assert AutoModelForCausalLM.from_pretrained(source).dtype is torch.bfloat16
    assert find_model(str(source)).config.dtype == "bfloat16"
    written = convert(ConvertConfig(), source, tmp_path / "out").path
    assert json.loads((written / CONFIG).read_text())["dtype"] == "bfloat16"


def test_a_file_that_disappears_meanwhile_is_named(source: Path, tmp_path: Path) -> None:
    progress = Until(0.5, (source / WEIGHTS).unlink)
    with pytest.raises(ForgeError, match=rf"{WEIGHTS}"):
        convert(ConvertConfig(), source, tmp_path / "out", progress=progress)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_file_that_becomes_shorter_meanwhile_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtforge.convert.slabs.SLAB_BYTES", 256)
    progress = Until(0.01, lambda: truncate(source / WEIGHTS))
    with pytest.raises(ForgeError, match=rf"{WEIGHTS} (became shorter|changed) while it was read"):
        convert(ConvertConfig(), source, tmp_path / "out", progress=progress)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_the_template_for_tools_keeps_its_place(source: Path, tmp_path: Path) -> None:
    """In the checkpoint, in what the LLM API gets of it, and of the source itself."""
    (source / TOOL_TEMPLATE_FILE).parent.mkdir()
    (source / TOOL_TEMPLATE_FILE).write_text("tools")
    checkpoint = convert(ConvertConfig(), source, tmp_path / "out").path
    assert (checkpoint / TOKENIZER_DIRECTORY / TOOL_TEMPLATE_FILE).read_text() == "tools"
    for made in (checkpoint, source):
        engine = compile_engine(EngineConfig(backend="llmapi"), made, tmp_path / f"engine-{made.name}").path
        assert (engine / TOOL_TEMPLATE_FILE).read_text() == "tools"


def test_a_file_that_nobody_reads_may_change(source: Path, tmp_path: Path) -> None:
    (source / "README.md").write_text("before")
    progress = Until(0.5, lambda: (source / "README.md").write_text("after, and longer"))
    assert not convert(ConvertConfig(), source, tmp_path / "out", progress=progress).cached


def test_hub_cache_is_a_source(make_hf: MakeHf, tmp_path: Path) -> None:
    plain = make_hf(shard_size="50KB")
    repository = tmp_path / "models--me--llama"
    snapshot = repository / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(plain.iterdir())):
        path.rename(repository / "blobs" / f"{number:064}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:064}")

    made = convert(ConvertConfig(tp=2), snapshot, tmp_path / "out")

    names = {path.name for path in snapshot.glob("*.safetensors")}
    assert len(names) > 2
    assert made.manifest.identity.inputs.keys() == {*names, "config.json", "tokenizer/generation_config.json"}
    assert convert(ConvertConfig(tp=2), snapshot, tmp_path / "out").cached


def test_links_that_leave_the_directory_are_named(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint of somebody else could name any file of this machine; those of the hub's cache are expected."""
    convert(ConvertConfig(), source, tmp_path / "plain")
    (tmp_path / "blobs").mkdir()
    for place in ("blobs/0123", "elsewhere"):
        (source / TOKENIZER).rename(tmp_path / place)
        (source / TOKENIZER).symlink_to(tmp_path / place)
        assert caplog.messages == []
        convert(ConvertConfig(), source, tmp_path / "out", force=True)
        (source / TOKENIZER).unlink()
        (tmp_path / place).rename(source / TOKENIZER)
    (message,) = caplog.messages
    assert message == f"{source / TOKENIZER} is a link to {tmp_path / 'elsewhere'}, which is copied into the artifacts"


def test_a_blob_that_changes_meanwhile_is_named_by_its_link(source: Path, tmp_path: Path) -> None:
    (source / WEIGHTS).rename(tmp_path / "blob")
    (source / WEIGHTS).symlink_to("../blob")
    progress = Until(0.5, lambda: rewrite(tmp_path / "blob"))
    with pytest.raises(ForgeError, match=rf"hf/{WEIGHTS} changed while it was read"):
        convert(ConvertConfig(), source, tmp_path / "out", progress=progress)


@pytest.mark.parametrize(
    ("config", "end_ids"),
    [
        ({"eos_token_id": [5, 7]}, (5, 7, 0)),
        ({"eos_token_id": 5, "pad_token_id": 6}, (5, 0)),
        ({"eos_token_id": None, "text_config": {"eos_token_id": [8, 9]}}, (8, 9, 0)),
        ({"eos_token_id": None}, (0,)),
    ],
)
def test_a_model_without_a_generation_config_ends_as_its_config_says(
    source: Path, tmp_path: Path, config: dict[str, Any], end_ids: tuple[int, ...]
) -> None:
    """As in transformers, and as its tokenizer's end of text says."""
    (source / "generation_config.json").unlink()
    (source / "tokenizer_config.json").write_text('{"eos_token": "a", "added_tokens_decoder": {"0": {"content": "a"}}}')
    values = json.loads((source / CONFIG).read_text()) | config
    (source / CONFIG).write_text(json.dumps(values))
    out = convert(ConvertConfig(), source, tmp_path / "out").path
    assert read_special_tokens(out / "tokenizer").end_ids == end_ids


def test_a_generation_config_without_end_ids_gets_those_of_the_config(source: Path, tmp_path: Path) -> None:
    """config.json is not part of the checkpoint's tokenizer, so its end ids would be lost."""
    (source / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": null, "pad_token_id": 3}')
    values = json.loads((source / CONFIG).read_text()) | {"eos_token_id": [5, 7], "pad_token_id": 6}
    (source / CONFIG).write_text(json.dumps(values))
    before = read_special_tokens(source)
    out = convert(ConvertConfig(), source, tmp_path / "out").path
    written = json.loads((out / "tokenizer/generation_config.json").read_text())
    assert written == {"temperature": 0.6, "eos_token_id": [5, 7], "pad_token_id": 3}
    assert read_special_tokens(out / "tokenizer") == before


def test_a_generation_config_is_copied_as_it_is(source: Path, tmp_path: Path) -> None:
    (source / "generation_config.json").write_text('{"eos_token_id": [3]}')
    out = convert(ConvertConfig(), source, tmp_path / "out").path
    assert (out / "tokenizer/generation_config.json").read_text() == '{"eos_token_id": [3]}'
