"""EAGLE networks become part of the checkpoint, as TensorRT-LLM's own converter writes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.runtime.checkpoints import tiny_llama
from tests.runtime.eagle_networks import HIDDEN, VOCAB, write_network
from trtforge.compile.gathered_eagle import gather_eagle
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.core.features import EagleFeature
from trtforge.core.manifest import read_manifest
from trtforge.core.recipe import GateConfig
from trtforge.formats.eagle_checkpoint import eagle_in, eagle_rank_shapes
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.verify.stage import verify

HEADS, KV_HEADS, SIZE, INNER = 8, 4, 16, 96

SHAPES = {
    "drafter.vocab_embedding.weight": lambda tp: (VOCAB, HIDDEN),
    "drafter.fc.weight": lambda tp: (HIDDEN // tp, 2 * HIDDEN),
    "drafter.fc.bias": lambda tp: (HIDDEN // tp,),
    "drafter.layers.0.attention.qkv.weight": lambda tp: ((HEADS + 2 * max(KV_HEADS, tp)) // tp * SIZE, HIDDEN),
    "drafter.layers.0.attention.dense.weight": lambda tp: (HIDDEN, HEADS // tp * SIZE),
    "drafter.layers.0.mlp.fc.weight": lambda tp: (INNER // tp, HIDDEN),
    "drafter.layers.0.mlp.gate.weight": lambda tp: (INNER // tp, HIDDEN),
    "drafter.layers.0.mlp.proj.weight": lambda tp: (HIDDEN, INNER // tp),
    "drafter.layers.0.post_layernorm.weight": lambda tp: (HIDDEN,),
    "lm_head.weight": lambda tp: (-(-VOCAB // tp), HIDDEN),
}
"""After `eagle_nets.{i}.`: name and shape on a rank. Sources, at 06255cb7 to 65b31db1 (1.2): `EagleNet` in
tensorrt_llm/models/eagle/model.py (the LM head is a `ColumnLinear` of the padded vocabulary), which sets
`fc_after_embed`, no `use_input_layernorm_in_first_layer` and no `use_last_layernorm`; `LLaMAModel` in
models/llama/model.py (`fc` is a `ColumnLinear` of 2 x hidden with a bias, `vocab_embedding` is not split)."""

NETWORK_CONFIG = {
    "architecture": "LlamaForCausalLM",
    "dtype": "float32",
    "logits_dtype": "float32",
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "position_embedding_type": "rope_gpt_neox",
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rotary_base": 5000.0,
    "rotary_scaling": None,
    "norm_epsilon": 1e-5,
    "use_parallel_embedding": False,
    "embedding_sharding_dim": 0,
    "head_dim": SIZE,
    "head_size": SIZE,
}
"""The keys of `eagle_net_config` in examples/eagle/convert_checkpoint.py (65b31db1), apart from mapping and
quantization; `rotary_base` is the network's own."""


def made(tmp_path: Path, network: Path | None, name: str = "checkpoint", **options: Any) -> Path:
    source = tmp_path / "hf"
    if not source.is_dir():
        tiny_llama().save_pretrained(source)
    asked = {key: options.pop(key) for key in ("depth", "draft_tokens", "choices") if key in options}
    drafting = None if network is None else EagleFeature(model=str(network), **asked)
    config = ConvertConfig.model_validate({"dtype": "float32"} | options)
    return convert(config, source, tmp_path / name, drafting=drafting).path


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_tensors_are_those_of_upstreams_network(tmp_path: Path, tp: int) -> None:
    network = write_network(tmp_path / "network", "eagle")
    checkpoint, plain = made(tmp_path, network, tp=tp, depth=2), made(tmp_path, None, "plain", tp=tp)
    stored = load_file(network / "model.safetensors")
    for rank in range(tp):
        found, base = load_file(checkpoint / f"rank{rank}.safetensors"), load_file(plain / f"rank{rank}.safetensors")
        own = {name: found.pop(name) for name in list(found) if name.startswith("eagle_nets.")}
        assert found.keys() == base.keys()
        assert all(torch.equal(found[name], base[name]) for name in base)
        expected = {f"eagle_nets.{net}.{name}": shape(tp) for net in range(2) for name, shape in SHAPES.items()}
        assert {name: tuple(tensor.shape) for name, tensor in own.items()} == expected
        for net in range(2):
            one = {name: own[f"eagle_nets.{net}.{name}"] for name in SHAPES}
            assert torch.equal(one["lm_head.weight"], base["lm_head.weight"])
            assert torch.equal(one["drafter.vocab_embedding.weight"], stored["embed_tokens.weight"])
            assert torch.equal(one["drafter.fc.weight"], stored["fc.weight"].chunk(tp)[rank])
            assert torch.equal(one["drafter.fc.bias"], stored["fc.bias"].chunk(tp)[rank])
            qkv = [stored[f"layers.0.self_attn.{part}_proj.weight"].chunk(tp)[rank] for part in "qkv"]
            assert torch.equal(one["drafter.layers.0.attention.qkv.weight"], torch.cat(qkv))
            dense = stored["layers.0.self_attn.o_proj.weight"].chunk(tp, dim=1)[rank]
            assert torch.equal(one["drafter.layers.0.attention.dense.weight"], dense)
            assert torch.equal(
                one["drafter.layers.0.mlp.fc.weight"], stored["layers.0.mlp.gate_proj.weight"].chunk(tp)[rank]
            )
            assert torch.equal(
                one["drafter.layers.0.mlp.gate.weight"], stored["layers.0.mlp.up_proj.weight"].chunk(tp)[rank]
            )


def test_config_is_that_of_upstreams_converter(tmp_path: Path) -> None:
    network = write_network(tmp_path / "network", "eagle")
    values = json.loads((made(tmp_path, network, tp=2) / "config.json").read_text())
    plain = json.loads((made(tmp_path, None, "plain", tp=2) / "config.json").read_text())
    own = values.pop("eagle_net_config")
    added = {"max_draft_len": 63, "num_eagle_layers": 4, "max_non_leaves_per_layer": 10, "head_dim": 16}
    assert values == plain | added | {"architecture": "EagleForCausalLM"}
    assert {key: own[key] for key in NETWORK_CONFIG} == NETWORK_CONFIG
    assert (own["mapping"]["tp_size"], own["quantization"]["quant_algo"]) == (2, None)
    other = made(tmp_path, network, "other", choices=((0,), (0, 0)), draft_tokens=7)
    values = json.loads((other / "config.json").read_text())
    assert (values["num_eagle_layers"], values["max_draft_len"]) == (2, 7)


def test_what_a_network_lacks_is_the_models(tmp_path: Path) -> None:
    network = write_network(tmp_path / "network", "eagle", **{"embed_tokens.weight": None, "fc.bias": None})
    found = load_file(made(tmp_path, network, depth=1) / "rank0.safetensors")
    embedding = found["transformer.vocab_embedding.weight"]
    assert torch.equal(found["eagle_nets.0.drafter.vocab_embedding.weight"], embedding)
    assert torch.equal(found["eagle_nets.0.drafter.fc.bias"], torch.zeros(HIDDEN))


@pytest.mark.parametrize(("tp", "quant"), [(2, "none"), (1, "int8_wo")])
def test_a_checkpoint_with_networks_computes_the_model(tmp_path: Path, tp: int, quant: str) -> None:
    network = write_network(tmp_path / "network", "eagle")
    checkpoint = made(tmp_path, network, tp=tp, quant=quant)
    config = read_checkpoint_config(checkpoint)
    assert config.base_architecture == "LlamaForCausalLM"
    if quant != "none":
        assert config.quantization.exclude_modules is not None
        assert config.quantization.exclude_modules[-1] == "*eagle_nets*"
    save_file({"input_ids": torch.arange(32)[None]}, tmp_path / "windows.safetensors")
    gate = GateConfig(data=str(tmp_path / "windows.safetensors"), samples=1)
    assert verify(checkpoint, tmp_path / "hf", gate).passed


def test_the_network_is_an_input_of_the_checkpoint(tmp_path: Path) -> None:
    first = read_manifest(made(tmp_path, write_network(tmp_path / "network", "eagle")))
    assert first is not None
    assert first.identity.config["eagle"] == {"draft_tokens": None, "networks": 4}
    assert {"eagle/config.json", "eagle/model.safetensors"} <= first.identity.inputs.keys()
    write_network(tmp_path / "network", "eagle", **{"fc.bias": torch.zeros(HIDDEN)})
    second = read_manifest(made(tmp_path, tmp_path / "network"))
    assert second is not None
    assert second.digest != first.digest


@pytest.mark.parametrize(
    ("config", "changes", "options", "message"),
    [
        ({}, {"fc.weight": torch.zeros(4, 4)}, {}, r"fc\.weight is \(4, 4\), the model needs \(64, 128\)"),
        ({}, {"fc.bias": torch.full((HIDDEN,), torch.nan)}, {}, r"fc\.bias holds NaN at \[0\]"),
        (
            {},
            {"layers.0.self_attn.q_proj.bias": torch.zeros(HEADS * SIZE)},
            {},
            r"q_proj\.bias: TensorRT-LLM's EAGLE networks have no biases",
        ),
        ({}, {}, {"pp": 2}, "pp is 2, which TensorRT-LLM's EAGLE is not known to support"),
        ({}, {}, {"kv_cache": "fp8"}, "kv_cache is FP8, which"),
        ({}, {}, {"tp": 2, "parallel_embedding": True}, "parallel_embedding is True, which"),
    ],
)
def test_networks_that_do_not_fit_are_refused(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, torch.Tensor], options: dict[str, Any], message: str
) -> None:
    network = write_network(tmp_path / "network", "eagle", config=config, **changes)
    with pytest.raises(ForgeError, match=message):
        made(tmp_path, network, **options)
    assert not (tmp_path / "checkpoint").exists()


@given(tp=st.sampled_from([1, 2, 4, 8]))
def test_gathering_undoes_the_split(tmp_path_factory: pytest.TempPathFactory, tp: int) -> None:
    """With 8 ranks each of the network's 4 KV heads is on two of them; the model has 8 heads there."""
    base = tmp_path_factory.mktemp("eagle")
    tiny_llama(num_attention_heads=8, num_key_value_heads=8).save_pretrained(base / "hf")
    network = write_network(base / "network", "eagle")
    checkpoint = made(base, network, tp=tp, depth=1)
    (base / "gathered").mkdir()
    gather_eagle(read_checkpoint_config(checkpoint), checkpoint, base / "gathered")
    found, whole = load_file(base / "gathered" / "model.safetensors"), load_file(network / "model.safetensors")
    whole["lm_head.weight"] = load_file(base / "hf" / "model.safetensors")["lm_head.weight"]
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_eagle_layers": 0}, "num_eagle_layers is 0, not a whole number from 1 to 256"),
        ({"num_eagle_layers": True}, "num_eagle_layers is True"),
        ({"eagle_net_config": None}, "eagle_net_config is not an object"),
        ({"eagle_net_config": {"num_hidden_layers": 2}}, r"eagle_net_config\.num_hidden_layers is 2"),
        ({"eagle_net_config": {"hidden_size": 32}}, r"eagle_net_config\.hidden_size is 32"),
        ({"eagle_net_config": {"attn_bias": True}}, r"eagle_net_config\.attn_bias is True"),
    ],
)
def test_an_odd_config_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    checkpoint = made(tmp_path, write_network(tmp_path / "network", "eagle"), depth=1)
    values = json.loads((checkpoint / "config.json").read_text())
    network = changes.get("eagle_net_config")
    if isinstance(network, dict):
        changes = {"eagle_net_config": values["eagle_net_config"] | network}
    (checkpoint / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(ForgeError, match=message):
        eagle_in(read_checkpoint_config(checkpoint))


def test_missing_or_quantised_networks_are_named(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, write_network(tmp_path / "network", "eagle"), depth=1)
    config, tensors = read_checkpoint_config(checkpoint), load_file(checkpoint / "rank0.safetensors")
    assert eagle_rank_shapes(config).keys() == {name for name in tensors if name.startswith("eagle_nets.")}
    name = "eagle_nets.0.drafter.layers.0.mlp.fc.weight"
    for changed in ({name: tensors[name].to(torch.int8)}, {name: None}):
        kept = {key: value for key, value in (tensors | changed).items() if value is not None}
        save_file(kept, checkpoint / "rank0.safetensors")
        with pytest.raises(ForgeError, match=rf"{name} is not float32 \[96, 64\]"):
            gather_eagle(config, checkpoint, tmp_path)
