"""Medusa heads become part of the checkpoint, as TensorRT-LLM's own converter writes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.runtime.checkpoints import tiny_llama
from tests.runtime.test_medusa import HEADS, HIDDEN, VOCAB, write_heads
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.features import MedusaFeature
from trtforge.core.manifest import read_manifest
from trtforge.core.recipe import GateConfig
from trtforge.formats.medusa import MEDUSA_FILE, gather_medusa, head_shapes, heads_in, name_in_rank, rank_shapes
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.verify.stage import verify

TENSORS = {
    "medusa_heads.{h}.medusa_layers.{l}.linear.weight": ("{h}.{l}.linear.weight", lambda tp: (HIDDEN // tp, HIDDEN)),
    "medusa_heads.{h}.medusa_layers.{l}.linear.bias": ("{h}.{l}.linear.bias", lambda tp: (HIDDEN // tp,)),
    "medusa_heads.{h}.lm_head.weight": ("{h}.{n}.weight", lambda tp: (-(-VOCAB // tp), HIDDEN)),
}
"""Name in a rank file, name in the file of the heads, and shape on a rank. Source: `load_medusa_hf` in
tensorrt_llm/models/medusa/weight.py and `MedusaHead` in model.py beside it, as examples/medusa/convert_checkpoint.py of
b93e14ca (1.2) uses them: all are `ColumnLinear(gather_output=True)`, and the vocabulary is
`pad_vocab_size(vocab_size, tp_size)`."""

CONFIG = {
    "architecture": "MedusaForCausalLM",
    "model_type": "llama",
    "max_draft_len": 63,
    "num_medusa_heads": 4,
    "num_medusa_layers": 1,
}
"""What examples/medusa/convert_checkpoint.py of that commit writes into config.json beside the model's own fields."""


def made(tmp_path: Path, directory: Path | None, name: str = "checkpoint", **options: Any) -> Path:
    source = tmp_path / "hf"
    if not source.is_dir():
        tiny_llama().save_pretrained(source)
    asked = {key: options.pop(key) for key in ("heads", "layers", "draft_tokens") if key in options}
    medusa = None if directory is None else MedusaFeature(model=str(directory), **asked)
    return convert(ConvertConfig(**{"dtype": "float32"} | options), source, tmp_path / name, drafting=medusa).path


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_tensors_are_those_of_upstreams_converter(tmp_path: Path, tp: int, pp: int) -> None:
    heads = write_heads(tmp_path / "heads", layers=2)
    checkpoint = made(tmp_path, heads, tp=tp, pp=pp)
    plain = made(tmp_path, None, "plain", tp=tp, pp=pp)
    stored = load_file(heads / MEDUSA_FILE)
    for rank in range(tp * pp):
        found, base = load_file(checkpoint / f"rank{rank}.safetensors"), load_file(plain / f"rank{rank}.safetensors")
        own = {name: found.pop(name) for name in list(found) if name.startswith("medusa_heads.")}
        assert found.keys() == base.keys()
        assert all(torch.equal(found[name], base[name]) for name in base)
        expected = {}
        for pattern, (source, shape) in TENSORS.items():
            for head in range(HEADS):
                for layer in range(2 if "{l}" in pattern else 1):
                    whole = stored[source.format(h=head, l=layer, n=2)]
                    rows = shape(tp)[0]
                    part = whole[rank % tp * rows : (rank % tp + 1) * rows]
                    padded = torch.cat((part, torch.zeros(rows - len(part), *part.shape[1:])))
                    expected[pattern.format(h=head, l=layer)] = padded
        assert own.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(own[name], tensor), name


def test_config_is_that_of_upstreams_converter(tmp_path: Path) -> None:
    values = json.loads((made(tmp_path, write_heads(tmp_path / "heads")) / "config.json").read_text())
    plain = json.loads((made(tmp_path, None, "plain") / "config.json").read_text())
    assert values == plain | CONFIG
    fewer = made(tmp_path, tmp_path / "heads", "fewer", heads=2, draft_tokens=7)
    values = json.loads((fewer / "config.json").read_text())
    assert (values["num_medusa_heads"], values["max_draft_len"]) == (2, 7)
    assert rank_shapes(read_checkpoint_config(fewer)).keys() == {
        name for name in load_file(fewer / "rank0.safetensors") if "medusa" in name
    }


def test_heads_of_a_quantised_model_stay_as_they_are(tmp_path: Path) -> None:
    """`quantize_layers` in tensorrt_llm/quantization/quantize.py would replace linear layers that are not excluded."""
    checkpoint = made(tmp_path, write_heads(tmp_path / "heads"), quant="int8_wo", dtype="float16")
    config = read_checkpoint_config(checkpoint)
    assert config.quantization.exclude_modules is not None
    assert config.quantization.exclude_modules[-1] == "*medusa_heads*"
    tensors = load_file(checkpoint / "rank0.safetensors")
    assert tensors["medusa_heads.0.medusa_layers.0.linear.weight"].dtype is torch.float16
    assert verify(checkpoint, tmp_path / "hf", GateConfig(data=windows(tmp_path), samples=1)).passed


def windows(tmp_path: Path) -> str:
    save_file({"input_ids": torch.arange(32)[None]}, tmp_path / "windows.safetensors")
    return str(tmp_path / "windows.safetensors")


def test_a_checkpoint_with_heads_computes_the_model(tmp_path: Path) -> None:
    found = verify(
        made(tmp_path, write_heads(tmp_path / "heads"), tp=2),
        tmp_path / "hf",
        GateConfig(data=windows(tmp_path), samples=1),
    )
    assert found.passed
    assert found.perplexity.increase == pytest.approx(0, abs=1e-5)


def test_the_model_type_chooses_the_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=VOCAB, tie_word_embeddings=False))
    model.float().save_pretrained(tmp_path / "hf")
    checkpoint = made(tmp_path, write_heads(tmp_path / "heads"))
    config = read_checkpoint_config(checkpoint)
    assert (config.model_dump()["model_type"], config.model_dump()["qwen_type"]) == ("qwen2", "qwen2")
    assert config.base_architecture == "Qwen2ForCausalLM"
    assert verify(checkpoint, tmp_path / "hf", GateConfig(data=windows(tmp_path), samples=1)).passed


def test_heads_are_inputs_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, write_heads(tmp_path / "heads"))
    first = read_manifest(checkpoint)
    assert first is not None
    assert first.identity.config["medusa"] == {"draft_tokens": None, "heads": None, "layers": None}
    assert f"medusa/{MEDUSA_FILE}" in first.identity.inputs
    write_heads(tmp_path / "heads", **{"0.0.linear.bias": torch.zeros(HIDDEN)})
    second = read_manifest(made(tmp_path, tmp_path / "heads"))
    assert second is not None
    assert second.digest != first.digest


@pytest.mark.parametrize(
    ("changes", "asked", "message"),
    [
        ({"0.1.weight": torch.zeros(99, HIDDEN)}, {}, r"0\.1\.weight is \(99, 64\), the model needs \(131, 64\)"),
        ({"0.0.linear.bias": torch.zeros(HIDDEN, dtype=torch.int8)}, {}, r"0\.0\.linear\.bias is int8, not one of"),
        ({"0.0.linear.bias": torch.full((HIDDEN,), torch.nan)}, {}, r"0\.0\.linear\.bias holds NaN at \[0\]"),
        ({}, {"heads": 5}, r"engine\.features\.medusa\.heads is 5, medusa_lm_head\.safetensors has 4"),
        ({}, {"layers": 2}, r"engine\.features\.medusa\.layers is 2, medusa_lm_head\.safetensors has 1"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor], asked: dict[str, int], message: str
) -> None:
    with pytest.raises(ForgeError, match=message):
        made(tmp_path, write_heads(tmp_path / "heads", **changes), **asked)
    assert not (tmp_path / "checkpoint").exists()


def test_pickled_heads_and_other_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "medusa_lm_head.pt").touch()
    with pytest.raises(ForgeError, match=f"has no {MEDUSA_FILE}") as caught:
        made(tmp_path, tmp_path / "heads")
    assert "pickled" in caught.value.hint
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    granite = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | granite))
    with pytest.raises(ForgeError, match=r"TensorRT-LLM has medusa for LlamaForCausalLM, .*, not for Granite"):
        made(tmp_path, write_heads(tmp_path / "heads"))


@given(tp=st.sampled_from([1, 2, 4]), heads=st.integers(1, HEADS), layers=st.integers(0, 2))
def test_gathering_undoes_the_split(tmp_path_factory: pytest.TempPathFactory, tp: int, heads: int, layers: int) -> None:
    base = tmp_path_factory.mktemp("heads")
    shapes = head_shapes(heads, layers, 8, 13)
    whole = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in shapes.items()}
    config = read_checkpoint_config(_config_of(base, tp, heads, layers))
    for rank in range(tp):
        parts = {}
        for name, tensor in whole.items():
            each = -(-len(tensor) // tp)
            part = tensor[rank * each : (rank + 1) * each]
            parts[name_in_rank(name)] = torch.cat((part, torch.zeros(each - len(part), *part.shape[1:])))
        assert {name: tuple(part.shape) for name, part in parts.items()} == rank_shapes(config)
        save_file(parts, base / f"rank{rank}.safetensors")
    gather_medusa(config, base, base)
    found = load_file(base / MEDUSA_FILE)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def _config_of(directory: Path, tp: int, heads: int, layers: int, **changes: object) -> Path:
    values = {
        "architecture": "MedusaForCausalLM",
        "dtype": "float32",
        "vocab_size": 13,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "hidden_act": "silu",
        "mapping": {"world_size": tp, "tp_size": tp, "pp_size": 1},
        "num_medusa_heads": heads,
        "num_medusa_layers": layers,
    }
    (directory / "config.json").write_text(json.dumps(values | changes))
    return directory


@pytest.mark.parametrize("value", [0, -1, True, "4", 4096])
def test_an_odd_number_of_heads_is_refused(tmp_path: Path, value: object) -> None:
    config = read_checkpoint_config(_config_of(tmp_path, 1, 4, 1, num_medusa_heads=value))
    with pytest.raises(ForgeError, match="num_medusa_heads is"):
        heads_in(config)


def test_missing_or_quantised_heads_are_named(tmp_path: Path) -> None:
    """The weight-only heads that upstream's converter writes with --use_weight_only are int8."""
    checkpoint = made(tmp_path, write_heads(tmp_path / "heads"))
    config, tensors = read_checkpoint_config(checkpoint), load_file(checkpoint / "rank0.safetensors")
    name = "medusa_heads.1.medusa_layers.0.linear.weight"
    for changed in ({name: tensors[name].to(torch.int8)}, {name: None}):
        kept = {key: value for key, value in (tensors | changed).items() if value is not None}
        save_file(kept, checkpoint / "rank0.safetensors")
        with pytest.raises(ForgeError, match=rf"{name} is not float32 \[64, 64\]"):
            gather_medusa(config, checkpoint, tmp_path)
