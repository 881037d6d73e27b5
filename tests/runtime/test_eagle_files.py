"""Files of EAGLE networks: which layers they are for, and networks that are damaged or of other models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.runtime.checkpoints import tiny_llama, write_checkpoint
from tests.runtime.eagle_networks import HIDDEN, VOCAB, write_network
from trtforge.core.errors import ForgeError
from trtforge.formats.eagle import read_eagle
from trtforge.formats.hf import CONFIG, SINGLE
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.runtime.decoder.eagle import require_network

WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"fc.weight": None}, f"{SINGLE}: fc.weight is nothing, the model needs (64, 192)"),
    ({}, {"norm.weight": torch.zeros(9)}, f"{SINGLE}: norm.weight is (9,), the model needs (64,)"),
    ({}, {"lm_head.weight": None}, f"{SINGLE}: lm_head.weight is nothing, the model needs (50, 64)"),
    ({}, {"d2t": None}, f"{SINGLE}: d2t is nothing, the model needs (50,)"),
    ({}, {"embed_tokens.weight": torch.zeros(99, 64)}, "embed_tokens.weight is (99, 64), the model needs (131, 64)"),
    ({}, {"layers.1.mlp": torch.zeros(1)}, f"{SINGLE}: layers.1.mlp is not a tensor of a network of one Llama layer"),
    ({}, {"layers.0.hidden_norm.weight": torch.zeros(64)}, "hidden_norm.weight occurs twice"),
    ({}, {"fc.weight": torch.zeros(64, 192, dtype=torch.int8)}, "fc.weight is int8, not float16 or bfloat16 or"),
    ({"vocab_size": 99}, {}, f"{CONFIG}: vocab_size is 99, the model's vocabulary has 131 tokens"),
    ({"eagle_config": {}}, {}, "its default needs at least 7 layers, the model has 4"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 9], "eagle_config": {}}, {}, "is [1, 9], the model has 4 layers"),
    ({"num_hidden_layers": 2}, {}, "num_hidden_layers is 2, networks of one layer are supported"),
    (
        {"num_attention_heads": 3},
        {},
        "num_attention_heads 3, num_key_value_heads 4 and head_dim 16 do not fit together",
    ),
    ({"hidden_act": "relu"}, {}, "hidden_act is relu, silu is supported"),
    ({"fc_norm": True}, {}, "fc_norm is set, which is not supported"),
    ({"max_position_embeddings": 10**12}, {}, "max_position_embeddings is 1,000,000,000,000, which is implausible"),
    ({}, {"norm.weight": torch.full((64,), torch.nan)}, f"{SINGLE}: norm.weight has numbers that are not finite"),
    ({}, {"d2t": torch.full((50,), 90)}, f"{SINGLE}: d2t maps token 41 to 131, the model has 131"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": "8 times"}}, {}, f"{CONFIG}: rope_scaling is not valid"),
]


@pytest.mark.parametrize(("config", "changes", "message"), WRONG)
def test_networks_that_are_damaged_or_of_other_models_are_refused(
    checkpoint: Path, tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    model = read_checkpoint_config(checkpoint)
    directory = write_network(tmp_path / "network", config=config, **changes)
    with pytest.raises(ForgeError) as caught:
        require_network(read_eagle(directory, "eagle3", model), model.vocab_size, 192)
    assert message in caught.value.message
    assert str(directory) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("hidden", [32, 128])
def test_an_eagle_network_of_another_hidden_size_is_refused(checkpoint: Path, tmp_path: Path, hidden: int) -> None:
    """Its outputs are read as the model's hidden states; EAGLE-3 reads its own."""
    model = read_checkpoint_config(checkpoint)
    changes = {"fc.weight": torch.zeros(hidden, hidden + HIDDEN), "lm_head.weight": torch.zeros(VOCAB, hidden)}
    write_network(tmp_path, "eagle", config={"hidden_size": hidden}, **changes)
    with pytest.raises(ForgeError, match=f"hidden_size is {hidden}, the model's is {HIDDEN}, and EAGLE needs the same"):
        read_eagle(tmp_path, "eagle", model)


def test_networks_that_are_missing_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    model = read_checkpoint_config(checkpoint)
    with pytest.raises(ForgeError, match=rf"^{tmp_path} has no {CONFIG}"):
        read_eagle(tmp_path, "eagle", model)
    (write_network(tmp_path) / SINGLE).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ForgeError, match=rf"^{tmp_path} has no safetensors file, the only supported"):
        read_eagle(tmp_path, "eagle3", model)


def test_the_layers_that_are_read(tmp_path: Path) -> None:
    """By default those of EAGLE-3's own code; of `eagle_config` the outputs, beside it the inputs."""
    model = tiny_llama(num_hidden_layers=9)
    config = read_checkpoint_config(write_checkpoint(model, tmp_path / "checkpoint"))
    ids = "eagle_aux_hidden_state_layer_ids"
    for number, (changes, expected) in enumerate(
        (
            ({"eagle_config": None}, (2, 4, 6)),
            ({"eagle_config": {ids: [1, 3, 8]}}, (2, 4, 9)),
            ({"eagle_config": None, ids: [0, 5, 9]}, (0, 5, 9)),
        )
    ):
        directory = write_network(tmp_path / str(number), config=changes)
        assert read_eagle(directory, "eagle3", config).layers == expected


def test_a_config_of_speculators(checkpoint: Path, tmp_path: Path) -> None:
    """The layer's sizes are in an object of their own."""
    directory = write_network(tmp_path / "network")
    values = json.loads((directory / CONFIG).read_text())
    outer = {key: values.pop(key) for key in ("draft_vocab_size", "eagle_config")}
    (directory / CONFIG).write_text(json.dumps({"transformer_layer_config": values, **outer}))
    found = read_eagle(directory, "eagle3", read_checkpoint_config(checkpoint))
    assert (found.heads, found.kv_heads, found.vocab, found.rotary_base) == (8, 4, 50, 5000.0)
    assert found.tensors.keys() == {
        name.replace("midlayer", "layers.0") for name in load_file(directory / SINGLE) if name != "t2d"
    }
