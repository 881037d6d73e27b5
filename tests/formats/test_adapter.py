"""LoRA adapters as PEFT saves them: an engine's rank and modules follow from adapter_config.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file

from trtforge.core.errors import ForgeError
from trtforge.core.features import LoraFeature
from trtforge.core.recipe import ResolvedBackend
from trtforge.formats.adapter import (
    adapter_names,
    adapter_scale,
    modules_of,
    read_adapter,
    require_layers_of,
    resolved_lora,
)

QKV = ("attn_q", "attn_k", "attn_v")


def adapter(directory: Path, **values: Any) -> str:
    directory.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config | values))
    return str(directory)


def test_rank_and_modules_are_read(tmp_path: Path) -> None:
    found = read_adapter(Path(adapter(tmp_path / "a", target_modules=["model.layers.0.self_attn.o_proj", "up_proj"])))
    assert (found.rank, found.modules) == (16, ("attn_dense", "mlp_gate"))
    assert read_adapter(Path(adapter(tmp_path / "b", rank_pattern={"q_proj": 64}))).rank == 64


def test_absent_keys_have_the_defaults_of_peft(tmp_path: Path) -> None:
    place = tmp_path / "a"
    place.mkdir()
    (place / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    default = LoraConfig()
    assert read_adapter(place).rank == default.r
    assert adapter_scale(place, 8) == default.lora_alpha / default.r
    with pytest.raises(ForgeError, match="its layers have rank 8, but its tensors have 4"):
        adapter_scale(place, 4)


def test_initial_values_of_the_adapter_alone_change_nothing(tmp_path: Path) -> None:
    for number, first in enumerate((True, False, "gaussian", "eva", "orthogonal", None)):
        assert read_adapter(Path(adapter(tmp_path / str(number), init_lora_weights=first))).rank == 16


def test_the_layers_of_a_pattern_are_those_of_the_tensors(tmp_path: Path) -> None:
    place = Path(adapter(tmp_path / "a", target_modules=r".*layers\.1\.self_attn\.(?:q|o)_proj"))
    begun = "base_model.model.model.layers.1.self_attn"
    names = [f"{begun}.{module}.lora_{half}.weight" for module in ("q_proj", "o_proj") for half in "AB"]
    save_file({name: torch.zeros(16, 16) for name in names}, place / "adapter_model.safetensors")
    assert read_adapter(place).modules == ("attn_q", "attn_dense")
    (place / "adapter_model.safetensors").unlink()
    with pytest.raises(ForgeError, match=r"a has no adapter_model\.safetensors"):
        read_adapter(place)


def test_names_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    """As PEFT takes them: the usual list for a model with fused query, key and value."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1"]
    place = Path(adapter(tmp_path / "a", target_modules=names))
    layers = [f"base_model.model.model.layers.0.{name}" for name in ("self_attn.o_proj", "mlp.down_proj")]
    save_file(
        {f"{layer}.lora_{half}.weight": torch.zeros(16, 16) for layer in layers for half in "AB"},
        place / "adapter_model.safetensors",
    )
    assert read_adapter(place).modules == ("attn_dense", "mlp_4h_to_h")
    save_file({"other": torch.zeros(2)}, place / "adapter_model.safetensors")
    with pytest.raises(ForgeError, match="it changes w1, which engines do not support"):
        read_adapter(place)


def test_a_name_of_several_layers_stands_for_those_of_the_model(tmp_path: Path) -> None:
    """GPT-2 has c_proj in the attention and in the MLP, StarCoder2 in the MLP alone."""
    assert [modules_of(name) for name in ("c_proj", "attn.c_proj", "transformer.h.0.mlp.c_proj")] == [
        ("attn_dense", "mlp_4h_to_h"), ("attn_dense",), ("mlp_4h_to_h",)
    ]  # fmt: skip
    place = Path(adapter(tmp_path / "a", target_modules=["c_proj", "c_attn"], fan_in_fan_out=True))
    assert read_adapter(place).modules == ("attn_dense", "mlp_4h_to_h", "attn_qkv")
    assert adapter_scale(place, 16) == 2
    save_file(
        {f"base_model.model.model.layers.0.mlp.c_proj.lora_{half}.weight": torch.zeros(16, 16) for half in "AB"},
        place / "adapter_model.safetensors",
    )
    assert read_adapter(place).modules == ("mlp_4h_to_h",)


@pytest.mark.parametrize(
    ("layer", "backend", "message"),
    [
        (
            "query_key_value",
            "tensorrt_llm",
            "changes query_key_value, of which only the embedded engine applies adapters",
        ),
        ("attn.c_proj", "llmapi", "changes c_proj, of which only the embedded engine applies adapters"),
        ("qkv_proj", "llmapi", "changes qkv_proj, which the LLM API's releases load differently or not at all"),
    ],
)
def test_adapters_that_a_backend_does_not_load_are_refused(
    tmp_path: Path, layer: str, backend: ResolvedBackend, message: str
) -> None:
    lora = LoraFeature(adapters=(adapter(tmp_path / "a", target_modules=["q_proj", layer]),))
    with pytest.raises(ForgeError, match=message):
        require_layers_of(lora, backend)
    require_layers_of(lora, "torch")


def test_adapters_have_the_names_by_which_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also links, as to a snapshot in the hub's cache, whose directory is named by a commit."""
    (tmp_path / "snapshots" / "0a1b2c").mkdir(parents=True)
    (tmp_path / "sql").symlink_to(tmp_path / "snapshots" / "0a1b2c")
    monkeypatch.chdir(tmp_path / "snapshots")
    assert adapter_names(["../sql", f"{tmp_path}/sql/../chat/", "."]) == ("sql", "chat", "snapshots")
    with pytest.raises(ForgeError, match="two directories are called sql"):
        adapter_names(["../sql", "sql/"])


def test_an_engine_is_built_for_all_adapters_at_once(tmp_path: Path) -> None:
    one = adapter(tmp_path / "one", r=8)
    two = adapter(tmp_path / "two", r=32, target_modules=["gate_proj", "up_proj", "down_proj"])
    found = resolved_lora(LoraFeature(adapters=(one, two)))
    assert found.max_rank == 32
    assert found.modules == (*QKV, "mlp_h_to_4h", "mlp_gate", "mlp_4h_to_h")
    assert found.adapters == ()
    assert resolved_lora(found) == found


def test_without_adapters_the_defaults_of_tensorrt_llm_hold() -> None:
    found = resolved_lora(LoraFeature())
    assert (found.max_rank, found.modules) == (64, QKV)
    assert resolved_lora(LoraFeature(modules=("attn_v", "attn_dense"))).modules == (*QKV, "attn_dense")
    assert resolved_lora(LoraFeature(modules=("attn_qkv",))).modules == ("attn_qkv",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_rank": 8}, "rank 16 is more than engine.features.lora.max_rank 8"),
        ({"modules": ("attn_dense",)}, "changes attn_q, which engine.features.lora.modules leaves out"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        resolved_lora(LoraFeature(adapters=(adapter(tmp_path / "a"),), **given))


def test_null_is_the_default(tmp_path: Path) -> None:
    unset = dict.fromkeys(("alpha_pattern", "rank_pattern", "use_rslora", "bias", "fan_in_fan_out", "use_dora"))
    assert read_adapter(Path(adapter(tmp_path / "a", **unset))).rank == 16


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, "has non-LoRA weights"),
        ({"trainable_token_indices": [3]}, "has non-LoRA weights"),
        ({"use_dora": True}, "has DoRA"),
        ({"bias": "all"}, "has biases"),
        ({"lora_bias": True}, "has biases"),
        ({"init_lora_weights": "pissa"}, "has pissa initialization, which changes the model's own weights"),
        ({"init_lora_weights": "pissa_niter_4"}, "has pissa_niter_4 initialization"),
        ({"init_lora_weights": "OLoRA"}, "has olora initialization"),
        ({"init_lora_weights": "corda"}, "has corda initialization"),
        ({"init_lora_weights": "loftq"}, "has loftq initialization"),
        ({"init_lora_weights": "lora_ga"}, "has lora_ga initialization"),
        ({"alpha_pattern": {"q_proj": 64}}, "has alpha_pattern, which TensorRT-LLM ignores"),
        ({"layer_replication": [[1, 3], [0, 2]]}, "has layer_replication, which repeats the model's layers"),
        ({"alora_invocation_tokens": [5, 6]}, "has alora_invocation_tokens, from which on alone it is active"),
        ({"target_parameters": ["mlp.experts.down_proj"], "target_modules": None}, "has target_parameters"),
        ({"use_bdlora": {"nblocks": 2}}, "has use_bdlora"),
        ({"use_qalora": True}, "has use_qalora"),
        ({"kasa_config": {}, "monteclora_config": {"n": 1}}, "has monteclora_config"),
        ({"peft_type": "LOHA"}, "peft_type is LOHA, engines apply adapters of type LORA alone"),
        ({"peft_type": "ADALORA", "rank_pattern": None}, "peft_type is ADALORA, engines apply adapters of type LORA"),
        ({"peft_type": "IA3", "r": None}, "peft_type is IA3"),
        ({"target_modules": ["w1"]}, "it changes w1, which engines do not support"),
        ({"target_modules": ["cross.c_proj"]}, "it changes cross.c_proj, which engines do not support"),
        ({"r": "many"}, "not the configuration of a LoRA adapter: r: "),
        ({"r": 0}, "not the configuration of a LoRA adapter: r: "),
        ({"rank_pattern": {"q_proj": -1}}, "not the configuration of a LoRA adapter: rank_pattern: "),
        ({"lora_alpha": None}, "not the configuration of a LoRA adapter: lora_alpha: "),
        ({"lora_alpha": float("nan")}, "not the configuration of a LoRA adapter: lora_alpha: "),
    ],
)
def test_what_an_engine_has_no_place_for_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ForgeError, match=message) as caught:
        read_adapter(Path(adapter(tmp_path / "a", **values)))
    assert "adapter_config.json" in caught.value.message
    assert caught.value.hint


def test_an_adapter_of_some_tokens_is_not_to_be_merged(tmp_path: Path) -> None:
    with pytest.raises(ForgeError) as caught:
        read_adapter(Path(adapter(tmp_path / "a", alora_invocation_tokens=[5, 6])))
    assert caught.value.hint.startswith("Train it as plain LoRA, without invocation tokens")


def test_a_directory_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"adapter_config\.json: No such file"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ForgeError, match="not the configuration of a LoRA adapter"):
        read_adapter(tmp_path)
