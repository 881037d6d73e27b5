"""Llama 4: the language part of the published architecture, its stacked experts quantised as ModelOpt exports them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration, PreTrainedModel

from tests.compile.quantised import PROMPT, computed_in_every_layout, quantised
from tests.compile.test_llmapi import IDS, LLMAPI, tensors_of
from tests.families import TINY
from tests.modelopt import export_for_hugging_face, nvfp4_values
from tests.plan.models import asked
from tests.runtime.converted import computed, error
from trtforge.compile.llmapi import plan_for_hugging_face
from trtforge.compile.stage import compile_engine
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.parallel import Parallel
from trtforge.core.recipe import EngineConfig
from trtforge.formats.hf import open_checkpoint
from trtforge.plan.evaluate import evaluate
from trtforge.plan.model import find_model

TEXT = "language_model."
EXPERTS = "model.layers.1.feed_forward.experts"
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}


def published(text: PreTrainedModel) -> PreTrainedModel:
    """A tiny model with vision, whose language model is `text`."""
    config = Llama4Config(text_config=text.config.to_dict(), vision_config=VISION, image_token_index=130)
    model = Llama4ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.1)
    model.language_model.load_state_dict(text.state_dict())
    model.config.architectures = [type(model).__name__]
    return model.eval()


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama4")
    published(TINY["llama4"]()).bfloat16().save_pretrained(directory / "hf")
    save_file({"input_ids": IDS}, directory / "ids.safetensors")
    return directory / "hf"


def meant(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the language model that a quantised checkpoint stands for, in float32."""
    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if not name.startswith(TEXT) or name.endswith(("_scale", "_scale_2")):
            continue
        own, scale = (
            name.removeprefix(TEXT),
            f"{name.removesuffix('.weight')}{'.' if name.endswith('.weight') else '_'}",
        )
        if f"{scale}weight_scale_2" in stored and tensor.dim() == 3:
            parts = zip(tensor.mT, stored[f"{scale}weight_scale"].mT, strict=True)
            both = stored[f"{scale}weight_scale_2"]
            tensor = torch.stack(
                [
                    nvfp4_values({"x.weight": part, "x.weight_scale": blocks, "x.weight_scale_2": both}, "x").T
                    for part, blocks in ((part.contiguous(), blocks.contiguous()) for part, blocks in parts)
                ]
            )
        elif f"{scale}weight_scale_2" in stored:
            tensor = nvfp4_values(stored, name.removesuffix(".weight"))
        elif f"{scale}weight_scale" in stored:
            tensor = tensor.float() * stored[f"{scale}weight_scale"]
        found[own] = tensor.float()
    return found


@pytest.mark.parametrize("text", ["llama4", "llama4_dense_between"])
def test_the_language_part_is_converted_and_the_vision_part_copied(text: str, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    published(TINY[text]()).bfloat16().save_pretrained(hf)
    model = Llama4ForConditionalGeneration.from_pretrained(hf, dtype=torch.float32, attn_implementation="eager")
    ids = IDS[0, :40].tolist()
    with torch.inference_mode():
        language = model.language_model  # transformers 5.24 does not compute the whole model without images
        expected = language(input_ids=torch.tensor([PROMPT])).logits[0]
    for number, layout in enumerate(({}, {"tp": 2, "pp": 2}, {"tp": 4, "ep": 2})):
        made = convert(ConvertConfig.parse({"dtype": "float32", **layout}, "test"), hf, tmp_path / f"ck{number}").path
        assert error(computed(made, ids)[0], expected) < 1e-4
        engine = compile_engine(LLMAPI, made, tmp_path / f"engine{number}").path
        found, source = tensors_of(engine), tensors_of(hf)
        assert found.keys() == source.keys()
        for key, tensor in source.items():
            assert torch.equal(found[key].float(), tensor.float()), key


@pytest.mark.parametrize("quant", ["fp8", "nvfp4"])
def test_modelopt_exports_the_same_tensors(quant: str, hf: Path, tmp_path: Path) -> None:
    """Names, shapes and dtypes, and bit for bit what depends on the weights alone; gate and up share a scale here."""
    import modelopt.torch.quantization as mtq

    text = Llama4ForCausalLM(TINY["llama4"]().config).eval()
    text.config.architectures = ["Llama4ForCausalLM"]
    text.load_state_dict(TINY["llama4"]().bfloat16().float().state_dict())
    preset = {"fp8": mtq.FP8_DEFAULT_CFG, "nvfp4": mtq.NVFP4_DEFAULT_CFG}[quant]
    theirs = mtq.quantize(text, preset, lambda model: model(IDS))
    export_for_hugging_face(theirs, tmp_path / "theirs")
    wanted = load_file(tmp_path / "theirs" / "model.safetensors")
    made = compile_engine(LLMAPI, quantised(hf, quant, tmp_path / "ck", tp=2), tmp_path / "engine").path
    found = {name.removeprefix(TEXT): tensor for name, tensor in tensors_of(made).items() if name.startswith(TEXT)}
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.shape == wanted[name].shape, name
        if wanted[name].dtype is not torch.float32:  # theirs is a float32 model
            assert tensor.dtype is wanted[name].dtype, name
    for part in ("gate_up_proj", "down_proj"):
        assert found[f"{EXPERTS}.{part}"].shape[0] == 4
        for suffix in ("", "_weight_scale", "_weight_scale_2") if quant == "nvfp4" else ("", "_weight_scale"):
            ours, other = found[f"{EXPERTS}.{part}{suffix}"], wanted[f"{EXPERTS}.{part}{suffix}"]
            assert torch.equal(ours.float(), other.float()), f"{part}{suffix}"
        scale = f"{EXPERTS}.{part}_input_scale"
        assert torch.allclose(found[scale], wanted[scale], rtol=0.1), part
    described = json.loads((made / "hf_quant_config.json").read_text())["quantization"]
    excluded = json.loads((tmp_path / "theirs" / "hf_quant_config.json").read_text())["quantization"]
    assert described["quant_algo"] == excluded["quant_algo"]
    assert {f"{TEXT}{name}" for name in excluded["exclude_modules"]} <= set(described["exclude_modules"])
    assert "vision_model.patch_embedding.linear" in described["exclude_modules"]
    assert not any("experts" in name or name.endswith("_proj") for name in described["exclude_modules"] if TEXT in name)


@pytest.mark.parametrize("quant", ["fp8", "nvfp4"])
def test_the_logits_are_those_that_the_codes_stand_for(
    quant: str, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every layout, where activations are not rounded; read by ModelOpt's own code and run by transformers."""
    made, found = computed_in_every_layout(hf, quant, tmp_path, monkeypatch)
    engine = compile_engine(LLMAPI, made, tmp_path / "engine").path
    model = Llama4ForCausalLM(TINY["llama4"]().config).eval()
    model.load_state_dict(meant(tensors_of(engine)))
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0]
    for logits in found:
        assert error(logits, expected) < 1e-4


def test_the_number_that_was_published_for_a_flag_is_taken(hf: Path, tmp_path: Path) -> None:
    """`attn_temperature_tuning` was 4 in Llama 4's config.json; transformers 5 takes true or false."""
    values = json.loads((hf / "config.json").read_text())
    values["text_config"]["attn_temperature_tuning"] = 4
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(values))
    (tmp_path / "hf" / "model.safetensors").symlink_to(hf / "model.safetensors")
    (tmp_path / "ids.safetensors").symlink_to(hf.parent / "ids.safetensors")
    made = compile_engine(LLMAPI, quantised(tmp_path / "hf", "fp8", tmp_path / "ck"), tmp_path / "engine").path
    expected = compile_engine(LLMAPI, quantised(hf, "fp8", tmp_path / "other"), tmp_path / "expected").path
    assert (made / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


def test_stacked_experts_keep_the_digests_of_their_files(hf: Path) -> None:
    checkpoint = open_checkpoint(hf)
    assert f"{TEXT}{EXPERTS}.3.down_proj.weight" in checkpoint.tensors
    assert f"{TEXT}{EXPERTS}.down_proj" not in checkpoint.tensors
    assert checkpoint.stored_bytes == sum(tensor.nbytes for tensor in load_file(hf / "model.safetensors").values())
    before = checkpoint.digests["model.safetensors"]
    damaged = load_file(hf / "model.safetensors")
    damaged[f"{TEXT}{EXPERTS}.down_proj"][3, -1, -1] += 1
    other = hf.parent / "other"
    other.mkdir()
    save_file(damaged, other / "model.safetensors", {"format": "pt"})
    (other / "config.json").write_text((hf / "config.json").read_text())
    assert open_checkpoint(other).digests["model.safetensors"] != before


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("down_proj", torch.empty(1 << 40, 0, 3), "down_proj has 1,099,511,627,776 experts: the limit is 131,072"),
        ("2.down_proj.weight", torch.empty(32, 64), "experts.2.down_proj.weight is in .*experts.down_proj too"),
    ],
)
def test_a_damaged_stack_is_refused(name: str, tensor: Tensor, message: str, hf: Path, tmp_path: Path) -> None:
    tensors = load_file(hf / "model.safetensors")
    tensors[f"{TEXT}{EXPERTS}.{name}"] = tensor
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((hf / "config.json").read_text())
    with pytest.raises(ForgeError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint == "Fetch the checkpoint again."


def test_what_the_llm_api_lacks_is_refused(hf: Path, tmp_path: Path) -> None:
    model = find_model(str(hf))
    engine = {"backend": "llmapi", "max_seq_len": 64, "max_batch_size": 2}
    assert evaluate(model, asked(model, recipe={"engine": engine}, dtype="bfloat16", quant="nvfp4")).legal
    for quant in ("fp8_rowwise", "int8_sq", "w4a8_awq"):
        problem, *_ = evaluate(model, asked(model, recipe={"engine": engine}, dtype="float16", quant=quant)).problems
        assert problem.message.startswith(
            "the LLM API's mixture of experts (llama4_multimodal) is not known to support"
        )
    text = TINY["llama4"]()
    text.config.architectures = ["Llama4ForCausalLM"]
    text.save_pretrained(tmp_path / "text")
    made = convert(ConvertConfig(), tmp_path / "text", tmp_path / "ck").path
    with pytest.raises(ForgeError, match="runs Llama 4 with its vision part only") as caught:
        compile_engine(LLMAPI, made, tmp_path / "y")
    assert caught.value.hint == "Use the checkpoint as it is published, or engine.backend: torch."
    adapters = EngineConfig.parse({"backend": "llmapi", "features": {"lora": {"max_rank": 8}}}, "test")
    with pytest.raises(ForgeError, match="not supported by TensorRT-LLM's attention of Llama 4"):
        plan_for_hugging_face(hf, Parallel(), adapters)


@pytest.mark.parametrize(
    ("changed", "warned"),
    [
        ({}, True),
        ({"max_seq_len": 16}, False),
        ({"features": {}}, False),
        ({"target": {"gpu": "b200"}}, False),
        ({"target": {"gpu": "h200"}}, True),
    ],
)
def test_chunks_that_speculation_switches_off_are_a_warning(changed: dict[str, Any], warned: bool, hf: Path) -> None:
    engine: dict[str, Any] = {"backend": "llmapi", "max_seq_len": 64, "max_batch_size": 2}
    engine |= {"features": {"ngram": {"draft_tokens": 3}}} | changed
    message = (
        "engine.features.ngram: before Blackwell, TensorRT-LLM then attends to all tokens, not to chunks of 16: "
        "beyond them answers differ from the model's. Use max_seq_len 16, or leave it out."
    )
    model = find_model(str(hf))
    found = evaluate(model, asked(model, recipe={"engine": engine}, dtype="bfloat16"))
    assert found.legal
    assert (message in found.warnings) is warned
    as_it_is = plan_for_hugging_face(hf, Parallel(), EngineConfig.parse(engine, "test"))
    assert (message in as_it_is.warnings) is warned


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is not a 0 or 1 for each of 4 layers"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types does not agree with no_rope_layers"),
        ({"moe_layers": [1]}, "moe_layers does not agree with interleave_moe_layer_step 1"),
    ],
)
def test_layers_that_tensorrt_llm_does_not_have_are_refused(
    changes: dict[str, Any], message: str, hf: Path, tmp_path: Path
) -> None:
    values = json.loads((hf / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"text_config": values["text_config"] | changes}))
    with pytest.raises(ForgeError, match=message) as caught:
        find_model(str(tmp_path))
    assert caught.value.hint
