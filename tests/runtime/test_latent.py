from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families import TINY
from tests.runtime.checkpoints import write_engine
from tests.runtime.converted import LONG, TOKENS, Families, computed, error
from tests.runtime.thread_ranks import ThreadRanks
from trtforge.calibrate.stage import CalibrateConfig, calibrate
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.core.errors import ForgeError
from trtforge.formats.trtllm import read_checkpoint_config
from trtforge.runtime.architecture.positions import ALL
from trtforge.runtime.architecture.spec import DecoderSpec
from trtforge.runtime.architecture.spec_parts import LatentSpec
from trtforge.runtime.decoder.attention import Attention
from trtforge.runtime.decoder.batch import ContextRow
from trtforge.runtime.decoder.kv_capacity import block_bytes
from trtforge.runtime.decoder.latent import LatentAttention
from trtforge.runtime.decoder.scores import FusedScores
from trtforge.runtime.linears.kernels import Kernels
from trtforge.runtime.linears.packing import pack_rank
from trtforge.runtime.ranks.source import open_model
from trtforge.runtime.scheduling.batch import Step

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


@pytest.mark.parametrize(
    ("quant", "tolerance"), [("fp8", 0.3), ("int4_awq", 0.6), ("nvfp4", 0.9), ("int8_wo", 0.05), ("int4_wo", 0.7)]
)
def test_what_makes_latent_vectors_is_quantised_in_no_format(tmp_path: Path, quant: str, tolerance: float) -> None:
    """Also in an engine, whose kernels pack every linear layer that is."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "v_head_dim": 32}
    model = TINY["deepseek_v3"](**wide, num_experts_per_tok=8, topk_group=4)  # all experts, however scores are rounded
    model.save_pretrained(tmp_path / "hf")
    ids = torch.randint(3, 131, (8, 32), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": ids}, tmp_path / "ids.safetensors")
    data = {"data": str(tmp_path / "ids.safetensors"), "samples": 8, "sequence_length": 32}
    calibration = None
    if not quant.endswith("_wo"):
        grouped = {"format": quant, "data": data, **({"group_size": 64} if quant == "int4_awq" else {})}
        settings = CalibrateConfig.parse(grouped, "test")
        calibration = calibrate(settings, tmp_path / "hf", tmp_path / "calibration").path
    wanted = ConvertConfig.parse({"quant": quant, "dtype": "float32"}, "test")
    checkpoint = convert(wanted, tmp_path / "hf", tmp_path / "checkpoint", calibration=calibration).path
    with torch.no_grad():
        exact = model(torch.tensor([TOKENS])).logits[0]
    kept = rank(checkpoint)["transformer.layers.0.attention.fused_a.weight"]
    assert torch.equal(kept[:20], model.model.layers[0].self_attn.q_a_proj.weight)
    for made in (checkpoint, write_engine(checkpoint, tmp_path / "engine")):
        found = computed(made, TOKENS)[0]
        assert 0 < float((found - exact).norm() / exact.norm()) < tolerance


@pytest.mark.parametrize("expands", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3"])
def test_contexts_may_attend_to_latents_or_to_expanded_keys(
    families: Families, name: str, expands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, beside the single tokens of another sequence, and whole."""
    monkeypatch.setattr(LatentAttention, "_expands", lambda self, batch: expands and bool(batch.context))
    family = families(name)
    ranks = ThreadRanks(open_model(family.checkpoint()), 4)
    parts, wanted = [], family.logits(LONG[:50])
    for at, (start, end) in enumerate([(0, 1), (0, 23), (23, 24), (24, 50)]):
        beside, own = np.array([at, start]), np.array([1, end - start])
        tables = np.array([[2, 3], [0, 1]])
        tokens = np.array([LONG[at], *LONG[start:end]])
        logits = ranks.execute(Step(beside, own, own, tables, tokens))
        assert logits is not None
        parts.append(logits[1:])
        assert error(logits[:1], wanted[at : at + 1]) < 2e-5
    ranks.close()
    assert error(torch.cat(parts[1:]), wanted) < 2e-5


def test_keys_are_expanded_where_that_takes_fewer_products() -> None:
    """With the sizes of DeepSeek-V3: for whole contexts and long chunks, not for a few tokens after many."""
    sizes = LatentSpec(q_rank=1536, kv_rank=512, nope_size=128, rope_size=64, value_size=128)
    attention = LatentAttention(
        **{name: None for name in ("fused_a", "query_norm", "latent_norm", "query", "expand", "absorb", "values")},
        **{name: None for name in ("dense", "kernels")},
        sizes=sizes,
        attention=Attention(128, 1, sizes.cached_size, FusedScores(1.0), ALL, latent=True),
        rotary=0,
    )  # type: ignore[arg-type]

    def expands(*contexts: tuple[int, int]) -> bool:
        rows = tuple(
            ContextRow(0, count, start, np.zeros(0, dtype=np.int64), torch.device("cpu")) for start, count in contexts
        )
        return attention._expands(SimpleNamespace(context=rows))  # type: ignore[arg-type]

    assert not expands()
    assert expands((0, 1))
    assert expands((0, 4096))
    assert expands((4096, 1024))
    assert not expands((4096, 64))
    assert expands((4096, 64), (0, 1024))
    assert not expands((8192, 64), (0, 16))
