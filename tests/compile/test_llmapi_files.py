"""What the llmapi backend writes: whole artifacts, shards, and Hugging Face directories linked as they are."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.compile.checkpoints import engine
from tests.compile.test_llmapi import Models, tensors_of
from tests.conftest import DEMO_MODEL
from trtforge.compile.hf_writer import shards_of
from trtforge.compile.stage import CompileOptions, compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.manifest import read_manifest
from trtforge.core.parallel import Parallel
from trtforge.formats.shards import read_header


def test_the_artifact_is_whole_and_deterministic(tmp_path: Path) -> None:
    checkpoint = convert(ConvertConfig(tp=2), DEMO_MODEL, tmp_path / "checkpoint").path
    first = compile_engine(engine(backend="llmapi"), checkpoint, tmp_path / "a")
    again = compile_engine(engine(backend="llmapi"), checkpoint, tmp_path / "b")
    names = {"config.json", "generation_config.json", "model.safetensors", "model.yaml", "tokenizer.json"}
    assert names <= set(first.manifest.files)
    assert (first.path / "forge.json").read_bytes() == (again.path / "forge.json").read_bytes()
    assert first.manifest.identity.config["backend"] == "llmapi"
    assert compile_engine(engine(backend="llmapi"), checkpoint, tmp_path / "a").cached
    config = json.loads((first.path / "config.json").read_text())
    source = json.loads((DEMO_MODEL / "config.json").read_text())
    types = {"dtype": config["torch_dtype"], "torch_dtype": config["torch_dtype"]}
    rotation = {"rope_theta": source["rope_parameters"]["rope_theta"]}  # which transformers 4 reads
    assert config == source | types | rotation


def test_a_checkpoint_without_the_models_configuration_is_refused(models: Models, tmp_path: Path) -> None:
    from trtforge.core.artifact import produce

    old = models.checkpoint("llama")
    manifest = read_manifest(old)
    assert manifest is not None

    def write(directory: Path) -> dict[str, Any]:
        shutil.copytree(old, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("source", "forge.json"))
        return {}

    older = produce(tmp_path / "checkpoint", manifest.identity, write).path
    with pytest.raises(ForgeError, match=r"lacks source/config\.json") as caught:
        compile_engine(engine(backend="llmapi"), older, tmp_path / "engine")
    assert "--force" in caught.value.hint


def test_tensors_go_into_shards_with_an_index(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = models.checkpoint("llama", tp=2)
    whole = tensors_of(models.engine("llama", tp=2))
    monkeypatch.setattr("trtforge.compile.hf_writer.SHARD_BYTES", 300_000)
    monkeypatch.setattr(shards_of, "__defaults__", (300_000,))
    monkeypatch.setattr("trtforge.compile.hf_writer._SLAB_BYTES", 5_000)
    out = compile_engine(engine(backend="llmapi"), checkpoint, tmp_path / "engine").path
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 3
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(out / file)[name], whole[name]), name
    sizes = {file: sum(t.spec.nbytes for t in read_header(out / file)) for file in files}
    assert sum(sizes.values()) == index["metadata"]["total_size"]
    assert all(size <= 300_000 or len(read_header(out / file)) == 1 for file, size in sizes.items())


def test_shards_that_are_finished_are_kept(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, expected = models.checkpoint("llama"), models.engine("llama")
    monkeypatch.setattr(shards_of, "__defaults__", (300_000,))
    import trtforge.compile.hf_writer as writer

    real, written = writer._write_shard, []

    def killed(shard: Any, *arguments: Any) -> Any:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(shard.file)
        return real(shard, *arguments)

    monkeypatch.setattr(writer, "_write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        compile_engine(engine(backend="llmapi"), checkpoint, tmp_path / "engine")
    rest: list[str] = []

    def counted(shard: Any, *arguments: Any) -> Any:
        rest.append(shard.file)
        return real(shard, *arguments)

    monkeypatch.setattr(writer, "_write_shard", counted)
    out = compile_engine(engine(backend="llmapi"), checkpoint, tmp_path / "engine").path
    assert not set(rest) & set(written)
    for name, tensor in tensors_of(expected).items():
        assert torch.equal(tensors_of(out)[name], tensor), name


def test_a_hugging_face_directory_is_linked_as_it_is(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    shutil.copytree(DEMO_MODEL, source)
    (source / "modeling_custom.py").write_text("raise SystemExit")
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"architectures": ["NewForCausalLM"]}))
    options = CompileOptions(parallel=Parallel(tp=2))
    made = compile_engine(engine(backend="llmapi", max_seq_len=256), source, tmp_path / "engine", options)
    assert os.stat(made.path / "model.safetensors").st_ino == os.stat(source / "model.safetensors").st_ino
    assert "modeling_custom.py" not in made.manifest.files
    args = yaml.safe_load((made.path / "model.yaml").read_text())
    assert (args["tensor_parallel_size"], args["max_seq_len"], args["kv_cache_config"]["dtype"]) == (2, 256, "auto")
    assert made.manifest.identity.config["made_from"] == "hugging_face"
    assert set(made.manifest.identity.inputs) == set(made.manifest.files) - {"model.yaml"}


def test_excluded_linears_are_copies(models: Models) -> None:
    left = ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.o_proj")
    written = models.engine("llama", "int4_awq", exclude_modules=left)
    found, source = tensors_of(written), tensors_of(models.source("llama"))
    for name in (*(f"{module}.weight" for module in left), "model.layers.1.post_attention_layernorm.weight"):
        assert torch.equal(found[name], source[name])
    described = json.loads((written / "hf_quant_config.json").read_text())["quantization"]
    assert set(left) <= set(described["exclude_modules"])
