"""Byte for byte what TensorRT-LLM's own converter wrote."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.golden.make_hf import write_case
from trtforge.convert.stage import ConvertConfig, convert
from trtforge.formats.shards import RowReader, read_header

GOLDEN = Path(__file__).parent.parent / "golden"
TABLES = ("embed_positions", "embed_positions_for_gpt_attention", "rotary_inv_freq")
CONFIG_FIELDS = (
    "architecture", "dtype", "logits_dtype", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_size", "intermediate_size", "hidden_act", "norm_epsilon", "position_embedding_type",
    "max_position_embeddings", "rotary_base", "rotary_scaling", "rotary_embedding_dim", "attn_bias", "mlp_bias",
    "use_parallel_embedding", "embedding_sharding_dim", "mapping", "quantization", "qk_layernorm",
)  # fmt: skip


def layouts() -> list[tuple[str, str]]:
    cases = sorted((GOLDEN / "expected").glob("*.json"))
    return [(case.stem, layout) for case in cases for layout in json.loads(case.read_text())["layouts"]]


def tensors_of(path: Path) -> dict[str, list[object]]:
    """As the golden files record them: dtype, shape and the digest of the bytes."""
    found = {}
    with RowReader() as reader:
        for tensor in read_header(path):
            data = reader.read(tensor, 0, tensor.spec.shape[0], memoryview(bytearray(tensor.spec.nbytes)))
            digest = hashlib.sha256(data).hexdigest()[:32]
            found[tensor.spec.name] = [tensor.spec.dtype.safetensors, list(tensor.spec.shape), digest]
    return found


@pytest.mark.parametrize(("case", "layout"), layouts())
def test_checkpoint_equals_tensorrt_llms(case: str, layout: str, tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / "expected" / f"{case}.json").read_text())
    expected = golden["layouts"][layout]
    source = write_case(golden["hf"], tmp_path / "hf")
    mapping = expected["config"]["mapping"]
    config = ConvertConfig(
        tp=mapping["tp_size"],
        pp=mapping["pp_size"],
        parallel_embedding=expected["config"]["use_parallel_embedding"],
        embedding_sharding_dim=expected["config"]["embedding_sharding_dim"],
    )

    out = convert(config, source, tmp_path / "checkpoint").path

    written = json.loads((out / "config.json").read_text())
    assert {key: written[key] for key in CONFIG_FIELDS} == {key: expected["config"][key] for key in CONFIG_FIELDS}
    assert sorted(p.name for p in out.glob("rank*")) == [f"rank{r}.safetensors" for r in range(len(expected["ranks"]))]
    for rank, tensors in enumerate(expected["ranks"]):
        wanted = {name: value for name, value in tensors.items() if name not in TABLES}
        assert tensors_of(out / f"rank{rank}.safetensors") == wanted
