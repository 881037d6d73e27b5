"""Calibration of a whole model against the same numbers taken from `transformers` by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.conftest import Edit, MakeHf
from trtforge.calibrate.stage import METHOD, CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.formats.calibration import open_calibration
from trtforge.models.transforms import dequantize_int4, unpack_int4

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    tokens = torch.randint(0, 97, (6, 24), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": tokens}, tmp_path / "ids.safetensors")
    return tmp_path / "ids.safetensors"


def config(ids: Path, quant: str, **changes: object) -> CalibrateConfig:
    data = {"data": str(ids), "samples": 6, "sequence_length": 24, "batch_size": 4}
    return CalibrateConfig.parse({"format": quant, "data": data} | changes, "test")


def test_amax_is_that_of_the_model(make_hf: MakeHf, ids: Path, tmp_path: Path) -> None:
    source = make_hf(**SHAPE)
    calibrate(config(ids, "fp8", kv_cache="fp8"), source, tmp_path / "calibration")
    found = open_calibration(tmp_path / "calibration")

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    seen: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: seen.update({name: float(inputs[0].abs().max())})
            )
    with torch.no_grad():
        output = model(load_file(ids)["input_ids"], use_cache=True)
    assert len(seen) == 14
    for name, amax in seen.items():
        assert found.input_amax(name).item() == pytest.approx(amax, rel=1e-5)
        weight = model.get_submodule(name).weight
        assert found.weight_amax(name).item() == weight.abs().max().item()
    for layer, cached in enumerate(output.past_key_values.layers):
        largest = max(cached.keys.abs().max().item(), cached.values.abs().max().item())
        assert found.kv_amax(layer).item() == pytest.approx(largest, rel=1e-5)


def test_a_head_that_conversion_refuses_is_refused_before_the_work(
    make_hf: MakeHf, ids: Path, tmp_path: Path, edit_tensors: Edit
) -> None:
    source = make_hf(**SHAPE, tie_word_embeddings=True)
    edit_tensors(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ForgeError, match=r"config\.json ties lm_head\.weight"):
        calibrate(config(ids, "fp8"), source, tmp_path / "calibration")
    assert not list(tmp_path.glob("*calibration*"))


def test_manifest_says_what_the_data_was(make_hf: MakeHf, ids: Path, tmp_path: Path) -> None:
    made = calibrate(config(ids, "fp8"), make_hf(**SHAPE), tmp_path / "calibration").manifest.identity
    assert {key: made.config[key] for key in ("samples", "tokens", "documents", "document_lengths")} == {
        "samples": 6, "tokens": 144, "documents": 6, "document_lengths": {"32": 6},
    }  # fmt: skip
    assert len(made.inputs["data"]) == 64


def test_a_calibration_by_another_method_is_not_used_again(
    make_hf: MakeHf, ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_hf(**SHAPE)
    monkeypatch.setenv("TRTFORGE_CACHE", str(tmp_path / "cache"))
    first = calibrate(config(ids, "fp8"), source, tmp_path / "first").manifest.identity.digest
    assert calibrate(config(ids, "fp8"), source, tmp_path / "again").cached
    monkeypatch.setattr("trtforge.calibrate.stage.METHOD", METHOD + 1)
    changed = calibrate(config(ids, "fp8"), source, tmp_path / "changed")
    assert not changed.cached
    assert changed.manifest.identity.digest != first


def test_fp8_scales_are_shared_as_tensorrt_llm_shares_them(make_hf: MakeHf, ids: Path, tmp_path: Path) -> None:
    source = make_hf(**SHAPE)
    calibration = calibrate(config(ids, "fp8"), source, tmp_path / "calibration").path
    out = convert(ConvertConfig(quant="fp8"), source, tmp_path / "out", calibration=calibration).path
    rank, original = load_file(out / "rank0.safetensors"), load_file(source / "model.safetensors")

    prefix, layer = "model.layers.0.", "transformer.layers.0."
    qkv = [original[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    scale = rank[layer + "attention.qkv.weights_scaling_factor"]
    assert scale.item() == pytest.approx(max(w.abs().max().item() for w in qkv) / 448, rel=1e-6)
    expected = (torch.cat(qkv) / scale).to(torch.float8_e4m3fn)
    assert torch.equal(rank[layer + "attention.qkv.weight"].view(torch.uint8), expected.view(torch.uint8))
    fc, gate = (rank[f"{layer}mlp.{name}.weights_scaling_factor"] for name in ("fc", "gate"))
    assert torch.equal(fc, gate)


def test_int4_weights_stand_for_the_original(make_hf: MakeHf, ids: Path, tmp_path: Path) -> None:
    source = make_hf(**SHAPE)
    nearest = config(ids, "int4_awq", group_size=64, rounding="nearest")
    calibration = calibrate(nearest, source, tmp_path / "calibration").path
    out = convert(ConvertConfig(quant="int4_awq"), source, tmp_path / "out", calibration=calibration).path
    rank, original = load_file(out / "rank0.safetensors"), load_file(source / "model.safetensors")
    layer = "transformer.layers.1."
    for target, sources in {
        "attention.qkv": [f"self_attn.{name}_proj" for name in "qkv"],
        "mlp.proj": ["mlp.down_proj"],
    }.items():
        weight = torch.cat([original[f"model.layers.1.{name}.weight"] for name in sources])
        scales = rank[f"{layer}{target}.weights_scaling_factor"]
        prequant = rank[f"{layer}{target}.prequant_scaling_factor"].float()
        restored = dequantize_int4(unpack_int4(rank[f"{layer}{target}.weight"]), scales) * prequant
        step = (scales.repeat_interleave(64, dim=1) * prequant).abs()
        assert ((restored - weight).abs() <= 0.501 * step).all()


LAYOUTS = {"tp1": {}, "tp2": {"tp": 2}, "tp4": {"tp": 4}, "pp2": {"pp": 2}}


@pytest.mark.parametrize(
    ("quant", "rounding"),
    [
        *((quant, "nearest") for quant in ("fp8", "int4_awq", "w4a8_awq", "int8_sq", "nvfp4")),
        ("int4_awq", "compensated"),
        ("w4a8_awq", "compensated"),
        ("nvfp4", "compensated"),
    ],
)
def test_one_calibration_serves_every_layout(
    make_hf: MakeHf, ids: Path, tmp_path: Path, quant: str, rounding: str
) -> None:
    """Every tensor of every layout, put together, is that of a single rank, byte for byte."""
    source = make_hf(
        **SHAPE | {"num_key_value_heads": 4, "intermediate_size": 256, "hidden_size": 256, "vocab_size": 128}
    )
    settings = config(ids, quant, group_size=64, kv_cache="int8", rounding=rounding)
    calibration = calibrate(settings, source, tmp_path / "calibration").path
    outs = {
        name: convert(
            ConvertConfig(quant=quant, kv_cache="int8", **split), source, tmp_path / name, calibration=calibration
        ).path
        for name, split in LAYOUTS.items()
    }
    whole = load_file(outs["tp1"] / "rank0.safetensors")
    for name in ("tp2", "tp4"):
        ranks = [load_file(path) for path in sorted(outs[name].glob("rank*.safetensors"))]
        for key, tensor in whole.items():
            assert joined(key, [rank[key] for rank in ranks]) == bits(tensor), key
    for stage in range(2):
        for key, tensor in load_file(outs["pp2"] / f"rank{stage}.safetensors").items():
            assert bits(tensor) == bits(whole[key.replace("layers.0", f"layers.{stage}")]), key


def bits(tensor: torch.Tensor) -> tuple[tuple[int, ...], bytes]:
    return tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()


def joined(key: str, parts: list[torch.Tensor]) -> tuple[tuple[int, ...], bytes]:
    """What tensor-parallel ranks hold of one tensor, as one rank would."""
    raw = [part.view(torch.uint8) if part.dtype is torch.float8_e4m3fn else part for part in parts]
    row_parallel = "attention.dense." in key or "mlp.proj." in key
    per_row = key.endswith(("weight", "weights_scaling_factor")) and raw[0].dim() > 0 and raw[0].numel() > 1
    if row_parallel and (raw[0].dim() == 2 or key.endswith("prequant_scaling_factor")):
        return bits(torch.cat(raw, dim=raw[0].dim() - 1))
    if "attention.qkv." in key and per_row:
        thirds = zip(*(part.chunk(3) for part in raw), strict=True)  # as many KV heads as heads: q, k and v are alike
        return bits(torch.cat([torch.cat(third) for third in thirds]))
    if ("mlp.fc." in key or "mlp.gate." in key or key == "lm_head.weight") and per_row:
        return bits(torch.cat(raw))
    assert all(torch.equal(raw[0], other) for other in raw), key
    return bits(raw[0])


def test_rerun_is_a_cache_hit_and_identical(make_hf: MakeHf, ids: Path, tmp_path: Path) -> None:
    source = make_hf(**SHAPE)
    first = calibrate(config(ids, "int4_awq"), source, tmp_path / "a")
    assert calibrate(config(ids, "int4_awq"), source, tmp_path / "a").cached
    assert calibrate(config(ids, "int4_awq"), source, tmp_path / "b").manifest.digest == first.manifest.digest


def test_calibration_of_another_model_is_refused(make_hf: MakeHf, ids: Path, tmp_path: Path) -> None:
    calibration = calibrate(config(ids, "fp8"), make_hf("one", **SHAPE), tmp_path / "calibration").path
    other = make_hf("other", rms_norm_eps=1e-3, **SHAPE)
    with pytest.raises(ForgeError, match=r"is of another model: config\.json differs"):
        convert(ConvertConfig(quant="fp8"), other, tmp_path / "out", calibration=calibration)


def test_calibration_of_another_format_is_refused(make_hf: MakeHf, ids: Path, tmp_path: Path) -> None:
    source = make_hf(**SHAPE)
    calibration = calibrate(config(ids, "fp8"), source, tmp_path / "calibration").path
    with pytest.raises(ForgeError, match="was calibrated for fp8, not int4_awq"):
        convert(ConvertConfig(quant="int4_awq"), source, tmp_path / "out", calibration=calibration)


def test_nan_weights_are_named(make_hf: MakeHf, ids: Path, tmp_path: Path, edit_tensors: Callable[..., None]) -> None:
    source = make_hf(**SHAPE)
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(source, lambda tensors: tensors[name].view(-1)[7:8].fill_(float("nan")))
    with pytest.raises(ForgeError, match=f"{name} holds NaN"):
        calibrate(config(ids, "fp8"), source, tmp_path / "calibration")
    assert not (tmp_path / "calibration").exists()
    assert not (tmp_path / ".calibration.partial").exists()


def test_group_must_fit_the_model(make_hf: MakeHf, ids: Path, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="64 inputs a rank at tp 1 are not a multiple of the AWQ group size 128"):
        calibrate(config(ids, "int4_awq"), make_hf(), tmp_path / "calibration")


def test_samples_longer_than_the_model_has_positions_are_refused(make_hf: MakeHf, tmp_path: Path) -> None:
    source = make_hf(**SHAPE, max_position_embeddings=16)
    save_file({"input_ids": torch.ones(2, 24, dtype=torch.int64)}, tmp_path / "ids.safetensors")
    with pytest.raises(ForgeError, match="calibration samples have 24 tokens, the model has 16 positions") as refused:
        calibrate(config(tmp_path / "ids.safetensors", "fp8"), source, tmp_path / "out")
    assert refused.value.hint.startswith("Give --seq-len 16")
    assert not (tmp_path / "out").exists()


def test_a_calibration_must_hold_what_is_asked_of_it(make_hf: MakeHf, ids: Path, tmp_path: Path) -> None:
    source, calibration = make_hf(**SHAPE), tmp_path / "calibration"
    calibrate(config(ids, "fp8"), source, calibration)

    def refused(**choices: str) -> ForgeError:
        with pytest.raises(ForgeError) as error:
            convert(ConvertConfig.parse(choices, "test"), source, tmp_path / "out", calibration=calibration)
        assert not (tmp_path / "out").exists()
        return error.value

    missing = refused(quant="fp8", kv_cache="int8")
    assert missing.message == f"{calibration} has no scales for an int8 KV cache"
    assert f"`trtforge calibrate {source} CALIBRATION --quant fp8 --kv-cache int8`" in missing.hint
    for quant in ("none", "int8_wo", "fp8_rowwise"):
        for kv_cache in ("none", "fp8"):
            unused = refused(quant=quant, kv_cache=kv_cache)
            assert unused.message.endswith(f"is not needed with --quant {quant} and --kv-cache {kv_cache}")
            assert unused.hint == "Give --quant fp8, or leave --calibration out."
    with pytest.raises(ForgeError, match="--kv-cache int8 needs a calibration") as needed:
        convert(ConvertConfig(kv_cache="int8"), source, tmp_path / "out")
    assert f"`trtforge calibrate {source} CALIBRATION --quant none --kv-cache int8`" in needed.value.hint
