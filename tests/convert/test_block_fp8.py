"""FP8 checkpoints with block scales, as DeepSeek-V3 and Qwen3 have them, are read as the bfloat16 model they mean."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.families import TINY
from tests.plan.models import asked
from tests.quantized import BLOCKS, Quantized, fp8_blocks, tiny_llama, write_quantized
from tests.reference.streamed import assert_streams
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.recipe import CalibrationConfig, EngineConfig, GateConfig
from trtforge.formats.hf import open_checkpoint
from trtforge.formats.shards import BlockScaled, RowReader
from trtforge.models.torch_tensors import read_tensor
from trtforge.pipeline.description import hugging_face
from trtforge.plan.evaluate import evaluate
from trtforge.plan.model import find_model
from trtforge.verify.stage import verify

IDS = torch.randint(0, 97, (2, 32), generator=torch.Generator().manual_seed(0))
EDGED = {"hidden_size": 192, "intermediate_size": 320}
"""Sizes that are no multiples of 128; keys have 96 outputs."""


def stored(directory: Path, **changes: Any) -> Quantized:
    return write_quantized(directory, fp8_blocks(128, 128), BLOCKS, dtype=torch.bfloat16, **EDGED | changes)


def plain(source: Quantized, directory: Path) -> Path:
    """The bfloat16 checkpoint that an FP8 one means."""
    source.model.bfloat16().save_pretrained(directory)
    source.model.float()
    values = json.loads((source.directory / "config.json").read_text())
    del values["quantization_config"]
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def edited(source: Quantized, name: str, tensor: torch.Tensor | None) -> None:
    file = source.directory / "model.safetensors"
    tensors = load_file(file)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, file, {"format": "pt"})


def test_matrices_are_dequantised_as_transformers_does(tmp_path: Path) -> None:
    source = stored(tmp_path / "hf", hidden_size=256, intermediate_size=384)
    raw, checkpoint = load_file(source.directory / "model.safetensors"), open_checkpoint(source.directory)
    assert not any(name.endswith("_scale_inv") for name in checkpoint.tensors)
    matrices = [name for name, tensor in checkpoint.tensors.items() if isinstance(tensor, BlockScaled)]
    assert len(matrices) == 2 * 7
    theirs = Fp8Dequantize(None)
    with RowReader() as reader:
        for name in matrices:
            expected = theirs._dequantize_one(raw[name], raw[f"{name}_scale_inv"], torch.bfloat16)
            assert torch.equal(read_tensor(reader, checkpoint.tensors[name]), expected), name
    assert checkpoint.stored_bytes == sum(tensor.nbytes for tensor in raw.values())


def test_any_bytes_of_a_matrix_can_be_read(tmp_path: Path) -> None:
    source = stored(tmp_path / "hf")
    name = "model.layers.1.mlp.down_proj.weight"
    tensor = open_checkpoint(source.directory).tensors[name]
    whole = dict(source.model.named_parameters())[name].bfloat16().view(torch.uint8).flatten().numpy().tobytes()
    with RowReader() as reader:
        for first, count in ((0, len(whole)), (1, 639), (640 * 127 + 3, 1300), (640 * 128, 640)):
            found = reader.read_bytes(tensor, first, memoryview(bytearray(count)))
            assert bytes(found) == whole[first : first + count]


def test_the_reference_computes_the_model_that_they_mean(tmp_path: Path) -> None:
    source = stored(tmp_path / "hf")
    assert_streams(source.directory, source.model, IDS)


@pytest.mark.parametrize("quant", ["none", "int8_wo"])
def test_conversion_writes_the_bytes_of_the_bfloat16_model(quant: str, tmp_path: Path) -> None:
    source = stored(tmp_path / "hf")
    config = ConvertConfig.parse({"tp": 2, "pp": 2, "quant": quant}, "test")
    ours = convert(config, source.directory, tmp_path / "ours").path
    other = convert(config, plain(source, tmp_path / "plain"), tmp_path / "other").path
    for rank in range(4):
        name = f"rank{rank}.safetensors"
        assert (ours / name).read_bytes() == (other / name).read_bytes()
    save_file({"input_ids": IDS}, tmp_path / "data.safetensors")
    gate = GateConfig(data=str(tmp_path / "data.safetensors"), samples=2, sequence_length=32)
    result = verify(ours, source.directory, gate)
    assert result.kl_mean < (1e-6 if quant == "none" else 1e-2)


def test_calibration_measures_that_model(tmp_path: Path) -> None:
    source = stored(tmp_path / "hf")
    save_file({"input_ids": IDS}, tmp_path / "ids.safetensors")
    data = CalibrationConfig(data=str(tmp_path / "ids.safetensors"), samples=2, sequence_length=32)
    config = CalibrateConfig.model_validate({"format": "fp8", "data": data})
    ours = calibrate(config, source.directory, tmp_path / "ours").path
    other = calibrate(config, plain(source, tmp_path / "plain"), tmp_path / "other").path
    (one,), (two,) = ([load_file(file) for file in path.glob("*.safetensors")] for path in (ours, other))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    made = convert(ConvertConfig(quant="fp8"), source.directory, tmp_path / "ck", calibration=ours).path
    assert json.loads((made / "config.json").read_text())["quantization"]["quant_algo"] == "FP8"


def test_experts_and_layers_for_multi_token_prediction_too(tmp_path: Path) -> None:
    """DeepSeek-V3 with every linear layer in FP8, latent attention's too; the layer behind the others is copied."""
    blocks = BLOCKS | {"weight_block_size": [16, 16]}
    tiny = TINY["deepseek_v3"]()
    tiny.config.architectures = ["DeepseekV3ForCausalLM"]
    tiny.bfloat16().save_pretrained(tmp_path / "plain")
    tensors, pack = load_file(tmp_path / "plain" / "model.safetensors"), fp8_blocks(16, 16)
    behind = torch.randn(64, 40, generator=torch.Generator().manual_seed(5))
    packed, meant = {}, {}
    for name, tensor in (*tensors.items(), ("model.layers.4.eh_proj.weight", behind.bfloat16())):
        if name.endswith("_proj.weight") or "kv_a_proj" in name:
            parts, value = pack(name, tensor.float())
            packed |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
            meant[name] = value.bfloat16()
        else:
            packed[name] = meant[name] = tensor
    values = json.loads((tmp_path / "plain" / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    for directory, written, more in (("fp8", packed, {"quantization_config": blocks}), ("plain", meant, {})):
        (tmp_path / directory).mkdir(exist_ok=True)
        save_file(written, tmp_path / directory / "model.safetensors", {"format": "pt"})
        (tmp_path / directory / "config.json").write_text(json.dumps(values | more))
    made = [convert(ConvertConfig(tp=2), tmp_path / name, tmp_path / f"ck-{name}").path for name in ("fp8", "plain")]
    names = sorted(path.name for path in made[0].glob("*.safetensors"))
    assert len(names) == 3
    for name in names:
        assert (made[0] / name).read_bytes() == (made[1] / name).read_bytes()
    config = EngineConfig(backend="llmapi")
    engine = compile_engine(config, made[0], tmp_path / "engine").path
    assert "quantization_config" not in json.loads((engine / "config.json").read_text())


def test_plan_and_inspection_see_the_bfloat16_model(tmp_path: Path) -> None:
    source = stored(tmp_path / "hf")
    found, other = find_model(str(source.directory)), find_model(str(plain(source, tmp_path / "plain")))
    assert found.stored is None
    assert found.complaint is None
    assert found.stored_bytes is not None
    assert other.stored_bytes is not None
    assert found.stored_bytes < other.stored_bytes
    (one, two) = (evaluate(model, asked(model, dtype="bfloat16")) for model in (found, other))
    assert (one.memory, one.problems) == (two.memory, two.problems)
    described = hugging_face(source.directory)
    assert described["quantization"] == "fp8, blocks of 128 x 128"
    assert described["bytes"] == found.stored_bytes
    assert {"none", "fp8"} <= {each["format"] for each in described["formats"]}


def test_a_changed_scale_is_another_model(tmp_path: Path) -> None:
    source = stored(tmp_path / "hf")
    made = convert(ConvertConfig(), source.directory, tmp_path / "ck").path
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    edited(source, name, load_file(source.directory / "model.safetensors")[name] * 2)
    with pytest.raises(ForgeError, match="differs"):
        verify(made, source.directory, GateConfig())
    again = convert(ConvertConfig(), source.directory, tmp_path / "ck")
    assert not again.cached


SCALE = "model.layers.0.mlp.up_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (SCALE, torch.ones(3, 3), r"float32 \[3, 3\], blocks of 128 x 128 in \[320, 192\] need .* \[3, 2\]"),
        (SCALE, torch.ones(3, 2, dtype=torch.int32), "up_proj.weight_scale_inv is int32"),
        (SCALE, None, r"up_proj\.weight has dtype float8_e4m3fn, which cannot be converted"),
        (SCALE, torch.full((3, 2), float("nan")), r"up_proj\.weight holds NaN at \[0, 0\]"),
        ("model.norm.weight_scale_inv", torch.ones(1), r"has no E4M3 matrix model\.norm\.weight"),
    ],
)
def test_damaged_scales_are_named(name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path) -> None:
    source = stored(tmp_path / "hf")
    edited(source, name, tensor)
    with pytest.raises(ForgeError, match=message):
        convert(ConvertConfig(), source.directory, tmp_path / "ck")


def as_it_is(directory: Path, out: Path, gpu: str) -> Path:
    config = EngineConfig.parse({"backend": "llmapi", "target": {"gpu": gpu, "tensorrt_llm": "1.3.0"}}, "test")
    return compile_engine(config, directory, out).path


def test_the_llm_api_gets_the_published_weights(tmp_path: Path) -> None:
    source = stored(tmp_path / "hf")
    for gpu in ("h100-80gb", "b200"):
        out = as_it_is(source.directory, tmp_path / gpu, gpu)
        assert (out / "model.safetensors").samefile(source.directory / "model.safetensors")
        assert json.loads((out / "config.json").read_text())["quantization_config"] == BLOCKS
    with pytest.raises(ForgeError, match=r"no FP8 with block scales on compute capability 8\.9") as refused:
        as_it_is(source.directory, tmp_path / "ada", "l40s")
    assert "--quant fp8" in refused.value.hint
    shutil.rmtree(source.directory)
    blocks = BLOCKS | {"weight_block_size": [64, 64]}
    write_quantized(source.directory, fp8_blocks(64, 64), blocks, model=tiny_llama(torch.bfloat16))
    with pytest.raises(ForgeError, match="FP8 blocks of 64 x 64: the LLM API has only 128 x 128"):
        as_it_is(source.directory, tmp_path / "small", "h100-80gb")
