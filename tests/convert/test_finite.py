"""Weights that are NaN or infinite are refused by name, or converted as they are with a warning."""

import logging
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import Edit, MakeHf
from tests.convert.test_errors import refuse
from trtforge.convert.stage import ConvertConfig, convert

DOWN, NORM, EMBED = "model.layers.1.mlp.down_proj.weight", "model.norm.weight", "model.embed_tokens.weight"
SPELLED = {math.nan: "NaN", math.inf: "an infinity", -math.inf: "an infinity"}


def put(name: str, place: tuple[int, ...], value: float) -> "object":
    return lambda tensors: tensors[name].__setitem__(place, value)


@pytest.mark.parametrize("value", SPELLED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_copied_weight(make_hf: MakeHf, tmp_path: Path, edit_tensors: Edit, value: float, dtype: torch.dtype) -> None:
    source = make_hf(dtype=dtype)
    edit_tensors(source, put(DOWN, (3, 17), value))  # type: ignore[arg-type]
    error = refuse(source, tmp_path, rf"model\.safetensors: {DOWN} holds {SPELLED[value]} at \[3, 17\]$")
    assert "--allow-nonfinite" in error.hint
    assert "model.allow_nonfinite" in error.hint


def test_a_vector_is_named_by_its_element(make_hf: MakeHf, tmp_path: Path, edit_tensors: Edit) -> None:
    source = make_hf()
    edit_tensors(source, put(NORM, (5,), math.nan))  # type: ignore[arg-type]
    refuse(source, tmp_path, rf"model\.safetensors: {NORM} holds NaN at \[5\]$")


def test_the_shard_is_named(make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf(shard_size="50KB")
    shard = next(path for path in sorted(source.glob("*.safetensors")) if DOWN in load_file(path))
    tensors = load_file(shard)
    tensors[DOWN][1, 2] = math.inf
    save_file(tensors, shard, metadata={"format": "pt"})
    refuse(source, tmp_path, rf"{shard.name}: {DOWN} holds an infinity at \[1, 2\]$")


def test_a_later_slab_is_counted_from_the_tensors_start(
    make_hf: MakeHf, tmp_path: Path, edit_tensors: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_hf()
    edit_tensors(source, put(EMBED, (96, 63), math.nan))  # type: ignore[arg-type]
    monkeypatch.setattr("trtforge.convert.slabs.SLAB_BYTES", 1024)
    refuse(source, tmp_path, rf"{EMBED} holds NaN at \[96, 63\]$")


def test_a_transposed_weight(tmp_path: Path, edit_tensors: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=97, n_positions=64)
    GPT2LMHeadModel(shape).save_pretrained(tmp_path / "hf")
    name = "transformer.h.0.mlp.c_fc.weight"
    edit_tensors(tmp_path / "hf", put(name, (7, 101), -math.inf))  # type: ignore[arg-type]
    monkeypatch.setattr("trtforge.convert.slabs.COLUMN_BLOCK_BYTES", 2048)
    refuse(tmp_path / "hf", tmp_path, rf"{name} holds an infinity at \[7, 101\]$")


@pytest.mark.parametrize("allow", [False, True])
def test_what_is_rounded_has_no_scale(make_hf: MakeHf, tmp_path: Path, edit_tensors: Edit, allow: bool) -> None:
    source = make_hf()
    edit_tensors(source, put(DOWN, (0, 3), math.nan))  # type: ignore[arg-type]
    error = refuse(source, tmp_path, f"{DOWN} holds NaN", quant="fp8_rowwise", allow_nonfinite=allow)
    assert ("--exclude-module" in error.hint) is allow


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_allowed_ones_are_converted_with_one_warning(
    make_hf: MakeHf, tmp_path: Path, edit_tensors: Edit, caplog: pytest.LogCaptureFixture, dtype: str
) -> None:
    source = make_hf(dtype=torch.bfloat16)
    edit_tensors(source, lambda tensors: tensors[DOWN].view(-1)[3:6].copy_(torch.tensor([math.nan, math.inf, 2.0])))
    with caplog.at_level(logging.WARNING, logger="trtforge"):
        convert(ConvertConfig(tp=2, dtype=dtype, allow_nonfinite=True), source, tmp_path / "out")  # type: ignore[arg-type]

    written = load_file(tmp_path / "out" / "rank0.safetensors")["transformer.layers.1.mlp.proj.weight"].view(-1)[3:6]
    assert str(written.tolist()) == "[nan, inf, 2.0]"
    assert [record.getMessage() for record in caplog.records] == [
        f"{source / 'model.safetensors'}: {DOWN} holds NaN at [0, 3]: converted as it is (--allow-nonfinite)"
    ]


def test_a_strict_run_does_not_take_over_what_was_allowed(make_hf: MakeHf, tmp_path: Path, edit_tensors: Edit) -> None:
    source = make_hf()
    edit_tensors(source, put(NORM, (0,), math.nan))  # type: ignore[arg-type]
    convert(ConvertConfig(allow_nonfinite=True), source, tmp_path / "out")
    refuse(source, tmp_path, f"{NORM} holds NaN")
    assert (tmp_path / "out" / "rank0.safetensors").is_file()
