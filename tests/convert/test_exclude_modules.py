"""Linear layers that a quantised checkpoint leaves as they are."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import MakeHf
from tests.families import TINY
from tests.runtime.converted import computed, error
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import GateConfig
from trtforge.formats.trtllm import UNQUANTIZED_MODULES, rank_file, read_checkpoint_config
from trtforge.verify.stage import verify

SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
MLP = "*.1.mlp.gate_proj", "*.1.mlp.up_proj"
TOKENS = [3, 14, 15, 92, 65, 35]


@pytest.fixture
def calibration(make_hf: MakeHf, tmp_path: Path) -> Path:
    """Of `tmp_path / "hf"`, in INT4-AWQ."""
    source = make_hf(**SHAPE)
    ids = torch.randint(0, 97, (4, 24), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    config = CalibrateConfig.parse({"format": "int4_awq", "data": {"data": str(tmp_path / "ids.safetensors")}}, "test")
    return calibrate(config, source, tmp_path / "calibration").path


def test_excluded_layers_are_copies(calibration: Path, tmp_path: Path) -> None:
    config = ConvertConfig(quant="int4_awq", dtype="float32", exclude_modules=("model.layers.0.self_attn.o_proj", *MLP))
    out = convert(config, tmp_path / "hf", tmp_path / "out", calibration=calibration).path
    rank, source = load_file(out / "rank0.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    linears = tuple(f"{name}.weight" for name in ("qkv", "dense", "fc", "gate", "proj"))
    left = [name for name, tensor in rank.items() if name.endswith(linears) and tensor.dtype is torch.float32]
    expected = ["transformer.layers.0.attention.dense", "transformer.layers.1.mlp.fc", "transformer.layers.1.mlp.gate"]
    assert sorted(left) == [f"{name}.weight" for name in expected]
    assert torch.equal(rank[f"{expected[0]}.weight"], source["model.layers.0.self_attn.o_proj.weight"])
    assert f"{expected[0]}.prequant_scaling_factor" not in rank
    assert read_checkpoint_config(out).quantization.exclude_modules == [*UNQUANTIZED_MODULES, *expected]


def test_a_checkpoint_with_everything_excluded_computes_what_the_plain_one_does(
    calibration: Path, tmp_path: Path
) -> None:
    source = tmp_path / "hf"
    config = ConvertConfig(quant="int4_awq", dtype="float32", exclude_modules=("model.layers.*",))
    out = convert(config, source, tmp_path / "out", calibration=calibration).path
    plain = convert(ConvertConfig(dtype="float32"), source, tmp_path / "plain").path
    made, wanted = (load_file(directory / rank_file(0)) for directory in (out, plain))
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[name], wanted[name]) for name in made)
    assert error(computed(out, TOKENS)[0], computed(plain, TOKENS)[0]) < 1e-6


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_fewer_quantised_layers_are_nearer_to_the_model(tp: int, pp: int, calibration: Path, tmp_path: Path) -> None:
    """The same layers of every pipeline stage, so that one list of names serves both."""
    gate = GateConfig(data=str(tmp_path / "ids.safetensors"), samples=4, sequence_length=24)

    def kl(name: str, *patterns: str) -> tuple[float, int]:
        config = ConvertConfig(quant="int4_awq", dtype="float32", tp=tp, pp=pp, exclude_modules=patterns)
        out = convert(config, tmp_path / "hf", tmp_path / name, calibration=calibration).path
        found = verify(out, tmp_path / "hf", gate)
        return found.kl_mean, found.tensors_checked

    everything, some, none = kl("all"), kl("some", "*.mlp.*"), kl("none", "*.mlp.*", "*.self_attn.*")
    assert everything[0] > some[0] > none[0]
    assert none[0] < 1e-7
    assert everything[1] > some[1] > none[1]  # scales


@pytest.mark.parametrize("quant", ["int8_wo", "int4_wo"])
def test_weight_only_formats_name_tensors_too(quant: str, make_hf: MakeHf, tmp_path: Path) -> None:
    """TensorRT-LLM's build looks for the names of the tensors that it quantises."""
    config = ConvertConfig.parse({"quant": quant, "exclude_modules": ("*.o_proj",)}, "test")
    out = convert(config, make_hf(**SHAPE), tmp_path / "out").path
    names = read_checkpoint_config(out).quantization.exclude_modules
    assert names is not None
    for layer in range(2):
        assert f"transformer.layers.{layer}.attention.dense" in names
        assert f"transformer.layers.{layer}.attention.dense.weight" in names
    plain = ConvertConfig.parse({"quant": quant}, "test")
    other = convert(plain, tmp_path / "hf", tmp_path / "plain").path
    assert not torch.equal(computed(out, TOKENS)[0], computed(other, TOKENS)[0])


def refused(source: Path, message: str, calibration: Path | None = None, **config: object) -> None:
    """With a hint, and nothing written."""
    out = source.parent / "out"
    with pytest.raises(ForgeError, match=re.escape(message)) as caught:
        convert(ConvertConfig.parse(config, "test"), source, out, calibration=calibration)
    assert caught.value.hint
    assert not out.exists()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.0.self_attn.q_proj", "layers.0.self_attn.q_proj is excluded and model.layers.0.self_attn.k_proj is not"),
        ("*.mlp.gate_proj", "layers.0.mlp.gate_proj is excluded and model.layers.0.mlp.up_proj is not"),
        ("transformer.layers.0.mlp.fc", "transformer.layers.0.mlp.fc matches no linear layer of this model"),
    ],
)
def test_patterns_that_cannot_be_are_refused(pattern: str, message: str, calibration: Path, tmp_path: Path) -> None:
    refused(tmp_path / "hf", message, calibration, quant="int4_awq", exclude_modules=(pattern,))


def test_stages_that_differ_are_refused(calibration: Path, tmp_path: Path) -> None:
    message = "exclude_modules leaves different layers unquantised in the 2 pipeline stages"
    refused(tmp_path / "hf", message, calibration, quant="int4_awq", pp=2, exclude_modules=MLP)


def test_exclusions_without_a_format_are_refused(make_hf: MakeHf) -> None:
    refused(make_hf(), "exclude_modules without a format", exclude_modules=("*.o_proj",))


def test_experts_are_refused(tmp_path: Path) -> None:
    TINY["mixtral"]().save_pretrained(tmp_path / "hf")
    message = "exclude_modules: *.experts.0.* matches experts, which cannot be excluded"
    refused(tmp_path / "hf", message, quant="int8_wo", exclude_modules=("*.experts.0.*",))
