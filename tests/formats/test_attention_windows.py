"""Sliding windows: per layer those of transformers, and in a repository as TensorRT-LLM's executor takes them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from tests.conftest import DEMO_MODEL
from tests.families import TINY, WINDOW
from tests.package.engines import engine_config, write_engine
from tests.package.test_stage import model_config, parameters
from trtforge.core.parallel import Parallel
from trtforge.formats.attention_windows import attention_windows, executor_windows
from trtforge.formats.hf import HfConfig
from trtforge.formats.trtllm import CheckpointConfig
from trtforge.models.checkpoint_config import checkpoint_config
from trtforge.models.checkpoint_plan import Layout
from trtforge.models.registry import family_of
from trtforge.package.config import PackageConfig
from trtforge.package.stage import package

WINDOWED = ("mistral", "qwen2_window", "gemma2", "gemma3", "starcoder2", "phi3")
FULL = ("llama", "qwen2", "qwen3", "granite", "phi")


def converted(name: str) -> tuple[Any, CheckpointConfig]:
    """A tiny model of a family, and the config.json of its checkpoint."""
    model = TINY[name]()
    values = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    config = HfConfig(values, Path("config.json"))
    family = family_of(config.architecture)
    return model, checkpoint_config(family, family.facts(config), config.architecture, Layout(Parallel(), "float32"))


def seen_by_the_last(model: Any, tokens: int) -> list[int]:
    """How many tokens the last of `tokens` attends to in each layer, by the masks of transformers."""
    text, window = model.config, getattr(model.config, "sliding_window", None)
    embeds = torch.zeros(1, tokens, 8)
    arguments = {
        "config": text, "inputs_embeds": embeds, "attention_mask": None, "past_key_values": None,
        "position_ids": torch.arange(tokens)[None],
    }  # fmt: skip
    masks = {
        kind: make(**arguments)
        for kind, make in (
            ("full_attention", create_causal_mask),
            *([("sliding_attention", create_sliding_window_causal_mask)] if window else []),
        )
    }
    kinds = (
        getattr(text, "layer_types", None)
        or ["sliding_attention" if window else "full_attention"] * text.num_hidden_layers
    )
    return [int((masks[kind][0, 0, -1] == 0).sum()) for kind in kinds]


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("tokens", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_windows_are_those_of_transformers(name: str, tokens: int) -> None:
    model, checkpoint = converted(name)
    windows = attention_windows(checkpoint)
    assert WINDOW in windows
    assert [min(window or tokens, tokens) for window in windows] == seen_by_the_last(model, tokens)


@pytest.mark.parametrize("name", FULL)
def test_other_models_have_none(name: str) -> None:
    assert set(attention_windows(converted(name)[1])) == {None}


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ((None, None), ()),
        ((16, 16), (16,)),
        ((16, None), (16, 1024)),
        ((2048, None), ()),
        ((16, 16, 2048), (16, 16, 1024)),
    ],
)
def test_the_executor_gets_one_window_or_one_a_layer(
    windows: tuple[int | None, ...], expected: tuple[int, ...]
) -> None:
    assert executor_windows(windows, 1024) == expected


@pytest.mark.parametrize("version", ["0.17.0", "0.18.2", "0.19.0", "0.20.0", "0.21.0", "1.0.0", "1.1.0", "1.2.1"])
@pytest.mark.parametrize("name", [*WINDOWED, "llama"])
def test_a_repository_of_a_tensorrt_engine_has_them(name: str, version: str, tmp_path: Path) -> None:
    """As `transformers` masks 1,024 tokens, the engine's longest sequence."""
    model, checkpoint = converted(name)
    config = engine_config(version=version)
    config["pretrained_config"] = checkpoint.model_dump(mode="json") | {"vocab_size": 2048}
    repository = package(PackageConfig(), write_engine(tmp_path / "engine", config), DEMO_MODEL, tmp_path / "out").path
    found = parameters(model_config(repository, "tensorrt_llm")).get("max_attention_window_size", "absent")
    seen = seen_by_the_last(model, 1024)
    written = [int(window) for window in found.split(",")] if found != "absent" else [1024]
    assert (written * len(seen) if len(written) == 1 else written) == seen
    assert (found == "absent") == (name == "llama")
