"""Quantised checkpoints of other families: a rank's codes mean what the rank of the dense model holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    MistralConfig,
    NemotronConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.convert.test_errors import refuse
from tests.convert.test_quantized_sources import matrix
from tests.quantized import AWQ, GPTQ, Pack, awq, compressed, fp8_rows, gptq, write_quantized
from tests.reference.streamed import assert_streams
from trtforge.convert.stage import ConvertConfig, convert

SIZES: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GQA = SIZES | {"num_key_value_heads": 2, "intermediate_size": 256, "max_position_embeddings": 128}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**GQA),
    "qwen3": lambda: Qwen3Config(**GQA, head_dim=32, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**GQA),
    "phi3": lambda: Phi3Config(**GQA),
    "gemma": lambda: GemmaConfig(**GQA, head_dim=32),
    "nemotron": lambda: NemotronConfig(**GQA),
    "cohere": lambda: CohereConfig(**GQA),
    "phi": lambda: PhiConfig(**GQA | {"num_key_value_heads": 4}),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES, intermediate_size=256),
    "falcon_40b": lambda: FalconConfig(**SIZES, ffn_hidden_size=256, new_decoder_architecture=True, num_kv_heads=2),
    "opt": lambda: OPTConfig(**SIZES | {"pad_token_id": 1}, ffn_dim=256, max_position_embeddings=128),
    "gpt2": lambda: GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=97, n_positions=128),
}
ROWS = compressed("float-quantized", "channel", "token")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("pack", "values"), [(awq(), AWQ), (gptq(), GPTQ), (fp8_rows, ROWS)], ids=["awq", "gptq", "fp8_rows"]
)
def test_ranks_mean_what_the_dense_models_ranks_hold(
    name: str, pack: Pack, values: dict[str, Any], tp: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[name]()).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    source = write_quantized(tmp_path / "hf", pack, values, model=model)
    if name == "gpt2" and pack is fp8_rows:
        refuse(source.directory, tmp_path, "is a Conv1D layer, which is not converted from compressed-tensors")
        return
    source.model.save_pretrained(tmp_path / "dense")
    if tp == 1 and pack is not fp8_rows:
        assert_streams(source.directory, source.model, torch.arange(32).view(2, 16))
    out = convert(ConvertConfig(tp=tp), source.directory, tmp_path / "out").path
    expected = convert(ConvertConfig(tp=tp, dtype="float32"), tmp_path / "dense", tmp_path / "dense-out").path
    for rank in range(tp):
        made, dense = (load_file(path / f"rank{rank}.safetensors") for path in (out, expected))
        assert {tensor for tensor in made if tensor.endswith((".weight", ".bias"))} == set(dense)
        scaled = "per_channel_scale" if pack is fp8_rows else "weights_scaling_factor"
        modules = [tensor.removesuffix(f".{scaled}") for tensor in made if tensor.endswith(scaled)]
        assert len(modules) in (8, 10)
        for module in modules:
            assert torch.equal(matrix(made, module), dense[f"{module}.weight"]), module
