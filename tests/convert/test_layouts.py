"""What the golden files do not show: sharded sources, odd vocabularies, MLP biases, embedding columns, dtypes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import SMALL_TOKENIZER, Edit, MakeHf
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.formats.hf import open_checkpoint
from trtforge.formats.trtllm import read_checkpoint_config

EMBEDDING = "model.embed_tokens.weight"


def ranks(out: Path) -> list[dict[str, torch.Tensor]]:
    return [load_file(path) for path in sorted(out.glob("rank*.safetensors"))]


def source_tensors(source: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in source.glob("*.safetensors") for k, v in load_file(path).items()}


def test_shards_and_slabs_change_nothing(make_hf: MakeHf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single, sharded = make_hf("one"), make_hf("many", shard_size="50KB")
    assert len(open_checkpoint(sharded).weight_files) > 2
    whole = convert(ConvertConfig(tp=2, pp=2), single, tmp_path / "a").path
    monkeypatch.setattr("trtforge.convert.slabs.SLAB_BYTES", 1)
    cut = convert(ConvertConfig(tp=2, pp=2), sharded, tmp_path / "b").path
    for rank in range(4):
        name = f"rank{rank}.safetensors"
        assert (whole / name).read_bytes() == (cut / name).read_bytes()


def test_vocabulary_is_padded_for_the_head_only(make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf(vocab_size=97)
    first, second = ranks(convert(ConvertConfig(tp=2), source, tmp_path / "out").path)
    original = source_tensors(source)["lm_head.weight"].half()
    assert first["lm_head.weight"].shape == second["lm_head.weight"].shape == (49, 64)
    assert torch.equal(torch.cat((first["lm_head.weight"], second["lm_head.weight"]))[:97], original)
    assert torch.equal(second["lm_head.weight"][48], torch.zeros(64, dtype=torch.float16))
    assert first["transformer.vocab_embedding.weight"].shape == (97, 64)
    assert read_checkpoint_config(tmp_path / "out").vocab_size == 97


def test_mlp_biases_are_kept(make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf(mlp_bias=True, attention_bias=True)
    first, second = ranks(convert(ConvertConfig(tp=2, dtype="float32"), source, tmp_path / "out").path)
    original = source_tensors(source)
    prefix, layer = "model.layers.1.mlp.", "transformer.layers.1.mlp."
    assert torch.equal(
        torch.cat((first[layer + "fc.bias"], second[layer + "fc.bias"])), original[prefix + "gate_proj.bias"]
    )
    assert torch.equal(first[layer + "proj.bias"], original[prefix + "down_proj.bias"])
    assert torch.equal(second[layer + "proj.bias"], original[prefix + "down_proj.bias"])
    assert read_checkpoint_config(tmp_path / "out").mlp_bias is True


def test_embedding_columns_are_split(make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf()
    config = ConvertConfig(tp=2, parallel_embedding=True, embedding_sharding_dim=1, dtype="float32")
    first, second = ranks(convert(config, source, tmp_path / "out").path)
    name = "transformer.vocab_embedding.weight"
    assert torch.equal(
        torch.cat((first[name], second[name]), dim=1), source_tensors(source)["model.embed_tokens.weight"]
    )


def test_tied_embedding_gets_an_explicit_head(make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf(tie_word_embeddings=True)
    assert "lm_head.weight" not in source_tensors(source)
    (rank,) = ranks(convert(ConvertConfig(), source, tmp_path / "out").path)
    assert torch.equal(rank["lm_head.weight"], rank["transformer.vocab_embedding.weight"])


def test_a_tied_head_may_be_stored_too(make_hf: MakeHf, tmp_path: Path, edit_tensors: Edit) -> None:
    source = make_hf(tie_word_embeddings=True)
    edit_tensors(source, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))
    (rank,) = ranks(convert(ConvertConfig(), source, tmp_path / "out").path)
    assert torch.equal(rank["lm_head.weight"], rank["transformer.vocab_embedding.weight"])


@pytest.mark.parametrize(
    ("source_dtype", "requested", "expected"),
    [
        (torch.float32, "auto", torch.float16),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.float16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
    ],
)
def test_dtype(
    make_hf: MakeHf, tmp_path: Path, source_dtype: torch.dtype, requested: str, expected: torch.dtype
) -> None:
    source = make_hf(dtype=source_dtype)
    (rank,) = ranks(convert(ConvertConfig(dtype=requested), source, tmp_path / "out").path)
    assert {tensor.dtype for tensor in rank.values()} == {expected}
    original = source_tensors(source)["model.norm.weight"]
    assert torch.equal(rank["transformer.ln_f.weight"], original.to(expected))


def test_tokenizer_goes_along(make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf()
    (source / "tokenizer.json").write_text(SMALL_TOKENIZER)
    out = convert(ConvertConfig(), source, tmp_path / "out").path
    assert (out / "tokenizer" / "tokenizer.json").read_text() == SMALL_TOKENIZER


def test_rerun_is_a_cache_hit_and_identical(make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf()
    first = convert(ConvertConfig(tp=2), source, tmp_path / "a")
    assert convert(ConvertConfig(tp=2), source, tmp_path / "a").cached
    second = convert(ConvertConfig(tp=2), source, tmp_path / "b")
    assert first.manifest.digest == second.manifest.digest
