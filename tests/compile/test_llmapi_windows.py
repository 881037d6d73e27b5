"""Sliding windows for the LLM API: written where a release's network applies them, a warning elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.compile.checkpoints import engine, llama
from tests.families import WINDOW
from tests.formats.test_attention_windows import WINDOWED, converted
from trtforge.compile.llmapi import plan_for_checkpoint, plan_for_hugging_face
from trtforge.compile.llmapi_windows import Windows
from trtforge.core.parallel import Parallel
from trtforge.formats.attention_windows import attention_windows
from trtforge.formats.hf import HfConfig
from trtforge.formats.llmapi import applies_windows

MAX_SEQ_LEN = 64


def settings(version: str) -> Any:
    return engine(backend="llmapi", max_seq_len=MAX_SEQ_LEN, target={"tensorrt_llm": version})


@pytest.mark.parametrize(
    ("name", "version"),
    [(name, version) for name in WINDOWED for version in ("1.2.1", "1.3.0") if (name, version) != ("gemma2", "1.2.1")],
)
def test_both_sources_of_a_model_get_the_windows_that_its_network_applies(
    name: str, version: str, tmp_path: Path
) -> None:
    model, checkpoint = converted(name)
    directory = tmp_path / "hf"
    directory.mkdir()
    values = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (directory / "config.json").write_text(json.dumps(values))
    plans = (
        plan_for_checkpoint(checkpoint, settings(version)),
        plan_for_hugging_face(directory, Parallel(), settings(version)),
    )
    expected = [window or MAX_SEQ_LEN for window in attention_windows(checkpoint)]
    for plan in plans:
        written = plan.as_json()["model_yaml"]["kv_cache_config"].get("max_attention_window")
        if applies_windows(type(model).__name__, version):
            assert written in (expected, sorted(set(expected)))
            assert plan.warnings == ()
        else:
            assert written is None
            assert f"does not apply the sliding window of {type(model).__name__}" in plan.warnings[0]
            assert f"max_seq_len {WINDOW}" in plan.warnings[0]


@pytest.mark.parametrize(
    ("architecture", "version", "expected"),
    [
        ("MistralForCausalLM", "1.2.1", False),
        ("MistralForCausalLM", "1.3.0", True),
        ("Gemma3ForCausalLM", "1.2.1", True),
        ("Phi3ForCausalLM", "1.3.0", False),
        ("Qwen2ForCausalLM", "1.3.0", False),
        ("Gemma3ForCausalLM", "0.17.0", False),
    ],
)
def test_which_networks_apply_windows_is_data(architecture: str, version: str, expected: bool) -> None:
    assert applies_windows(architecture, version) is expected


def test_a_family_that_is_not_converted_has_its_layer_types() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    values = {"architectures": ["Cohere2ForCausalLM"], "num_hidden_layers": 4, "sliding_window": 128}
    config = HfConfig(values | {"layer_types": kinds}, Path("config.json"))
    found = Windows.of_hugging_face(config, config)
    assert found.applied("1.3.0", 1024) == ((128, 1024, 128, 1024), ())
    older = HfConfig(values | {"sliding_window_pattern": 4}, Path("config.json"))
    assert Windows.of_hugging_face(older, older).layers == (128, 128, 128, None)
    everywhere = HfConfig(values, Path("config.json"))
    assert Windows.of_hugging_face(everywhere, everywhere).layers == (128,) * 4
    off = HfConfig(values | {"use_sliding_window": False}, Path("config.json"))
    assert Windows.of_hugging_face(off, off).layers == ()


def test_a_multimodal_checkpoint_has_those_of_its_language_model() -> None:
    """Also without `layer_types`, as google/gemma-3-12b-it is published: every sixth layer attends to all tokens."""

    def windows(text: dict[str, object]) -> Windows:
        values = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
        return Windows.of_hugging_face(HfConfig(values, Path("config.json")), HfConfig(text, Path("config.json")))

    sizes: dict[str, object] = {"hidden_size": 64, "intermediate_size": 64, "sliding_window": 512}
    kinds = ["sliding_attention", "full_attention"]
    assert windows(sizes | {"num_hidden_layers": 2, "layer_types": kinds}).applied("1.2.1", 4096) == ((512, 4096), ())
    assert windows(sizes | {"num_hidden_layers": 7}).layers == (512, 512, 512, 512, 512, None, 512)


@given(st.lists(st.none() | st.integers(1, 5000), min_size=1, max_size=8), st.integers(2, 5000))
def test_no_window_is_longer_than_a_sequence(layers: list[int | None], max_seq_len: int) -> None:
    written, warnings = Windows("Gemma3ForCausalLM", tuple(layers)).applied("1.2.1", max_seq_len)
    assert warnings == ()
    assert (written is None) == all((window or max_seq_len) >= max_seq_len for window in layers)
    assert all(window <= max_seq_len for window in written or ())


def test_a_model_without_windows_has_neither_windows_nor_warnings() -> None:
    plan = plan_for_checkpoint(llama(), settings("1.2.1"))
    assert plan.args.kv_cache_config.max_attention_window is None
    assert plan.warnings == ()
