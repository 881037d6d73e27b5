"""The vision part of a multimodal model is planned with the bytes that conversion copies."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from tests.families import TINY
from tests.plan.models import known
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.recipe import Recipe
from trtforge.formats.hf import HfConfig
from trtforge.formats.shards import read_header
from trtforge.machine.processor import Processor
from trtforge.models.vision import vision_weights
from trtforge.plan.checkpoint_model import model_to_plan
from trtforge.plan.evaluate import evaluate
from trtforge.plan.memory import Memory
from trtforge.plan.model import Model
from trtforge.plan.request import request_of

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14}
LLAMA = SIZES | {"image_size": 28, "projector_input_dim": 40, "projector_output_dim": 40, "vision_output_dim": 40}
GEMMA, MISTRAL = SIZES | {"image_size": 28}, SIZES | {"image_size": 56, "model_type": "pixtral"}


def multimodal(name: str, vision: dict[str, Any], **more: Any) -> torch.nn.Module:
    """A tiny model with a vision part; its values do not matter."""
    if name == "gemma3":
        text = TINY["gemma3"]().config.to_dict() | {"tie_word_embeddings": True}
        ids = {"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}
        config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)
        return Gemma3ForConditionalGeneration(config).half()
    if name == "llama4":
        config = Llama4Config(text_config=TINY["llama4"]().config.to_dict(), vision_config=vision)
        return Llama4ForConditionalGeneration(config).half()
    text = TINY["mistral"]().config.to_dict() | {"sliding_window": None}
    config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False, **more)
    return Mistral3ForConditionalGeneration(config).half()


def planned(model: Model, backend: str = "llmapi", **parallel: int) -> Memory:
    values = {"name": "x", "model": {"source": model.name}, "parallel": parallel}
    engine = {"backend": backend, "max_seq_len": 64, "compute_dtype": "float32"}
    recipe = Recipe.parse(values | {"engine": engine}, "test")
    memory = evaluate(model, request_of(recipe, model, {})).memory
    assert memory is not None
    return memory


@pytest.mark.parametrize(
    ("name", "vision", "more"),
    [
        ("gemma3", GEMMA, {}),
        ("gemma3", GEMMA | {"vision_use_head": False}, {}),
        ("mistral3", MISTRAL, {}),
        ("llama4", LLAMA, {}),
        ("mistral3", MISTRAL, {"multimodal_projector_bias": True, "vision_feature_layer": [-1, -2]}),
    ],
)
def test_the_plan_holds_what_conversion_writes(
    name: str, vision: dict[str, Any], more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = multimodal(name, vision, **more)
    made.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    checkpoint = convert(ConvertConfig(), tmp_path / "hf", tmp_path / "checkpoint").path
    sizes = [
        sum(tensor.spec.nbytes for tensor in read_header(checkpoint / file))
        for file in ("rank0.safetensors", "carried.safetensors")
    ]
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    from_config = Model.of_config(str(tmp_path / "hf"), HfConfig(described, tmp_path / "hf" / "config.json"))
    for model in (model_to_plan(str(tmp_path / "hf")), model_to_plan(str(checkpoint)), from_config):
        assert model.vision_bytes == sizes[1]
        assert planned(model).weights == sum(sizes)
        assert planned(model).fullest.weights == sum(sizes)
    tensors = read_header(checkpoint / "rank0.safetensors")
    exact = sum(tensor.spec.nbytes for tensor in tensors if tensor.spec.dtype.name == "float32")
    monkeypatch.setattr(Processor, "of", lambda host: Processor(bfloat16=False, vnni=False))  # without kernels
    assert planned(from_config, "torch").weights == 2 * sizes[0] - exact, "in float32, without the vision part"
    split = planned(from_config, tp=2)
    assert split.as_json()["replicated"] > sizes[1], "each GPU is planned with the whole vision part"


def test_gemma_3_27b_has_the_weights_that_the_hub_says() -> None:
    assert known("google/gemma-3-27b-it").vision_bytes == 2 * (27_432_406_640 - 27_009_346_304)


@pytest.mark.parametrize("vision", [None, {"model_type": "other"}, {"model_type": "pixtral", "hidden_size": "wide"}])
def test_an_unknown_vision_part_is_said(vision: dict[str, Any] | None, tmp_path: Path) -> None:
    text = TINY["mistral"]().config.to_dict()
    values = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, "torch_dtype": "float16"}
    config = HfConfig(values | ({"vision_config": vision} if vision else {}), tmp_path / "config.json")
    assert vision_weights(config) is None
    model = Model.of_config("mine", config)
    recipe = Recipe.parse({"name": "x", "model": {"source": "mine"}, "engine": {"backend": "llmapi"}}, "test")
    warnings = evaluate(model, request_of(recipe, model, {})).warnings
    assert "the vision part of mine is not in the plan: its size is not known" in warnings


def test_a_model_of_text_has_no_vision_part() -> None:
    assert known("Qwen/Qwen3-8B").vision_bytes == 0
