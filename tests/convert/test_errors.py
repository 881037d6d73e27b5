"""Bad checkpoints: each is named before anything is written, and nothing is left behind."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import Edit, MakeHf
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.formats.hf import resolve_source


def refuse(source: Path, tmp_path: Path, match: str, **config: object) -> ForgeError:
    """Convert must fail with this message, a hint, and no trace on disk."""
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ForgeError, match=match) as caught:
        convert(ConvertConfig(**config), source, tmp_path / "out")
    assert caught.value.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    return caught.value


def test_missing_weights(golden_hf: Path, tmp_path: Path) -> None:
    (golden_hf / "model.safetensors").unlink()
    refuse(golden_hf, tmp_path, "has neither model.safetensors nor")


def test_shards_without_their_index(make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf(shard_size="50KB")
    (source / "model.safetensors.index.json").unlink()
    assert "Download the index" in refuse(source, tmp_path, "has neither model.safetensors nor").hint


@pytest.mark.parametrize("source", ["~/model", "$MODELS/llama/small", "./$MODELS"])
def test_a_path_that_only_a_shell_expands(source: str) -> None:
    with pytest.raises(ForgeError, match="no such directory") as caught:
        resolve_source(source)
    assert "~ and variables are not expanded" in caught.value.hint


def test_pickled_weights(golden_hf: Path, tmp_path: Path) -> None:
    (golden_hf / "model.safetensors").rename(golden_hf / "pytorch_model.bin")
    assert "save_pretrained" in refuse(golden_hf, tmp_path, "run code when loaded").hint


def test_truncated_weights(golden_hf: Path, tmp_path: Path) -> None:
    path = golden_hf / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refuse(golden_hf, tmp_path, r"model\.safetensors is truncated")


def test_absent_shard(make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf(shard_size="50KB")
    shard = sorted(source.glob("model-*.safetensors"))[1]
    shard.unlink()
    refuse(source, tmp_path, rf"{shard.name} is missing, but model\.safetensors\.index\.json lists it")


def test_index_of_another_download(make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf(shard_size="50KB")
    index = source / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.extra.weight"] = next(iter(values["weight_map"].values()))
    index.write_text(json.dumps(values))
    refuse(source, tmp_path, r"lists model\.extra\.weight in .* does not contain it")


def test_two_saves_in_one_directory(make_hf: MakeHf, tmp_path: Path) -> None:
    """transformers loads model.safetensors and leaves the index of the other save unread."""
    source = make_hf(shard_size="50KB")
    shutil.copyfile(make_hf("single") / "model.safetensors", source / "model.safetensors")
    error = refuse(source, tmp_path, r"has a model\.safetensors beside the model\.safetensors\.index\.json of other")
    assert "model.safetensors is what transformers loads" in (error.hint or "")
    index = source / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weight_map, "model.safetensors")}))
    convert(ConvertConfig(), source, tmp_path / "out")


def test_shard_names_are_no_paths(make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf(shard_size="50KB")
    index = source / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["lm_head.weight"] = "../../etc/passwd"
    index.write_text(json.dumps(values))
    refuse(source, tmp_path, "is not a plain file name")


NAME = "model.layers.1.mlp.up_proj.weight"


def test_missing_tensor(golden_hf: Path, tmp_path: Path, edit_tensors: Edit) -> None:
    edit_tensors(golden_hf, lambda tensors: tensors.pop(NAME))
    refuse(golden_hf, tmp_path, f"lacks {NAME}")


@pytest.mark.parametrize(
    ("prefix", "hint"),
    [
        ("_orig_mod.", r"_orig_mod\.lm_head\.weight is stored: save the model's own tensors, without what wraps it"),
        ("base_model.model.", r"base_model\.model\.lm_head\.weight is stored, as PEFT names it"),
    ],
)
def test_names_with_a_prefix(golden_hf: Path, tmp_path: Path, edit_tensors: Edit, prefix: str, hint: str) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    edit_tensors(golden_hf, rename)
    assert re.match(hint, refuse(golden_hf, tmp_path, r"lacks lm_head\.weight, ").hint or "")


def test_a_missing_head_or_embedding_that_may_be_tied(make_hf: MakeHf, tmp_path: Path, edit_tensors: Edit) -> None:
    untied = make_hf("untied")
    edit_tensors(untied, lambda tensors: tensors.pop("lm_head.weight"))
    error = refuse(untied, tmp_path, r"lacks lm_head\.weight$")
    assert 'set "tie_word_embeddings": true in config.json' in (error.hint or "")
    tied = make_hf("tied", tie_word_embeddings=True)
    edit_tensors(tied, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    error = refuse(tied, tmp_path, r"lacks model\.embed_tokens\.weight$")
    assert "lm_head.weight, which is tied to it, is stored instead" in (error.hint or "")


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"])
def test_rotary_tables_are_left_out(golden_hf: Path, tmp_path: Path, edit_tensors: Edit, name: str) -> None:
    edit_tensors(golden_hf, lambda tensors: tensors.update({name: torch.ones(8)}))
    convert(ConvertConfig(), golden_hf, tmp_path / "out")


def test_unexpected_tensor(golden_hf: Path, tmp_path: Path, edit_tensors: Edit) -> None:
    edit_tensors(golden_hf, lambda tensors: tensors.update({"model.layers.1.extra": torch.zeros(2)}))
    refuse(golden_hf, tmp_path, r"unexpected tensors for a llama model: model\.layers\.1\.extra")


@pytest.mark.parametrize("changed", ["value", "dtype", "shape"])
def test_a_tied_head_that_is_another(make_hf: MakeHf, tmp_path: Path, edit_tensors: Edit, changed: str) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        if changed == "value":
            head[-1, -1] += 1
        tensors["lm_head.weight"] = {"value": head, "dtype": head.half(), "shape": head[:-1]}[changed]

    source = make_hf(tie_word_embeddings=True)
    edit_tensors(source, change)
    found = refuse(source, tmp_path, r"ties lm_head\.weight to model\.embed_tokens\.weight, but a different lm_head")
    assert '"tie_word_embeddings": false' in found.hint


def test_wrong_shape(golden_hf: Path, tmp_path: Path, edit_tensors: Edit) -> None:
    edit_tensors(golden_hf, lambda tensors: tensors.update({NAME: torch.zeros(3, 128, dtype=torch.bfloat16)}))
    refuse(golden_hf, tmp_path, rf"{NAME} has shape \[3, 128\], config\.json says \[256, 128\]")


def test_wrong_dtype(golden_hf: Path, tmp_path: Path, edit_tensors: Edit) -> None:
    edit_tensors(golden_hf, lambda tensors: tensors.update({NAME: torch.zeros(256, 128, dtype=torch.int32)}))
    refuse(golden_hf, tmp_path, f"{NAME} has dtype int32")


def test_unknown_architecture(golden_hf: Path, tmp_path: Path, edit_config: Callable[..., None]) -> None:
    edit_config(golden_hf, architectures=["GrokForCausalLM"])
    assert "LlamaForCausalLM" in refuse(golden_hf, tmp_path, "architecture GrokForCausalLM is not supported").hint


def test_a_model_type_of_another_architecture(
    golden_hf: Path, tmp_path: Path, edit_config: Callable[..., None]
) -> None:
    """transformers loads a Mistral then, with a window; a type that no family has is that of a model's own code."""
    edit_config(golden_hf, model_type="mistral")
    error = refuse(golden_hf, tmp_path, "is LlamaForCausalLM, but model_type mistral is of another one")
    assert 'Set "model_type": "llama"' in (error.hint or "")
    edit_config(golden_hf, model_type="kimi_k2")
    convert(ConvertConfig(), golden_hf, tmp_path / "out")


def test_already_quantised(golden_hf: Path, tmp_path: Path, edit_config: Callable[..., None]) -> None:
    edit_config(golden_hf, quantization_config={"quant_method": "bitsandbytes"})
    refuse(golden_hf, tmp_path, "quant_method bitsandbytes is not converted: TensorRT-LLM has no NF4")


def test_missing_config_number(golden_hf: Path, tmp_path: Path, edit_config: Callable[..., None]) -> None:
    edit_config(golden_hf, intermediate_size=None)
    refuse(golden_hf, tmp_path, "intermediate_size is missing")


def test_illegal_tensor_parallelism(golden_hf: Path, tmp_path: Path) -> None:
    refuse(golden_hf, tmp_path, "8 attention heads cannot be split over tp 3", tp=3)


def test_quantised_without_calibration(golden_hf: Path, tmp_path: Path) -> None:
    assert "trtforge calibrate" in refuse(golden_hf, tmp_path, "--quant fp8 needs a calibration", quant="fp8").hint


def test_absent_directory(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", tmp_path, "No such file or directory")


def test_overflow_of_float16(make_hf: MakeHf, tmp_path: Path, edit_tensors: Edit) -> None:
    source = make_hf()
    edit_tensors(source, lambda tensors: tensors[NAME].view(-1)[3:4].fill_(1e6))
    error = refuse(source, tmp_path, r"transformer\.layers\.1\.mlp\.gate\.weight: a value does not fit float16")
    assert "--dtype bfloat16" in error.hint


@pytest.mark.parametrize("weight_map", [None, [], {"lm_head.weight": 3}])
def test_damaged_index(make_hf: MakeHf, tmp_path: Path, weight_map: object) -> None:
    source = make_hf(shard_size="50KB")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refuse(source, tmp_path, "weight_map is missing or damaged")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0, not a whole number above zero"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x', not a number"),
        ({"rope_theta": "q"}, "rope_theta is 'q', not a number"),
        ({"rope_scaling": [1]}, "rope_scaling is .* not an object"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', not a list"),
        ({"architectures": []}, "architectures is missing"),
        ({"hidden_act": "relu"}, "hidden_act relu cannot be converted"),
    ],
)
def test_odd_config(
    golden_hf: Path, tmp_path: Path, edit_config: Callable[..., None], changes: dict[str, object], message: str
) -> None:
    edit_config(golden_hf, **changes)
    refuse(golden_hf, tmp_path, message)
