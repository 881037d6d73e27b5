from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.runtime.converted import TOKENS, Families, computed
from trtforge.core.errors import ForgeError
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.decoder.kv_capacity import block_bytes
from trtforge.runtime.linears.kernels import Kernels
from trtforge.runtime.linears.packing import pack_rank

FUSED = "transformer.layers.1.attention.fused_q_proj"


def rank(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "rank0.safetensors")


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2_lite"])
def test_the_cache_holds_one_compressed_vector_a_token(families: Families, name: str) -> None:
    config = read_checkpoint_config(families(name).checkpoint(tp=2))
    spec = DecoderSpec.of(config, 0)
    assert spec.cached == (1, 24 + 8)
    assert block_bytes(spec, torch.float32, 16) == 4 * 16 * (24 + 8) * 4


def test_the_fused_query_is_checked_and_not_kept(families: Families) -> None:
    checkpoint = families("deepseek_v2").checkpoint()
    config, tensors = read_checkpoint_config(checkpoint), rank(checkpoint)
    assert FUSED not in pack_rank(config, 0, tensors, Kernels(), torch.float32)
    tensors[FUSED][5] *= 1.01
    with pytest.raises(ForgeError, match=r"layers.1.attention.fused_q_proj is not the product of q_b_proj and kv_b"):
        pack_rank(config, 0, tensors, Kernels(), torch.float32)


def test_the_fused_query_of_a_bfloat16_checkpoint_may_be_rounded(families: Families) -> None:
    checkpoint = families("deepseek_v2").checkpoint()
    config = read_checkpoint_config(checkpoint).model_copy(update={"dtype": "bfloat16"})
    tensors = {name: tensor.bfloat16() for name, tensor in rank(checkpoint).items()}
    pack_rank(config, 0, tensors, Kernels(), torch.float32)


def test_a_dense_layer_among_those_with_experts_is_known_by_its_tensors(families: Families) -> None:
    checkpoint = families("deepseek_v2").checkpoint()
    tensors = rank(checkpoint)
    assert "transformer.layers.0.mlp.gate.weight" in tensors
    assert "transformer.layers.1.mlp.router.weight" in tensors
    assert computed(checkpoint, TOKENS)[0].isfinite().all()
